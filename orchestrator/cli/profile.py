"""``splitserve profile``: what the engines of a running cluster take for what, as a file."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from splitserve.orchestrator.cli.errors import EXIT_FAILED
from splitserve.orchestrator.cli.probe_client import ProbeClient
from splitserve.orchestrator.cli.router_tls import router_tls
from splitserve.orchestrator.cli.running_nodes import RunningNodes, name_of
from splitserve.orchestrator.launch.files import write_private
from splitserve.orchestrator.tuner.live_watch import LiveWatch
from splitserve.orchestrator.tuner.measured_profile import (
    build_profile,
    limits_of,
    neighbours_of,
    nodes_to_measure,
)
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.probe_plan import plan_probes
from splitserve.orchestrator.tuner.probing import Measured, ProbeError, Prober
from splitserve.orchestrator.tuner.profile import write_profile

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.tuner.profile import Estimate, Profile

PATIENCE_SHARE = 0.5
"""Of the time, that may be spent on waiting for nodes to have nothing else to do."""
ANSWER_FACTOR = 20.0
"""A probe that takes so many times --longest-ms is not waited for."""
ANSWER_LEAST_S = 60.0
LARGE_ERROR = 0.1
"""Relative error of predictions from which the profile is said to be rough."""

_milliseconds = click.FloatRange(min=0, min_open=True)


@click.command()
@click.argument("cluster", required=False)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where the profile goes (default: beside the cluster's state, where `tune` looks for it).",
)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=3.0,
    show_default=True, help="About how long to measure.")  # fmt: skip
@click.option(
    "--longest-ms",
    type=_milliseconds,
    default=3000.0,
    show_default=True,
    help="Send no prompts that take longer to compute: a client may have to wait for one.",
)
@click.option(
    "--ttft-ms", type=_milliseconds, help="Stop when clients' first tokens come later than this."
)
@click.option("--itl-ms", type=_milliseconds, help="Or the gaps of their answers are longer.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile itself.")
def profile(
    cluster: str | None,
    out: Path | None,
    minutes: float,
    longest_ms: float,
    ttft_ms: float | None,
    itl_ms: float | None,
    as_json: bool,
) -> None:
    """Measure the engines of the running cluster CLUSTER (a name, or the YAML it was started from;
    default: the only one that runs), for `simulate` and `tune`.

    Probes are sent to nodes that nobody else uses at the moment, and to no others: clients come
    first. Ctrl-C ends all of them.
    """
    running = RunningNodes(name_of(cluster))
    targets = Targets(
        None if ttft_ms is None else ttft_ms / 1000, None if itl_ms is None else itl_ms / 1000
    )
    longest_s = longest_ms / 1000
    if targets.ttft_s is not None:
        longest_s = min(longest_s, targets.ttft_s)
    run = _Run(running, LiveWatch(targets), budget_s=minutes * 60, longest_s=longest_s)
    console = Console(stderr=True)
    with _bar(console) as progress:
        task = progress.add_task("looking at the cluster", total=1.0)
        show = _shower(console, lambda words, part: progress.update(
            task, description=words, completed=part))  # fmt: skip
        try:
            found, measured = asyncio.run(run.measure(show))
        except ProbeError as error:
            raise MeasuringError(str(error)) from error
    path = out or running.files.profile_path
    write_private(path, write_profile(found))
    if as_json:
        click.echo(write_profile(found), nl=False)
    else:
        _print(found, measured, Console(markup=False))
        click.echo(f"written to {path}")


class MeasuringError(click.ClickException):
    """There is no profile; the message says why."""

    exit_code = EXIT_FAILED


class _Run:
    """One measuring of one cluster."""

    def __init__(
        self, running: RunningNodes, watch: LiveWatch, *, budget_s: float, longest_s: float
    ) -> None:
        self._url = running.record.url
        self._tls = router_tls(running.record)
        self._token = running.files.token_path.read_text()
        self._watch = watch
        self._budget_s = budget_s
        self._longest_s = longest_s

    async def measure(self, progress: Callable[[str, float], None]) -> tuple[Profile, Measured]:
        """The profile, and what it was fitted to. Raises ``ProbeError``."""
        limit_s = max(ANSWER_LEAST_S, ANSWER_FACTOR * self._longest_s)
        async with ProbeClient(
            self._url, self._token, self._watch, answer_limit_s=limit_s, tls=self._tls
        ) as client:
            nodes: dict[str, dict[str, Any]] = (await client.status())["nodes"]
            prefill_nodes, decode_nodes = nodes_to_measure(nodes)
            names = [*prefill_nodes, *decode_nodes]
            limits = limits_of(nodes, names)
            caches = all(nodes[name]["reports_prefixes"] for name in names)
            prober = Prober(
                client,
                plan_probes(limits, has_prefix_cache=caches),
                prefill_nodes=prefill_nodes,
                decode_nodes=decode_nodes,
                neighbours=neighbours_of(nodes, names),
                vocabulary=_plain_ids(nodes[names[0]]["vocabulary_tokens"]),
                block_tokens=limits.block_tokens,
                has_prefix_cache=caches,
                budget_s=self._budget_s,
                longest_s=self._longest_s,
                patience_s=PATIENCE_SHARE * self._budget_s,
                draws=random.Random(time.time_ns()),
                progress=progress,
            )
            measured = await prober.run()
        progress("fitting", 1.0)
        return build_profile(measured, nodes, names, now_unix_s=time.time()), measured


def _plain_ids(vocabulary: int) -> range:
    """Token ids in the middle: special ones lie at the ends."""
    return range(vocabulary // 8, max(vocabulary - vocabulary // 8, vocabulary // 8 + 1))


def _bar(console: Console) -> Progress:
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _shower(console: Console, update: Callable[[str, float], None]) -> Callable[[str, float], None]:
    """Moves the bar on a terminal; elsewhere says every tenth part."""
    told = -1

    def show(words: str, part: float) -> None:
        nonlocal told
        update(words, part)
        if not console.is_terminal and int(part * 10) > told:
            told = int(part * 10)
            click.echo(f"{told * 10:3d} %  {words}", err=True)

    return show


def _print(found: Profile, measured: Measured, console: Console) -> None:
    """For people: each part of each time with its band."""
    click.echo(f"{found.model} on {found.engine}, {found.hardware}")
    table = Table(box=None, pad_edge=False)
    for heading in ("time of", "part", "value", "95 % band", "error"):
        table.add_column(heading, justify="left" if heading in ("time of", "part") else "right")
    prefill, decode = found.prefill, found.decode
    rows: list[tuple[str, str, Estimate, float, str, float | None]] = [
        ("a prefill step", "always", prefill.base_s, 1e3, "ms", prefill.error),
        ("", "per token", prefill.token_s, 1e6, "µs", None),
        ("", "per token and token before it", prefill.attention_s, 1e9, "ns", None),
        ("", "per token that it sends", prefill.sending_s, 1e6, "µs", None),
        ("a decode step", "always", decode.base_s, 1e3, "ms", decode.error),
        ("", "per sequence", decode.sequence_s, 1e6, "µs", None),
        ("", "per token of context", decode.context_s, 1e9, "ns", None),
    ]
    if found.nodes_per_host > 1:
        part = "per busy neighbour"
        rows.insert(7, ("", part, decode.neighbour, 1e2, "%", None))
        rows.insert(4, ("", part, prefill.neighbour, 1e2, "%", None))
    for link in found.transfers:
        pair = f" {link.prefill_node} to {link.decode_node}" if link.prefill_node else ""
        rows.append((f"a transfer{pair}", "always", link.latency_s, 1e3, "ms", link.error))
        rows.append(("", "bandwidth", link.bytes_per_s, 1e-6, "MB/s", None))
    for of, part, estimate, scale, unit, error in rows:
        band = f"{estimate.low * scale:.4g} to {estimate.high * scale:.4g}"
        told = "" if error is None else f"{error:.1%}"
        table.add_row(of, part, f"{estimate.value * scale:.4g} {unit}", band, told)
    table.add_row("a request", "beside its steps", f"{found.request_s * 1e3:.4g} ms", "", "")
    console.print(table)
    click.echo(f"{measured.count} probes in {measured.rounds} whole rounds")
    if measured.left_out:
        click.echo(f"{len(measured.left_out)} left out, the last one: {measured.left_out[-1]}")
    worst = max(prefill.error, decode.error)
    if worst > LARGE_ERROR:
        click.echo(
            f"predictions are wrong by {worst:.0%} in the middle: something else used these"
            " machines, or there was too little time (--minutes)"
        )
