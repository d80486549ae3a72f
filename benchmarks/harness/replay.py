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


async def replay(
    session: aiohttp.ClientSession,
    url: str,
    requests: Sequence[TraceRequest],
    bodies: Sequence[dict[str, Any]],
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
        late += time.monotonic() - began - request.at_s > LATE_LIMIT_S
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
