"""Endpoints that need no pair: they reach a decode node as they came, and wait for nobody."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from router_stubs.cluster import completion, stub_cluster, until
from router_stubs.engine import Asked, send

from splitserve.orchestrator.router.endpoints import FORWARDED, Forwarded

JSON = {"Content-Type": "application/json"}


async def echo(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """What the engine was asked."""
    await send(writer, 200, json.dumps([asked.path, asked.raw.decode()]).encode())


@pytest.mark.parametrize("endpoint", FORWARDED, ids=lambda e: e.path)
async def test_it_reaches_a_decode_node_as_it_came(endpoint: Forwarded) -> None:
    """Path, query, method and bytes; never a prefill node, and the answer is the engine's own."""
    async with stub_cluster("p0", "d0") as cluster:
        cluster.engines["d0"].answer = echo
        raw = b'{"model" : "m","x":1}' if endpoint.method == "POST" else None
        response = await cluster.session.request(
            endpoint.method,
            f"{cluster.url}{endpoint.path}?a=1",
            data=raw,
            headers=(JSON if raw else {}) | {"X-Request-Id": "mine", "x-own": "o"},
        )
        assert response.status == 200
        assert await response.json() == [f"{endpoint.path}?a=1", (raw or b"").decode()]
        assert response.headers["x-request-id"] == "mine"
        await cluster.idle()
        (asked,) = cluster.engines["d0"].asked
        assert asked.headers["authorization"] == "Bearer key-d0"
        assert asked.headers["x-own"] == "o"
        assert not cluster.engines["p0"].asked
        cluster.router.log.flush()
        record = json.loads(cluster.log.getvalue())
        assert (record["endpoint"], record["decision"]) == (endpoint.name, "alone_other_endpoint")


@pytest.mark.parametrize("body", [b"{", b"[]", b"7", b'{"model":"other"}', b""])
async def test_the_engine_is_the_judge_of_its_body(body: bytes) -> None:
    """Also of what is no JSON; its 4xx comes back unchanged."""
    async with stub_cluster("p0", "d0") as cluster:

        async def refuse(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await send(writer, 404, b'{"detail":"Not Found"}')

        cluster.engines["d0"].answer = refuse
        url = f"{cluster.url}/v1/embeddings"
        response = await cluster.session.post(url, data=body, headers=JSON)
        assert (response.status, await response.read()) == (404, b'{"detail":"Not Found"}')
        assert cluster.engines["d0"].asked[0].raw == body
        await cluster.idle()


async def test_what_the_router_refuses_itself() -> None:
    """Bodies that are not said to be JSON or are compressed, keys that are not known, URLs that are
    none.
    """
    async with stub_cluster("p0", "d0", keys={"sk-1": "a"}) as cluster:
        key = {"Authorization": "Bearer sk-1"}
        for headers, status in (
            (JSON, 401),
            (JSON | {"Authorization": "Bearer sk-2"}, 401),
            (key | {"Content-Type": "text/plain"}, 400),
            (key | JSON | {"Content-Encoding": "gzip"}, 415),
        ):
            url = f"{cluster.url}/tokenize"
            response = await cluster.session.post(url, data=b"{}", headers=headers)
            assert response.status == status
            assert (await response.json())["error"]["code"] == status
        for path in ("/version", "/v1/responses/resp_1"):
            response = await cluster.session.get(cluster.url + path)
            assert response.status == 401
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.port)
        writer.write(
            b"GET /version?\xe4 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-1\r\n"
            b"connection: close\r\n\r\n"
        )
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
        assert not cluster.engines["d0"].asked


async def test_it_passes_requests_that_wait() -> None:
    """Generation waits for a free node; tokenising does not."""
    limits = {"prefill_ahead_requests": 0, "prefill_batch_tokens": 0}
    async with stub_cluster("p0", "d0", **limits) as cluster:

        async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
            if asked.path == "/tokenize":
                await echo(asked, writer)
            else:
                await asyncio.Event().wait()

        for engine in cluster.engines.values():
            engine.answer = hang
        waiting = [asyncio.ensure_future(cluster.post()) for _ in range(2)]
        await until(lambda: len(cluster.router.core.queue) == 1)
        response = await cluster.session.post(f"{cluster.url}/tokenize", json={"prompt": "x"})
        assert response.status == 200
        for posting in waiting:
            posting.cancel()
        await cluster.idle()


async def test_their_number_is_bounded() -> None:
    """As many as may wait in the queue; the next one is told when to come again."""
    async with stub_cluster("p0", "d0", queue_limit_requests=2) as cluster:

        async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        cluster.engines["d0"].answer = hang
        url = f"{cluster.url}/tokenize"
        held = [asyncio.ensure_future(cluster.session.post(url, json={})) for _ in range(2)]
        await until(lambda: len(cluster.engines["d0"].asked) == 2)
        refused = await cluster.session.post(url, json={})
        assert refused.status == 429
        assert refused.headers["retry-after"] == "1"
        for posting in held:
            posting.cancel()
        await cluster.idle()
        assert all(
            node.placed_at_once == 0 for node in cluster.router.core.membership.nodes.values()
        )


async def test_another_node_is_tried() -> None:
    """One that is gone or answers 5xx does not fail what another one can answer."""
    async with stub_cluster("p0", "d0", "d1") as cluster:

        async def fail(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await send(writer, 503, b"{}")

        cluster.engines["d0"].answer = fail
        cluster.engines["d1"].answer = echo
        for _ in range(4):
            response = await cluster.session.post(f"{cluster.url}/tokenize", json={})
            assert response.status == 200
        await cluster.engines["d0"].stop()
        for _ in range(4):
            response = await cluster.session.get(f"{cluster.url}/version")
            assert response.status == 200
        await cluster.idle()


async def test_a_slow_engine_has_a_deadline() -> None:
    """That of all requests."""
    async with stub_cluster("p0", "d0", request_deadline_s=0.2) as cluster:

        async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        cluster.engines["d0"].answer = hang
        response = await cluster.session.get(f"{cluster.url}/version")
        assert response.status == 504
        await cluster.idle()


async def test_without_nodes() -> None:
    """503 for what a node has to answer; the router's own health for a ping."""
    async with stub_cluster() as cluster:
        response = await cluster.session.post(f"{cluster.url}/tokenize", json={})
        assert response.status == 503
        for method in ("GET", "POST"):
            assert (await cluster.session.request(method, f"{cluster.url}/ping")).status == 503
    async with stub_cluster("d0") as cluster:
        assert (await cluster.session.get(f"{cluster.url}/ping")).status == 200


async def test_many_with_one_request_id_get_their_own_answers() -> None:
    """A hundred at once under one ``X-Request-Id``: everybody gets the right answer."""
    async with stub_cluster("p0", "d0", "d1") as cluster:

        async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
            body: Any = asked.body
            await asyncio.sleep(0)
            await send(writer, 200, json.dumps({"choices": [{"text": body["prompt"]}]}).encode())

        for engine in cluster.engines.values():
            engine.answer = answer
        headers = {"X-Request-Id": "the-same"}

        async def one(number: int) -> None:
            body = completion(prompt=f"p{number}", stream=False)
            path = "/v1/completions" if number % 2 else "/tokenize"
            response = await cluster.session.post(cluster.url + path, json=body, headers=headers)
            assert response.headers["x-request-id"] == "the-same"
            assert (await response.json())["choices"][0]["text"] == f"p{number}"

        await asyncio.gather(*(one(number) for number in range(100)))
        await cluster.idle()
