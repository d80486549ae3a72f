"""What ``splitserve tune`` has found as four charts: good requests, times to the first token and
between tokens over the ratio, and the frontier of both times.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from splitserve.orchestrator.cli import charts
from splitserve.orchestrator.cli.tune_report import seconds, shown_trials

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.tuner.trial import Trial
    from splitserve.orchestrator.tuner.tuning import Tuned

PERCENTILES = ("p50", "p90", "p99")
TICKS = 12
"""Most numbers along the ratio's axis."""


def picture_of(tuned: Tuned, source: str) -> str:
    """The charts as SVG."""
    trials = shown_trials(tuned)
    targets = tuned.wish.targets
    return charts.svg(
        [
            _goodput(tuned, trials, source),
            _times(tuned, trials, "time to the first token", "ttft", targets.ttft_s),
            _frontier(tuned, trials),
            _times(tuned, trials, "mean time between tokens", "itl", targets.itl_s),
        ],
        columns=2,
    )


def _goodput(tuned: Tuned, trials: Sequence[Trial], source: str) -> charts.Chart:
    offered = tuned.rate_per_s
    goods = [trial.goodput for trial in trials]
    levels = (("all that come", offered),) if math.isfinite(offered) else ()
    return charts.Chart(
        f"{source}: good requests per second",
        _ratio_axis(tuned),
        charts.even_axis("good requests/s", [*goods, offered], lambda rate: f"{rate:.3g}"),
        _curves(tuned, trials, {"goodput": goods}),
        _marks(tuned),
        levels,
    )


def _times(
    tuned: Tuned, trials: Sequence[Trial], title: str, name: str, target_s: float | None
) -> charts.Chart:
    lines = {
        percentile: [getattr(getattr(trial, name), percentile) for trial in trials]
        for percentile in PERCENTILES
    }
    values = [value for line in lines.values() for value in line]
    levels: tuple[tuple[str, float], ...] = ()
    if target_s is not None:
        levels = ((f"target {seconds(target_s)}", target_s),)
        values.append(target_s)
    return charts.Chart(
        title,
        _ratio_axis(tuned),
        charts.log_axis("seconds", values, seconds),
        _curves(tuned, trials, lines),
        _marks(tuned),
        levels,
    )


def _frontier(tuned: Tuned, trials: Sequence[Trial]) -> charts.Chart:
    """Both p90 of each split; no other is left of and below those on the line."""
    targets = tuned.wish.targets
    known = [trial for trial in trials if not math.isnan(trial.ttft.p90 + trial.itl.p90)]
    best: list[Trial] = []
    for trial in sorted(known, key=lambda each: (each.ttft.p90, each.itl.p90)):
        if not best or trial.itl.p90 < best[-1].itl.p90:
            best.append(trial)
    across = [trial.ttft.p90 for trial in known] + [t for t in [targets.ttft_s] if t is not None]
    up = [trial.itl.p90 for trial in known] + [t for t in [targets.itl_s] if t is not None]
    return charts.Chart(
        "frontier: what one time costs in the other",
        charts.log_axis("p90 of the time to the first token", across, seconds),
        charts.log_axis("p90 of the time between tokens", up, seconds),
        (
            charts.Curve("not improved by any other", _places(best)),
            charts.Curve("all", _places(known), tuple(str(t.split) for t in known), False),
        ),
        () if targets.ttft_s is None else ((f"target {seconds(targets.ttft_s)}", targets.ttft_s),),
        () if targets.itl_s is None else ((f"target {seconds(targets.itl_s)}", targets.itl_s),),
    )


def _places(trials: Sequence[Trial]) -> tuple[tuple[float, float], ...]:
    return tuple((trial.ttft.p90, trial.itl.p90) for trial in trials)


def _curves(
    tuned: Tuned, trials: Sequence[Trial], lines: dict[str, list[float]]
) -> tuple[charts.Curve, ...]:
    """A line over the ratios, and points for splits with another threshold."""
    usual = {trial.split for trial in tuned.findings.ratios}
    found = []
    for name, values in lines.items():
        pairs = list(zip(trials, values, strict=True))
        points = [(float(t.split.prefill), v) for t, v in pairs if t.split in usual]
        # Not disaggregating is no ratio among others: the line begins beside it
        found.append(charts.Curve(name, tuple(points[1:]), apart=tuple(points[:1])))
    for name, values in lines.items():
        pairs = [p for p in zip(trials, values, strict=True) if p[0].split not in usual]
        if pairs and name in ("goodput", "p90"):
            points = [(float(t.split.prefill), v) for t, v in pairs]
            tokens = max(t.split.threshold_tokens for t, _ in pairs)
            label = f"{name} from {tokens} tokens".strip()
            found.append(charts.Curve(label, tuple(points), is_joined=False))
    return tuple(found)


def _ratio_axis(tuned: Tuned) -> charts.Axis:
    nodes = tuned.wish.nodes
    step = math.ceil(max(nodes - 1, 1) / TICKS)
    ticks = [(float(n), f"{n}:{nodes - n}") for n in range(step, nodes, step)]
    return charts.Axis(
        "prefill:decode nodes", 0.0, float(max(nodes - 1, 1)), ((0.0, "aggregated"), *ticks)
    )


def _marks(tuned: Tuned) -> tuple[tuple[str, float], ...]:
    advice, current = tuned.recommendation, tuned.wish.current
    chosen = None if advice.is_beyond else advice.split.prefill
    marks = [] if chosen is None else [("recommended", float(chosen))]
    if current is not None and current.prefill != chosen:
        marks.append(("runs now", float(current.prefill)))
    return tuple(marks)
