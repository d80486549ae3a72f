"""The configuration of a running cluster with another number of nodes in one pool.

Nodes are numbered from 0, so a pool grows by the next numbers and shrinks by its highest ones. What
the YAML gives each replica, a new one must get too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from splitserve.orchestrator.config.checks import problems_between_keys
from splitserve.orchestrator.config.errors import ConfigError
from splitserve.orchestrator.config.nodes import nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.config.schema import ClusterConfig, PoolConfig

LIMIT_NODES = 1_000
_WITHOUT = {
    "prefill": "decode nodes can compute prompts themselves: `splitserve drain prefill-0` takes the"
    " last prefill node out, and `restart` brings it back",
    "decode": "without a decode node no request is answered; `splitserve down` stops the cluster",
}


class Scaled(NamedTuple):
    """A cluster of another size."""

    config: ClusterConfig
    new: list[str]
    """Names of nodes that it has and the one before has not."""
    gone: list[str]
    """Those that only the one before has, the highest number first."""
    warning: str = ""
    """What a person should know of it."""


def scaled(
    config: ClusterConfig,
    pool: str,
    replicas: int,
    *,
    cpus: Sequence[Sequence[int]] = (),
    gpus: Sequence[Sequence[int]] = (),
) -> Scaled:
    """The cluster with so many nodes in the pool. ``cpus`` and ``gpus`` are for the new ones, a
    list for each; where the pool's nodes are pinned and no ``cpus`` are given, new nodes share
    those of the others. Raises ``ConfigError`` with all that is against it.
    """
    settings = config.pool(pool)
    more = replicas - settings.replicas
    problems = _problems(pool, settings, replicas, more, len(cpus), len(gpus))
    if problems:
        raise ConfigError(problems)
    shares = more > 0 and settings.cpus is not None and not cpus
    update = {
        "replicas": replicas,
        "cpus": _resized(settings.cpus, replicas, cpus),
        "gpus": _resized(settings.gpus, replicas, gpus),
    }
    fresh = config.model_copy(update={pool: settings.model_copy(update=update)})
    checked = fresh.model_copy(update={"allow_shared_devices": True}) if shares else fresh
    problems = [p for p in problems_between_keys(checked) if p not in problems_between_keys(config)]
    if problems:
        raise ConfigError(problems)
    before, after = [n.name for n in nodes(config)], [n.name for n in nodes(fresh)]
    new = [name for name in after if name not in before]
    gone = [name for name in reversed(before) if name not in after]
    warning = ""
    if shares:
        warning = (
            f"{' and '.join(new)} share the CPUs of the other {pool} nodes, and each slows the "
            "other; give --cpus once for each new node"
        )
    return Scaled(fresh, new, gone, warning)


def _problems(
    pool: str, settings: PoolConfig, replicas: int, more: int, cpus: int, gpus: int
) -> list[str]:
    problems = []
    if replicas < 1:
        problems.append(f"a pool keeps at least one node: {_WITHOUT[pool]}")
    if replicas > LIMIT_NODES:
        return [
            f"a pool of more than {LIMIT_NODES} nodes has never been tried; start other clusters"
        ]
    if settings.hosts is not None and more:
        problems.append(
            f"{pool}.hosts names the host of each replica; change it in the YAML and start the "
            "cluster again"
        )
    for key, lists, given in (("cpus", settings.cpus, cpus), ("gpus", settings.gpus, gpus)):
        if given and lists is None:
            problems.append(
                f"--{key}: {pool}.{key} is not in the YAML, so no node of the pool has its own; "
                f"leave --{key} out"
            )
        elif given and given != max(0, more):
            problems.append(
                f"--{key}: {given} list{'' if given == 1 else 's'} for {max(0, more)} new "
                f"node{'' if more == 1 else 's'}; give one for each"
            )
    if more > 0 and settings.gpus is not None and not gpus:
        problems.append(f"{pool}.gpus gives each node its own; give --gpus once for each new node")
    return problems


def _resized(
    lists: list[list[int]] | None, length: int, more: Sequence[Sequence[int]]
) -> list[list[int]] | None:
    if lists is None:
        return None
    found = [*lists[:length], *(list(numbers) for numbers in more)]
    return found + [lists[n % len(lists)] for n in range(len(found), length)]
