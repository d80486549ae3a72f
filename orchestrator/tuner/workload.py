"""What clients will ask: requests drawn from a mix of lengths, and changes to a recorded trace.

A mix has Poisson arrivals and lognormal lengths; its requests share no prefix. A trace keeps its
order, its lengths and what its prompts share; what is changed here is when its requests come, and
how many of them do.

Pure: the same arguments and the same seed give the same requests.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import msgspec

from splitserve.orchestrator.traces import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

LENGTH_LIMIT_TOKENS = 10_000_000
SPREAD_LIMIT = 20.0
"""Largest coefficient of variation of lengths."""
RATE_LIMIT_PER_S = 1e6
CUT_SAMPLE_REQUESTS = 10_000
"""Drawn to say which share of a mix is cut."""
REQUESTS_LIMIT = 2_000_000
"""Most requests that are made here; a longer workload is a mistake in its numbers."""

COMMON_SHARE = 0.05
"""A block in more of the requests than this stands for no conversation."""


class WorkloadError(ValueError):
    """A workload cannot be made; the message says what is wrong with which value."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts."""

    mean: float
    spread: float = 0.0
    """Coefficient of variation (standard deviation / mean); 0: all are equal."""

    def __post_init__(self) -> None:
        """Raise ``WorkloadError`` for what no lengths have."""
        if not 1 <= self.mean <= LENGTH_LIMIT_TOKENS:
            raise WorkloadError(f"a mean length is 1 to {LENGTH_LIMIT_TOKENS}, not {self.mean:g}")
        if not 0 <= self.spread <= SPREAD_LIMIT:
            raise WorkloadError(f"a spread of lengths is 0 to {SPREAD_LIMIT:g}, not {self.spread}")

    def drawn(self, random: Random) -> int:
        """One length, at least 1."""
        if not self.spread:
            return round(self.mean)
        variance = math.log1p(self.spread**2)
        middle = math.log(self.mean) - variance / 2
        return max(1, round(min(random.lognormvariate(middle, math.sqrt(variance)), 1e9)))


@dataclass(frozen=True)
class Mix:
    """Requests without a record: how long they are and how many come."""

    inputs: Lengths
    outputs: Lengths
    rate_per_s: float

    def __post_init__(self) -> None:
        """Raise ``WorkloadError`` for a rate that cannot be."""
        if not 0 < self.rate_per_s <= RATE_LIMIT_PER_S:
            raise WorkloadError(
                f"a rate is more than 0 and at most {RATE_LIMIT_PER_S:g} requests per second, "
                f"not {self.rate_per_s:g}"
            )


def parse_lengths(text: str) -> Lengths:
    """``2000`` or, with a coefficient of variation, ``2000:0.8``. Raises ``WorkloadError``."""
    mean, colon, spread = text.partition(":")
    try:
        return Lengths(float(mean), float(spread) if colon else 0.0)
    except WorkloadError:
        raise
    except ValueError:
        raise WorkloadError(
            f"{text!r} is no length; write a mean in tokens, or mean:variation as in 2000:0.8"
        ) from None


def drawn_requests(
    mix: Mix, count: int, seed: int, max_model_len: int = LENGTH_LIMIT_TOKENS
) -> list[TraceRequest]:
    """``count`` requests of ``mix``, by arrival. Lengths that do not fit into ``max_model_len``
    together are cut: the prompt to leave a token for the answer, then the answer. Raises
    ``WorkloadError`` when the means do not fit: the load would not be the one that was asked for.
    """
    if mix.inputs.mean + mix.outputs.mean > max_model_len:
        raise WorkloadError(
            f"prompts of {mix.inputs.mean:,.0f} and answers of {mix.outputs.mean:,.0f} tokens are "
            f"longer than the engines' max_model_len, {max_model_len:,} tokens for both together; "
            "give shorter ones, or measure engines that take them"
        )
    if not 0 < count <= REQUESTS_LIMIT:
        raise WorkloadError(f"a workload has 1 to {REQUESTS_LIMIT} requests, not {count}")
    random = Random(seed)
    now = 0.0
    requests = []
    for _ in range(count):
        inputs = min(mix.inputs.drawn(random), max_model_len - 1)
        outputs = min(mix.outputs.drawn(random), max_model_len - inputs)
        requests.append(TraceRequest(now, inputs, outputs, ()))
        now += random.expovariate(mix.rate_per_s)
    return requests


def cut_note(mix: Mix, max_model_len: int, seed: int) -> str:
    """Which share of the mix ``drawn_requests`` cuts, as words; empty when it cuts none."""
    drawn = drawn_requests(mix, CUT_SAMPLE_REQUESTS, seed)
    cut = len(drawn) - len(fitting(drawn, max_model_len))
    if not cut:
        return ""
    return (
        f"{cut / len(drawn):.1%} of the requests were cut to fit into max_model_len, "
        f"{max_model_len:,} tokens for prompt and answer together"
    )


def spread_ticks(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The requests with coarse times made fine: those that have one time are spread evenly over
    the tick that begins there. A tick is the smallest step between two times of the trace, so
    times that were recorded finely barely change.
    """
    times = sorted({request.at_s for request in requests})
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    if not steps:
        return list(requests)
    tick = min(steps)
    sizes: dict[float, int] = {}
    for request in requests:
        sizes[request.at_s] = sizes.get(request.at_s, 0) + 1
    placed: dict[float, int] = {}
    spread = []
    for request in requests:
        place = placed.get(request.at_s, 0)
        placed[request.at_s] = place + 1
        at_s = request.at_s + tick * place / sizes[request.at_s]
        spread.append(msgspec.structs.replace(request, at_s=at_s))
    return spread


def rate_of(requests: Sequence[TraceRequest]) -> float:
    """Mean arrivals per second; infinite when all come at once."""
    span = requests[-1].at_s - requests[0].at_s if requests else 0.0
    return (len(requests) - 1) / span if span > 0 else math.inf


def with_rate(requests: Sequence[TraceRequest], rate_per_s: float) -> list[TraceRequest]:
    """The same requests, faster or slower, so that ``rate_per_s`` come on the average."""
    if not 0 < rate_per_s <= RATE_LIMIT_PER_S:
        raise WorkloadError(f"a rate is more than 0 and at most {RATE_LIMIT_PER_S:g} per second")
    rate = rate_of(requests)
    if math.isinf(rate):
        raise WorkloadError("requests that all come at one time have no rate that could be changed")
    start = requests[0].at_s
    return [
        msgspec.structs.replace(request, at_s=(request.at_s - start) * rate / rate_per_s)
        for request in requests
    ]


def thinned(requests: Sequence[TraceRequest], share: float, seed: int) -> list[TraceRequest]:
    """About ``share`` of the requests at their times. Requests of one conversation stay or go
    together, so that what is left shares as much as before.
    """
    if not 0 < share <= 1:
        raise WorkloadError(f"a share of requests is more than 0 and at most 1, not {share:g}")
    random = Random(seed)
    uses = Counter(block for request in requests for block in request.blocks)
    limit = max(1, len(requests) * COMMON_SHARE)
    stays: dict[int, bool] = {}
    kept = []
    for number, request in enumerate(requests):
        # A block that nearly all prompts begin with, a system prompt, tells no conversation
        own = next((block for block in request.blocks if uses[block] <= limit), -1 - number)
        if stays.setdefault(own, random.random() < share):
            kept.append(request)
    return kept


def repeated(requests: Sequence[TraceRequest], times: int) -> list[TraceRequest]:
    """The trace ``times`` times, one after the other. Prompts of different rounds share nothing."""
    if times < 1 or len(requests) * times > REQUESTS_LIMIT:
        raise WorkloadError(
            f"{len(requests)} requests cannot be repeated {times} times: 1 to {REQUESTS_LIMIT} "
            "requests may come of it"
        )
    if not requests:
        return []
    rate = rate_of(requests)
    period = requests[-1].at_s - requests[0].at_s + (0.0 if math.isinf(rate) else 1 / rate)
    stride = 1 + max((block for request in requests for block in request.blocks), default=0)
    return [
        msgspec.structs.replace(
            request,
            at_s=request.at_s + period * number,
            blocks=tuple(block + stride * number for block in request.blocks),
        )
        for number in range(times)
        for request in requests
    ]


def window(requests: Sequence[TraceRequest], count: int) -> list[TraceRequest]:
    """At most ``count`` requests that follow each other: those that took the least time to come,
    since a cluster has to stand its busiest time. Times begin at 0.
    """
    if len(requests) > count:
        starts = range(0, len(requests) - count + 1, max(1, count // 8))
        first = min(starts, key=lambda at: requests[at + count - 1].at_s - requests[at].at_s)
        requests = requests[first : first + count]
    start = requests[0].at_s if requests else 0.0
    return [msgspec.structs.replace(request, at_s=request.at_s - start) for request in requests]


def fitting(requests: Sequence[TraceRequest], max_model_len: int) -> list[TraceRequest]:
    """Those that an engine takes: a prompt and an answer of at least a token each, together at
    most ``max_model_len``.
    """
    return [
        request
        for request in requests
        if request.input_tokens >= 1
        and request.output_tokens >= 1
        and request.input_tokens + request.output_tokens <= max_model_len
    ]
