"""A Ray cluster as its user sees it: hosts, placement groups, and the actors of one namespace. The
only module that calls Ray from outside; every call ends within a deadline.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.util import (
    get_placement_group,
    list_named_actors,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from splitserve.orchestrator.config import ConfigError
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.ray.keeper import Keeper, actor_options
from splitserve.orchestrator.launch.ray.placement import RayHost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.launch.ray.placement import Group

T = TypeVar("T")

CONNECT_LIMIT_S = 30.0
_REACH_LIMIT_S = 5.0
_ASK_LIMIT_S = 5.0
_POLL_S = 0.2
_HEAD_MARK = "node:__internal_head__"


class SilentActorError(Exception):
    """An actor that does not answer: it waits for a host, starts again, or has ended."""


def connect(config: ClusterConfig) -> RayCluster:
    """The Ray cluster of the YAML. Raises ``ConfigError`` with what to do when there is none."""
    address = config.ray.address if config.ray is not None else "auto"
    _check_reachable(address)
    logging.getLogger("ray").setLevel(logging.ERROR)  # Importing Ray has set its own
    namespace = namespace_of(config)
    try:
        _within(
            CONNECT_LIMIT_S,
            lambda: ray.init(
                address=address,
                namespace=namespace,
                log_to_driver=False,
                configure_logging=False,
            ),
        )
    except TimeoutError:
        raise _unreachable(address, f"no answer within {CONNECT_LIMIT_S:.0f} s") from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _unreachable(address, str(error).strip().splitlines()[0]) from error
    return RayCluster()


def version() -> str:
    """Of the Ray that is installed here."""
    return str(ray.__version__)


def take_back_signals() -> None:
    """SIGTERM does what it did before ``connect``. Ray puts a handler of its own in front, which
    ends the process three seconds after the signal. To be called from the main thread.
    """
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    signal.siginterrupt(signal.SIGTERM, False)


def namespace_of(config: ClusterConfig) -> str:
    """Ray's namespace of the cluster's actors."""
    return (config.ray.namespace if config.ray is not None else "") or config.name


class RayCluster:
    """A connection to a Ray cluster, in one namespace. Its methods block, but not for ever."""

    def close(self) -> None:
        """Not connected any more; what runs, runs on."""
        ray.shutdown()

    def hosts(self) -> list[RayHost]:
        """The hosts that are alive."""
        return [
            RayHost(
                id=node["NodeID"],
                address=node["NodeManagerAddress"],
                hostname=node["NodeManagerHostname"],
                resources=dict(node["Resources"]),
                labels=dict(node.get("Labels") or {}),
                is_head=_HEAD_MARK in node["Resources"],
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def own_host_id(self) -> str:
        """The host on which this process runs; of a ``ray://`` connection that of its server."""
        return str(ray.get_runtime_context().get_node_id())

    def reserve(self, group: Group, target: str = "", *, may_replace: bool = False) -> bool:
        """The placement group is there, or waits for room; False when it was there before. A group
        of one node gets its room on the host with the id ``target``, while that has some. One of
        that name that reserves something else, left behind by an ``up`` that was killed, goes where
        it may be replaced.
        """
        if self._has_group(group.name):
            found = placement_group_table(get_placement_group(group.name))
            if not may_replace or _bundles(found) == list(group.bundles):
                return False
            self.release(group.name)
        rule: dict[str, Any] = {"strategy": group.strategy}
        if group.is_single:
            rule = {"strategy": "STRICT_PACK"}
            if target:  # Ray takes it as a wish, for this strategy only
                rule["_soft_target_node_id"] = target
        if group.same_label:
            rule = {"topology_strategy": {group.same_label: "STRICT_PACK"}}
        placement_group(
            [dict(bundle) for bundle in group.bundles],
            name=group.name,
            lifetime="detached",
            bundle_label_selector=[dict(selector) for selector in group.selectors],
            **rule,
        )
        return True

    def group_names(self) -> list[str]:
        """Of the placement groups of the namespace that are there, or wait for room."""
        named = {
            str(group["name"])
            for group in placement_group_table().values()
            if group["state"] != "REMOVED"
        }
        return sorted(name for name in named if name and self._has_group(name))

    def hosts_of(self, group: Group) -> list[str] | None:
        """The id of the host of each bundle; None while it waits for room."""
        table = placement_group_table(get_placement_group(group.name))
        if table["state"] != "CREATED":
            return None
        return [str(host) for _, host in sorted(table["bundles_to_node_id"].items())]

    def release(self, name: str) -> bool:
        """There is no placement group of that name; False when there was none."""
        try:
            remove_placement_group(get_placement_group(name))
        except ValueError:
            return False
        return True

    def _has_group(self, name: str) -> bool:
        """Whether a group of that name is in this namespace."""
        try:
            get_placement_group(name)
        except ValueError:
            return False
        return True

    def start(
        self,
        name: str,
        plain: dict[str, Any],
        config: ClusterConfig,
        *,
        host: str = "",
        bundle: tuple[Group, int] | None = None,
        takes: dict[str, float] | None = None,
    ) -> None:
        """The actor ``name`` is there, or waits for its host: ``host``, or that of the bundle."""
        amounts = dict(takes or {})
        where: Any = NodeAffinitySchedulingStrategy(host, soft=False) if host else None
        if bundle is not None:
            group, index = bundle
            where = PlacementGroupSchedulingStrategy(
                get_placement_group(group.name), placement_group_bundle_index=index
            )
        actor = ray.remote(Keeper).options(
            **actor_options(name, config),
            num_cpus=amounts.pop("CPU", 0),
            num_gpus=amounts.pop("GPU", 0),
            resources=amounts,
            scheduling_strategy=where,
        )
        actor.remote(plain)

    def names(self) -> list[str]:
        """Of the actors of the namespace, those that wait or start again included."""
        return sorted(list_named_actors())

    def ask(self, name: str, method: str, *arguments: Any, limit_s: float = _ASK_LIMIT_S) -> Any:
        """An actor's answer. Raises ``SilentActorError``."""
        try:
            actor = ray.get_actor(name)
            return ray.get(getattr(actor, method).remote(*arguments), timeout=limit_s)
        except ValueError:
            raise SilentActorError(f"there is no actor {name}") from None
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise SilentActorError(f"{name}: {_first_line(error)}") from error

    def end(self, name: str) -> None:
        """The actor ends, and is not started again."""
        try:
            ray.kill(ray.get_actor(name), no_restart=True)
        except ValueError:
            return

    def wait_until_gone(self, names: Sequence[str], limit_s: float) -> list[str]:
        """Those of ``names`` that are still there at the end."""
        end = time.monotonic() + limit_s
        while (left := sorted(set(names) & set(self.names()))) and time.monotonic() < end:
            time.sleep(_POLL_S)
        return left

    def on_host(
        self, host: RayHost, function: Callable[..., Any], *arguments: Any, limit_s: float
    ) -> Any:
        """What ``function``, of a module of splitserve, returns on that host. Raises
        ``StartError``.
        """
        where = NodeAffinitySchedulingStrategy(host.id, soft=False)
        task = ray.remote(function).options(
            num_cpus=0, max_retries=0, scheduling_strategy=where, name="splitserve-host"
        )
        try:
            return ray.get(task.remote(*arguments), timeout=limit_s)
        except (ray.exceptions.RayError, TimeoutError, ImportError) as error:
            if "ModuleNotFoundError" in str(error) or isinstance(error, ImportError):
                what = "splitserve is not installed in the Python of its Ray"
                todo = "run `pip install 'splitserve[ray]'` there"
                raise StartError(f"{host.hostname} ({host.address}): {what}; {todo}") from error
            raise StartError(
                f"{host.hostname} ({host.address}) does not answer: {_first_line(error)}; see "
                "`ray status`"
            ) from error


def _bundles(table: dict[str, Any]) -> list[dict[str, float]]:
    """What a placement group reserves, in the order of its bundles."""
    return [dict(bundle) for _, bundle in sorted(table["bundles"].items())]


def _check_reachable(address: str) -> None:
    """Something listens at an address that was given: Ray itself would try for minutes."""
    given = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    host, separator, port = given.removeprefix("ray://").rpartition(":")
    if given == "auto" or not separator:
        return
    if not port.isdigit():
        raise _unreachable(given, "not of the form HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_LIMIT_S).close()
    except OSError as error:
        raise _unreachable(given, str(error)) from error


def _unreachable(address: str, why: str) -> ConfigError:
    return ConfigError(
        [
            f"ray.address: no Ray cluster can be reached at {address} ({why}); start one with `ray "
            "start --head`, join it with `ray start --address`, or correct the address"
        ]
    )


def _within(limit_s: float, call: Callable[[], T]) -> T:
    """What ``call`` returns. Raises ``TimeoutError`` after ``limit_s``; its thread then ends with
    this process.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="splitserve-ray-connect", daemon=True).start()
    return outcome.result(limit_s)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
