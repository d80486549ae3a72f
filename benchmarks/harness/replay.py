"""Requests of a trace sent to a running system when the trace says, whatever the system does: an
open loop, with the same outcome as a simulation of it gives.
"""

from __future__ import annotations

import asyncio
import time
from random import Random
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np

from harness.client import RequestFailedError, stream_completion
from splitserve.orchestrator.traces import TraceRequest
from splitserve.orchestrator.tuner.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.client import Streamed

LATE_LIMIT_S = 0.05
"""A request that leaves later than this after its time says that the client is too busy."""

CHAT_BLOCK_TOKENS = 128
OPEN_CHATS = 40
CHAT_LIMIT_TOKENS = 3000


class LateClientError(Exception):
    """The client could not send in time, so the run says nothing."""


def draw_trace(
    seed: int, *, seconds: float, per_s: float, input_tokens: int, output_tokens: int
) -> list[TraceRequest]:
    """Poisson arrivals; lengths are log-normal around the given medians, the long ones cut."""
    source = Random(f"trace/{seed}")
    found = []
    at_s = 0.0
    while at_s < seconds:
        prompt = round(input_tokens * source.lognormvariate(0.0, 0.6))
        answer = round(output_tokens * source.lognormvariate(0.0, 0.6))
        prompt = min(max(prompt, input_tokens // 8), 4 * input_tokens)
        answer = min(max(answer, 2), 4 * output_tokens)
        found.append(TraceRequest(at_s, prompt, answer, ()))
        at_s += source.expovariate(per_s)
    return found


def draw_chats(
    seed: int, *, seconds: float, per_s: float, turn_tokens: int, output_tokens: int
) -> list[TraceRequest]:
    """Poisson arrivals of turns: one of three begins a chat, the others go on with one of the
    latest chats, whose prompt they repeat. Blocks have ``CHAT_BLOCK_TOKENS``.
    """
    source = Random(f"chats/{seed}")
    chats: list[tuple[int, ...]] = []
    found: list[TraceRequest] = []
    at_s, blocks_so_far = 0.0, 0
    while at_s < seconds:
        is_new = not chats or source.random() < 1 / 3
        before = () if is_new else chats.pop(source.randrange(len(chats)))
        tokens = min(round(turn_tokens * source.lognormvariate(0.0, 0.6)), 4 * turn_tokens)
        count = max(1, tokens // CHAT_BLOCK_TOKENS)
        blocks = (*before, *range(blocks_so_far, blocks_so_far + count))
        blocks_so_far += count
        if len(blocks) * CHAT_BLOCK_TOKENS < CHAT_LIMIT_TOKENS:
            chats = [*chats, blocks][-OPEN_CHATS:]
        answer = max(2, min(round(output_tokens * source.lognormvariate(0.0, 0.6)), 160))
        found.append(TraceRequest(at_s, len(blocks) * CHAT_BLOCK_TOKENS, answer, blocks))
        at_s += source.expovariate(per_s)
    return found


def prompt_of(seed: object, request: TraceRequest) -> list[int]:
    """Token ids; equal blocks of one seed are equal, everything else differs."""
    if not request.blocks:
        source = Random(f"prompt/{seed}/{request.at_s}")
        return [source.randrange(256) for _ in range(request.input_tokens)]
    prompt: list[int] = []
    for block in request.blocks:
        source = Random(f"block/{seed}/{block}")
        prompt += [source.randrange(256) for _ in range(CHAT_BLOCK_TOKENS)]
    return prompt


async def replay(
    session: aiohttp.ClientSession,
    url: str,
    requests: Sequence[TraceRequest],
    bodies: Sequence[dict[str, Any]],
    late_limit_s: float = LATE_LIMIT_S,
) -> Outcome:
    """All requests have been sent, each with its body, and have ended. Raises ``LateClientError``
    when more than one in twenty left late.
    """
    tasks: list[asyncio.Task[Streamed]] = []
    late = 0
    began = time.monotonic()
    for request, body in zip(requests, bodies, strict=True):
        due = began + request.at_s - time.monotonic()
        await asyncio.sleep(max(0.0, due))
        late += time.monotonic() - began - request.at_s > late_limit_s
        tasks.append(asyncio.create_task(stream_completion(session, url, body)))
    if late * 20 > len(requests):
        for task in tasks:
            task.cancel()
        raise LateClientError(f"{late} of {len(requests)} requests left late; the machine is busy")
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    return outcome_of(requests, answers, began)


def outcome_of(
    requests: Sequence[TraceRequest], answers: Sequence[Streamed | BaseException], began: float
) -> Outcome:
    """What was measured. Raises what no server can have caused."""
    rows = []
    for request, answer in zip(requests, answers, strict=True):
        if isinstance(answer, RequestFailedError | aiohttp.ClientError):
            rows.append((request.at_s, np.nan, np.nan, np.nan))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            # From the trace's time on, so that what waits in the client counts
            first = answer.events[0] - began - request.at_s
            gaps = max(1, answer.completion_tokens - 1)
            itl = (answer.events[-1] - answer.events[0]) / gaps
            rows.append((request.at_s, first, itl, answer.events[-1] - began))
    arrived, ttft, itl, ended = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    return Outcome(arrived, ttft, itl, ended)
