"""From a workload, a profile and targets to a recommendation: what ``splitserve tune`` does.

The work is bounded. Of a long trace the busiest part is taken. Of a large cluster a part is
simulated with the same part of the requests: of a thousand nodes one sees as little in the
percentiles as of sixty, since both even out their load. What was done is noted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.tuner import workload
from splitserve.orchestrator.tuner.evaluation import Setting, Workers
from splitserve.orchestrator.tuner.recommendation import Recommendation, recommend
from splitserve.orchestrator.tuner.search import (
    EVERY_RATIO_NODES,
    GRID,
    WINDOW,
    Findings,
    Question,
    search,
)
from splitserve.orchestrator.tuner.trial import Split, Trial
from splitserve.orchestrator.tuner.variants import variants

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.orchestrator.traces import TraceRequest
    from splitserve.orchestrator.tuner.outcome import Targets
    from splitserve.orchestrator.tuner.profile import Profile
    from splitserve.orchestrator.tuner.workload import Mix

FIRST_PASS_REQUESTS = 250_000
"""Simulated for all ratios together."""
WINDOW_REQUESTS = 2_500
"""Of the busiest part, with which thresholds and conditions are tried."""
SIMULATED_NODES = 64
"""Of a larger cluster a part is simulated."""
MIX_S = 300.0
"""Of a mix's arrivals that are simulated, unless these are fewer requests than the next line."""
MIX_REQUESTS = 1_000
REDRAWS = 2
"""Of a mix, as conditions of the finalists."""
THRESHOLD_PERCENTS = (25, 50, 75, 90)
"""Percentiles of the prompts' lengths that are tried as thresholds."""


class TuningError(ValueError):
    """Nothing can be recommended for this; the message says why and what to change."""


@dataclass(frozen=True)
class Wish:
    """For what a split is looked for."""

    nodes: int
    targets: Targets
    current: Split | None = None
    limits: CoreLimits = field(default_factory=CoreLimits)
    """Of the router; its threshold is the one that ratios are compared with."""
    searches_threshold: bool = True
    block_tokens: int = 512
    """Of the trace's blocks."""
    mix_s: float = MIX_S
    """Seconds of a mix's arrivals that are simulated."""
    seed: int = 0


@dataclass(frozen=True)
class Tuned:
    """What was found."""

    wish: Wish
    findings: Findings
    recommendation: Recommendation
    requests: int
    rate_per_s: float
    """Of the whole cluster."""
    input_tokens: tuple[float, float]
    """(mean, p90) of the prompts."""
    output_tokens: tuple[float, float]
    notes: tuple[str, ...]
    """What was left out or made smaller, as sentences."""


def tune(
    source: Sequence[TraceRequest] | Mix,
    profile: Profile,
    wish: Wish,
    processes: int = 1,
    on_trial: Callable[[Trial], None] | None = None,
) -> Tuned:
    """The recommendation for a trace or a mix. Raises ``TuningError``, ``WorkloadError``."""
    if wish.nodes < 1:
        raise TuningError(f"a cluster has at least one node, not {wish.nodes}")
    scale = _Scale(wish.nodes)
    notes = list(scale.notes())
    workloads = _workloads(source, profile, wish, scale, notes)
    profiles = variants(profile)
    setting = Setting(
        tuple(tuple(requests) for requests in workloads),
        tuple(profiles),
        wish.targets,
        wish.limits,
        wish.block_tokens,
        seed=wish.seed,
    )
    conditions = [(WINDOW, number) for number in range(len(profiles))]
    conditions += [(number, 0) for number in range(WINDOW + 1, len(workloads))]
    threshold = wish.limits.placement.min_uncached_tokens
    whole = workloads[0]
    question = Question(
        scale.simulated,
        None if wish.current is None else scale.down(wish.current),
        threshold,
        thresholds_of(whole) if wish.searches_threshold else (),
        tuple(conditions),
    )
    with Workers(setting, processes, on_trial) as workers:
        findings = search(question, workers)
    findings = scale.up(findings, wish.current)
    return Tuned(
        wish=wish,
        findings=findings,
        recommendation=recommend(findings, wish.current, wish.seed),
        requests=len(whole),
        rate_per_s=workload.rate_of(whole) * scale.factor,
        input_tokens=_mean_and_p90([request.input_tokens for request in whole]),
        output_tokens=_mean_and_p90([request.output_tokens for request in whole]),
        notes=tuple(notes),
    )


def thresholds_of(requests: Sequence[TraceRequest]) -> tuple[int, ...]:
    """None at all, and round numbers near percentiles of the prompts' lengths."""
    lengths = [request.input_tokens for request in requests]
    found = {_round_number(value) for value in np.percentile(lengths, THRESHOLD_PERCENTS)}
    return tuple(sorted({0, *found}))


# Smaller workloads and clusters


class _Scale:
    """How much smaller the simulated cluster is."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.simulated = nodes // math.ceil(nodes / SIMULATED_NODES)
        self.factor = nodes / self.simulated

    def notes(self) -> list[str]:
        if self.factor == 1:
            return []
        return [
            f"simulated were {self.simulated} nodes with 1/{self.factor:.4g} of the requests; "
            f"goodput and nodes are given for {self.nodes}"
        ]

    def down(self, split: Split) -> Split:
        """The nearest split of the simulated nodes."""
        if split.is_aggregated:
            return Split(0, self.simulated)
        prefill = min(max(round(split.prefill / self.factor), 1), max(self.simulated - 1, 1))
        return Split(prefill, self.simulated - prefill, split.threshold_tokens)

    def up(self, findings: Findings, current: Split | None) -> Findings:
        """The same findings for all nodes."""
        if self.factor == 1:
            return findings
        small = None if current is None else self.down(current)

        def split_up(split: Split) -> Split:
            if current is not None and split == small:
                return current
            prefill = round(split.prefill * self.factor)
            return Split(prefill, self.nodes - prefill, split.threshold_tokens)

        def trial_up(trial: Trial) -> Trial:
            goodput = trial.goodput * self.factor
            return replace(trial, split=split_up(trial.split), goodput=goodput)

        return Findings(
            tuple(trial_up(trial) for trial in findings.ratios),
            tuple(trial_up(trial) for trial in findings.thresholds),
            {
                split_up(split): tuple(trial_up(trial) for trial in trials)
                for split, trials in findings.finalists.items()
            },
        )


def _workloads(
    source: Sequence[TraceRequest] | Mix,
    profile: Profile,
    wish: Wish,
    scale: _Scale,
    notes: list[str],
) -> list[list[TraceRequest]]:
    """All of it, its busiest part, and other draws of a mix; never an empty one."""
    ratios = wish.nodes if wish.nodes <= EVERY_RATIO_NODES else 2 * GRID
    limit = FIRST_PASS_REQUESTS // ratios
    if isinstance(source, workload.Mix):
        mix = replace(source, rate_per_s=source.rate_per_s / scale.factor)
        count = min(max(round(mix.rate_per_s * wish.mix_s), MIX_REQUESTS), limit)
        longest = profile.limits.max_model_len
        draws = [
            workload.drawn_requests(mix, size, wish.seed + number, longest)
            for number, size in enumerate([count, *[min(count, WINDOW_REQUESTS)] * REDRAWS])
        ]
        if cut := workload.cut_note(mix, longest, wish.seed):
            notes.append(cut)
        return [draws[0], workload.window(draws[0], WINDOW_REQUESTS), *draws[1:]]
    requests = _fitting(source, profile, notes)
    if scale.factor > 1:
        requests = workload.thinned(requests, 1 / scale.factor, wish.seed)
    if not requests:
        raise TuningError("the trace has too few requests for so many nodes")
    if len(requests) > limit:
        notes.append(f"simulated was the busiest part, {limit:,} of {len(requests):,} requests")
    whole = workload.window(requests, limit)
    return [whole, workload.window(whole, WINDOW_REQUESTS)]


def _fitting(
    source: Sequence[TraceRequest], profile: Profile, notes: list[str]
) -> list[TraceRequest]:
    longest = profile.limits.max_model_len
    requests = workload.fitting(source, longest)
    left_out = len(source) - len(requests)
    if not requests:
        raise TuningError(
            f"no request of the trace fits: prompt and answer may have {longest:,} tokens "
            "together (max_model_len of the profile), and both at least one"
        )
    if left_out:
        notes.append(
            f"left out were {left_out:,} of {len(source):,} requests: empty, or longer than "
            f"{longest:,} tokens with their answer (max_model_len)"
        )
    return requests


def _round_number(value: float) -> int:
    """Two digits that count."""
    digits = max(0, math.floor(math.log10(max(value, 1))) - 1)
    return int(round(value / 10**digits) * 10**digits)


def _mean_and_p90(values: Sequence[int]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.percentile(values, 90))
