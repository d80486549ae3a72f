"""``splitserve scale`` of a cluster on Ray: the command itself tells its actors, and needs no
running ``up``. Ray is imported late.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click
import msgspec

from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.cli.scale import Scaling
from splitserve.orchestrator.config import ConfigError, dump_resolved, nodes
from splitserve.orchestrator.launch.ray.installed import require_ray
from splitserve.orchestrator.launch.ray.order import sized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.launch.ray.order import Order
    from splitserve.orchestrator.launch.ray.ray_cluster import RayCluster


class ScalingOnRay(Scaling):
    """A cluster whose nodes are actors. Connected to Ray until ``close``."""

    def __init__(self, cluster: str | None, timeout_s: float | None, *, force: bool) -> None:
        super().__init__(cluster, timeout_s, force=force)
        require_ray()
        from splitserve.orchestrator.launch.ray.ray_cluster import connect, take_back_signals
        from splitserve.orchestrator.launch.ray.resize import running_order

        self._cluster: RayCluster = connect(self.config)
        take_back_signals()
        self._order: Order = running_order(self._cluster)
        self._know(self._order)

    def close(self) -> None:
        """Not connected to Ray any more."""
        self._cluster.close()

    def order_size(
        self,
        pool: str,
        replicas: int,
        cpus: Sequence[Sequence[int]],
        gpus: Sequence[Sequence[int]],
    ) -> None:
        """Actors of new nodes are there, those of old ones are gone. Raises ``RefusedError`` when
        the Ray cluster cannot hold it.
        """
        from splitserve.orchestrator.launch.ray.resize import resize

        try:
            order = resize(self._cluster, self._order, pool, replicas, os.environ, click.echo)
        except ConfigError as error:
            raise RefusedError("; ".join(error.problems)) from None
        self._know(order)

    def failure(self, name: str, status: Any) -> str:
        """Also what the node's actor says of it."""
        from splitserve.orchestrator.launch.ray.ray_cluster import SilentActorError

        if said := super().failure(name, status):
            return said
        try:
            report = self._cluster.ask(name, "report")
        except SilentActorError:
            return ""
        return f"{report['why']} on {report['host']}" if report["state"] == "failed" else ""

    def _know(self, order: Order) -> None:
        """The commands on this machine know the sizes, whoever has changed them."""
        self._order = order
        self.config = sized(self.config, order.sizes)
        self.files.write_resolved(dump_resolved(self.config))
        names = tuple(node.name for node in nodes(self.config))
        if names != self.record.nodes:
            self.record = msgspec.structs.replace(self.record, nodes=names)
            self.files.write_record(self.record)
