"""``splitserve scale``: a pool of a running cluster gets more nodes or fewer, and no request fails.

New nodes are started by whoever runs the cluster's processes, and take part when they have loaded.
Nodes that go are drained before: the highest numbers first, so that names stay without gaps.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from splitserve.orchestrator.cli.departures import Departures
from splitserve.orchestrator.cli.display import stage_of
from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.cli.router_client import RouterClient
from splitserve.orchestrator.cli.running_nodes import MARGIN_S, name_of
from splitserve.orchestrator.config import ConfigError, load_resolved
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.config.scaling import Scaled, scaled
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.checks.cpu_lists import listed, parsed
from splitserve.orchestrator.launch.files import ScaleAnswer, ScaleOrder, ScalingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.launch.files import ClusterRecord

ANSWER_LIMIT_S = 30.0
"""For `up` to take the order, beside what it waits for processes to end."""
LIMIT_NUMBER = 65_535
"""No machine has a CPU beyond that number."""


class NumberList(click.ParamType["tuple[int, ...]"]):
    """``0-3,6``, ascending, each number once."""

    name = "list"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        try:
            if any(int(number) > LIMIT_NUMBER for number in re.findall(r"\d+", value)):
                raise ValueError
            return tuple(sorted(parsed(value)))
        except ValueError:
            self.fail(f"{value!r} is no list of numbers such as 0-3,6", param, ctx)


class SizeCommand(click.Command):
    """One whose number may be typed below 0, which click takes for an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As any command does. Raises ``UsageError`` that says what is wrong with such a number."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if re.fullmatch(r"-\d", error.option_name):
                raise click.UsageError("NODES must be at least 1", ctx) from None
            raise


@click.command(cls=SizeCommand)
@click.argument("pool", type=click.Choice(POOLS))
@click.argument("nodes", type=int)
@click.option(
    "--cpus",
    type=NumberList(),
    multiple=True,
    help="CPUs of a new node, e.g. 8-11; once for each. Without it new nodes of a pinned pool "
    "share those of the others.",
)
@click.option("--gpus", type=NumberList(), multiple=True, help="GPUs of a new node; once for each.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    help="Seconds after which a node that is to go goes whatever it owes; default: "
    "router.request_deadline_s.",
)
@click.option("--cluster", help="The cluster's name (default: the only one that runs).")
@click.option(
    "--force", is_flag=True, help="Also when no other decode node could answer meanwhile."
)
def scale(
    pool: str,
    nodes: int,
    cpus: tuple[tuple[int, ...], ...],
    gpus: tuple[tuple[int, ...], ...],
    timeout_s: float | None,
    cluster: str | None,
    force: bool,
) -> None:
    """Let POOL have so many NODES, while it serves. Returns when new ones serve and old ones have
    left.
    """
    scaling = Scaling(name_of(cluster), timeout_s, force=force)
    scaling.check_launcher(pool, nodes)
    try:
        lock = scaling.files.scale_lock()
    except ScalingError as error:
        raise RefusedError(str(error)) from None
    with lock, closing(_scaling(scaling.record, cluster, timeout_s, force=force)) as scaling:
        scaling.check_phase()
        found = scaling.planned(pool, nodes, cpus, gpus)
        if not (found.new or found.gone):
            click.echo(
                f"{scaling.record.name} has {nodes} {pool} node{'' if nodes == 1 else 's'} already"
                f"{scaling.hint(pool)}"
            )
            return
        if found.warning:
            click.echo(f"note: {found.warning}", err=True)
        try:
            scaling.let_leave(found.gone)
            scaling.has_ordered = True
            scaling.order_size(pool, nodes, cpus, gpus)
            scaling.forget(found.gone)
            scaling.wait_for_new(pool, found.new)
        except KeyboardInterrupt:
            scaling.say_interrupted(pool, nodes, found)
            raise


def _scaling(
    record: ClusterRecord, cluster: str | None, timeout_s: float | None, *, force: bool
) -> Scaling:
    """The cluster as it is now, whatever another one has changed until now."""
    if record.launcher == "ray":
        from splitserve.orchestrator.cli.scale_on_ray import ScalingOnRay

        return ScalingOnRay(name_of(cluster), timeout_s, force=force)
    return Scaling(name_of(cluster), timeout_s, force=force)


class Scaling(Departures):
    """One running cluster that gets another size."""

    has_ordered = False
    """Something has been asked of the cluster."""

    def close(self) -> None:
        """Nothing is held any more."""

    def hint(self, pool: str) -> str:
        """How those of a pool's nodes that do not run come back; empty when all of them run."""
        size = self.config.pool(pool).replicas
        phases = {name: self.phase(name) for name in (f"{pool}-{n}" for n in range(size))}
        away = [name for name, phase in phases.items() if phase in ("left", "failed")]
        if not away:
            return ""
        told = ", ".join(f"{name} has {phases[name]}" for name in away)
        words, them = ("", "it") if len(away) == 1 else ("--rolling ", "them")
        return f", but {told}: `splitserve restart {words}{' '.join(away)}` brings {them} back"

    def say_interrupted(self, pool: str, replicas: int, wanted: Scaled) -> None:
        """Ctrl-C has come: say what goes on without the command, and what to do."""
        told = "nothing has been changed"
        if self.has_ordered and wanted.gone:
            told = (
                f"still leaving: {', '.join(wanted.gone)}; `splitserve scale {pool} {replicas}` "
                "finishes it, `splitserve restart NODE` brings back one that has left"
            )
        elif self.has_ordered:
            told = (
                f"still loading: {', '.join(wanted.new)}; `splitserve status {self.record.name}` "
                f"shows how far, `splitserve scale {pool} {replicas - len(wanted.new)}` takes away "
                "what is new"
            )
        click.echo(f"\ninterrupted; {told}", err=True)

    def check_launcher(self, pool: str, replicas: int) -> None:
        """Raises ``RefusedError`` for a cluster whose nodes are started by somebody else."""
        if self.record.launcher in ("local", "ray"):
            return
        yaml, node = shlex.quote(self.record.source), f"{pool}-{max(1, replicas) - 1}"
        raise RefusedError(
            f"the nodes of {self.record.name} are started by somebody else: set {pool}.replicas to "
            f"{replicas} in the YAML; then, on Kubernetes, `splitserve render kubernetes {yaml}` "
            f"and `kubectl apply` (fewer nodes: `kubectl scale statefulset` does, too), elsewhere "
            f"`splitserve node {node} {yaml}` on the new node's machine, or `splitserve drain`"
        )

    def check_phase(self) -> None:
        """Raises ``RefusedError`` while the cluster starts or stops."""
        if self.record.phase != "serving":
            raise RefusedError(f"{self.record.name} is {self.record.phase}; wait until it serves")

    def planned(
        self,
        pool: str,
        replicas: int,
        cpus: Sequence[Sequence[int]],
        gpus: Sequence[Sequence[int]],
    ) -> Scaled:
        """What is to become of the cluster. Raises ``RefusedError``."""
        strange = {number for numbers in cpus for number in numbers} - os.sched_getaffinity(0)
        if strange and self.record.launcher == "local":
            raise RefusedError(
                f"--cpus: {listed(strange)} cannot be used here; this machine offers "
                f"{listed(os.sched_getaffinity(0))}"
            )
        try:
            return scaled(self.config, pool, replicas, cpus=cpus, gpus=gpus)
        except ConfigError as error:
            raise RefusedError("; ".join(error.problems)) from None

    def let_leave(self, names: Sequence[str]) -> None:
        """They have left. Raises ``RefusedError`` before any has been ordered to when the last
        decode node is among them.
        """
        nodes = self.nodes()
        usable = {name for name, node in nodes.items() if _decodes(node)}
        if usable and usable <= set(names) and not self._force:
            flipped = sorted(
                name for name in nodes if name not in names and _is_flipped(name, nodes)
            )
            raise self._last_decode_node(_why_they_stay(sorted(usable), flipped))
        self.has_ordered = bool(names)
        ordered = [
            name
            for name in names
            if self.phase(name) not in ("left", "failed") and self.order(name, restart=False)
        ]
        for name in ordered:
            self.wait_until_left(name)

    def order_size(
        self,
        pool: str,
        replicas: int,
        cpus: Sequence[Sequence[int]],
        gpus: Sequence[Sequence[int]],
    ) -> None:
        """The cluster's own process has done it: new agents run, old ones are gone. Raises
        ``RefusedError`` when it says why not.
        """
        ticket = secrets.token_hex(8)
        order = ScaleOrder(
            ticket=ticket,
            pool=pool,
            replicas=replicas,
            cpus=tuple(map(tuple, cpus)),
            gpus=tuple(map(tuple, gpus)),
        )
        self.files.order_scale(order)
        end = time.monotonic() + ANSWER_LIMIT_S + self.config.supervision.stop_timeout_s
        answer: ScaleAnswer | None = None
        while (answer := self.files.scale_answer(ticket)) is None:
            self.pause(end, f"the `up` of {self.record.name} does not take the order")
        if answer.problems:
            raise RefusedError("; ".join(answer.problems))

    def forget(self, names: Sequence[str]) -> None:
        """The router knows nothing of them any more."""
        for name in names:
            end = time.monotonic() + MARGIN_S
            while not self.ask(partial(RouterClient.forget, node=name)):
                self.pause(end, f"the router does not hear that {name} has ended")
            click.echo(f"{name} is no part of the cluster any more")

    def wait_for_new(self, pool: str, names: Sequence[str]) -> None:
        """All of them serve. Raises ``StartError`` when one does not come up."""
        end = time.monotonic() + MARGIN_S + self.config.pool(pool).startup_timeout_s
        for name in names:
            began = time.monotonic()
            while not self.nodes().get(name, {}).get("is_usable"):
                status = self.status(name)
                if failure := self.failure(name, status):
                    raise StartError(
                        f"{name} does not come up: {failure}",
                        (f"`splitserve scale {pool} {name.rpartition('-')[2]}` removes it",),
                    )
                if status is not None:
                    self.say(name, stage_of(status))
                self.pause(end, f"{name} does not serve in time")
            pinned = self._cpus_of(name)
            click.echo(f"{name} serves{pinned} (after {time.monotonic() - began:.1f} s)")

    def failure(self, name: str, status: Any) -> str:
        """Why a new node will not come up, as far as it is known; empty while it may."""
        if status is not None and (status.phase == "failed" or status.refused):
            return stage_of(status)
        return ""

    def _cpus_of(self, name: str) -> str:
        pool, _, index = name.rpartition("-")
        lists = load_resolved(self.files.config_path).pool(pool).cpus
        return f" on CPUs {listed(lists[int(index)])}" if lists else ""


def _decodes(node: dict[str, Any]) -> bool:
    return node["role"] == "decode" and bool(node["is_usable"])


def _is_flipped(name: str, nodes: dict[str, dict[str, Any]]) -> bool:
    return name.startswith("decode-") and nodes[name]["role"] != "decode"


def _why_they_stay(last: Sequence[str], flipped: Sequence[str]) -> str:
    are, them = ("is the last decode node", "it")
    if len(last) > 1:
        are, them = ("are the last decode nodes", "them")
    told = f"{' and '.join(last)} {are}: without {them} no request is answered"
    if flipped:
        told += f" ({' and '.join(flipped)} {'prefills' if len(flipped) == 1 else 'prefill'} now)"
    return told
