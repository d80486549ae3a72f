"""The actor: one per process of the cluster, on whichever host Ray has put it."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from splitserve.orchestrator.config import parse
from splitserve.orchestrator.launch.ray.host_process import HostProcess
from splitserve.orchestrator.launch.ray.order import CACHE, is_ours, newest, order_of

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.launch.ray.order import Order

CACHE_PREFIX = "cache-"
"""Of the names of cache servers' actors; the beginning of their host's id follows."""
_EXIT_PROCESS_DIED = 17
"""Of the actor's own process, so that Ray starts it again."""
_CALLS = 8
"""Questions that an actor answers at a time: a stop may take long."""
_CACHE_ID_CHARACTERS = 16
_PEERS_LIMIT_S = 2.0
"""For what other actors know; those that start themselves at the moment do not answer."""


class Keeper:
    """Keeps one process alive while it lives itself. Everything that crosses Ray is a dictionary, a
    list, a text or a number.
    """

    def __init__(self, plain: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        order = self._order = _latest(order_of(plain))
        gpus = tuple(int(gpu) for gpu in ray.get_gpu_ids())
        address = ray.util.get_node_ip_address()
        self._process = HostProcess(order, address, gpus, on_death=_die)
        if order.kind == "node":
            config = parse(order.config)
            if config.cache is not None:
                _bring_cache(config, order)
        self._process.start()

    def told(self) -> dict[str, Any]:
        """Its order."""
        return dict(msgspec.to_builtins(self._order))

    def learn(self, sizes: dict[str, int], edition: int) -> bool:
        """Its order has the sizes of that edition, for this process and for those that take its
        place; False when it has that edition, or a later one, already.
        """
        with self._lock:
            if self._order.edition >= edition:
                return False
            self._order = msgspec.structs.replace(self._order, sizes=sizes, edition=edition)
            self._process.learn(self._order)
        return True

    def report(self) -> dict[str, Any]:
        """See ``HostProcess.report``."""
        return self._process.report() | {
            "host_id": ray.get_runtime_context().get_node_id(),
            "actor_pid": os.getpid(),
            "sizes": self._order.sizes,
            "edition": self._order.edition,
        }

    def stop(self, limit_s: float) -> None:
        """See ``HostProcess.stop``."""
        self._process.stop(limit_s)

    def start_again(self) -> bool:
        """See ``HostProcess.start_again``."""
        return self._process.start_again()


def actor_options(name: str, config: ClusterConfig) -> dict[str, Any]:
    """Ray's options of every actor of the cluster: it outlives whoever has started it, and Ray
    starts it again ``supervision.restart_limit`` times.
    """
    return {
        "name": name,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": config.supervision.restart_limit,
        "max_task_retries": 0,
        "max_concurrency": _CALLS,
    }


def _latest(given: Order) -> Order:
    """The order that counts for an actor that was given that one. Ray starts an actor again with
    what it was given first: what it has learnt since, the others know.
    """
    if not ray.get_runtime_context().was_current_actor_reconstructed:
        return given
    own = ray.get_runtime_context().get_actor_name()
    asked = []
    for name in (name for name in list_named_actors() if is_ours(name) and name != own):
        with contextlib.suppress(ValueError):  # It has ended meanwhile
            asked.append(ray.get_actor(name).told.remote())
    if not asked:
        return given
    answers, _ = ray.wait(asked, num_returns=len(asked), timeout=_PEERS_LIMIT_S)
    orders = [given]
    for answer in answers:
        with contextlib.suppress(ray.exceptions.RayError):
            orders.append(order_of(ray.get(answer)))
    latest = newest(order for order in orders if order.run == given.run)
    return msgspec.structs.replace(given, sizes=latest.sizes, edition=latest.edition)


def _bring_cache(config: ClusterConfig, given: Order) -> None:
    """This host has a cache server: the first node that lands here brings it."""
    here = ray.get_runtime_context().get_node_id()
    order = msgspec.structs.replace(given, name=CACHE)
    options = actor_options(CACHE_PREFIX + here[:_CACHE_ID_CHARACTERS], config)
    where = NodeAffinitySchedulingStrategy(here, soft=False)
    actor = ray.remote(Keeper).options(**options, num_cpus=0, scheduling_strategy=where)
    actor.remote(msgspec.to_builtins(order))


def _die() -> None:
    os._exit(_EXIT_PROCESS_DIED)
