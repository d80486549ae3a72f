"""The actor: one per process of the cluster, on whichever host Ray has put it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from splitserve.orchestrator.config import parse
from splitserve.orchestrator.launch.ray.host_process import HostProcess
from splitserve.orchestrator.launch.ray.order import CACHE, order_of

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig

CACHE_PREFIX = "cache-"
"""Of the names of cache servers' actors; the beginning of their host's id follows."""
_EXIT_PROCESS_DIED = 17
"""Of the actor's own process, so that Ray starts it again."""
_CALLS = 8
"""Questions that an actor answers at a time: a stop may take long."""
_CACHE_ID_CHARACTERS = 16


class Keeper:
    """Keeps one process alive while it lives itself. Everything that crosses Ray is a dictionary, a
    list, a text or a number.
    """

    def __init__(self, plain: dict[str, Any]) -> None:
        self._plain = plain
        order = order_of(plain)
        gpus = tuple(int(gpu) for gpu in ray.get_gpu_ids())
        address = ray.util.get_node_ip_address()
        self._process = HostProcess(order, address, gpus, on_death=_die)
        if order.kind == "node":
            config = parse(order.config)
            if config.cache is not None:
                _bring_cache(config, plain)
        self._process.start()

    def told(self) -> dict[str, Any]:
        """Its order."""
        return self._plain

    def report(self) -> dict[str, Any]:
        """See ``HostProcess.report``."""
        return self._process.report() | {
            "host_id": ray.get_runtime_context().get_node_id(),
            "actor_pid": os.getpid(),
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


def _bring_cache(config: ClusterConfig, plain: dict[str, Any]) -> None:
    """This host has a cache server: the first node that lands here brings it."""
    here = ray.get_runtime_context().get_node_id()
    order = msgspec.structs.replace(order_of(plain), name=CACHE)
    options = actor_options(CACHE_PREFIX + here[:_CACHE_ID_CHARACTERS], config)
    where = NodeAffinitySchedulingStrategy(here, soft=False)
    actor = ray.remote(Keeper).options(**options, num_cpus=0, scheduling_strategy=where)
    actor.remote(msgspec.to_builtins(order))


def _die() -> None:
    os._exit(_EXIT_PROCESS_DIED)
