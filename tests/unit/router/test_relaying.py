"""From a client's request to both engines and back: bodies, headers, streams, statuses."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest
from router_stubs.cluster import SECRET, StubCluster, completion, settled, stub_cluster, until
from router_stubs.engine import DONE, SSE, Asked, chunk, plain_answer, send, start_stream, stream

from splitserve.kv_transfer.transfer_params import unseal
from splitserve.orchestrator.config import tenant_tag

WORDS = "Grüße, 你好, 😀! "
EVENTS = b"".join(
    b"data: " + json.dumps({"text": w}, ensure_ascii=False).encode() + b"\n\n" for w in WORDS
)


async def test_both_legs_leave_with_one_transfer() -> None:
    """Same transfer id, request id and attempt; each leg names the other side; both carry the
    cluster's MAC.
    """
    async with stub_cluster("p0", "d0") as cluster:
        response = await cluster.post(headers={"X-Request-Id": "mine-1"})
        assert (await response.read()) == b"".join(SSE) + DONE
        assert response.headers["x-request-id"] == "mine-1"
        await cluster.idle()
        (on_p,), (on_d,) = cluster.engines["p0"].asked, cluster.engines["d0"].asked
        prefill = unseal(on_p.body["kv_transfer_params"], SECRET)
        decode = unseal(on_d.body["kv_transfer_params"], SECRET)
        assert prefill is not None
        assert decode is not None
        assert prefill.transfer_id == decode.transfer_id
        assert (prefill.role, prefill.peer_incarnation) == ("prefill", "d0-1")
        assert (decode.role, decode.peer_incarnation) == ("decode", "p0-1")
        assert decode.peer_addresses == ("tcp://p0",)
        assert on_p.headers["x-request-id"] == on_d.headers["x-request-id"] == "mine-1"
        assert (on_p.body["max_tokens"], on_p.body["stream"]) == (1, False)
        assert on_p.path == on_d.path == "/v1/completions"


async def test_what_cannot_be_split_goes_to_decode_alone() -> None:
    """The prefill engine is not asked, and the body arrives byte for byte."""
    async with stub_cluster("p0", "d0") as cluster:
        raw = b'{"prompt" : "x", "n": 2}'
        response = await cluster.post(data=raw, headers={"Content-Type": "application/json"})
        assert response.status == 200
        assert cluster.engines["p0"].asked == []
        assert cluster.engines["d0"].asked[0].raw == raw


async def test_the_header_policy() -> None:
    """Tracing, user and own headers travel; hop-by-hop headers, the client's key and encodings do
    not.
    """
    async with stub_cluster("p0", "d0", keys={"sk-1": "acme"}) as cluster:
        response = await cluster.post(
            headers={
                "Authorization": "Bearer sk-1",
                "traceparent": "00-1-2-01",
                "x-custom": "c",
                "user-agent": "u",
                "Accept-Encoding": "gzip",
                "Connection": "keep-alive, x-hop",
                "x-hop": "1",
                "Proxy-Authorization": "secret",
                "x-data-parallel-rank": "3",
                "x-api-key": "sk-1",
            }
        )
        await response.read()
        await cluster.idle()
        for name, engine in cluster.engines.items():
            headers = engine.asked[0].headers
            assert headers["authorization"] == f"Bearer key-{name}"
            assert headers["traceparent"] == "00-1-2-01"
            assert (headers["x-custom"], headers["user-agent"]) == ("c", "u")
            unwanted = {"accept-encoding", "connection", "x-hop", "te", "proxy-authorization"}
            assert not unwanted & headers.keys()
            assert not {"x-data-parallel-rank", "x-api-key"} & headers.keys()
        assert response.headers["x-engine"] == "kept"
        assert response.headers.get("server") != "stub"


@pytest.mark.parametrize(
    ("header", "field", "expected"),
    [("h", "f", "h"), (None, "f", "f"), (None, 7, None), (None, "\u00e9 ", None)],
)
async def test_the_body_may_name_the_request(
    header: str | None, field: object, expected: str | None
) -> None:
    """As with one engine; the header counts more, and what is fit for no header is not taken."""
    async with stub_cluster("p0", "d0") as cluster:
        headers = {"X-Request-Id": header} if header else {}
        response = await cluster.post(json=completion(request_id=field), headers=headers)
        name = response.headers["x-request-id"]
        assert name == expected if expected else name not in (str(field), header)
        assert cluster.engines["d0"].asked[0].headers["x-request-id"] == name
        await response.read()


async def test_a_strange_request_id_is_replaced() -> None:
    """Too long or not printable: the router's own goes to engines and client."""
    async with stub_cluster("p0", "d0") as cluster:
        response = await cluster.post(headers={"X-Request-Id": "x" * 129})
        own = response.headers["x-request-id"]
        assert len(own) < 40
        await response.read()
        assert cluster.engines["d0"].asked[0].headers["x-request-id"] == own


async def test_tenants_get_different_salts_on_both_legs() -> None:
    """The salt follows from the tenant and what the client sent; keys are never passed on."""
    async with stub_cluster("p0", "d0", keys={"sk-1": "a", "sk-2": "b"}) as cluster:
        salts = []
        for key, extra in (("sk-1", {}), ("sk-2", {}), ("sk-1", {"cache_salt": "s"}), ("sk-1", {})):
            body = completion(**extra)
            response = await cluster.post(json=body, headers={"Authorization": f"Bearer {key}"})
            await response.read()
            await cluster.idle()
            on_p, on_d = cluster.engines["p0"].asked[-1], cluster.engines["d0"].asked[-1]
            assert on_p.body["cache_salt"] == on_d.body["cache_salt"]
            salts.append(on_d.body["cache_salt"])
        assert salts[0] == salts[3]
        assert len(set(salts)) == 3


async def test_legs_carry_the_tenants_tag() -> None:
    """Sealed, the same on both legs and on a request that is not split; nothing without keys."""
    tag = tenant_tag(SECRET, "a")
    headers = {"Authorization": "Bearer sk-1"}
    async with stub_cluster("p0", "d0", keys={"sk-1": "a"}) as cluster:
        for body in (completion(), completion(n=2)):
            await (await cluster.post(json=body, headers=headers)).read()
            await cluster.idle()
        asked = [*cluster.engines["p0"].asked, *cluster.engines["d0"].asked]
        found = [unseal(leg.body["kv_transfer_params"], SECRET) for leg in asked]
        told = [(leg.role, leg.tenant) for leg in found if leg is not None]
        assert told == [("prefill", tag), ("decode", tag), ("alone", tag)]
    async with stub_cluster("p0", "d0") as cluster:
        for body in (completion(), completion(n=2)):
            await (await cluster.post(json=body)).read()
            await cluster.idle()
        split, alone = (leg.body for leg in cluster.engines["d0"].asked)
        assert "tenant" not in json.dumps(split["kv_transfer_params"])
        assert "kv_transfer_params" not in alone


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7])
@pytest.mark.parametrize("ends", ["lf", "crlf"])
async def test_stream_bytes_pass_unchanged(piece_bytes: int, ends: str) -> None:
    """Cut anywhere, also inside characters and line ends, with comments in between."""
    data = b": comment\n\n" + EVENTS + b": ping\n\n" + DONE
    if ends == "crlf":
        data = data.replace(b"\n", b"\r\n")
    async with stub_cluster("p0", "d0") as cluster:

        async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await stream(writer, data, piece_bytes)

        cluster.engines["d0"].answer = answer
        response = await cluster.post("chat/completions", json=chat(stream=True))
        assert response.headers["content-type"].startswith("text/event-stream")
        assert await response.read() == data
        await cluster.idle()


async def test_the_status_line_waits_for_the_first_data_event() -> None:
    """Neither the head nor a comment of the engine makes the router promise success; half an event
    neither.
    """
    async with stub_cluster("p0", "d0") as cluster:
        go = asyncio.Event()

        async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await start_stream(writer)
            await chunk(writer, b": wait\n\n")
            await chunk(writer, SSE[0][:9])
            await go.wait()
            await chunk(writer, SSE[0][9:] + DONE)
            await chunk(writer, b"")

        cluster.engines["d0"].answer = answer
        posting = asyncio.ensure_future(cluster.post())
        await until(lambda: len(cluster.engines["d0"].asked) == 1)
        done, _ = await asyncio.wait((posting,), timeout=0.05)
        assert not done
        go.set()
        response = await posting
        assert response.status == 200
        assert await response.read() == b": wait\n\n" + SSE[0] + DONE


async def test_an_error_in_the_first_event_becomes_a_status() -> None:
    """Engines send some failures inside a 200; the client sees the real status."""
    async with stub_cluster("p0", "d0") as cluster:

        async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await stream(writer, b'data: {"error": {"message": "no", "code": 418}}\n\n' + DONE)

        cluster.engines["d0"].answer = answer
        response = await cluster.post()
        assert response.status == 418
        assert (await response.json())["error"]["message"] == "no"
        await cluster.idle()


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("status", [400, 404, 422, 500])
async def test_an_engines_error_is_passed_on_unchanged(is_streaming: bool, status: int) -> None:
    """Status and body; the prefill leg is cancelled."""
    async with stub_cluster("p0", "d0") as cluster:

        async def refuse(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await send(writer, status, b'{"error":{"message":"mine"}}')

        async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        cluster.engines["d0"].answer = refuse
        cluster.engines["p0"].answer = hang
        response = await cluster.post(json=completion(stream=is_streaming))
        assert response.status == status
        assert await response.read() == b'{"error":{"message":"mine"}}'
        assert response.headers["x-engine"] == "kept"
        await cluster.idle()
        async with asyncio.timeout(20):
            await cluster.engines["p0"].asked[0].client_left.wait()


async def test_many_refused_requests_leave_the_nodes_alone() -> None:
    """Fifty 400s in a row, then a good request is served at once."""
    async with stub_cluster("p0", "d0") as cluster:

        async def refuse(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await send(writer, 400, b"{}")

        cluster.engines["d0"].answer = refuse
        for _ in range(50):
            assert (await cluster.post()).status == 400
        cluster.engines["d0"].answer = plain_answer
        assert (await cluster.post()).status == 200


@pytest.mark.parametrize("how", ["status", "reset", "refused connection"])
async def test_a_failed_prefill_leg_does_not_fail_the_request(how: str) -> None:
    """The decode node's agent is told the transfer id, and the client gets its answer."""
    async with stub_cluster("p0", "d0") as cluster:
        p0, d0 = cluster.engines["p0"], cluster.engines["d0"]
        go = asyncio.Event()

        async def fail(asked: Asked, writer: asyncio.StreamWriter) -> None:
            if how == "status":
                await send(writer, 500, b"oops")
            writer.transport.abort()

        async def slow(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await go.wait()
            await plain_answer(asked, writer)

        p0.answer, d0.answer = fail, slow
        if how == "refused connection":
            await p0.stop()
        posting = asyncio.ensure_future(cluster.post())
        frames = cluster.agents["d0"].frames
        await until(lambda: any(type(f).__name__ == "FailTransfer" for f in frames))
        (frame,) = [f for f in frames if type(f).__name__ == "FailTransfer"]
        params = unseal(d0.asked[0].body["kv_transfer_params"], SECRET)
        assert params is not None
        assert frame.transfer_id == params.transfer_id  # type: ignore[union-attr]
        go.set()
        response = await posting
        assert await response.read() == b"".join(SSE) + DONE
        await cluster.idle()


async def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    """Never a clean [DONE]: the last event is an error, also when the engine dies in an event."""
    async with stub_cluster("p0", "d0") as cluster:

        async def die(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await start_stream(writer)
            await chunk(writer, SSE[0] + SSE[1][:-10])
            writer.transport.abort()

        cluster.engines["d0"].answer = die
        response = await cluster.post()
        assert response.status == 200
        text = await response.read()
        assert text.startswith(SSE[0])
        last = text.strip().rpartition(b"\n\n")[2]
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["code"] == 502
        assert b"[DONE]" not in text
        await cluster.idle()


async def test_an_unstreamed_answer_that_breaks_is_a_5xx() -> None:
    """Half a body is never handed on as if it were whole."""
    async with stub_cluster("p0", "d0") as cluster:

        async def die(asked: Asked, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n" + b"x" * 50)
            await writer.drain()
            writer.transport.abort()

        cluster.engines["d0"].answer = die
        response = await cluster.post(json=completion(stream=False))
        assert response.status == 502
        assert "middle" in (await response.json())["error"]["message"]
        await cluster.idle()


async def test_a_dead_decode_engine_is_replaced_before_its_first_token() -> None:
    """With a second decode node the client notices nothing."""
    async with stub_cluster("p0", "d0", "d1") as cluster:
        await cluster.engines["d0"].stop()
        for _ in range(4):
            response = await cluster.post()
            assert response.status == 200
            assert await response.read() == b"".join(SSE) + DONE
        await cluster.idle()
        assert len(cluster.engines["d1"].asked) == 4


@pytest.mark.parametrize("stage", ["before the first token", "in mid stream"])
async def test_a_client_that_leaves_closes_both_legs(stage: str) -> None:
    """Both engines see their connection closed, and the router is idle again."""
    async with stub_cluster("p0", "d0") as cluster:

        async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
            if asked.body["stream"] and stage == "in mid stream":
                await start_stream(writer)
                await chunk(writer, SSE[0])
            await asyncio.Event().wait()

        for engine in cluster.engines.values():
            engine.answer = hang
        posting = asyncio.ensure_future(cluster.post())
        await until(lambda: all(engine.asked for engine in cluster.engines.values()))
        if stage == "in mid stream":
            response = await posting
            await response.content.readany()
            response.close()
        else:
            posting.cancel()
        await cluster.idle()
        for engine in cluster.engines.values():
            async with asyncio.timeout(20):
                await engine.asked[0].client_left.wait()
        cluster.router.log.flush()
        assert json.loads(cluster.log.getvalue())["status"] == 499


async def test_a_slow_client_slows_the_engine() -> None:
    """The router holds little more than its bound; the bytes are all there in the end."""
    async with stub_cluster("p0", "d0") as cluster:
        sent = 0
        event = b"data: " + b"x" * 65_000 + b"\n\n"

        async def flood(asked: Asked, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            await start_stream(writer)
            for _ in range(400):
                await chunk(writer, event)
                sent += len(event)
            await chunk(writer, b"")

        cluster.engines["d0"].answer = flood
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.port)
        body = json.dumps(completion()).encode()
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            await until(lambda: sent > 0)
            await settled(lambda: sent)
            assert sent < 400 * len(event), "the engine was never slowed"
            await reader.readuntil(b"\r\n\r\n")
            received = 0
            while data := await reader.read(2**16):
                received += data.count(b"x")
            assert received == 400 * 65_000
        finally:
            writer.transport.abort()
        await cluster.idle()


async def test_a_hundred_requests_at_once() -> None:
    """Each gets its own answer, streamed or not, over few connections."""
    async with stub_cluster("p0", "d0", prefill_ahead_requests=7) as cluster:

        async def echo(asked: Asked, writer: asyncio.StreamWriter) -> None:
            text = json.dumps({"text": asked.body["prompt"]}).encode()
            if asked.body["stream"]:
                await stream(writer, b"data: " + text + b"\n\n" + DONE, 5)
            else:
                await send(writer, 200, text)

        for engine in cluster.engines.values():
            engine.answer = echo

        async def one(number: int) -> bool:
            body = completion(prompt=f"prompt {number}", stream=number % 2 == 0)
            response = await cluster.post(json=body)
            return json.dumps({"text": body["prompt"]}).encode() in await response.read()

        assert all(await asyncio.gather(*map(one, range(100))))
        await cluster.idle()
        assert cluster.engines["p0"].connections <= 10


@pytest.mark.parametrize("megabytes", [0.9, 3, 30])
@pytest.mark.parametrize("encoding", ["length", "chunked"])
async def test_large_bodies_arrive_whole(megabytes: float, encoding: str) -> None:
    """Up to the limit, with a length or in chunks, on both legs."""
    async with stub_cluster("p0", "d0") as cluster:
        body = chat(content="x" * int(megabytes * 1e6))
        raw = json.dumps(body).encode()

        async def pieces() -> Any:
            for start in range(0, len(raw), 100_000):
                yield raw[start : start + 100_000]

        response = await cluster.post(
            "chat/completions",
            data=io.BytesIO(raw) if encoding == "length" else pieces(),
            headers={"Content-Type": "application/json", "Expect": "100-continue"},
        )
        assert response.status == 200
        await cluster.idle()
        assert cluster.engines["d0"].asked[0].body["messages"] == body["messages"]
        assert cluster.engines["p0"].asked[0].body["messages"] == body["messages"]


def chat(content: str = "hi", **changes: Any) -> dict[str, Any]:
    """A small chat."""
    return {"model": "m", "messages": [{"role": "user", "content": content}]} | changes


async def test_stopping_ends_streams_with_an_error_event() -> None:
    """And the stop takes little time."""
    async with stub_cluster("p0", "d0") as cluster:

        async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
            if asked.body["stream"]:
                await start_stream(writer)
                await chunk(writer, SSE[0])
            await asyncio.Event().wait()

        for engine in cluster.engines.values():
            engine.answer = hang
        response = await cluster.post()
        reading = asyncio.ensure_future(response.read())
        async with asyncio.timeout(20):
            await cluster.router.drain(0.05)
            assert (await refused(cluster)) == 503
            await cluster.router.stop()
            text = await reading
        assert b'"code":503' in text
        assert b"[DONE]" not in text


async def refused(cluster: StubCluster) -> int:
    """The status of one more request."""
    return (await cluster.post()).status
