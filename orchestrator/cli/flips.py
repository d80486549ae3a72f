"""``splitserve flip``: a node takes work of the other role from now on, and no request fails."""

from __future__ import annotations

import time

import click

from splitserve.orchestrator.cli.display import owed_in_words, stage_of
from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.cli.running_nodes import MARGIN_S, RunningNodes
from splitserve.orchestrator.launch.base import StartError

SETTLE_S = 1.0
"""A node that owes nothing has reported since its last leg ended, when it says so for this long."""


@click.command()
@click.argument("node")
@click.argument("role", type=click.Choice(["prefill", "decode"]))
@click.option("--wait", "waits", is_flag=True, help="Return when nothing of the old role is left.")
@click.option("--cluster", help="The cluster's name (default: the only one that runs).")
@click.option("--force", is_flag=True, help="Also when NODE is the last prefill node.")
def flip(node: str, role: str, waits: bool, cluster: str | None, force: bool) -> None:
    """Let NODE take ROLE work from now on, and no other. Its engine runs on; what it has begun in
    its old role it finishes.
    """
    flips = Flips(cluster)
    flips.check_names([node])
    flips.order(node, role, force=force)
    if waits:
        flips.wait_until_settled(node, role)


class Flips(RunningNodes):
    """Nodes of one running cluster that change their roles."""

    def order(self, node: str, role: str, *, force: bool) -> None:
        """The node has that role. Raises ``RefusedError`` when it may not have it."""
        verdict, message = self.ask(lambda router: router.flip(node, role, force=force))
        if verdict == "unknown_node":
            raise RefusedError(
                f"the router has no {node} to flip: it is {stage_of(self.status(node))}"
            )
        if verdict == "last_prefill_node":
            raise RefusedError(f"{message}; add --force to do it all the same")
        if verdict == "last_decode_node":
            raise RefusedError(f"{message}; make another node a decode node before")
        if verdict not in ("flipped", "same_role"):
            raise RefusedError(message)
        click.echo(message)

    def wait_until_settled(self, node: str, role: str) -> None:
        """It owes nothing of its old role; what it still owes is said meanwhile. Raises
        ``StartError`` when that takes longer than a request may.
        """
        limit_s = self.config.router.request_deadline_s + MARGIN_S
        end = time.monotonic() + limit_s
        quiet_since: float | None = None
        while quiet_since is None or time.monotonic() < quiet_since + SETTLE_S:
            known = self.nodes().get(node)
            if known is None:
                # Its engine has died, or restarts: what it owed is over, its role is not
                self.say(node, stage_of(self.status(node)))
                quiet_since = None
            elif known["role"] != role:
                raise StartError(f"{node} has been made a {known['role']} node meanwhile")
            elif known["is_flipping"]:
                self.say(node, f"still owes {owed_in_words(known['owed'])}")
                quiet_since = None
            elif quiet_since is None:
                quiet_since = time.monotonic()
            self.pause(end, f"{node} still owes something after {limit_s:.0f} s")
        click.echo(f"{node} owes nothing of its old role any more")
