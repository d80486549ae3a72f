"""``splitserve simulate``: what becomes of a load on so many nodes of each role."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.cli.workload_options import workload_of, workload_options
from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.core.placement import PlacementLimits
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.profile import ProfileError, parse_profile
from splitserve.orchestrator.tuner.simulator import SimulationSettings, run_fixed
from splitserve.orchestrator.tuner.workload import Mix, WorkloadError, drawn_requests, rate_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.traces import TraceRequest
    from splitserve.orchestrator.tuner.outcome import Floats, Outcome
    from splitserve.orchestrator.tuner.profile import Profile

NODES_LIMIT = 10_000
PERCENTS = (50, 90, 99)


@click.command("simulate")
@click.argument("profile", type=click.Path(path_type=Path))
@workload_options
@click.option("--requests", type=click.IntRange(min=1), help="Only so many; 2000 without a trace.")
@click.option(
    "--prefill",
    required=True,
    type=click.IntRange(0, NODES_LIMIT),
    help="Prefill nodes; 0: every node computes its own prompts.",
)
@click.option("--decode", required=True, type=click.IntRange(1, NODES_LIMIT), help="Decode nodes.")
@click.option("--ttft-ms", type=click.FloatRange(0, min_open=True), help="Target of a first token.")
@click.option(
    "--itl-ms", type=click.FloatRange(0, min_open=True), help="Target of an answer's mean gap."
)
@click.option(
    "--threshold-tokens",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Split only prompts of which so many tokens have to be computed.",
)
@click.option(
    "--noise",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Relative spread of the time of a step.",
)
@click.option("--seed", default=0, show_default=True, help="Of everything that is drawn.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def simulate_command(
    profile: Path,
    trace: Path | None,
    isl: str | None,
    osl: str | None,
    rate: float | None,
    block_tokens: int,
    requests: int | None,
    prefill: int,
    decode: int,
    ttft_ms: float | None,
    itl_ms: float | None,
    threshold_tokens: int,
    noise: float,
    seed: int,
    as_json: bool,
) -> None:
    """Run a load through a cluster in virtual time, with the real router and the times of PROFILE,
    a file that `splitserve profile` wrote.

    \b
    splitserve simulate profile.json --isl 2000:0.8 --osl 300 --rate 4 --prefill 1 --decode 3
    splitserve simulate profile.json --trace chats.jsonl --prefill 2 --decode 2 --ttft-ms 2000
    """
    measured = _profile(profile)
    source = workload_of(trace, isl, osl, rate, block_tokens)
    load = _requests(source, requests, seed, measured.limits.max_model_len)
    settings = SimulationSettings(
        CoreLimits(placement=PlacementLimits(min_uncached_tokens=threshold_tokens)),
        trace_block_tokens=block_tokens,
        noise=noise,
    )
    targets = Targets(_seconds(ttft_ms), _seconds(itl_ms))
    begun = time.perf_counter()
    run = run_fixed(load, measured, prefill, decode, settings, seed)
    took_s = time.perf_counter() - begun
    found = _Found(run.outcome(), run.busy_shares(), targets, rate_of(load), took_s)
    if as_json:
        click.echo(json.dumps(_json_of(found, prefill, decode, seed), indent=1))
    else:
        _show(found, prefill, decode)


def _profile(path: Path) -> Profile:
    try:
        return parse_profile(path.read_bytes(), str(path))
    except ProfileError as error:
        raise RefusedError(str(error)) from error


def _requests(
    source: Sequence[TraceRequest] | Mix, count: int | None, seed: int, most_tokens: int
) -> Sequence[TraceRequest]:
    """The load, from time 0 on."""
    if isinstance(source, Mix):
        try:
            return drawn_requests(source, count or 2000, seed, most_tokens)
        except WorkloadError as error:
            raise RefusedError(f"--requests: {error}") from error
    return source[:count]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


@dataclass(frozen=True)
class _Found:
    """What came of it."""

    outcome: Outcome
    busy: dict[str, float]
    targets: Targets
    rate_per_s: float
    took_s: float

    @property
    def failed(self) -> int:
        return int(np.isnan(self.outcome.ttft_s).sum())

    @property
    def share_good(self) -> float:
        return float(self.outcome.is_good(self.targets).mean())

    def percentiles(self) -> dict[str, list[float]]:
        """By quantity, in seconds."""
        outcome = self.outcome
        return {
            "ttft": [outcome.ttft_percentile(percent) for percent in PERCENTS],
            "itl": [outcome.itl_percentile(percent) for percent in PERCENTS],
            "gap": _weighted(outcome.gaps_s, outcome.gap_counts),
        }


def _weighted(values: Floats, counts: Floats) -> list[float]:
    """Percentiles of values of which each came ``counts`` times."""
    if not len(values):
        return [math.nan] * len(PERCENTS)
    order = np.argsort(values)
    places = np.cumsum(counts[order])
    at = np.searchsorted(places, np.array(PERCENTS) / 100 * places[-1])
    return [float(value) for value in values[order][at]]


def _json_of(found: _Found, prefill: int, decode: int, seed: int) -> dict[str, Any]:
    times = found.percentiles()
    return {
        "prefill": prefill,
        "decode": decode,
        "seed": seed,
        "requests": len(found.outcome.arrived_s),
        "failed": found.failed,
        "rate_per_s": _known(found.rate_per_s),
        "goodput_per_s": found.outcome.goodput(found.targets),
        "share_good": found.share_good,
        "busy": found.busy,
        **{
            f"{name}_ms": {
                f"p{percent}": _known(value * 1000)
                for percent, value in zip(PERCENTS, values, strict=True)
            }
            for name, values in times.items()
        },
    }


def _known(value: float) -> float | None:
    """None for what JSON has no number for."""
    return value if math.isfinite(value) else None


def _show(found: _Found, prefill: int, decode: int) -> None:
    console = Console(highlight=False, markup=False)
    outcome, count = found.outcome, len(found.outcome.arrived_s)
    how = f"{prefill} prefill and {decode} decode nodes" if prefill else f"{decode} nodes, no split"
    console.print(f"{how}: {count:,} requests at {found.rate_per_s:.3g}/s")
    table = Table()
    table.add_column("milliseconds")
    for percent in PERCENTS:
        table.add_column(f"p{percent}", justify="right")
    names = {"ttft": "first token", "itl": "mean gap of an answer", "gap": "single gaps"}
    for name, values in found.percentiles().items():
        shown = [f"{value * 1000:,.1f}" if math.isfinite(value) else "-" for value in values]
        table.add_row(names[name], *shown)
    console.print(table)
    good = f"{outcome.goodput(found.targets):.3g} good requests/s, {found.share_good:.1%} of all"
    if found.failed:
        good += f"; {found.failed:,} were refused or given up"
    console.print(good)
    for role, share in found.busy.items():
        console.print(f"{role} nodes computed {share:.0%} of the time")
    console.print(f"simulated in {found.took_s:.1f} s, {count / found.took_s:,.0f} requests/s")
