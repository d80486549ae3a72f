"""The router's two sides with TLS: what clients get, and engines that cannot be trusted."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING

import aiohttp
from router_stubs.cluster import until
from support.certificates import Authority

from splitserve.orchestrator.config import TlsConfig
from splitserve.orchestrator.config.tls import ServerTls, client_context
from splitserve.orchestrator.router.engine_client import EngineAddress, EngineClient, RawHeaders
from splitserve.orchestrator.router.http_server import HttpConnection, HttpServer

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from splitserve.orchestrator.router.http_request import HttpRequest

BODY = b"x" * 3_000_000
LIMIT_BYTES = 100_000


def tls_of(authority: Authority, name: str = "site") -> TlsConfig:
    """The section with a fresh certificate."""
    files = authority.issue(name)
    named = {key: str(getattr(files, key)) for key in ("cert_file", "key_file", "ca_file")}
    return TlsConfig.model_validate(named)


def answer(request: HttpRequest, connection: HttpConnection) -> None:
    """More than a client's buffers hold."""
    connection.answer(200, [], request.body + BODY)


class Heard:
    """What becomes of one leg."""

    def __init__(self) -> None:
        self.body = b""
        self.reason = ""
        self.is_over = False

    def head_received(self, status: int, headers: RawHeaders) -> None:
        assert status == 200

    def body_received(self, data: bytes, is_last: bool) -> None:
        self.body += data

    def ended(self) -> None:
        self.is_over = True

    def failed(self, reason: str) -> None:
        self.is_over, self.reason = True, reason


async def test_clients_get_whole_answers_and_refusals_by_https(tmp_path: Path) -> None:
    """Large ones, several on one connection, and a 413 in the middle of a body; what is not TLS
    gets nothing and breaks nothing.
    """
    authority = Authority(tmp_path)
    server = HttpServer(answer, LIMIT_BYTES)
    port = await server.listen("localhost", 0, ServerTls(tls_of(authority)))
    url = f"https://localhost:{port}/"
    context = ssl.create_default_context(cafile=authority.path)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
        for _ in range(3):
            async with session.post(url, data=b"ab") as response:
                assert len(await response.read()) == len(BODY) + 2
        async with session.post(url, data=b"a" * (LIMIT_BYTES + 1)) as response:
            assert response.status == 413
        async with session.post(url, data=b"a" * 9 * LIMIT_BYTES) as response:
            assert response.status == 413
    reader, writer = await asyncio.open_connection("localhost", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    async with asyncio.timeout(20):
        assert b"HTTP/1.1 200" not in await reader.read()
    writer.close()
    async with aiohttp.ClientSession() as session, session.get(url, ssl=context) as response:
        assert len(await response.read()) == len(BODY)
    await server.close(1)


async def test_an_engine_is_verified_and_a_failure_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each leg fails with the reason in words; the log has it once."""
    caplog.set_level(logging.ERROR)
    authority = Authority(tmp_path)
    tls = tls_of(authority)
    server = HttpServer(answer, LIMIT_BYTES)
    port = await server.listen("127.0.0.1", 0, ServerTls(tls))
    address = EngineAddress.of(f"https://127.0.0.1:{port}")
    payload = [b"GET / HTTP/1.1\r\nHost: e\r\n\r\n"]
    client = EngineClient(tls=client_context(tls))
    for _ in range(2):
        heard = Heard()
        client.send(address, payload, heard)
        await until(lambda: heard.is_over, 10)  # noqa: B023
        assert (heard.reason, len(heard.body)) == ("", len(BODY))
    client.close()
    other = Authority(tmp_path, "other")
    doubtful = EngineClient(tls=client_context(tls.model_copy(update={"ca_file": str(other.path)})))
    for _ in range(3):
        heard = Heard()
        doubtful.send(address, payload, heard)
        await until(lambda: heard.is_over, 10)  # noqa: B023
        assert f"no connection to 127.0.0.1:{port}: it was issued by a CA" in heard.reason
    doubtful.close()
    told = [r for r in caplog.records if r.name.endswith("engine_client")]
    assert len(told) == 1
    await server.close(1)
