"""The count of cached tokens in a split request's answer is the prefill engine's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from router_stubs.cluster import StubCluster, completion, stub_cluster, until
from router_stubs.engine import DONE, Asked, send, stream

from splitserve.orchestrator.router.prompt_usage import (
    LINE_LIMIT_BYTES,
    WholeLines,
    figure_of,
)

FIGURE = figure_of("completions")
FIELD = '"prompt_tokens_details":{"cached_tokens":'
IN_A_TEXT = json.dumps({"text": FIELD + "5}"}).encode()


def usage(cached: int | None, **more: int | None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached, **more}
    return {"prompt_tokens": 300, "prompt_tokens_details": details}


def answer(cached: int | None, text: str = "4") -> bytes:
    """Of an engine; written without blanks, as engines do."""
    value = {"choices": [{"text": text}], "usage": usage(cached), "more": None}
    return json.dumps(value, separators=(",", ":")).encode()


def test_a_figure_is_found() -> None:
    """As the engine wrote it; null where there is none."""
    assert FIGURE.read(answer(256)) == b"256"
    assert FIGURE.read(answer(None)) == FIGURE.read(b"") == FIGURE.read(IN_A_TEXT) == b"null"


def test_a_figure_is_replaced() -> None:
    """With what stands around it unchanged, and the last one only; a text is no figure."""
    more = json.dumps(usage(300, created=None), separators=(",", ":")).encode()
    assert json.loads(FIGURE.written(more, b"7")) == usage(7, created=None)
    assert FIGURE.written(answer(300) + answer(1), b"20") == answer(300) + answer(20)
    for text in (b"", IN_A_TEXT, answer(None)):
        assert FIGURE.written(text, b"7") == text


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


async def test_a_figure_that_comes_too_late_is_null() -> None:
    """The decode engine has ended before the prefill engine answers."""
    has_answer = asyncio.Event()

    async def late(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await has_answer.wait()
        await engine(256)(asked, writer)

    async with stub_cluster("p0", "d0") as cluster:
        cluster.engines["p0"].answer = late
        cluster.engines["d0"].answer = engine(300)
        response = await cluster.post(json=completion(stream=False))
        details = (await response.json())["usage"]["prompt_tokens_details"]
        has_answer.set()
        assert details == {"cached_tokens": None}
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
