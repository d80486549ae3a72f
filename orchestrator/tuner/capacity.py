"""What share of requests meets the targets with a split of the nodes, in closed form: fast enough
to ask inside a router, for every split, again and again.

Prefill nodes are one queue with several servers (M/G/c): the chance of a wait longer than ``t``
falls exponentially, with the mean of Sakasegawa's approximation
(https://doi.org/10.1007/BF02888260). Decode nodes share their time among their streams: a node that
is asked for ``a`` tokens per second has ``B`` streams with ``a = B / (base + m * B)``, and ``B``
spreads around that as in a birth-death process. A pool that is asked for more than it can do has a
queue that grows over the horizon; one that has a queue already works it off.

What it leaves out: the order of arrivals, what nodes differ in, and blocks that are held by
leases and by requests whose prompt is still computed. The simulator knows more, and takes seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from splitserve.orchestrator.tuner.outcome import Targets
    from splitserve.orchestrator.tuner.profile import Profile

Floats = npt.NDArray[np.float64]

FULL = 0.98
"""A pool that is asked for more than this part of what it can do has a growing queue, not a steady
one.
"""
WAITING_STEPS = 1.5
"""Steps of a decode node from a landed prompt to its first token: the one that runs, and its own.
"""


@dataclass(frozen=True)
class Sample:
    """Requests that stand for all; one entry per request in each array."""

    new_tokens: Floats
    """Of the prompt, to be computed."""
    cached_tokens: Floats
    """Of the prompt, not to be computed."""
    answer_tokens: Floats


@dataclass(frozen=True)
class Assumptions:
    """What holds for every load."""

    targets: Targets
    split_from_tokens: int = 0
    """Prompts of which fewer tokens have to be computed are computed by decode nodes."""
    batch_tokens: int = 0
    """Prompts are computed together up to so many tokens."""
    horizon_s: float = 300.0
    """Over which a queue grows or is worked off."""


class Expected(NamedTuple):
    """Of one split under one load."""

    good_share: float
    """Of the requests that come within the horizon."""
    prefill_use: float
    """Part of what the prefill nodes can compute that is asked; above 1 is too much."""
    decode_use: float
    """Part of the tokens that decode nodes can sample within the target; above 1 is too much."""
    step_s: float
    """Of a decode node."""


class _Wait(NamedTuple):
    """How long requests wait for a pool."""

    use: float
    any_share: float
    """Requests that wait at all, once the queue is steady."""
    mean_s: float
    """Of those."""
    seconds_each: float
    """By which one request more makes the queue longer."""


class _Streams(NamedTuple):
    """The decode nodes under a load."""

    use: float
    """Of all that they can sample."""
    use_in_time: float
    """Of what they can sample within the target."""
    step_s: float
    good_share: float
    seconds_each: float


class ClosedForm:
    """The expectations for one sample of requests."""

    def __init__(self, profile: Profile, assumed: Assumptions, sample: Sample) -> None:
        self._profile = profile
        self._assumed = assumed
        new, cached = np.maximum(1.0, sample.new_tokens), sample.cached_tokens
        answers = np.maximum(1.0, sample.answer_tokens)
        step = profile.limits.step_tokens
        times = profile.prefill
        chunks = np.ceil(new / step)
        attended = new * (cached + new / 2)
        work = times.token_s.value * new + times.attention_s.value * attended
        split = new >= assumed.split_from_tokens
        work += np.where(split, times.sending_s.value * new, 0.0)
        base = times.base_s.value
        batch = np.maximum(new, min(assumed.batch_tokens, step))
        own_s = work + base * chunks  # Of each prompt, in steps of its own
        shared_s = work + base * np.where(new < step, new / batch, chunks)  # On a busy node
        self._split_share = float(split.mean())
        self._prompt_s, self._prompt_spread = _moments(shared_s[split])
        self._own_prompt_s = float(np.where(split, 0.0, shared_s).mean())
        """Of a mean request, on decode nodes."""
        # From each request's arrival to its prompt being there, without any waiting
        ready_s = profile.request_s + own_s + np.where(split, self._landing(new, own_s), 0.0)
        self._split_ready_s = ready_s[split]
        self._alone_ready_s = ready_s[~split]
        self._typical_ready_s = float(np.median(ready_s))
        self._tokens = float(answers.mean())
        context = new + cached + answers / 2
        self._token_s = profile.decode.sequence_s.value + profile.decode.context_s.value * float(
            (answers * context).sum() / answers.sum()
        )
        """By which one stream makes a step longer."""
        self._streams_limit = self._most_streams(new + cached + answers, answers)

    def expected(self, rate: float, prefill: int, decode: int, waiting: float = 0.0) -> Expected:
        """What ``prefill`` and ``decode`` nodes, at least one each, make of ``rate`` requests per
        second, with ``waiting`` requests in the router's queue before them.
        """
        prompts = self._prompts(rate, prefill)
        passed = min(1.0, 1 / prompts.use) if prompts.use else 1.0
        streams = self._decode(rate, passed, decode)
        steady = self._first_tokens(prompts, streams)
        slack_s = self._slack(streams)
        queued = min(
            self._in_time(prompts.use, waiting * prompts.seconds_each, slack_s),
            self._in_time(streams.use, waiting * streams.seconds_each, slack_s),
        )
        share = steady * queued * streams.good_share
        return Expected(share, prompts.use, streams.use_in_time / passed, streams.step_s)

    # Prefill nodes

    def _prompts(self, rate: float, nodes: int) -> _Wait:
        mean_s = self._prompt_s
        use = rate * self._split_share * mean_s / nodes
        steady = min(use, FULL)
        any_share = steady ** (math.sqrt(2 * (nodes + 1)) - 1)
        mean_wait_s = mean_s * (1 + self._prompt_spread) / 2 / (nodes * (1 - steady))
        return _Wait(use, any_share, mean_wait_s, mean_s * self._split_share / nodes)

    def _first_tokens(self, prompts: _Wait, streams: _Streams) -> float:
        """Share of first tokens within the target when no queue grows."""
        limit = self._assumed.targets.ttft_s
        if limit is None:
            return 1.0
        left_s = limit - WAITING_STEPS * streams.step_s
        good = float((self._alone_ready_s <= left_s).sum())
        slack = left_s - self._split_ready_s
        slack = slack[slack >= 0]
        good += len(slack)
        if prompts.mean_s > 0:
            good -= prompts.any_share * float(np.exp(-slack / prompts.mean_s).sum())
        return good / (len(self._alone_ready_s) + len(self._split_ready_s))

    def _landing(self, new: Floats, own_s: Floats) -> Floats:
        """From the end of each prompt's last step to all of its KV being there."""
        transfer, profile = self._profile.transfer(), self._profile
        per_token_s = profile.kv_bytes_per_token / max(transfer.bytes_per_s.value, 1e-9)
        last = np.minimum(new, profile.limits.step_tokens) * per_token_s
        rest = np.maximum(last, new * per_token_s - own_s)
        landing: Floats = transfer.latency_s.value + np.maximum(0.0, rest)
        return landing

    # Decode nodes

    def _decode(self, rate: float, passed: float, nodes: int) -> _Streams:
        base = self._profile.decode.base_s.value
        token_s, most = self._token_s, self._streams_limit
        # The part of the time that own prompts leave, and the tokens per second asked in it
        left = max(0.05, 1 - rate * self._own_prompt_s / nodes)
        asked = rate * passed * self._tokens / nodes / left
        capacity = most / (base + most * token_s)
        use = asked / capacity
        limit = self._assumed.targets.itl_s
        steady = min(asked, FULL * capacity)
        streams = min(most, steady * base / max(1e-9, 1 - steady * token_s))
        step = base + streams * token_s
        good, use_in_time = 1.0, use
        if limit is not None:
            good = self._steps_in_time(limit * left, step, streams, nodes)
            # The most tokens per second at which a step still takes no longer than the target
            in_time = max(0.0, 1 - base / (limit * left)) / token_s if token_s else math.inf
            use_in_time = asked / max(1e-9, min(capacity, in_time))
        return _Streams(use, use_in_time, step / left, good, self._tokens / capacity / nodes)

    def _steps_in_time(self, limit_s: float, step_s: float, streams: float, nodes: int) -> float:
        """Share of requests whose mean step is within the limit: the number of streams varies, and
        a request sees a mean of it over its own time.
        """
        base = self._profile.decode.base_s.value
        slower = step_s / base if base else 1.0
        memory = 2 * slower**2 * (1 / slower - 1 + math.exp(-1 / slower)) if slower > 0 else 1.0
        spread = math.sqrt(max(streams, 1e-9) * slower * memory / nodes) * self._token_s
        if spread <= 0:
            return float(step_s <= limit_s)
        return 0.5 * math.erfc((step_s - limit_s) / spread / math.sqrt(2))

    def _most_streams(self, lengths: Floats, answers: Floats) -> float:
        """That a node has blocks and sequences for."""
        limits = self._profile.limits
        weights = answers / answers.sum()
        blocks = float((np.ceil(lengths / limits.block_tokens) * weights).sum())
        return max(1.0, min(limits.sequences, limits.total_blocks / max(1.0, blocks)))

    # Queues

    def _slack(self, streams: _Streams) -> float:
        """What a typical request may wait; a minute when nothing was promised."""
        limit = self._assumed.targets.ttft_s
        if limit is None:
            return 60.0
        return max(0.0, limit - WAITING_STEPS * streams.step_s - self._typical_ready_s)

    def _in_time(self, use: float, queue_s: float, slack_s: float) -> float:
        """Part of the horizon in which the queue, now ``queue_s`` long, makes nobody late."""
        horizon = self._assumed.horizon_s
        if use > FULL:
            until_late = max(0.0, slack_s - queue_s) / (use - FULL)
            return min(1.0, until_late / horizon)
        late_for = max(0.0, queue_s - slack_s) / max(1e-9, 1 - use)
        return max(0.0, 1 - late_for / horizon)


def _moments(values: Floats) -> tuple[float, float]:
    """(mean, variance in squares of the mean); zeros for no values."""
    mean = float(values.mean()) if len(values) else 0.0
    return mean, float(values.var()) / mean**2 if mean else 0.0
