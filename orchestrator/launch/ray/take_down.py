"""How a cluster on Ray ends: everything that carries one of its names is gone afterwards, and
nothing else of the Ray cluster is touched.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.ray.host_check import sweep_host
from splitserve.orchestrator.launch.ray.order import (
    CACHE_NAME,
    NODE_NAME,
    ROUTER_NAME,
    is_ours,
)
from splitserve.orchestrator.launch.ray.ray_cluster import SilentActorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.launch.ray.placement import RayHost
    from splitserve.orchestrator.launch.ray.ray_cluster import RayCluster

STOP_MARGIN_S = 10.0
_CACHE_STOP_S = 10.0
"""For cache servers to write what waits for their lower tiers."""
_GONE_LIMIT_S = 20.0
_SWEEP_LIMIT_S = 30.0
_ASK_LIMIT_S = 2.0
_AT_A_TIME = 16
GROUP_NAME = re.compile(r"(prefill|decode)(-\d+)?|pair-\d+")


def take_down(
    cluster: RayCluster,
    config: ClusterConfig,
    *,
    drain_s: float,
    say: Callable[[str], None],
    is_hurried: Callable[[], bool] = lambda: False,
) -> bool:
    """Nothing of the cluster of that namespace lives any more, on any host that can be reached.
    False when there was nothing. Raises ``StartError`` for what does not end.
    """
    names = [name for name in cluster.names() if is_ours(name)]
    runs = {str(told["run"]) for told in _told(cluster, names)}
    stop_s = config.supervision.stop_timeout_s + STOP_MARGIN_S
    for kind, limit_s in (
        (ROUTER_NAME, drain_s + STOP_MARGIN_S if drain_s else 1.0),
        (NODE_NAME, stop_s),
        (CACHE_NAME, _CACHE_STOP_S),
    ):
        limit_s = 0.0 if is_hurried() else limit_s
        stop(cluster, [name for name in names if kind.fullmatch(name)], limit_s)
    # A node that came back meanwhile may have brought a cache server
    names = sorted({*names, *(name for name in cluster.names() if is_ours(name))})
    for name in names:
        cluster.end(name)
    groups = [name for name in cluster.group_names() if GROUP_NAME.fullmatch(name)]
    released = [name for name in groups if cluster.release(name)]
    left = cluster.wait_until_gone(names, _GONE_LIMIT_S)
    left += _sweep(cluster, config.name, runs, say)
    if left:
        raise StartError(
            f"{config.name}: these do not end: {', '.join(left)}; run `splitserve down` again, or "
            "end them on their hosts"
        )
    return bool(names or released)


def _told(cluster: RayCluster, names: list[str]) -> list[dict[str, Any]]:
    """The orders of those that answer."""

    def ask(name: str) -> list[dict[str, Any]]:
        try:
            return [cluster.ask(name, "told", limit_s=_ASK_LIMIT_S)]
        except SilentActorError:
            return []

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return [order for orders in pool.map(ask, names) for order in orders]


def stop(cluster: RayCluster, names: Sequence[str], limit_s: float) -> None:
    """Their processes have ended; those that cannot be asked end with their actors."""
    if not names:
        return

    def stop_one(name: str) -> None:
        try:
            cluster.ask(name, "report", limit_s=_ASK_LIMIT_S)
            cluster.ask(name, "stop", limit_s, limit_s=limit_s + STOP_MARGIN_S)
        except SilentActorError:
            return

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        list(pool.map(stop_one, names))


def _sweep(
    cluster: RayCluster, name: str, runs: Iterable[str], say: Callable[[str], None]
) -> list[str]:
    """Processes of the runs that live on, on any host."""

    def sweep(run: str, host: RayHost) -> list[str]:
        try:
            found = cluster.on_host(host, sweep_host, name, run, limit_s=_SWEEP_LIMIT_S)
        except StartError as error:
            say(f"not looked at: {error}")
            return []
        return [f"{process} on {host.hostname}" for process in found]

    asked = [(run, host) for run in runs for host in cluster.hosts()]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return [left for found in pool.map(lambda pair: sweep(*pair), asked) for left in found]
