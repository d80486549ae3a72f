"""The nodes of a running cluster, for commands that order something about them and wait for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

import click

from splitserve.orchestrator.agent.status_file import read_status
from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.cli.far_nodes import seen_by_router
from splitserve.orchestrator.cli.router_client import RouterClient, RouterSilentError
from splitserve.orchestrator.cli.up import chosen_cluster, is_alive, not_running
from splitserve.orchestrator.config import load, load_resolved
from splitserve.orchestrator.launch.base import StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord

Answer = TypeVar("Answer")

POLL_S = 0.25
MARGIN_S = 60.0
"""How long a router that restarts is waited for, and what is added to other limits."""


def name_of(cluster: str | None) -> str | None:
    """The name of the cluster that was named, if need be by its YAML."""
    if cluster is not None and cluster.endswith((".yaml", ".yml")):
        return load(cluster).name
    return cluster


class RunningNodes:
    """One running cluster: what its agents and its router say. Exits with status 3 when there is
    none.
    """

    def __init__(self, cluster: str | None) -> None:
        self.files: ClusterFiles = chosen_cluster(cluster)
        found = self.files.record()
        if found is None or not self.files.is_running():
            raise click.exceptions.Exit(not_running(self.files.name))
        self.record: ClusterRecord = found
        self.config = load_resolved(self.files.config_path)
        self._router = RouterClient(self.files, found)
        self._said: dict[str, str] = {}

    def check_names(self, names: Sequence[str]) -> None:
        """Raises ``RefusedError`` for a node that the cluster does not have."""
        for name in names:
            if name not in self.record.nodes:
                known = ", ".join(self.record.nodes)
                raise RefusedError(f"{self.record.name} has no node {name!r}; known: {known}")

    def status(self, node: str) -> Any:
        """What the node's agent wrote last; of one on another machine what the router knows."""
        if self.record.launcher != "local":
            return seen_by_router(self.ask(lambda router: router.status()), node)
        return read_status(self.files.run_dir, node)

    def phase(self, node: str) -> str:
        """The phase in that, empty when there is nothing."""
        status = self.status(node)
        return status.phase if status is not None else ""

    def nodes(self) -> dict[str, dict[str, Any]]:
        """What the router says of its nodes."""
        return self.ask(lambda router: router.nodes())

    def ask(self, question: Callable[[RouterClient], Answer]) -> Answer:
        """The router's answer; one that restarts is waited for."""
        end = time.monotonic() + MARGIN_S
        while True:
            try:
                return question(self._router)
            except RouterSilentError as error:
                self.pause(end, str(error))

    def pause(self, end: float, failure: str) -> None:
        """A moment passes. Raises ``StartError`` at ``end``, or when the cluster has ended."""
        if not is_alive(self.files, self.record):
            raise StartError(f"{self.record.name} has been stopped meanwhile")
        if time.monotonic() > end:
            raise StartError(failure)
        time.sleep(POLL_S)

    def say(self, node: str, line: str) -> None:
        """Print a line that is news."""
        if self._said.get(node) != line:
            self._said[node] = line
            click.echo(f"{node}: {line}")
