"""What ``splitserve tune`` has found, as a table and sentences, and as JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from splitserve.orchestrator.tuner.recommendation import SERVED, interval, percent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.tuner.recommendation import Gain
    from splitserve.orchestrator.tuner.trial import Percentiles, Split, Trial
    from splitserve.orchestrator.tuner.tuning import Tuned


FILE_WIDTH = 140
"""Of tables that no terminal shows."""


def show(tuned: Tuned, source: str) -> None:
    """Print the workload, the table over the ratio, and the advice."""
    is_terminal = Console().is_terminal
    console = Console(
        soft_wrap=not is_terminal,
        highlight=False,
        markup=False,
        width=None if is_terminal else FILE_WIDTH,
    )
    inputs, outputs = tuned.input_tokens, tuned.output_tokens
    console.print(
        f"{source}: {tuned.rate_per_s:.3g} requests/s; prompts of {inputs[0]:,.0f} tokens (p90 "
        f"{inputs[1]:,.0f}), answers of {outputs[0]:,.0f} (p90 {outputs[1]:,.0f}); "
        f"{targets_text(tuned)}"
    )
    for note in tuned.notes:
        console.print(f"Note: {note}.")
    console.print(_table(tuned))
    for line in advice_lines(tuned):
        console.print(line)


def targets_text(tuned: Tuned) -> str:
    """``targets: TTFT 2 s, ITL 50 ms``."""
    targets = tuned.wish.targets
    parts = []
    if targets.ttft_s is not None:
        parts.append(f"TTFT {seconds(targets.ttft_s)}")
    if targets.itl_s is not None:
        parts.append(f"ITL {seconds(targets.itl_s)}")
    return f"targets: {', '.join(parts)}"


def advice_lines(tuned: Tuned) -> Iterator[str]:
    """The recommendation, sentence by sentence."""
    advice = tuned.recommendation
    trial = advice.trial
    if not advice.are_targets_met:
        yield (
            f"No ratio meets the targets for {SERVED:.0%} of the requests. The least p90 of the "
            f"TTFT is {seconds(advice.least_ttft.seconds)}, with {advice.least_ttft.split}; of the "
            f"ITL {seconds(advice.least_itl.seconds)}, with {advice.least_itl.split}."
        )
    if advice.is_beyond:
        yield f"Nothing is recommended: {beyond_text(tuned)}."
        return
    yield (
        f"Recommended: {said(advice.split)}. {trial.goodput:.3g} good requests/s, "
        f"{trial.share_good:.1%} of all. Why: {advice.because}."
    )
    if advice.over_current is not None:
        yield f"Against what runs, {_gain_text(advice.over_current)}."
    if advice.over_aggregated is not None:
        yield f"Against not disaggregating, {_gain_text(advice.over_aggregated)}."
    if advice.split.is_aggregated and advice.aggregated_gain is not None:
        yield f"Against the best split, {_gain_text(advice.aggregated_gain)}."


def beyond_text(tuned: Tuned) -> str:
    """Why no split is recommended, and what would change that."""
    most = max(trial.share_good for trial in shown_trials(tuned))
    nodes = f"{tuned.wish.nodes} nodes" if tuned.wish.nodes > 1 else "one node"
    return (
        f"this load is beyond {nodes} with these targets, however they are split; at best "
        f"{100 * most:.2g} % of the requests are good. Lower --rate, add nodes (--nodes N tries "
        "it), or loosen --ttft-ms and --itl-ms"
    )


def said(split: Split) -> str:
    """A split as an order."""
    if split.is_aggregated:
        return f"do not disaggregate: {split.decode} nodes that do both"
    text = f"{split.prefill} prefill and {split.decode} decode nodes"
    if split.threshold_tokens:
        text += f", prompts of fewer than {split.threshold_tokens} uncached tokens not split"
    return text


def seconds(value: float) -> str:
    """``350 ms``, ``2.1 s``."""
    if math.isnan(value):
        return "-"
    return f"{1000 * value:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def _gain_text(gain: Gain) -> str:
    return f"{gain.over}: good requests {percent(gain.expected)} ({interval(gain)})"


def _table(tuned: Tuned) -> Table:
    advice, current = tuned.recommendation, tuned.wish.current
    chosen = None if advice.is_beyond else advice.split
    table = Table(
        box=box.SIMPLE_HEAD,
        caption="P:D prefill and decode nodes; -> recommended; * runs now",
        caption_justify="left",
    )
    table.add_column("P:D", no_wrap=True)
    for column in ("good/s", "good", "TTFT s\np50 / p90 / p99", "ITL ms\np50 / p90 / p99"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("busy\nP / D", justify="right", no_wrap=True)
    for trial in shown_trials(tuned):
        mark = "-> " if trial.split == chosen else "* " if trial.split == current else ""
        table.add_row(
            f"{mark}{trial.split}",
            f"{trial.goodput:.3g}",
            f"{trial.share_good:.1%}",
            " / ".join(_figure(value) for value in trial.ttft),
            " / ".join(_figure(1000 * value) for value in trial.itl),
            f"{_share(trial.busy_prefill)} / {_share(trial.busy_decode)}",
            style="bold" if trial.split == chosen else None,
        )
    return table


def shown_trials(tuned: Tuned) -> list[Trial]:
    """Of the whole workload: every ratio, and finalists that differ in the threshold."""
    ratios = list(tuned.findings.ratios)
    known = {trial.split for trial in ratios}
    others = [trials[0] for split, trials in tuned.findings.finalists.items() if split not in known]
    return sorted([*ratios, *others], key=lambda trial: trial.split)


def _figure(value: float) -> str:
    """Three digits at most."""
    if math.isnan(value):
        return "-"
    return f"{value:.{2 if value < 1 else 1 if value < 100 else 0}f}"


def _share(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"


# For programs


def json_of(tuned: Tuned) -> dict[str, Any]:
    """All figures; times in seconds, gains as shares; what is infinite or unknown is null."""
    advice, wish = tuned.recommendation, tuned.wish
    return {
        "nodes": wish.nodes,
        "targets": {"ttft_s": wish.targets.ttft_s, "itl_s": wish.targets.itl_s},
        "requests": tuned.requests,
        "rate_per_s": _number(tuned.rate_per_s),
        "notes": list(tuned.notes),
        "recommended": None if advice.is_beyond else _split_json(advice.split),
        "because": beyond_text(tuned) if advice.is_beyond else advice.because,
        "targets_met": advice.are_targets_met,
        "goodput_per_s": None if advice.is_beyond else _number(advice.trial.goodput),
        "current": None if wish.current is None else _split_json(wish.current),
        "gain_over_current": _gain_json(None if advice.is_beyond else advice.over_current),
        "gain_over_aggregated": _gain_json(None if advice.is_beyond else advice.over_aggregated),
        "aggregated_over_best_split": _gain_json(advice.aggregated_gain),
        "least_ttft_p90": {
            "seconds": _number(advice.least_ttft.seconds),
            **_split_json(advice.least_ttft.split),
        },
        "least_itl_p90": {
            "seconds": _number(advice.least_itl.seconds),
            **_split_json(advice.least_itl.split),
        },
        "splits": [_trial_json(trial) for trial in shown_trials(tuned)],
        "thresholds": [_trial_json(trial) for trial in tuned.findings.thresholds],
    }


def _split_json(split: Split) -> dict[str, int]:
    return {
        "prefill": split.prefill,
        "decode": split.decode,
        "min_uncached_tokens": split.threshold_tokens,
    }


def _trial_json(trial: Trial) -> dict[str, Any]:
    def percentiles(found: Percentiles) -> dict[str, float | None]:
        return {name: _number(value) for name, value in found._asdict().items()}

    return {
        **_split_json(trial.split),
        "goodput_per_s": _number(trial.goodput),
        "share_good": _number(trial.share_good),
        "failed": trial.failed,
        "ttft_s": percentiles(trial.ttft),
        "itl_s": percentiles(trial.itl),
        "busy_prefill": _number(trial.busy_prefill),
        "busy_decode": _number(trial.busy_decode),
    }


def _gain_json(gain: Gain | None) -> dict[str, float | None] | None:
    if gain is None:
        return None
    return {
        "expected": _number(gain.expected),
        "low": _number(gain.low),
        "high": _number(gain.high),
    }


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
