"""``splitserve tune``: the split of the nodes that serves the most requests within the targets."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import Progress

from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.cli.profile_choice import Nodes, chosen_profile
from splitserve.orchestrator.cli.tune_changes import apply_split, running_nodes, write_split
from splitserve.orchestrator.cli.tune_picture import picture_of
from splitserve.orchestrator.cli.tune_report import beyond_text, json_of, show
from splitserve.orchestrator.cli.workload_options import workload_of, workload_options
from splitserve.orchestrator.config import load
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.router.app import limits_of
from splitserve.orchestrator.tuner.evaluation import EvaluationError, cores
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.trial import Split
from splitserve.orchestrator.tuner.tuning import Tuned, TuningError, Wish, tune
from splitserve.orchestrator.tuner.workload import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.traces import TraceRequest
    from splitserve.orchestrator.tuner.profile import Profile
    from splitserve.orchestrator.tuner.workload import Mix

NODES_LIMIT = 10_000


@click.command("tune")
@click.argument("cluster")
@workload_options
@click.option("--ttft-ms", type=float, help="Target: a first token within so many milliseconds.")
@click.option(
    "--itl-ms", type=float, help="Target: so many between an answer's tokens, on average."
)
@click.option(
    "--nodes",
    type=click.IntRange(1, NODES_LIMIT),
    help="Nodes to be split; default: as many as the cluster has.",
)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path),
    help="What `splitserve profile` measured; default: the cluster's last one.",
)
@click.option(
    "--threshold",
    type=click.IntRange(min=0),
    help="Split only prompts of so many uncached tokens; default: look for the best.",
)
@click.option("--seed", default=0, show_default=True, help="Of everything that is drawn.")
@click.option("--jobs", type=click.IntRange(1, 256), help="Processes; default: one per core.")
@click.option("--out", type=click.Path(path_type=Path), help="Write charts to this file (.svg).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--write", "writes", is_flag=True, help="Write the recommendation to the YAML.")
@click.option("--apply", "applies", is_flag=True, help="Flip nodes of the running cluster.")
def tune_command(
    cluster: str,
    trace: Path | None,
    isl: str | None,
    osl: str | None,
    rate: float | None,
    block_tokens: int,
    ttft_ms: float | None,
    itl_ms: float | None,
    nodes: int | None,
    profile_path: Path | None,
    threshold: int | None,
    seed: int,
    jobs: int | None,
    out: Path | None,
    as_json: bool,
    writes: bool,
    applies: bool,
) -> None:
    """Find the ratio of prefill to decode nodes that serves the most requests within the targets.

    CLUSTER is a YAML file or a built-in name. Every ratio is simulated with the times that
    `splitserve profile` measured, and so is not disaggregating at all.

    \b
    splitserve tune mine.yaml --trace chats.jsonl --ttft-ms 2000 --itl-ms 50
    splitserve tune mine.yaml --isl 2000:0.8 --osl 300 --rate 4 --ttft-ms 500
    """
    if out is not None and out.suffix != ".svg":
        raise RefusedError(f"--out {out}: the picture is an SVG; name a file.svg")
    config = load(cluster)
    targets = _targets(ttft_ms, itl_ms)
    running = running_nodes(config)
    profile = chosen_profile(profile_path, config, running)
    source = workload_of(trace, isl, osl, rate, block_tokens)
    wish = _wish(config, running, targets, nodes, threshold)
    wish = replace(wish, block_tokens=block_tokens, seed=seed)
    tuned = _tuned(source, profile, wish, jobs or cores())
    name = trace.name if trace is not None else f"prompts of {isl}, answers of {osl} tokens"
    if out is not None:
        out.write_text(picture_of(tuned, name), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(json_of(tuned), indent=1))
    else:
        show(tuned, name)
    if out is not None:
        click.echo(f"the charts are in {out}", err=True)
    if (writes or applies) and tuned.recommendation.is_beyond:
        option = "--write" if writes else "--apply"
        raise RefusedError(f"{option}: nothing is changed: {beyond_text(tuned)}")
    if writes:
        write_split(cluster, config, tuned.recommendation.split)
    if applies:
        apply_split(config, tuned.recommendation.split)


def _targets(ttft_ms: float | None, itl_ms: float | None) -> Targets:
    if ttft_ms is None and itl_ms is None:
        raise RefusedError("give --ttft-ms, --itl-ms or both: without a target no ratio is better")
    for name, value in (("--ttft-ms", ttft_ms), ("--itl-ms", itl_ms)):
        if value is not None and not (0 < value < math.inf):
            raise RefusedError(f"{name} {value:g}: a target is a time above 0")
    return Targets(
        None if ttft_ms is None else ttft_ms / 1000, None if itl_ms is None else itl_ms / 1000
    )


def _wish(
    config: ClusterConfig,
    running: Nodes,
    targets: Targets,
    nodes: int | None,
    threshold: int | None,
) -> Wish:
    """What runs now is what the router says, or the YAML where the cluster does not run."""
    limits = limits_of(config)
    runs = (config.prefill.replicas, config.decode.replicas)
    if running:
        roles = [node["role"] for node in running.values()]
        runs = roles.count("prefill"), roles.count("decode")
    count = nodes or sum(runs)
    current = None
    if sum(runs) == count:
        current = Split(*runs, limits.placement.min_uncached_tokens)
    if threshold is not None:
        placement = replace(limits.placement, min_uncached_tokens=threshold)
        limits = replace(limits, placement=placement)
    return Wish(count, targets, current, limits, searches_threshold=threshold is None)


def _tuned(
    source: Sequence[TraceRequest] | Mix, profile: Profile, wish: Wish, processes: int
) -> Tuned:
    """What was found, with a line of progress on a terminal."""
    console = Console(stderr=True)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("simulating", total=None)
            return tune(
                source,
                profile,
                wish,
                processes,
                lambda trial: progress.update(
                    task, advance=1, description=f"simulating, {trial.split}"
                ),
            )
    except (TuningError, WorkloadError) as error:
        raise RefusedError(str(error)) from error
    except EvaluationError as error:
        raise StartError(str(error)) from error
