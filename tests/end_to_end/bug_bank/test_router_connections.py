"""The router's connections to engines, and what travels over them, with engines that only play."""

from __future__ import annotations

import asyncio
import json

import pytest
from router_stubs.cluster import StubCluster, completion, stub_cluster
from router_stubs.engine import DONE, SSE, Asked, plain_answer, send
from support.bank_client import LONG


async def _is_answered(cluster: StubCluster) -> None:
    """One more request gets the whole stream."""
    response = await cluster.post()
    assert (response.status, await response.read()) == (200, b"".join(SSE) + DONE)


@pytest.mark.parametrize("closes", ["before the request", "on the request", "as it restarts"])
@pytest.mark.parametrize("requests", [40, pytest.param(200, marks=LONG)])
async def test_a_kept_connection_that_the_engine_closes(requests: int, closes: str) -> None:
    """A37 (llm-d/llm-d PR#1564): both engines close every connection on which they have answered,
    just as it is used again, or are started anew on the same port. No client gets a 5xx.
    """
    async with stub_cluster("p0", "d0") as cluster:
        answered: set[asyncio.StreamWriter] = set()

        async def once(asked: Asked, writer: asyncio.StreamWriter) -> None:
            if writer in answered:
                writer.transport.abort()
                return
            answered.add(writer)
            await plain_answer(asked, writer)

        for engine in cluster.engines.values():
            engine.answer = once if closes == "on the request" else plain_answer
        for _ in range(requests):
            await _is_answered(cluster)
            for engine in cluster.engines.values():
                if closes == "before the request":
                    engine.drop_connections()
                elif closes == "as it restarts":
                    await engine.stop()
                    await engine.start(engine.port)
        await cluster.idle()


async def test_what_arrives_of_a_clients_headers() -> None:
    """A40 (sgl-project/sglang PR#3070): a client that waits for ``100 Continue`` and closes
    afterwards. Its own headers reach both engines, the engine's key stands in for its own, what
    belongs to its connection stays behind.
    """
    async with stub_cluster("p0", "d0", keys={"sk-1": "acme"}) as cluster:
        body = json.dumps(completion()).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-1\r\n"
            "Content-Type: application/json\r\nx-request-id: mine\r\ntraceparent: 00-1-2-01\r\n"
            "x-custom: c\r\nAccept-Encoding: gzip\r\nExpect: 100-continue\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.port)
        writer.write(head.encode())
        async with asyncio.timeout(30):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            answer = await reader.read()  # to the end: the router closes, as it was asked to
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200")
        assert DONE in answer
        await cluster.idle()
        for name, engine in cluster.engines.items():
            (asked,) = engine.asked
            assert asked.headers["authorization"] == f"Bearer key-{name}"
            assert asked.headers["x-request-id"] == "mine"
            assert asked.headers["traceparent"] == "00-1-2-01"
            assert asked.headers["x-custom"] == "c"
            assert not {"accept-encoding", "expect", "connection"} & asked.headers.keys()


async def test_a_wrong_key_touches_no_node() -> None:
    """A40: 401 as often as it is tried, no engine is asked, and the right key is served at once."""
    async with stub_cluster("p0", "d0", keys={"sk-1": "acme"}) as cluster:
        for _ in range(20):
            response = await cluster.post(headers={"Authorization": "Bearer sk-2"})
            assert response.status == 401
            assert (await response.json())["error"]["code"] == 401
        assert not any(engine.asked for engine in cluster.engines.values())
        assert all(node.is_usable for node in cluster.router.core.membership.nodes.values())
        response = await cluster.post(headers={"Authorization": "Bearer sk-1"})
        assert response.status == 200
        await response.read()
        await cluster.idle()


@pytest.mark.parametrize("node", ["p0", "d0"])
async def test_an_engine_that_refuses_the_key(node: str) -> None:
    """A40: a 401 of an engine itself is no fault of that node: it stays, and serves when it takes
    the key again.
    """
    async with stub_cluster("p0", "d0") as cluster:

        async def refuse(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await send(writer, 401, b'{"error":"Unauthorized"}')

        cluster.engines[node].answer = refuse
        for _ in range(20):
            response = await cluster.post()
            await response.read()
            assert response.status == (200 if node == "p0" else 401)
        cluster.engines[node].answer = plain_answer
        await _is_answered(cluster)
        await cluster.idle()
        assert all(known.is_usable for known in cluster.router.core.membership.nodes.values())
