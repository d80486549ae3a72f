"""Which splits are tried: every ratio, or a coarse grid that is refined around the best one; then
thresholds at the best ratio; then the few best under other conditions: in the busiest time, with
other draws of the same mix, at the ends of the profile's bands.

Pure: trials are made by a function that is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.orchestrator.tuner.trial import Job, Split, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Trials = Callable[[Sequence[Job]], list[Trial]]

EVERY_RATIO_NODES = 32
"""Up to so many nodes every ratio is tried."""
GRID = 16
"""Steps of the coarse grid for more nodes, and of each refinement."""
FINALISTS = 3
"""Best splits that are tried under all conditions, beside the current one and aggregated."""
WORTH = 1.01
"""A threshold has to serve more by this factor than none."""

WHOLE, WINDOW = 0, 1
"""Numbers of workloads: all of it, and its busiest part. Others are more draws of the same mix."""


@dataclass(frozen=True)
class Question:
    """What is looked for."""

    nodes: int
    current: Split | None
    """What runs now; None when it has another number of nodes."""
    threshold_tokens: int
    """With which ratios are compared."""
    thresholds: tuple[int, ...]
    """Others that are tried."""
    conditions: tuple[tuple[int, int], ...]
    """(workload, profile) numbers under which the finalists are tried, beside the whole workload
    with the measured profile, (0, 0).
    """


@dataclass(frozen=True)
class Findings:
    """Everything that was tried."""

    ratios: tuple[Trial, ...]
    """The whole workload with the measured profile: aggregated, then by prefill nodes."""
    thresholds: tuple[Trial, ...]
    """The busiest part at the best ratio, by threshold; empty when none was tried."""
    finalists: dict[Split, tuple[Trial, ...]]
    """The whole workload first, then the question's conditions in their order."""


def search(question: Question, trials: Trials) -> Findings:
    """What ``trials`` make of the splits that matter."""
    ratios = _all_ratios(question, trials)
    best = sorted(ratios, key=merit, reverse=True)
    finalists = [trial.split for trial in best[:FINALISTS]]
    split_best = next((trial.split for trial in best if not trial.split.is_aggregated), None)
    thresholds: list[Trial] = []
    if split_best is not None and question.thresholds:
        thresholds, worthy = _thresholds(question, split_best, trials)
        finalists += worthy
    finalists.append(_ratio(question, 0))
    if question.current is not None:
        finalists.append(question.current)
    runs = ((WHOLE, 0), *question.conditions)
    found = {}
    jobs = [Job(split, *run) for split in dict.fromkeys(finalists) for run in runs]
    made = trials(jobs)
    for number, split in enumerate(dict.fromkeys(finalists)):
        found[split] = tuple(made[number * len(runs) : (number + 1) * len(runs)])
    return Findings(tuple(ratios), tuple(thresholds), found)


def merit(trial: Trial) -> tuple[float, float]:
    """Of two trials the better one has more: first good requests, then distance to the targets."""
    return trial.share_good, -trial.strain


def _all_ratios(question: Question, trials: Trials) -> list[Trial]:
    """By prefill nodes: all of them, or those of the grids."""
    last = question.nodes - 1
    if question.nodes <= EVERY_RATIO_NODES:
        return trials([Job(_ratio(question, prefill)) for prefill in range(last + 1)])
    known: dict[int, Trial] = {}

    def try_all(counts: Iterable[int]) -> None:
        fresh = [count for count in counts if count not in known]
        known.update(zip(fresh, trials([Job(_ratio(question, n)) for n in fresh]), strict=True))

    try_all([0, *_grid(1, last)])
    while True:
        best = max((count for count in known if count), key=lambda count: merit(known[count]))
        order = sorted(count for count in known if count)
        place = order.index(best)
        low, high = order[max(place - 1, 0)], order[min(place + 1, len(order) - 1)]
        finer = [count for count in _grid(low, high) if count not in known]
        if not finer:
            return [known[count] for count in sorted(known)]
        try_all(finer)


def _grid(low: int, high: int) -> list[int]:
    """At most ``GRID + 1`` numbers from ``low`` to ``high``, both included, evenly."""
    steps = min(GRID, high - low)
    return [low + round((high - low) * step / steps) for step in range(steps + 1)] if steps else []


def _thresholds(question: Question, best: Split, trials: Trials) -> tuple[list[Trial], list[Split]]:
    """(trials at the best ratio by threshold, splits with another threshold that are better).

    What a threshold takes off the prefill nodes lets fewer of them do, so neighbouring ratios are
    tried with the best one.
    """
    tried = sorted({question.threshold_tokens, *question.thresholds})
    made = trials([Job(best._replace(threshold_tokens=tokens), WINDOW) for tokens in tried])
    plain = made[tried.index(question.threshold_tokens)]
    top = max(made, key=merit)
    if top.split.threshold_tokens == question.threshold_tokens:
        return made, []
    counts = {best.prefill - step for step in (-1, 0, 1, 2)} | {best.prefill // 2}
    near = [
        Split(count, question.nodes - count, top.split.threshold_tokens)
        for count in sorted(counts)
        if 0 < count < question.nodes
    ]
    others = sorted(trials([Job(split, WINDOW) for split in near]), key=merit, reverse=True)
    least = plain.share_good * WORTH
    return made, [trial.split for trial in others[:2] if trial.share_good > least]


def _ratio(question: Question, prefill: int) -> Split:
    threshold = question.threshold_tokens if prefill else 0
    return Split(prefill, question.nodes - prefill, threshold)
