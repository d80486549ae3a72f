"""What the probes of `splitserve profile` count: tokens, not events, and only answers that are
some.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from router_stubs.engine import DONE, Asked, StubEngine, chunk, send, start_stream

from splitserve.orchestrator.cli.probe_client import ProbeClient
from splitserve.orchestrator.tuner.live_watch import LiveWatch
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.probing import ProbeError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Reply = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


def event(ids: list[int] | None, **choice: Any) -> bytes:
    """An event of a stream."""
    body = {"choices": [{"index": 0, "text": "x", "token_ids": ids, **choice}]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@asynccontextmanager
async def probed(reply: Reply) -> AsyncIterator[ProbeClient]:
    """A client whose router answers so."""
    router = StubEngine()
    router.answer = reply
    await router.start()
    try:
        url, watch = f"http://127.0.0.1:{router.port}", LiveWatch(Targets(ttft_s=1, itl_s=1))
        async with ProbeClient(url, "token", watch, answer_limit_s=20) as client:
            yield client
    finally:
        await router.stop()


async def test_it_is_said_when_the_first_token_is_there() -> None:
    """Once, and while the answer goes on; an event without a token is not one."""
    seen: list[int] = []
    told, sent = asyncio.Event(), 0

    async def reply(asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await start_stream(writer)
        await chunk(writer, event([], delta={"role": "assistant"}))
        sent = 1
        await chunk(writer, event([1]))
        async with asyncio.timeout(20):
            await told.wait()
        sent = 2
        await chunk(writer, event([2, 3]))
        await chunk(writer, DONE)
        await chunk(writer, b"")

    def begun() -> None:
        seen.append(sent)
        told.set()

    async with probed(reply) as client:
        answer = await client.ask([1, 2], 3, decode="d0", begun=begun)
    assert len(answer.tokens) == 3
    assert seen == [1]


async def test_every_token_of_an_event_counts() -> None:
    """An event with the role alone is none; four tokens that come together come at one time."""
    has_first = asyncio.Event()

    async def reply(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await start_stream(writer)
        await chunk(writer, event([], delta={"role": "assistant"}))
        await has_first.wait()
        for number in range(5):
            await chunk(writer, event([number] * 4))
        await chunk(writer, DONE)
        await chunk(writer, b"")

    async with probed(reply) as client:
        asking = asyncio.ensure_future(client.ask([1, 2], 20, decode="d0"))
        done, _ = await asyncio.wait((asking,), timeout=0.05)
        assert not done
        before = asyncio.get_running_loop().time()
        has_first.set()
        answer = await asking
    assert len(answer.tokens) == 20
    assert answer.tokens[0] >= before
    assert all(len(set(answer.tokens[at : at + 4])) == 1 for at in range(0, 20, 4))


@pytest.mark.parametrize("status", [500, 200])
async def test_a_failure_is_no_answer(status: int) -> None:
    """An error status, or a 200 with nothing in it."""

    async def reply(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await send(writer, status, b"")

    async with probed(reply) as client:
        with pytest.raises(ProbeError, match=str(status) if status == 500 else "0 of 20 tokens"):
            await client.ask([1, 2], 20, decode="d0")
