"""HTTP/1.1 towards clients: message framing, pipelining, bounds, upgrades, slow and vanishing
clients.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from router_stubs.cluster import until

from splitserve.orchestrator.router import http_server
from splitserve.orchestrator.router.errors import ApiError
from splitserve.orchestrator.router.http_server import HttpConnection, HttpServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from splitserve.orchestrator.router.engine_client import RawHeaders
    from splitserve.orchestrator.router.http_request import HttpRequest


class Listener:
    """Hears of a client."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def client_gone(self) -> None:
        self.heard.append("gone")

    def pause(self) -> None:
        self.heard.append("pause")

    def resume(self) -> None:
        self.heard.append("resume")


TURN_S, SILENT_TURNS = 0.01, 15
"""Silence in so many turns of the loop, which the server shares: one long one says only that the
machine was busy.
"""


class Rig:
    """A server whose route echoes, or holds requests for ``/later``."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.held: list[HttpConnection] = []
        self.listener = Listener()
        self.server = HttpServer(self.route, max_body_bytes=100_000)
        self.port = 0

    def route(self, request: HttpRequest, connection: HttpConnection) -> None:
        self.requests.append(request)
        if request.path == "/later":
            connection.listener = self.listener
            self.held.append(connection)
        else:
            connection.answer(200, [(b"x-echo", b"1")], request.path.encode() + request.body)

    async def talk(self, data: bytes, piece_bytes: int = 0) -> bytes:
        """Send, and read until the server closes or says nothing for a moment."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        step = piece_bytes or len(data)
        for start in range(0, len(data), step):
            writer.write(data[start : start + step])
            await asyncio.sleep(0)
        answer, silent_turns = b"", 0
        while silent_turns < SILENT_TURNS:
            try:
                piece = await asyncio.wait_for(reader.read(1 << 20), TURN_S)
            except TimeoutError:
                silent_turns += 1
                continue
            if not piece:
                break
            answer, silent_turns = answer + piece, 0
        writer.transport.abort()
        return answer


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A listening server."""
    rig = Rig()
    rig.port = await rig.server.listen("127.0.0.1", 0)
    yield rig
    await rig.server.close(0.1)


GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /b?q=1 HTTP/1.1\r\nHost: x\r\nX-A: 1\r\ncontent-length: 3\r\n\r\nabc"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    b"2;ext\r\nde\r\n1\r\nf\r\n0\r\ntrailer: t\r\n\r\n"
)


@pytest.mark.parametrize("piece_bytes", [0, 1, 2, 7])
async def test_requests_are_read_however_they_are_cut(rig: Rig, piece_bytes: int) -> None:
    """Three requests on one connection, sent together: three answers in order."""
    answer = await rig.talk(GET + POST + CHUNKED, piece_bytes)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert [r.path + r.body.decode() for r in rig.requests] == ["/a", "/babc", "/cdef"]
    assert answer.index(b"/a") < answer.index(b"/babc") < answer.index(b"/cdef")
    assert (b"x-a", b"1") in rig.requests[1].headers
    assert b"date: " in answer


async def test_a_pipelined_request_waits_for_the_one_before(rig: Rig) -> None:
    """The second is not routed until the first is answered."""
    talking = asyncio.ensure_future(rig.talk(GET.replace(b"/a", b"/later") + GET))
    await until(lambda: len(rig.held) == 1)
    assert len(rig.requests) == 1
    rig.held[0].answer(200, [], b"first")
    answer = await talking
    assert answer.index(b"first") < answer.index(b"/a")


async def test_a_flood_of_pipelined_requests_ends_the_connection(rig: Rig) -> None:
    """More than the limit behind one that is being answered."""
    await rig.talk(GET.replace(b"/a", b"/later") + GET * 100)
    assert len(rig.requests) == 1
    await until(lambda: not rig.server.connections)


async def test_many_requests_in_one_packet(rig: Rig) -> None:
    """As many as may wait are answered, one after another; then the connection ends."""
    answer = await rig.talk(GET * 400)
    assert answer.count(b"HTTP/1.1 200") == http_server.PIPELINE_LIMIT_REQUESTS
    await until(lambda: not rig.server.connections)


async def test_a_client_that_leaves_with_a_request_waiting_is_noticed(rig: Rig) -> None:
    """What waits does not hide the connection's end."""
    await rig.talk(GET.replace(b"/a", b"/later") + GET)
    await until(lambda: rig.listener.heard == ["gone"])
    assert len(rig.requests) == 1


async def test_trailers_are_no_headers(rig: Rig) -> None:
    """They are dropped, and bounded like a head."""
    body = b"POST /b HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    answer = await rig.talk(body + b"authorization: Bearer sk\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert rig.requests[0].headers == [(b"transfer-encoding", b"chunked")]
    answer = await rig.talk(body + b"x: y\r\n" * http_server.HEAD_LIMIT_BYTES)
    assert answer.startswith(b"HTTP/1.1 431")
    assert len(rig.requests) == 1


async def test_who_may_not_send_is_told_before_the_body(rig: Rig) -> None:
    """The answer comes although the body does not."""

    def admit(path: str, headers: RawHeaders) -> None:
        assert (path, headers[0]) == ("/a", (b"content-length", b"9"))
        raise ApiError(401, "no")

    rig.server.admit = admit
    head = b"POST /a?b HTTP/1.1\r\ncontent-length: 9\r\nx-request-id: mine\r\n\r\n"
    answer = await rig.talk(head)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"x-request-id: mine\r\n" in answer
    assert b"www-authenticate: Bearer\r\n" in answer
    assert not rig.requests


async def test_all_bodies_together_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """503 for the one too many; room again once the others are answered or gone."""
    monkeypatch.setattr(http_server, "BODIES_LIMIT_BYTES", 10)
    head = b"POST /a HTTP/1.1\r\ncontent-length: 8\r\n\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(head + b"x" * 7)
    await until(lambda: rig.server.held_body_bytes == 7)
    answer = await rig.talk(head + b"x" * 8)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 5\r\n" in answer
    writer.transport.abort()
    await until(lambda: rig.server.held_body_bytes == 0)
    assert (await rig.talk(head + b"x" * 8)).startswith(b"HTTP/1.1 200")
    assert rig.server.held_body_bytes == 0


async def test_a_client_that_reads_nothing_gets_no_more_answers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the bound no further request is answered; a connection that takes nothing ends."""
    padding = b"x" * 90_000
    request = b"POST /a HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(padding) + padding
    _, writer = await asyncio.open_connection("127.0.0.1", rig.port, limit=1)
    for _ in range(http_server.PIPELINE_LIMIT_REQUESTS):
        writer.write(request)
    await until(lambda: any(c._is_unsent_high for c in rig.server.connections))
    answered = len(rig.requests)
    assert answered < http_server.PIPELINE_LIMIT_REQUESTS
    rig.server._close_stuck()
    assert rig.server.connections
    monkeypatch.setattr(http_server, "STALL_LIMIT_S", 0.0)
    rig.server._close_stuck()
    await until(lambda: not rig.server.connections)
    assert len(rig.requests) == answered
    writer.transport.abort()


async def test_http_1_0_and_connection_close_end_the_connection(rig: Rig) -> None:
    """With an answer that says so; a stream to HTTP/1.0 is not chunked."""
    for data in (
        b"GET /a HTTP/1.0\r\n\r\n",
        GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
    ):
        answer = await rig.talk(data + GET)
        assert answer.count(b"HTTP/1.1 200") == 1
        assert b"connection: close\r\n" in answer
    talking = asyncio.ensure_future(rig.talk(b"GET /later HTTP/1.0\r\n\r\n"))
    await until(lambda: len(rig.held) == 1)
    rig.held[0].send_head(200, [], None)
    rig.held[0].send_body(b"stream")
    rig.held[0].finish()
    assert (await talking).endswith(b"connection: close\r\n\r\nstream")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /a\r\n\r\n",
        b"GET /a HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /a HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /a HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /a HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_refused(rig: Rig, data: bytes) -> None:
    """400 with an error body and a closed connection; nothing is routed that could be smuggled."""
    answer = await rig.talk(data)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"code":400' in answer
    assert not rig.requests
    await until(lambda: not rig.server.connections)


async def test_a_large_head_is_refused(rig: Rig) -> None:
    """431 beyond the limit."""
    data = b"GET /a HTTP/1.1\r\n" + b"x: y\r\n" * (http_server.HEAD_LIMIT_BYTES // 6 + 1)
    assert (await rig.talk(data)).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("encoding", ["length", "chunked"])
async def test_a_large_body_is_refused_while_it_comes(rig: Rig, encoding: str) -> None:
    """413, and the client reads it although it is still sending."""
    if encoding == "length":
        data = b"POST /a HTTP/1.1\r\ncontent-length: 3000000\r\n\r\n" + b"x" * 3_000_000
    else:
        data = b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        data += (b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n") * 45
    answer = await rig.talk(data, 50_000)
    assert answer.startswith(b"HTTP/1.1 413")
    assert answer.endswith(b"}}")
    assert not rig.requests


async def test_expect_100_continue(rig: Rig) -> None:
    """The client is told to send the body, unless it is too large."""
    head = b"POST /a HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
    answer = await rig.talk(head % 3)
    assert answer == b"HTTP/1.1 100 Continue\r\n\r\n"
    answer = await rig.talk(head % 200_000)
    assert answer.startswith(b"HTTP/1.1 413")


async def test_an_unknown_upgrade_is_answered_without_it(rig: Rig) -> None:
    """As curl --http2 asks: the answer is HTTP/1.1, and the connection ends."""
    answer = await rig.talk(
        b"GET /a HTTP/1.1\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer


async def test_a_client_that_leaves_is_noticed(rig: Rig) -> None:
    """While its request is being answered, and only then."""
    await rig.talk(GET)
    assert rig.listener.heard == []
    await rig.talk(GET.replace(b"/a", b"/later"))
    await until(lambda: rig.listener.heard == ["gone"])
    connection = rig.held[0]
    connection.send_head(200, [], None)
    connection.send_body(b"to nobody")
    connection.finish()


async def test_a_slow_client_is_told_of(rig: Rig) -> None:
    """Pause above the bound, resume below it, every byte delivered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port, limit=1 << 16)
    writer.write(GET.replace(b"/a", b"/later"))
    await until(lambda: len(rig.held) == 1)
    rig.held[0].send_head(200, [], None)
    while "pause" not in rig.listener.heard:
        rig.held[0].send_body(b"x" * 100_000)
    rig.held[0].send_body(b"", is_last=True)
    await reader.readuntil(b"\r\n\r\n")
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        data += await reader.read(1 << 20)
    assert rig.listener.heard == ["pause", "resume"]
    rig.held[0].finish()
    writer.transport.abort()


async def test_idle_and_stuck_connections_are_closed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle between requests, or silent in one; never while the router is answering."""
    monkeypatch.setattr(http_server, "IDLE_LIMIT_S", 0.0)
    monkeypatch.setattr(http_server, "STALL_LIMIT_S", 0.0)
    streams = [await asyncio.open_connection("127.0.0.1", rig.port) for _ in range(4)]
    sent = [b"", b"GET /a HT", b"POST /a HTTP/1.1\r\ncontent-length: 9\r\n\r\nabc"]
    for (_, writer), data in zip(streams, [*sent, GET.replace(b"/a", b"/later")], strict=True):
        writer.write(data)
    await until(lambda: len(rig.held) == 1 and len(rig.server.connections) == 4)
    await until(
        lambda: all(
            c._active_at < asyncio.get_running_loop().time() for c in rig.server.connections
        )
    )
    rig.server._close_stuck()
    for reader, _ in streams[:3]:
        async with asyncio.timeout(20):
            assert await reader.read() == b""
    assert rig.server.connections == set(rig.held)
    for _, writer in streams:
        writer.transport.abort()


async def test_closing_lets_answers_leave(rig: Rig) -> None:
    """A request in progress may finish; idle connections go at once."""
    talking = asyncio.ensure_future(rig.talk(GET.replace(b"/a", b"/later")))
    await until(lambda: len(rig.held) == 1)
    closing = asyncio.ensure_future(rig.server.close(60))
    await asyncio.sleep(0)
    rig.held[0].answer(200, [], b"bye")
    assert (await talking).endswith(b"bye")
    async with asyncio.timeout(20):
        await closing
