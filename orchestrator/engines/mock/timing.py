"""How long the mock engine seems to compute and to receive: by two simple rates, or as a profile
says.

Time is kept in absolute deadlines. A step that follows another begins when that one was due to end,
not when the event loop came round to it, so being late once does not make an engine slow. What
computing really takes is part of the step, as long as it is less.

With a profile a prompt that comes from elsewhere counts as landed when one link into this engine
could have carried it, one prompt after another, and the latency is over; the real transfer takes
part of that time. What neighbours and sending add to steps is left out: each engine is by itself.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from splitserve.kv_transfer.orders import TransferResults
    from splitserve.orchestrator.engines.serving.scheduler import Request, StepPlan
    from splitserve.orchestrator.tuner.profile import Profile

CATCH_UP_LIMIT_S = 0.02
"""How much a late step may be shortened."""
LOOK_INTERVAL_S = 0.004
"""How exactly is known when a prompt has landed in the middle of a step."""


@dataclass(frozen=True)
class Timing:
    """What things take."""

    step_s: Callable[[StepPlan], float]
    """Of a step that computes something."""
    landing_latency_s: float = 0.0
    landing_token_s: float = 0.0
    """The link's time for one token's KV."""

    @property
    def delays_landings(self) -> bool:
        """Whether a landed prompt must wait at all."""
        return self.landing_latency_s > 0 or self.landing_token_s > 0


def simple_timing(per_step_s: float, per_prompt_token_s: float) -> Timing:
    """A constant, and more for each prompt token."""

    def step_s(plan: StepPlan) -> float:
        tokens = sum(chunk.tokens for chunk in plan.chunks if not chunk.request.answer)
        return per_step_s + tokens * per_prompt_token_s

    return Timing(step_s)


def profile_timing(profile: Profile, speed: float) -> Timing:
    """Steps as the profile says, ``speed`` times as fast; landings as between any two nodes."""

    def step_s(plan: StepPlan) -> float:
        new = attended = 0.0
        sequences = context = 0
        for chunk in plan.chunks:
            if chunk.tokens == 1:  # as of an answer, or a prompt's last one behind landed KV
                sequences += 1
                context += chunk.first + 1
            else:
                new += chunk.tokens
                attended += chunk.tokens * (chunk.first + chunk.tokens / 2)
        return profile.step_seconds(new, attended, sequences, context) / speed

    link = profile.transfer()
    token_s = profile.kv_bytes_per_token / max(link.bytes_per_s.value, 1e-9)
    return Timing(step_s, link.latency_s.value, token_s)


class StepClock:
    """When the layers of the present step are due."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._start = 0.0
        self._seconds = 0.0
        self._end: float | None = None
        """Of the step before, when this one follows it."""
        self._waits_in_layers = False

    def begin(self, seconds: float, *, computes_prompts: bool) -> None:
        """A step of so many seconds begins. Layers are spread over it only when somebody may wait
        for one of them: in steps that compute prompts.
        """
        now = time.monotonic()
        self._start = now if self._end is None else max(self._end, now - CATCH_UP_LIMIT_S)
        self._start = min(self._start, now)
        self._seconds = seconds
        self._waits_in_layers = computes_prompts
        self._end = self._start + seconds

    def rest(self) -> None:
        """The engine has nothing to compute: the next step begins when it begins."""
        self._end = None

    async def layer_due(self, layer: int, look: Callable[[], None] | None = None) -> None:
        """Returns when ``layer`` is due to be done; ``look`` is called now and then meanwhile."""
        is_last = layer == self._layers - 1
        if not self._seconds or not (is_last or self._waits_in_layers):
            return
        due = self._start + self._seconds * (layer + 1) / self._layers
        while (wait_s := due - time.monotonic()) > 0:
            await asyncio.sleep(wait_s if look is None else min(wait_s, LOOK_INTERVAL_S))
            if look is not None:
                look()


class Landings:
    """Holds back what has landed until the profile's link could have carried it."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._begun: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        """When transfers ended of which the engine is told at the step's end."""
        self._due: dict[str, float] = {}
        self._link_free = 0.0

    def parked(self, requests: Mapping[str, Request]) -> None:
        """These wait for their prompts now."""
        if self._timing.delays_landings:
            now = time.monotonic()
            self._begun = {name: self._begun.get(name, now) for name in requests}

    def seen(self, names: frozenset[str]) -> None:
        """The transfers of these have ended by now; without effect for those that had before."""
        now = time.monotonic()
        for name in names:
            self._seen.setdefault(name, now)

    def held_back(
        self, results: TransferResults, requests: Mapping[str, Request]
    ) -> TransferResults:
        """The results without prompts that are not due yet, and with those that have become due.
        ``requests`` are parked ones that somebody still waits for; the others are not held.
        """
        if not self._timing.delays_landings:
            return results
        now = time.monotonic()
        told = set(results.finished_receiving)
        for name in results.finished_receiving - results.failed_receiving:
            if name in requests:
                told.remove(name)
                ended = self._seen.get(name, now)
                self._due[name] = self._due_of(name, requests[name].expected, ended)
        self._seen.clear()
        for name, due in list(self._due.items()):
            if due <= now or name not in requests:
                told.add(name)
                del self._due[name]
        return structs.replace(results, finished_receiving=frozenset(told))

    def _due_of(self, name: str, tokens: int, ended: float) -> float:
        timing = self._timing
        begun = max(self._begun.get(name, ended), self._link_free)
        self._link_free = begun + tokens * timing.landing_token_s
        return max(ended, self._link_free) + timing.landing_latency_s
