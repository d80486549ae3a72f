"""CPUs of a node that is told how many it has and not which: in a container."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from splitserve.orchestrator.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Set

    from splitserve.orchestrator.config import NodeConfig


def with_given_cpus(node: NodeConfig, count: int, usable: Set[int]) -> NodeConfig:
    """The node with ``count`` CPUs of the machine, of which this process may use ``usable``.

    Where these are just so many they are its own, and it is pinned to them. Where there are more, a
    quota bounds what it may take, and which ones the kernel decides: two containers that each
    chose for themselves would choose the same. Raises ``ConfigError`` for a count that cannot be.
    """
    ranks = node.settings.engine_args.tensor_parallel_size
    if count % ranks:
        raise ConfigError(
            [f"--cpus: {count} do not split over tensor_parallel_size {ranks}; give a multiple"]
        )
    if count > len(usable):
        raise ConfigError(
            [
                f"--cpus: {count} for {node.name}, but this machine or container has "
                f"{len(usable)}; ask for fewer"
            ]
        )
    if count == len(usable):
        return replace(node, cpus=tuple(sorted(usable)))
    return replace(node, cpus=None, unpinned_cpus=count)
