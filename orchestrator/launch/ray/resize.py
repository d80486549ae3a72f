"""Another number of nodes for a cluster that runs on Ray, whoever has brought it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.config import ConfigError, parse, shared_secret
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.ray.bring_up import Wanted, bring_up
from splitserve.orchestrator.launch.ray.order import is_ours, newest, order_of, sized
from splitserve.orchestrator.launch.ray.ray_cluster import SilentActorError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from splitserve.orchestrator.launch.ray.order import Order
    from splitserve.orchestrator.launch.ray.ray_cluster import RayCluster

_TOLD_LIMIT_S = 2.0


def running_order(cluster: RayCluster) -> Order:
    """What the cluster's actors were told last. Raises ``StartError`` when none answers."""
    found = []
    for name in cluster.names():
        if not is_ours(name):
            continue
        try:
            found.append(order_of(cluster.ask(name, "told", limit_s=_TOLD_LIMIT_S)))
        except SilentActorError:
            continue
    if not found:
        raise StartError("no actor of the cluster answers on the Ray cluster; see `ray status`")
    return newest(found)


def resize(
    cluster: RayCluster,
    running: Order,
    pool: str,
    replicas: int,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Order:
    """The pool has so many nodes: every actor has been told, actors of new nodes are there, on
    hosts that have room and what they need, and nothing is left of nodes that go. Returns what
    actors are told from now on. Raises ``ConfigError`` when the hosts cannot hold it, and
    ``StartError``; then no actor has been started or ended, unless the message names those that do
    not end.
    """
    config = parse(running.config)
    now = sized(config, running.sizes)
    sizes = {"prefill": now.prefill.replicas, "decode": now.decode.replicas, pool: replicas}
    try:
        secret, is_given = shared_secret(config, environ), True
    except ConfigError:
        secret, is_given = bytes.fromhex(running.secret), False
    wanted = Wanted(config, running.run, secret, is_given, environ, say, lambda: False, sizes=sizes)
    return bring_up(cluster, wanted).order
