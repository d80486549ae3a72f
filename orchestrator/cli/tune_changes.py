"""Carries out what ``splitserve tune`` recommends: in the cluster's YAML, and on the running
cluster.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.cli.flips import Flips
from splitserve.orchestrator.config import builtin_names
from splitserve.orchestrator.config.editing import EditError, with_values
from splitserve.orchestrator.config.flips import flip_obstacle
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.files import ClusterFiles

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.tuner.trial import Split

SIZES = ("prefill.replicas", "decode.replicas")
THRESHOLD = "policy.conditional.min_uncached_tokens"


def write_split(cluster: str, config: ClusterConfig, split: Split) -> None:
    """The YAML has pools of these sizes and that threshold; nothing else in it has changed. Raises
    ``RefusedError``.
    """
    _refuse_aggregated(split, "--write")
    path = Path(cluster).expanduser()
    if not path.is_file():
        assert cluster in builtin_names()
        raise RefusedError(
            f"--write: {cluster} is built in; `splitserve config show {cluster} > mine.yaml` gives "
            "you a file of your own"
        )
    wanted = dict(zip(SIZES, split[:2], strict=True))
    if split.threshold_tokens != config.policy.conditional.min_uncached_tokens:
        wanted[THRESHOLD] = split.threshold_tokens
    text = path.read_text()
    try:
        changed = with_values(text, wanted, str(path))
    except EditError as error:
        values = ", ".join(f"{key}: {value}" for key, value in wanted.items())
        raise RefusedError(f"--write: {error}. Wanted: {values}; nothing was written") from error
    if changed == text:
        click.echo(f"{path} says so already", err=True)
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(changed)
    fresh.chmod(path.stat().st_mode & 0o7777)
    fresh.replace(path)
    click.echo(f"{path}: written; the next `splitserve up` takes it", err=True)


def running_nodes(config: ClusterConfig) -> dict[str, dict[str, Any]]:
    """The router's status of each node; empty when the cluster does not run."""
    flips = _running(config)
    return flips.nodes() if flips is not None else {}


def apply_split(config: ClusterConfig, split: Split) -> None:
    """The running cluster has so many nodes of each role; they are flipped one after the other,
    each when the one before owes nothing of its old role. Raises ``RefusedError``, ``StartError``.
    """
    _refuse_aggregated(split, "--apply")
    obstacle = flip_obstacle(config)
    flips = _running(config)
    if flips is None:
        raise RefusedError(f"--apply: no cluster named {config.name!r} is running")
    count = len(flips.nodes())
    if count != split.nodes:
        raise RefusedError(
            f"--apply: {count} nodes take part in {config.name} now, and {split} are {split.nodes}"
        )
    changes = 0
    while step := _next_flip(flips.nodes(), split):
        if obstacle:
            raise RefusedError(f"--apply: {obstacle}")
        if changes > split.nodes:
            raise StartError("somebody else changes roles at the same time; look at `status`")
        node, role = step
        flips.order(node, role, force=False)
        flips.wait_until_settled(node, role)
        changes += 1
    if split.threshold_tokens != config.policy.conditional.min_uncached_tokens:
        click.echo(f"{THRESHOLD} is taken by the next `splitserve up`; see --write", err=True)
    click.echo(f"{config.name} runs {split.prefill}:{split.decode}", err=True)


def _refuse_aggregated(split: Split, option: str) -> None:
    if split.is_aggregated:
        raise RefusedError(
            f"{option}: nothing is changed. A cluster of splitserve has at least one prefill node; "
            "not to disaggregate, serve with plain engines behind any load balancer"
        )


def _running(config: ClusterConfig) -> Flips | None:
    return Flips(config.name) if ClusterFiles(config.name).is_running() else None


def _next_flip(nodes: dict[str, dict[str, Any]], split: Split) -> tuple[str, str] | None:
    """(node, new role): of the role that has too many, the node with the least work; None when the
    sizes are right.
    """
    by_role: dict[str, list[str]] = {"prefill": [], "decode": []}
    for name, node in nodes.items():
        by_role[node["role"]].append(name)
    if len(by_role["prefill"]) == split.prefill:
        return None
    old, new = ("prefill", "decode")
    if len(by_role["prefill"]) < split.prefill:
        old, new = new, old
    usable = [name for name in by_role[old] if nodes[name]["is_usable"]] or by_role[old]
    return min(usable, key=lambda name: (nodes[name][f"{old}_legs"], name)), new
