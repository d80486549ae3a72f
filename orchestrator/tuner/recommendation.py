"""From trials to advice: which split, how much it gains over others, how sure that is, and why.

A finalist's *score* is its share of good requests: the mean of the whole workload with the measured
profile, and of the other conditions together. The best score does not always win: the current
split is kept, and else not disaggregating is preferred, when the best gains so little over it that
it lies within what is not known: over all, or with the profile as it was measured, which chances
of much more and much less do not outweigh. A change costs work, and two pools are more to run than
one.

An interval holds nine in ten of the gains that are found when the workload's parts are drawn again
(with repetition, the same parts for both splits) under every condition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.tuner.search import Findings
    from splitserve.orchestrator.tuner.trial import Split, Trial

    Finalists = dict[Split, tuple[Trial, ...]]

SAME = 0.01
"""Scores that differ by less than this share are the same."""
UNSURE = 0.04
"""A gain up to this share does not count when the interval includes none, or next to none."""
SERVED = 0.9
"""Targets are met when this share of the requests is good."""
NEXT_TO_NOTHING = 0.05
"""With at most this share of good requests at every split the load is beyond the nodes: splits then
differ only in which few requests came early enough.
"""
LARGE = 3.0
"""A gain from which it is told as a factor."""
DRAWS = 200
"""Of the workload's parts, for each condition."""


@dataclass(frozen=True)
class Gain:
    """More good requests than with another split, as a share of that one's; infinite when it has
    none.
    """

    over: Split
    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class Reachable:
    """The least p90 of a time that any ratio has on the whole workload."""

    seconds: float
    split: Split


@dataclass(frozen=True)
class Recommendation:
    """What to do."""

    split: Split
    trial: Trial
    """Of the whole workload with the measured profile."""
    because: str
    """Why this one, as a sentence."""
    over_current: Gain | None
    """None when it is the current one, or there is none."""
    over_aggregated: Gain | None
    """None when it is aggregated."""
    best_split: Split | None
    """The best that is disaggregated; None for a single node."""
    aggregated_gain: Gain | None
    """Of not disaggregating, over that one."""
    are_targets_met: bool
    is_beyond: bool
    """Whether no split serves more than ``NEXT_TO_NOTHING``. ``split`` is then only the one that
    comes nearest, and nothing to change a cluster for.
    """
    least_ttft: Reachable
    least_itl: Reachable


def recommend(findings: Findings, current: Split | None, seed: int = 0) -> Recommendation:
    """The advice that follows from ``findings``."""
    finalists = findings.finalists
    aggregated = next(split for split in finalists if split.is_aggregated)
    chosen, because = _chosen(finalists, current, aggregated, seed)
    splits = [split for split in finalists if not split.is_aggregated]
    tried = [*findings.ratios, *(trials[0] for trials in finalists.values())]
    most = max(trial.share_good for trial in tried)
    best_split = max(splits, key=lambda split: score(finalists[split]), default=None)

    def gain(split: Split | None, over: Split | None) -> Gain | None:
        if split is None or over is None or split == over:
            return None
        return gain_of(finalists, split, over, seed)

    return Recommendation(
        split=chosen,
        trial=finalists[chosen][0],
        because=because,
        over_current=gain(chosen, current),
        over_aggregated=gain(chosen, aggregated),
        best_split=best_split,
        aggregated_gain=gain(aggregated, best_split),
        are_targets_met=finalists[chosen][0].share_good >= SERVED,
        is_beyond=most <= NEXT_TO_NOTHING,
        least_ttft=_least([(trial.ttft.p90, trial.split) for trial in findings.ratios]),
        least_itl=_least([(trial.itl.p90, trial.split) for trial in findings.ratios]),
    )


def score(trials: Sequence[Trial]) -> float:
    """Of a finalist's trials, the whole workload first: share of good requests, 0 to 1."""
    first, others = trials[0], trials[1:]
    if not others:
        return first.share_good
    return (first.share_good + sum(trial.share_good for trial in others) / len(others)) / 2


def gain_of(finalists: Finalists, split: Split, over: Split, seed: int) -> Gain:
    """Of ``split``, with its interval."""
    ours, theirs = finalists[split], finalists[over]
    random = Random(seed)
    draws = []
    for mine, other in zip(ours, theirs, strict=True):
        parts = range(len(mine.good_in_part))
        for _ in range(DRAWS):
            drawn = random.choices(parts, k=len(parts))
            good = sum(mine.good_in_part[part] for part in drawn)
            draws.append(_ratio(good, sum(other.good_in_part[part] for part in drawn)))
    draws.sort()
    return Gain(
        over,
        _ratio(score(ours), score(theirs)),
        draws[round(0.05 * (len(draws) - 1))],
        draws[round(0.95 * (len(draws) - 1))],
    )


def percent(share: float) -> str:
    """``+4.2 %``; large ones as ``x12``, infinity in words."""
    if math.isinf(share):
        return "from none"
    return f"x{share + 1:.3g}" if share >= LARGE else f"{100 * share:+.1f} %"


def interval(gain: Gain) -> str:
    """``-1.0 % to +4.2 %``; without a bound where the other split may have no good request."""
    if math.isinf(gain.high):
        return f"{percent(gain.low)} or more" if math.isfinite(gain.low) else "from none"
    return f"{percent(gain.low)} to {percent(gain.high)}"


def _ratio(mine: float, other: float) -> float:
    if other > 0:
        return mine / other - 1
    return math.inf if mine > 0 else 0.0


def _chosen(
    finalists: Finalists, current: Split | None, aggregated: Split, seed: int
) -> tuple[Split, str]:
    """(split, why)."""
    scores = {split: score(trials) for split, trials in finalists.items()}
    most = max(scores.values())
    same = [split for split in finalists if scores[split] >= most * (1 - SAME)]
    top = min(same, key=lambda split: max(trial.strain for trial in finalists[split][:2]))
    if most == 0:
        return top, f"no split serves a request within the targets; {top} comes nearest"
    for split, merit in ((current, "it runs already"), (aggregated, "it is simpler to run")):
        if split == top:
            break
        if split is None:
            continue
        gain = gain_of(finalists, top, split, seed)
        as_measured = _ratio(finalists[top][0].share_good, finalists[split][0].share_good)
        least = min(gain.expected, as_measured)
        if gain.expected <= SAME or (least <= UNSURE and gain.low <= SAME):
            return split, (
                f"{merit}, and what {top} would change lies within what is not known: good "
                f"requests {percent(gain.expected)} ({interval(gain)})"
            )
    if len(same) > 1:
        alike = ", ".join(str(split) for split in same if split != top)
        return top, f"{alike} serve as many within 1 %; {top} is the farthest from its targets"
    return top, _most_text(top, finalists)


def _most_text(top: Split, finalists: Finalists) -> str:
    """Why the best score wins, also where the table, which is as measured, has a better line."""
    shares = {split: trials[0].share_good for split, trials in finalists.items()}
    first = max(shares, key=lambda split: shares[split])
    if shares[first] <= shares[top] * (1 + SAME):
        return f"{top} has the most good requests, also under what else may be true"
    return (
        f"as measured {first} has more good requests ({shares[first]:.1%}), but {top} has the most "
        "when errors of the profile and other draws of the load count too"
    )


def _least(found: Sequence[tuple[float, Split]]) -> Reachable:
    known = [pair for pair in found if not math.isnan(pair[0])]
    seconds, split = min(known or found, key=lambda pair: pair[0])
    return Reachable(seconds, split)
