"""Streams whose engine fails, and answers that come when their time is over, in a router with stub
engines: the client has one answer, and nothing behind it.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from router_stubs.cluster import StubCluster, completion, settled, stub_cluster, until
from router_stubs.engine import DONE, SSE, Asked, chunk, start_stream, stream

from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.router import core_driver

if TYPE_CHECKING:
    import pytest


def event(text: str, ids: list[int], *, finish: str | None = None, first: bool = False) -> bytes:
    """A completion's event with token ids, as an engine that was asked for them writes it."""
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish, "token_ids": ids}
    if first:
        choice["prompt_token_ids"] = [1, 2, 3]
    head = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m"}
    told = json.dumps(head | {"choices": [choice]}, separators=(",", ":"))
    return b"data: " + told.encode() + b"\n\n"


def decode_node_of(cluster: StubCluster) -> str:
    """Where the one request is."""
    (request,) = cluster.router.core.requests.values()
    assert request.choice is not None
    return request.choice.decode.name


async def post_raw(cluster: StubCluster) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that asks for a small stream, and is kept."""
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.port, limit=2**16)
    body = json.dumps(completion()).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    return reader, writer


async def test_first_data_that_comes_too_late_is_not_sent_behind_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop was busy past the first token's deadline, and the first data is what it reads then:
    the client gets its 504, and its next request on the same connection the right answer.
    """
    async with stub_cluster("p0", "d0", first_token_deadline_s=30.0) as cluster:
        go_on = asyncio.Event()

        async def late(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await go_on.wait()
            await stream(writer, b"".join(SSE) + DONE)

        cluster.engines["d0"].answer = late
        reader, writer = await post_raw(cluster)
        try:
            await until(lambda: len(cluster.engines["d0"].asked) == 1)
            (request,) = cluster.router.core.requests.values()
            await until(lambda: not request.has_prefill_leg)
            real = time.monotonic
            monkeypatch.setattr(core_driver.time, "monotonic", lambda: real() + 31)
            go_on.set()
            head = await reader.readuntil(b"\r\n\r\n")
            monkeypatch.undo()
            assert head.startswith(b"HTTP/1.1 504")
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert b"too slow" in await reader.readexactly(size)
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        finally:
            writer.transport.abort()
        await cluster.idle()


async def test_a_stream_that_cannot_be_gone_on_with_does_not_begin_again() -> None:
    """Its engine does not send token ids: however many decode nodes are left to try, the client
    gets an error behind what it has.
    """
    nodes = ("p0", "d0", "d1", "d2", "d3")
    async with stub_cluster(*nodes, policy={"max_attempts": 4}) as cluster:

        async def breaks(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await start_stream(writer)
            await chunk(writer, SSE[0])
            writer.transport.abort()

        for name in nodes[1:]:
            cluster.engines[name].answer = breaks
        async with await cluster.post() as answer:
            text = await answer.read()
        assert text.startswith(SSE[0])
        assert text.count(SSE[0]) == 1
        assert b'"code":502' in text
        await cluster.idle()


async def test_a_finished_answer_whose_node_is_lost_ends_well() -> None:
    """The last token was sent, the end of the stream was not, and there is no other node."""
    async with stub_cluster("p0", "d0") as cluster:

        async def hangs(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await start_stream(writer)
            await chunk(writer, event("a", [4], first=True))
            await chunk(writer, event("b", [5], finish="length"))
            await asyncio.Event().wait()

        cluster.engines["d0"].answer = hangs
        async with await cluster.post() as answer:
            async for line in answer.content:
                if b'"length"' in line:
                    break
            cluster.router.driver.tell(ev.NodeDied("d0", "d0-1", "killed"))
            assert (await answer.content.read()).strip() == DONE.strip()
        await cluster.idle()


async def test_a_slow_client_slows_the_engine_that_goes_on_too() -> None:
    """The first engine fails while the client does not read: the second one is read no faster."""
    async with stub_cluster("p0", "d0", "d1") as cluster:
        sent = 0
        break_off = asyncio.Event()
        events = 400
        large = event("x" * 65_000, [7])

        async def first(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await start_stream(writer)
            await chunk(writer, event("a", [4], first=True))
            feeding = asyncio.ensure_future(feed(writer, large))
            await break_off.wait()
            feeding.cancel()
            writer.transport.abort()

        async def feed(writer: asyncio.StreamWriter, data: bytes) -> None:
            nonlocal sent
            for _ in range(events):
                await chunk(writer, data)
                sent += 1

        async def second(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await start_stream(writer)
            await chunk(writer, event("b", [5], first=True))
            await feed(writer, large)
            await asyncio.Event().wait()

        for name in ("d0", "d1"):
            cluster.engines[name].answer = first
        _, writer = await post_raw(cluster)
        try:
            await until(lambda: sent > 0)
            await settled(lambda: sent)
            failing = decode_node_of(cluster)
            (other,) = {"d0", "d1"} - {failing}
            cluster.engines[other].answer = second
            sent = 0
            cluster.router.driver.tell(ev.NodeDied(failing, f"{failing}-1", "killed"))
            break_off.set()
            await until(lambda: sent > 0)
            await settled(lambda: sent)
            assert sent < events, "the second engine was never slowed"
        finally:
            writer.transport.abort()
        await cluster.idle()
