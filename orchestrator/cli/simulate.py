"""``splitserve simulate``: what becomes of a load on so many nodes of each role."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.cli.profile_choice import chosen_profile, profile_at
from splitserve.orchestrator.cli.tune_changes import running_nodes
from splitserve.orchestrator.cli.workload_options import workload_of, workload_options
from splitserve.orchestrator.config import load as load_config
from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.router.app import limits_of
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.simulator import SimulationSettings, run_fixed
from splitserve.orchestrator.tuner.workload import (
    Mix,
    WorkloadError,
    cut_note,
    drawn_requests,
    fitting,
    rate_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.traces import TraceRequest
    from splitserve.orchestrator.tuner.outcome import Floats, Outcome
    from splitserve.orchestrator.tuner.profile import Profile

NODES_LIMIT = 10_000
PERCENTS = (50, 90, 99)


@click.command("simulate")
@click.argument("cluster", required=False)
@workload_options
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path),
    help="What `splitserve profile` measured; default: the cluster's last one.",
)
@click.option("--requests", type=click.IntRange(min=1), help="Only so many; 2000 without a trace.")
@click.option(
    "--prefill",
    type=click.IntRange(0, NODES_LIMIT),
    help="Prefill nodes; 0: every node computes its own prompts; default: as many as the cluster "
    "has.",
)
@click.option(
    "--decode",
    type=click.IntRange(1, NODES_LIMIT),
    help="Decode nodes; default: as many as the cluster has.",
)
@click.option("--ttft-ms", type=click.FloatRange(0, min_open=True), help="Target of a first token.")
@click.option(
    "--itl-ms", type=click.FloatRange(0, min_open=True), help="Target of an answer's mean gap."
)
@click.option(
    "--threshold-tokens",
    type=click.IntRange(min=0),
    help="Split only prompts of which so many tokens have to be computed; default: the cluster's.",
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
    cluster: str | None,
    trace: Path | None,
    isl: str | None,
    osl: str | None,
    rate: float | None,
    block_tokens: int,
    profile_path: Path | None,
    requests: int | None,
    prefill: int | None,
    decode: int | None,
    ttft_ms: float | None,
    itl_ms: float | None,
    threshold_tokens: int | None,
    noise: float,
    seed: int,
    as_json: bool,
) -> None:
    """Run a load through a cluster in virtual time, with the real router and the times that
    `splitserve profile` measured.

    CLUSTER is a YAML file or a built-in name. Without it, name --profile, --prefill and --decode.

    \b
    splitserve simulate mine.yaml --isl 2000:0.8 --osl 300 --rate 4
    splitserve simulate mine.yaml --trace chats.jsonl --prefill 2 --decode 2 --ttft-ms 2000
    """
    measured, limits, runs = _simulated(cluster, profile_path)
    prefill = runs[0] if prefill is None else prefill
    decode = runs[1] if decode is None else decode
    if prefill is None or decode is None:
        raise RefusedError("without CLUSTER the numbers of nodes are needed: --prefill, --decode")
    if threshold_tokens is not None:
        placement = replace(limits.placement, min_uncached_tokens=threshold_tokens)
        limits = replace(limits, placement=placement)
    source = workload_of(trace, isl, osl, rate, block_tokens)
    load = _requests(source, requests, seed, measured.limits.max_model_len)
    settings = SimulationSettings(
        limits,
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


def _simulated(
    cluster: str | None, profile_path: Path | None
) -> tuple[Profile, CoreLimits, tuple[int | None, int | None]]:
    """(profile, limits of the router, numbers of prefill and decode nodes) of that cluster; limits
    are the default ones, and numbers unknown, without one. Raises ``RefusedError``.
    """
    if cluster is None:
        if profile_path is None:
            raise RefusedError("name a cluster (a YAML file or a built-in name), or --profile FILE")
        return profile_at(profile_path), CoreLimits(), (None, None)
    if cluster.endswith(".json") and Path(cluster).is_file():
        raise RefusedError(f"{cluster} is no cluster YAML; a profile is given with --profile")
    config = load_config(cluster)
    profile = chosen_profile(profile_path, config, running_nodes(config))
    return profile, limits_of(config), (config.prefill.replicas, config.decode.replicas)


def _requests(
    source: Sequence[TraceRequest] | Mix, count: int | None, seed: int, most_tokens: int
) -> Sequence[TraceRequest]:
    """The load, from time 0 on."""
    if isinstance(source, Mix):
        try:
            drawn = drawn_requests(source, count or 2000, seed, most_tokens)
        except WorkloadError as error:
            raise RefusedError(str(error)) from error
        if cut := cut_note(source, most_tokens, seed):
            click.echo(f"warning: {cut}", err=True)
        return drawn
    taken = source[:count]
    if refused := len(taken) - len(fitting(taken, most_tokens)):
        click.echo(
            f"warning: engines refuse {refused:,} of the {len(taken):,} requests: empty, or longer "
            f"than {most_tokens:,} tokens with their answer (max_model_len)",
            err=True,
        )
    return taken


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
