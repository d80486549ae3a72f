"""From measured times to the parts of a profile.

Each of the profile's times is a sum of a few parts (``profile``), so each is a linear fit of the
medians of what was measured alike. A transfer is hidden behind the computing while it is shorter,
so its bandwidth is looked for instead, and is only a lower bound when nothing was seen of it.
What a busy neighbour does is told from the same measured with and without one, time after time, so
that what else changes meanwhile changes both.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from splitserve.orchestrator.tuner.fitting import Floats, fit
from splitserve.orchestrator.tuner.profile import (
    NOTHING,
    DecodeTime,
    Estimate,
    PrefillTime,
    TransferTime,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from splitserve.orchestrator.tuner.probe_plan import DecodeProbe, PrefillProbe
    from splitserve.orchestrator.tuner.profile import EngineLimits

LEAST_PAIRS = 3
"""Fewer say nothing of neighbours."""
RESAMPLES = 200
STEPS = 80
"""Of the search for a bandwidth."""


@dataclass(frozen=True)
class PrefillSample:
    """Until the last first token of a probe's prompts."""

    probe: PrefillProbe
    seconds: float


@dataclass(frozen=True)
class DecodeSample:
    """Mean gap between tokens while all streams were running."""

    probe: DecodeProbe
    seconds: float


@dataclass(frozen=True)
class BesideSample:
    """What was measured twice, one time right after the other."""

    alone_s: float
    beside_s: float
    """While another node of the host computed."""


@dataclass(frozen=True)
class TransferSample:
    """Until the first token of a split request."""

    prefill_node: str
    decode_node: str
    tokens: int
    cached: int
    """Of those, what the prefill node did not have to compute."""
    seconds: float


@dataclass(frozen=True)
class SplitSample:
    """Until the first token of two prompts of so many tokens, one right after the other."""

    tokens: int
    alone_s: float
    """Computed by the prefill node and answered there."""
    split_s: float
    """Answered by a decode node."""


def fit_decode(samples: Sequence[DecodeSample]) -> DecodeTime:
    """The time of a step that samples. Raises ``FitError`` for too few different batches."""
    rows, seconds = _medians(
        ((1.0, s.probe.streams, s.probe.mean_context), s.seconds) for s in samples
    )
    found = fit(rows, seconds)
    base, sequence, context = found.parts
    return DecodeTime(base, sequence, context, found.error)


def fit_prefill(
    samples: Sequence[PrefillSample], decode: DecodeTime, limits: EngineLimits
) -> tuple[PrefillTime, Estimate]:
    """(time of a step over prompts, what a request costs beside). Raises ``FitError`` for too few
    different prompts.

    When no probe took two steps, a step over one prompt token is taken to last as long as one that
    samples: that is what an engine makes of it, and it tells the two costs apart.
    """
    rows, seconds = _medians((prefill_row(s.probe, limits), s.seconds) for s in samples)
    if rows.size and rows[:, 0].max() < 2:
        anchors = [(1.0, 1.0, c, 0.0) for c in (16.0, limits.max_model_len / 2)]
        rows = np.vstack((rows, anchors))
        seconds = np.append(seconds, [decode.seconds(1, row[2]) for row in anchors])
    found = fit(rows, seconds)
    base, token, attention, request = found.parts
    return PrefillTime(base, token, attention, found.error), request


def prefill_row(probe: PrefillProbe, limits: EngineLimits) -> tuple[float, ...]:
    """(steps, new tokens, tokens attended to, requests' own time) of a probe."""
    # Of several prompts each fills a step
    steps = probe.prompts if probe.prompts > 1 else math.ceil(probe.new / limits.step_tokens)
    tokens = probe.new * probe.prompts
    return steps, tokens, tokens * (probe.cached + probe.new / 2), 1.0


def fit_neighbour(samples: Sequence[BesideSample], request_s: float) -> Estimate:
    """By which part of itself a step is longer beside a busy neighbour; of each time ``request_s``
    is not a step's. What could be chance (the band holds zero) counts as nothing, so that
    simulating nodes that do not slow each other costs nothing.
    """
    pairs = [(s.alone_s - request_s, s.beside_s - request_s) for s in samples]
    found = np.array([pair for pair in pairs if min(pair) > 0], float).reshape(-1, 2)
    if len(found) < LEAST_PAIRS:
        return NOTHING
    (times,) = fit(found[:, :1], found[:, 1]).parts
    low, high = max(0.0, times.low - 1), max(0.0, times.high - 1)
    return Estimate(times.value - 1 if low else 0.0, low, high)


def fit_sending(
    samples: Sequence[SplitSample],
    transfer: TransferTime,
    decode: DecodeTime,
    *,
    request_s: float,
    bytes_per_token: int,
    seed: int = 0,
) -> Estimate:
    """By how much a split prompt's step is longer, for each of its tokens, than that of one which
    stays: what its times are apart beyond the transfer as ``transfer`` has it and the decode node's
    own step. What could be chance counts as nothing.
    """
    found = []
    for sample in samples:
        computing = sample.alone_s - request_s
        through = max(computing, sample.tokens * bytes_per_token / transfer.bytes_per_s.value)
        landed = through + transfer.latency_s.value
        answered = request_s + landed + decode.seconds(1, sample.tokens)
        found.append((sample.split_s - answered) / sample.tokens)
    if len(found) < LEAST_PAIRS:
        return NOTHING
    draws = random.Random(seed)
    tries = [median(draws.choices(found, k=len(found))) for _ in range(RESAMPLES)]
    low, high = (max(0.0, float(end)) for end in np.percentile(tries, (2.5, 97.5)))
    return Estimate(median(found) if low else 0.0, low, high)


def fit_transfers(
    samples: Sequence[TransferSample],
    prefill: PrefillTime,
    decode: DecodeTime,
    *,
    request_s: float,
    bytes_per_token: int,
    limits: EngineLimits,
    seed: int = 0,
) -> tuple[TransferTime, ...]:
    """The time between any two nodes, and then that of each pair that was measured."""
    pairs: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for sample in samples:
        new, cached = sample.tokens - sample.cached, sample.cached
        steps = math.ceil(new / limits.step_tokens)
        computing = prefill.seconds(new, cached) + (steps - 1) * prefill.base_s.value
        if new == 1:  # such a step is one that samples
            computing = decode.seconds(1, sample.tokens)
        left = sample.seconds - request_s - decode.seconds(1, sample.tokens)
        pair = (sample.prefill_node, sample.decode_node)
        pairs[pair].append((computing, float(sample.tokens * bytes_per_token), left))
    everything = [row for rows in pairs.values() for row in rows]
    found = [_transfer("", "", everything, seed)]
    if len(pairs) > 1:
        found += [_transfer(*pair, rows, seed) for pair, rows in sorted(pairs.items())]
    return tuple(found)


def _transfer(
    prefill_node: str, decode_node: str, seen: Sequence[tuple[float, float, float]], seed: int
) -> TransferTime:
    """By ``seen``: (seconds of computing, bytes, seconds until the KV was there)."""
    rows = np.array(seen, float)
    latency, byte_s, error = _search(rows)
    draws = random.Random(seed)
    tries = [
        _search(rows[draws.choices(range(len(rows)), k=len(rows))])[:2] for _ in range(RESAMPLES)
    ]
    # What the rest of the profile is wrong by is wrong in the latency too
    off_s = error * float(np.median(rows[:, 0]) + latency)
    return TransferTime(
        prefill_node,
        decode_node,
        _band(latency, [each[0] for each in tries], off_s),
        _band(1 / byte_s, [1 / each[1] for each in tries]),
        error,
    )


def _search(rows: Floats) -> tuple[float, float, float]:
    """(latency, seconds per byte, median relative error): the slowest link of those that explain
    the rows best.
    """
    computing, sizes, seen = rows.T
    slowest = float((np.maximum(seen, computing) / sizes).max())
    # A link so fast that nothing is seen of it is as good as any faster one
    fastest = min(float((computing / sizes).min()) / 4, slowest / 10)
    candidates = np.geomspace(max(fastest, 1e-15), max(slowest, 1e-14), STEPS)  # [candidates]
    for _ in range(3):
        through = np.maximum(computing, candidates[:, None] * sizes)  # [candidates, rows]
        latencies = np.maximum(0.0, np.median(seen - through, axis=1))
        off = np.abs(through + latencies[:, None] - seen)
        losses = off.sum(axis=1)
        best = int(np.flatnonzero(losses <= losses.min() * (1 + 1e-6) + 1e-9)[-1])
        result = float(latencies[best]), float(candidates[best])
        error = float(np.median(off[best] / (through[best] + latencies[best])))
        low, high = candidates[max(0, best - 1)], candidates[min(best + 1, STEPS - 1)]
        candidates = np.geomspace(low, high, STEPS)
    return *result, error


def _band(value: float, tries: Sequence[float], least: float = 0.0) -> Estimate:
    """The middle 95 % of ``tries``, and at least ``least`` to each side of the value."""
    low, high = np.percentile(tries, (2.5, 97.5))
    low, high = min(float(low), value - least), max(float(high), value + least)
    return Estimate(value, max(0.0, low), high)


def _medians(pairs: Iterable[tuple[tuple[float, ...], float]]) -> tuple[Floats, Floats]:
    """(rows, seconds), one for all that were measured alike."""
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for row, seconds in pairs:
        groups[row].append(seconds)
    rows = np.array(list(groups), float)
    return rows, np.array([median(found) for found in groups.values()])
