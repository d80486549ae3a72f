"""Requests whose lengths drift as those of a recorded service did.

A *drift* is a run of the trace's 6-hour windows, each of which passes in ``window_s``. From the
middle of one window to the middle of the next the mean lengths and their spreads go geometrically.
Lengths are lognormal with the mean and, within bounds, the median of the trace. Arrivals are
Poisson, at the rate at which the work of the present mix, prompts and answers together, takes
``demand`` of all nodes' time: with the trace's own rates the nodes would idle in one window and
drown with any split in the next, and no split would matter.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from splitserve.orchestrator.traces import TraceRequest

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.orchestrator.tuner.outcome import Targets
    from splitserve.orchestrator.tuner.profile import Profile

SPREADS = (0.4, 1.5)
"""Least and largest coefficient of variation."""
PROMPT_LIMIT_TOKENS = 16_000
ANSWER_LIMIT_TOKENS = 4_000


class Mix(NamedTuple):
    """Lengths: means, and coefficients of variation."""

    prompt: float
    prompt_spread: float
    answer: float
    answer_spread: float


@dataclass(frozen=True)
class Drift:
    """Some windows of the trace."""

    first: int
    """Number of the first window among those of its model."""
    mixes: tuple[Mix, ...]
    window_s: float

    @property
    def span_s(self) -> float:
        """Of all windows."""
        return len(self.mixes) * self.window_s

    def at(self, now: float) -> Mix:
        """The mix at that time."""
        place = now / self.window_s - 0.5
        before = min(max(math.floor(place), 0), len(self.mixes) - 1)
        after = min(before + 1, len(self.mixes) - 1)
        part = min(max(place - before, 0.0), 1.0)
        pairs = zip(self.mixes[before], self.mixes[after], strict=True)
        return Mix(*(math.exp((1 - part) * math.log(a) + part * math.log(b)) for a, b in pairs))


def read_drift(trace: Path, model: str, first: int, windows: int, window_s: float) -> Drift:
    """The drift of those windows of one of the trace's models."""
    with trace.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    mixes = tuple(
        Mix(
            float(row["in_mean"]),
            _spread(float(row["in_mean"]), float(row["in_p50"])),
            float(row["out_mean"]),
            _spread(float(row["out_mean"]), float(row["out_p50"])),
        )
        for row in rows[first : first + windows]
    )
    assert len(mixes) == windows, f"{model} has {len(rows)} windows"
    return Drift(first, mixes, window_s)


def requests_of(
    drift: Drift, profile: Profile, targets: Targets, nodes: int, demand: float, seed: int
) -> list[TraceRequest]:
    """All requests of the drift, by arrival."""
    random = Random(seed)
    now = 0.0
    requests = []
    while True:
        mix = drift.at(now)
        now += random.expovariate(demand * nodes / node_seconds(mix, profile, targets))
        if now >= drift.span_s:
            return requests
        mix = drift.at(now)
        prompt = min(PROMPT_LIMIT_TOKENS, _drawn(mix.prompt, mix.prompt_spread, random))
        answer = min(ANSWER_LIMIT_TOKENS, _drawn(mix.answer, mix.answer_spread, random))
        requests.append(TraceRequest(now, prompt, answer, ()))


def node_seconds(mix: Mix, profile: Profile, targets: Targets) -> float:
    """What one mean request takes of a prefill and of a decode node that does all it can within
    the targets.
    """
    assert targets.itl_s is not None
    decode, most = profile.decode, profile.limits.sequences
    token_s = decode.sequence_s.value + decode.context_s.value * (mix.prompt + mix.answer / 2)
    within = (1 - decode.base_s.value / targets.itl_s) / token_s
    capacity = min(within, most / (decode.base_s.value + most * token_s))
    return profile.prefill.seconds(mix.prompt, 0) + mix.answer / capacity


def _spread(mean: float, middle: float) -> float:
    """Coefficient of variation of a lognormal with this mean and median."""
    factor = max(1.0, mean / middle)
    return min(max(math.sqrt(factor**2 - 1), SPREADS[0]), SPREADS[1])


def _drawn(mean: float, spread: float, random: Random) -> int:
    variance = math.log1p(spread**2)
    return max(1, round(random.lognormvariate(math.log(mean) - variance / 2, variance**0.5)))
