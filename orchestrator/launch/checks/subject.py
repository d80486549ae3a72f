"""What every check is given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from splitserve.orchestrator.config import nodes
from splitserve.orchestrator.models.errors import ModelError
from splitserve.orchestrator.models.folder_facts import ModelFacts, read_facts
from splitserve.orchestrator.models.resolve import resolve_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from splitserve.orchestrator.config import ClusterConfig, NodeConfig
    from splitserve.orchestrator.launch.files import ClusterRecord


ROUTER = "router"


@dataclass(frozen=True)
class Subject:
    """A configuration, whose paths are filled in, on this machine."""

    config: ClusterConfig
    environ: Mapping[str, str]
    """Of ``splitserve up``: its processes inherit it."""
    contradictions: tuple[str, ...] = ()
    """What its keys do not agree on; ``up`` has refused it before."""
    running: ClusterRecord | None = None
    """The cluster of this name that runs already, where that matters: what it holds is its own."""

    here: frozenset[str] | None = None
    """Names of what runs on this machine, of a cluster on several: nodes, and ``router``; None for
    all of it.
    """

    placed: NodeConfig | None = None
    """The node that runs here, where its addresses are not the YAML's."""

    @cached_property
    def nodes(self) -> list[NodeConfig]:
        """The nodes that run on this machine."""
        if self.placed is not None:
            return [self.placed]
        return [node for node in nodes(self.config) if self.here is None or node.name in self.here]

    @property
    def has_router(self) -> bool:
        """Whether the router runs on this machine."""
        return self.here is None or ROUTER in self.here

    @cached_property
    def model_folder(self) -> Path | None:
        """The model's folder on this machine; None for a Hub id, the mock engine, and a model that
        is not there.
        """
        if self.config.engine == "mock":
            return None
        try:
            return resolve_model(self.config.model.path).folder
        except ModelError:
            return None

    @cached_property
    def model_facts(self) -> ModelFacts | None:
        """What its ``config.json`` says; None where that cannot be read."""
        if self.model_folder is None:
            return None
        try:
            return read_facts(self.model_folder)
        except ModelError:
            return None

    def environment_of(self, pool: str) -> dict[str, str]:
        """What the pool's engines inherit and are given by the YAML."""
        return {**self.environ, **self.config.pool(pool).env}
