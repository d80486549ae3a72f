"""Connections to engines: reuse, races with the server's keep-alive, bounds, broken answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from router_stubs.cluster import until

from splitserve.orchestrator.router.engine_client import (
    HEAD_LIMIT_BYTES,
    EngineAddress,
    EngineClient,
    Leg,
    RawHeaders,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REQUEST = b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: RawHeaders = []
        self.body = b""
        self.end = ""

    def head_received(self, status: int, headers: RawHeaders) -> None:
        self.status, self.headers = status, headers

    def body_received(self, data: bytes, is_last: bool) -> None:
        self.body += data

    def ended(self) -> None:
        self.end = "ended"

    def failed(self, reason: str) -> None:
        self.end = reason


class Server(asyncio.Protocol):
    """Answers each read with the next entry of ``script``; None closes the connection, "reset"
    aborts it.
    """

    script: list[bytes | str | None]
    connections: list[Server]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.received = b""
        self.connections.append(self)

    def data_received(self, data: bytes) -> None:
        self.received += data
        match self.script.pop(0):
            case None:
                self.transport.close()
            case "reset":
                self.transport.abort()
            case bytes() as answer:
                self.transport.write(answer)


class Rig:
    """A client and a scripted server."""

    def __init__(self, client: EngineClient, address: EngineAddress, server: type[Server]) -> None:
        self.client = client
        self.address = address
        self.server = server

    def send(self, *script: bytes | str | None) -> tuple[Heard, Leg]:
        """Extend the script and send a request."""
        self.server.script += script
        heard = Heard()
        return heard, self.client.send(self.address, [REQUEST], heard)

    async def ask(self, *script: bytes | str | None) -> Heard:
        """Send a request and wait for its end."""
        heard, _ = self.send(*script)
        await until(lambda: heard.end != "")
        return heard


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A scripted server on a loopback port."""
    kind: type[Server] = type("Scripted", (Server,), {"script": [], "connections": []})
    server = await asyncio.get_running_loop().create_server(kind, "127.0.0.1", 0)
    client = EngineClient(connect_timeout_s=0.3, idle_limit_s=0.2)
    port = server.sockets[0].getsockname()[1]
    yield Rig(client, EngineAddress("127.0.0.1", port), kind)
    client.close()
    server.close()
    for connection in kind.connections:
        connection.transport.abort()


async def test_a_connection_is_used_again(rig: Rig) -> None:
    """Three requests, one connection."""
    for _ in range(3):
        heard = await rig.ask(OK)
        assert (heard.status, heard.body, heard.end) == (200, b"ok", "ended")
    assert len(rig.server.connections) == 1


@pytest.mark.parametrize("how", [None, "reset"])
async def test_a_reused_connection_that_closes_without_an_answer_is_tried_once_more(
    rig: Rig, how: str | None
) -> None:
    """On a new connection, and only once: the keep-alive race costs no request."""
    await rig.ask(OK)
    heard = await rig.ask(how, OK)
    assert (heard.body, heard.end) == (b"ok", "ended")
    assert len(rig.server.connections) == 2
    heard = await rig.ask(how, how)
    assert "closed the connection before its answer" in heard.end


async def test_a_fresh_connection_that_closes_is_a_failure(rig: Rig) -> None:
    """Nothing is sent twice then."""
    heard = await rig.ask(None)
    assert "before its answer" in heard.end
    assert len(rig.server.connections) == 1


async def test_an_answer_that_has_begun_is_never_asked_again(rig: Rig) -> None:
    """Even on a reused connection."""
    await rig.ask(OK)
    heard, _ = rig.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
    await until(lambda: heard.body == b"half")
    rig.server.connections[0].transport.abort()
    await until(lambda: heard.end != "")
    assert "in the middle" in heard.end


async def test_an_idle_connection_is_closed_before_the_server_does(rig: Rig) -> None:
    """After ``idle_limit_s`` it is neither used nor kept."""
    await rig.ask(OK)
    connection = rig.server.connections[0]
    await until(connection.transport.is_closing)
    await rig.ask(OK)
    assert len(rig.server.connections) == 2


async def test_a_connection_that_the_server_closes_while_idle_is_forgotten(rig: Rig) -> None:
    """The next request opens a new one without a failure."""
    await rig.ask(OK)
    rig.server.connections[0].transport.close()
    await until(lambda: not any(rig.client._idle.values()))
    assert (await rig.ask(OK)).end == "ended"


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            b"3;x=y\r\nabc\r\n1\r\nd\r\n0\r\nt: r\r\n\r\n",
            b"abcd",
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
    ],
    ids=["chunked with extension and trailer", "interim answer", "empty"],
)
@pytest.mark.parametrize("piece_bytes", [1, 1000])
async def test_answers_are_read_however_they_are_cut(
    rig: Rig, answer: bytes, body: bytes, piece_bytes: int
) -> None:
    """Chunks, trailers and interim answers, byte by byte and at once."""
    heard, _ = rig.send(b"")
    await until(lambda: bool(rig.server.connections and rig.server.connections[0].received))
    for start in range(0, len(answer), piece_bytes):
        rig.server.connections[0].transport.write(answer[start : start + piece_bytes])
        await asyncio.sleep(0)
    await until(lambda: heard.end != "")
    assert (heard.status, heard.body, heard.end) == (200, body, "ended")
    assert (await rig.ask(OK)).body == b"ok"
    assert len(rig.server.connections) == 1


async def test_an_answer_without_a_length_ends_with_the_connection(rig: Rig) -> None:
    """As HTTP/1.0 servers send it."""
    heard, _ = rig.send(b"HTTP/1.0 200 OK\r\n\r\nall")
    await until(lambda: heard.body == b"all")
    rig.server.connections[0].transport.close()
    await until(lambda: heard.end != "")
    assert heard.end == "ended"


async def test_connection_close_is_obeyed(rig: Rig) -> None:
    """The connection is not used again."""
    await rig.ask(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")
    await rig.ask(OK)
    assert len(rig.server.connections) == 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * HEAD_LIMIT_BYTES, "larger than"),
    ],
)
async def test_bad_answers_fail_the_leg(rig: Rig, answer: bytes, words: str) -> None:
    """And the connection is closed."""
    heard = await rig.ask(answer)
    assert words in heard.end
    await until(rig.server.connections[0].transport.is_closing)


async def test_nobody_listening_is_a_failure(rig: Rig) -> None:
    """Told after ``send`` has returned."""
    heard = Heard()
    rig.client.send(EngineAddress("127.0.0.1", 1), [REQUEST], heard)
    assert heard.end == ""
    await until(lambda: heard.end != "")
    assert "no connection to 127.0.0.1:1" in heard.end


async def test_a_connection_that_does_not_come_about_is_given_up(rig: Rig) -> None:
    """After ``connect_timeout_s``; the address is reserved for documentation and drops packets."""
    rig.client.connect_timeout_s = 0.0
    heard = await rig.ask()
    assert "within 0 s" in heard.end


async def test_cancel_closes_the_connection_and_is_silent(rig: Rig) -> None:
    """Before and after the connection is made."""
    heard, leg = rig.send(b"")
    leg.cancel()
    other, leg = rig.send(b"")
    await until(lambda: any(c.received for c in rig.server.connections))
    leg.cancel()
    await until(lambda: all(c.transport.is_closing() for c in rig.server.connections))
    assert heard.end == other.end == ""
    assert not rig.client._busy


async def test_pause_stops_reading(rig: Rig) -> None:
    """Nothing is heard until ``resume``."""
    heard, leg = rig.send(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nab")
    await until(lambda: heard.body == b"ab")
    leg.pause()
    rig.server.connections[0].transport.write(b"cd")
    await asyncio.sleep(0.02)
    assert heard.body == b"ab"
    leg.resume()
    await until(lambda: heard.end == "ended")
    assert heard.body == b"abcd"


@pytest.mark.parametrize("url", ["ftp://a:1", "http://a", "a:1", "http://:1", "http://a:b"])
def test_only_plain_addresses_are_understood(url: str) -> None:
    """The error says how one looks."""
    with pytest.raises(ValueError, match="http://host:port"):
        EngineAddress.of(url)


def test_addresses_may_be_ipv6_and_speak_tls() -> None:
    """Shown to people as URLs write them."""
    address = EngineAddress.of("https://[fd00::2]:8101")
    assert address == EngineAddress("fd00::2", 8101, is_tls=True)
    assert address.shown == "[fd00::2]:8101"
    assert not EngineAddress.of("http://a:1").is_tls
