"""The count of cached tokens in a split request's answer is the prefill engine's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from router_stubs.cluster import StubCluster, completion, stub_cluster, until
from router_stubs.engine import DONE, Asked, send, stream

from splitserve.orchestrator.router import exchange
from splitserve.orchestrator.router.prompt_usage import (
    LINE_LIMIT_BYTES,
    Cached,
    WholeLines,
    figures_of,
)

FIGURES = figures_of("completions")
FIELD = '"prompt_tokens_details":{"cached_tokens":'
IN_A_TEXT = json.dumps({"text": FIELD + "5}"}).encode()


def usage(cached: int | None, **more: int | None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached, **more}
    return {"prompt_tokens": 300, "prompt_tokens_details": details}


def answer(cached: int | None, **more: int | None) -> bytes:
    """Of an engine; written without blanks, as engines do."""
    value = {"choices": [{"text": "4"}], "usage": usage(cached, **more), "more": None}
    return json.dumps(value, separators=(",", ":")).encode()


def test_figures_are_found() -> None:
    """As the engine wrote them; null where there is none."""
    assert FIGURES.read(answer(256)) == (b"256", b"null")
    assert FIGURES.read(answer(256, created_cache_tokens=32, more=None)) == (b"256", b"32")
    for text in (answer(None), b"", IN_A_TEXT):
        assert FIGURES.read(text) == (b"null", b"null")


def test_figures_are_replaced() -> None:
    """With what stands around them unchanged, and the last ones only; a text is no figure."""
    figures = Cached(b"7", b"64")
    more = json.dumps(usage(300, created=None), separators=(",", ":")).encode()
    assert json.loads(FIGURES.written(more, figures)) == usage(7, created=None)
    both = answer(300, created_cache_tokens=0, media=None)
    assert FIGURES.written(both, figures) == answer(7, created_cache_tokens=64, media=None)
    assert FIGURES.written(answer(300) + answer(1), figures) == answer(300) + answer(7)
    for text in (b"", IN_A_TEXT, answer(None)):
        assert FIGURES.written(text, figures) == text


@pytest.mark.parametrize("piece_bytes", [1, 5, 1000])
def test_lines_come_whole(piece_bytes: int) -> None:
    """Each piece ends where a line does, but for the rest; a line that is too long is let go."""
    text = b"one\n\ntwo\r\n\r\nthree"
    lines = WholeLines()
    pieces = [lines.feed(text[at : at + piece_bytes]) for at in range(0, len(text), piece_bytes)]
    assert all(piece.endswith(b"\n") for piece in pieces if piece)
    assert b"".join(pieces) + lines.rest() == text
    assert lines.rest() == b""
    long = b"x" * (LINE_LIMIT_BYTES + 1)
    assert lines.feed(long) == long


Reply = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


def engine(cached: int | None, piece_bytes: int = 0, *, ids: bool = False) -> Reply:
    """One that answers with that figure."""

    async def reply(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if not asked.body.get("stream"):
            await send(writer, 200, answer(cached))
            return
        first: dict[str, Any] = {"id": "a", "object": "o", "created": 1, "model": "m"}
        choice = {"text": "4", "token_ids": [4], "finish_reason": "stop"}
        if ids:
            choice["prompt_token_ids"] = [1, 2]
        events = [first | {"choices": [choice]}, first | {"choices": [], "usage": usage(cached)}]
        data = b"".join(
            b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
            for event in events
        )
        await stream(writer, data + DONE, piece_bytes)

    return reply


def afterwards(cluster: StubCluster, reply: Reply) -> Reply:
    """The decode engine's answer, when the router has the prefill engine's."""

    async def wait(asked: Asked, writer: asyncio.StreamWriter) -> None:
        node = cluster.router.core.membership.nodes["p0"]
        await until(lambda: bool(cluster.engines["p0"].asked) and not node.prefill_legs)
        await reply(asked, writer)

    return wait


@pytest.mark.parametrize("known", [256, 0, None])
async def test_a_whole_answer_has_the_prefill_engines_figure(known: int | None) -> None:
    """The decode engine says that all 300 tokens were cached. Null when nobody knows."""
    async with stub_cluster("p0", "d0") as cluster:
        cluster.engines["p0"].answer = engine(known)
        cluster.engines["d0"].answer = afterwards(cluster, engine(300))
        response = await cluster.post(json=completion(stream=False))
        details = (await response.json())["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": known}


def when(told: asyncio.Event, reply: Reply) -> Reply:
    """An engine that answers when it is told to."""

    async def wait(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await told.wait()
        await reply(asked, writer)

    return wait


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_a_figure_that_comes_late_is_waited_for(is_streaming: bool) -> None:
    """The decode engine has ended before the prefill engine answers: what comes before the figure
    is not held back, and its slot is free meanwhile.
    """
    told = asyncio.Event()
    async with stub_cluster("p0", "d0") as cluster:
        cluster.engines["p0"].answer = when(told, engine(256))
        cluster.engines["d0"].answer = engine(300, 7)
        body = completion(stream=is_streaming)
        if is_streaming:
            body["stream_options"] = {"include_usage": True}
        asking = asyncio.ensure_future(cluster.post(json=body))
        if is_streaming:
            response = await asking
            assert b'"text":"4"' in await response.content.readany()
        node = cluster.router.core.membership.nodes["d0"]
        await until(lambda: bool(cluster.engines["d0"].asked) and not node.decode_legs)
        told.set()
        text = await (await asking).read()
        assert b'"cached_tokens":256' in text
        assert text.endswith(DONE) == is_streaming
        await cluster.idle()


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("fails", [True, False])
async def test_a_figure_that_does_not_come_is_null(
    fails: bool, is_streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill engine breaks off, or its figure is waited for no longer."""
    monkeypatch.setattr(exchange, "WAIT_LIMIT_S", 60.0 if fails else 0.05)
    told = asyncio.Event()
    async with stub_cluster("p0", "d0") as cluster:
        cluster.engines["p0"].answer = when(told, engine(256))
        cluster.engines["d0"].answer = engine(300)
        body = completion(stream=is_streaming)
        if is_streaming:
            body["stream_options"] = {"include_usage": True}
        asking = asyncio.ensure_future(cluster.post(json=body))
        if fails:
            node = cluster.router.core.membership.nodes["d0"]
            await until(lambda: bool(cluster.engines["d0"].asked) and not node.decode_legs)
            cluster.engines["p0"].drop_connections()
        text = await (await asking).read()
        assert b'"cached_tokens":null' in text
        assert text.endswith(DONE) == is_streaming
        told.set()
        await cluster.idle()


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "no-ids"])
@pytest.mark.parametrize("piece_bytes", [1, 7, 0])
async def test_a_stream_has_the_prefill_engines_figure(ids: bool, piece_bytes: int) -> None:
    """However it is cut, whether the router follows its tokens or not; all else is unchanged."""
    body = completion(stream=True, stream_options={"include_usage": True})
    async with stub_cluster("p0", "d0") as cluster:
        cluster.engines["p0"].answer = engine(12)
        cluster.engines["d0"].answer = afterwards(cluster, engine(300, piece_bytes, ids=ids))
        text = await (await cluster.post(json=body)).read()
        events = [json.loads(line[6:]) for line in text.split(b"\n\n")[:-2]]
        assert [len(event["choices"]) for event in events] == [1, 0]
        assert events[1]["usage"] == usage(12)
        assert text.endswith(DONE)


async def test_a_decode_engine_that_computes_keeps_its_figure() -> None:
    """A request that is not split."""
    async with stub_cluster("p0", "d0") as cluster:
        cluster.engines["d0"].answer = engine(200)
        response = await cluster.post(json=completion(stream=False, n=2))
        assert (await response.json())["usage"] == usage(200)
