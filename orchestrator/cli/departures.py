"""``splitserve drain`` and ``restart``: nodes leave, or come back as another incarnation, and no
request fails.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from splitserve.orchestrator.cli.display import stage_of
from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.cli.on_ray import start_again
from splitserve.orchestrator.cli.running_nodes import MARGIN_S, RunningNodes
from splitserve.orchestrator.launch.base import StartError

if TYPE_CHECKING:
    from collections.abc import Sequence

_OWED = {
    "prefill_legs": "prefill legs",
    "decode_legs": "decode legs",
    "open_transfers": "open transfers",
    "leased_blocks": "leased blocks",
}
"""Figures of the router's status that say what a draining node still owes."""

_timeout = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    help="Seconds after which the node goes whatever it owes; default: router.request_deadline_s.",
)
_cluster = click.option("--cluster", help="The cluster's name (default: the only one that runs).")
_force = click.option(
    "--force", is_flag=True, help="Also when no other decode node could answer meanwhile."
)


@click.command()
@click.argument("node")
@click.option("--wait", "waits", is_flag=True, help="Return when the node has left.")
@_timeout
@_cluster
@_force
def drain(
    node: str, waits: bool, timeout_s: float | None, cluster: str | None, force: bool
) -> None:
    """Let NODE leave: it gets no new requests, and goes when those that it has are served."""
    departures = Departures(cluster, timeout_s, force=force)
    departures.check_names([node])
    if departures.phase(node) == "left":
        click.echo(f"{node} has left already")
        return
    if not departures.order(node, restart=False):
        raise RefusedError(
            f"the router has no {node} to drain: it is {stage_of(departures.status(node))}"
        )
    if waits:
        departures.wait_until_left(node)
    else:
        click.echo("`splitserve status` shows it as `left` when it has gone")


@click.command()
@click.argument("nodes", nargs=-1)
@click.option("--rolling", is_flag=True, help="One node after the other.")
@_timeout
@_cluster
@_force
def restart(
    nodes: tuple[str, ...],
    rolling: bool,
    timeout_s: float | None,
    cluster: str | None,
    force: bool,
) -> None:
    """Restart the engines of NODES (default: all of them), each one drained before.

    A node that has left, or failed for good, is started again. Several nodes are restarted one
    after the other (--rolling); all at once only with --force, for then requests wait or fail.
    """
    departures = Departures(cluster, timeout_s, force=force)
    chosen = list(dict.fromkeys(nodes)) or list(departures.record.nodes)
    departures.check_names(chosen)
    if len(chosen) > 1 and not (rolling or force):
        raise click.UsageError(
            f"restarting {len(chosen)} nodes at once stops the service: use --rolling for one "
            "after the other, or --force"
        )
    departures.check_decode_nodes(chosen)
    for number, group in enumerate([[name] for name in chosen] if rolling else [chosen]):
        began = {name: departures.begin_restart(name) for name in group}
        for name, old in began.items():
            try:
                departures.wait_until_back(name, old)
            except StartError as error:
                rest = ", ".join(chosen[number + 1 :]) if rolling else ""
                left_alone = (f"not restarted: {rest}",) if rest else ()
                raise StartError(str(error), (*error.details, *left_alone)) from error


class Departures(RunningNodes):
    """Nodes of one running cluster on their way out, and back."""

    def __init__(self, cluster: str | None, timeout_s: float | None, *, force: bool) -> None:
        super().__init__(cluster)
        self._timeout_s = timeout_s
        self._force = force

    def check_decode_nodes(self, names: Sequence[str]) -> None:
        """Raises ``RefusedError`` before anything is touched when there is no other decode node to
        answer while one of ``names`` restarts.
        """
        nodes = self.nodes()
        usable = [name for name, n in nodes.items() if n["role"] == "decode" and n["is_usable"]]
        for name in names:
            is_needed = usable == [name]
            if is_needed and not self._force:
                raise self._last_decode_node(f"{name} is the only decode node that is usable")

    def order(self, node: str, *, restart: bool) -> bool:
        """The node is draining; False when the router has no such node."""
        verdict, message = self._drain(node, restart=restart)
        if verdict == "last_decode_node":
            raise self._last_decode_node(message)
        if verdict != "unknown_node":
            click.echo(message)
        return verdict != "unknown_node"

    def wait_until_left(self, node: str) -> None:
        """It has left; what it still owes is said meanwhile."""
        limit_s = self._drain_limit_s()
        end = time.monotonic() + limit_s
        old = ""
        while self.phase(node) != "left":
            known = self.nodes().get(node)
            if known is not None:
                old = old or known["incarnation"]
                if known["incarnation"] != old:
                    raise StartError(f"{node} died while it drained, and has been started again")
                self._say_owed(node, known)
            self.pause(end, f"{node} has not left within {limit_s:.0f} s")
        click.echo(f"{node} has left")

    def begin_restart(self, node: str) -> str:
        """The node is on its way to another incarnation than the one that is returned."""
        if self.phase(node) in ("left", "failed"):
            if self.record.launcher == "none":
                raise RefusedError(
                    f"{node} has ended; start it again on its machine with "
                    f"`splitserve node {node} CLUSTER`"
                )
            if self.record.launcher == "ray":
                start_again(self.config, node)
            else:
                self.files.wish_for(node)
            click.echo(f"{node} is started again")
            return ""
        old = self.nodes().get(node, {}).get("incarnation", "")
        if not self.order(node, restart=True):
            click.echo(f"{node} is {stage_of(self.status(node))}; waiting for it")
            return ""
        return str(old)

    def wait_until_back(self, node: str, old: str) -> None:
        """Another incarnation than ``old`` serves. Raises ``StartError`` when it does not come."""
        began = time.monotonic()
        limit_s = self._drain_limit_s() + max(
            self.config.pool(pool).startup_timeout_s for pool in ("prefill", "decode")
        )
        while True:
            known = self.nodes().get(node)
            if known is not None and known["incarnation"] != old and known["is_usable"]:
                break
            status = self.status(node)
            if status is not None and not self.files.is_wished(node):
                if status.phase == "failed" or status.refused:
                    raise StartError(f"{node} does not come back: {stage_of(status)}")
                if known is not None and known["is_draining"]:
                    self._say_owed(node, known)
                else:
                    self.say(node, stage_of(status))
            self.pause(began + limit_s, f"{node} is not back within {limit_s:.0f} s")
        click.echo(f"{node} serves again (after {time.monotonic() - began:.1f} s)")

    def _drain(self, node: str, *, restart: bool) -> tuple[str, str]:
        return self.ask(
            lambda router: router.drain(
                node, restart=restart, force=self._force, timeout_s=self._timeout_s
            )
        )

    def _drain_limit_s(self) -> float:
        drain_s = self._timeout_s
        if drain_s is None:
            drain_s = self.config.router.request_deadline_s
        return drain_s + self.config.supervision.stop_timeout_s + MARGIN_S

    def _last_decode_node(self, what: str) -> RefusedError:
        return RefusedError(
            f"{what}; add --force to do it all the same: requests wait in the router's queue for a "
            "node that restarts, and are refused (503) after a node that leaves"
        )

    def _say_owed(self, node: str, known: dict[str, Any]) -> None:
        owed = [f"{known[key]} {what}" for key, what in _OWED.items() if known[key]]
        self.say(node, f"waits for {', '.join(owed)}" if owed else "owes nothing any more")
