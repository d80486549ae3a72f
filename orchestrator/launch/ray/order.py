"""What an actor is told, and the cluster YAML as its host reads it. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from splitserve.orchestrator.config import parse
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.config.ray_checks import WILDCARDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from splitserve.orchestrator.config import ClusterConfig

ROUTER = "router"
CACHE = "cache"
ROUTER_NAME = re.compile(r"router(-\d+)?")
NODE_NAME = re.compile(r"(prefill|decode)-\d+")
CACHE_NAME = re.compile(r"cache-[0-9a-f]+")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Order(msgspec.Struct, kw_only=True, frozen=True):
    """Everything that one process of the cluster is started from, wherever it lands. It crosses Ray
    as a plain dictionary, and Ray keeps it for restarts.
    """

    name: str
    """``router``, ``router-1``, ..., ``cache``, or the node's name."""
    run: str
    """Marker in the environment of every process of the cluster."""
    config: str
    """The cluster YAML."""
    sizes: dict[str, int] = {}
    """Nodes of each pool, where `splitserve scale` has changed what the YAML says."""
    edition: int = 0
    """Which of several orders of a run counts: the one with the highest. Each change of the sizes
    makes another.
    """
    router_hosts: tuple[str, ...]
    """Address of each router's host in the Ray cluster."""
    router_port: int
    """Of the first router on each host; another one there has the next."""
    secret: str = ""
    """The cluster secret in hexadecimal; empty where each host reads ``security.secret_file``."""
    router_environment: dict[str, str] = {}
    """Variables of ``up`` that hold clients' keys, for the router alone."""
    cache_environment: dict[str, str] = {}
    """Variables of ``up`` that hold credentials of the cache's tiers, for cache servers alone."""
    quality: str = ""
    """The record by which hosts know that lossy codecs keep ``cache.quality``; empty for none."""

    def __repr__(self) -> str:
        """Without what is secret."""
        return f"Order({self.name!r} of run {self.run!r})"

    @property
    def kind(self) -> str:
        """``router``, ``cache`` or ``node``."""
        if ROUTER_NAME.fullmatch(self.name):
            return ROUTER
        return CACHE if self.name == CACHE else "node"

    @property
    def router_index(self) -> int:
        """Which of the routers a process of that kind is."""
        return router_names(len(self.router_hosts)).index(self.name)


def sized(config: ClusterConfig, sizes: Mapping[str, int]) -> ClusterConfig:
    """The configuration with these numbers of nodes."""
    pools = {
        pool: config.pool(pool).model_copy(update={"replicas": count})
        for pool, count in sizes.items()
    }
    return config.model_copy(update=pools)


def config_of(order: Order) -> ClusterConfig:
    """The cluster's configuration, with the sizes that it has now. Raises ``ConfigError``."""
    return sized(parse(order.config, "the YAML of the Ray cluster"), order.sizes)


def newest(orders: Iterable[Order]) -> Order:
    """The one that counts, of some; of equal ones a router's, which runs where it says."""
    return max(orders, key=lambda order: (order.edition, order.kind == ROUTER))


def is_ours(name: str) -> bool:
    """Whether an actor of the namespace is one of a cluster's."""
    return any(kind.fullmatch(name) for kind in (ROUTER_NAME, NODE_NAME, CACHE_NAME))


def variables_of(config: ClusterConfig, environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """What processes elsewhere need of ``up``'s environment, as fields of an order."""
    keys = {entry.key_env for entry in config.security.api_keys if entry.key_env is not None}
    tiers = config.cache.tiers if config.cache is not None else []
    text = _yaml([tier.model_dump(mode="json") for tier in tiers])
    credentials = set(_VARIABLE.findall(text))
    return {
        "router_environment": {name: environ[name] for name in sorted(keys) if name in environ},
        "cache_environment": {n: environ[n] for n in sorted(credentials) if n in environ},
    }


def source_text(config: ClusterConfig) -> str:
    """The configuration as a YAML, equal for equal configurations: only what was given."""
    return _yaml(config.model_dump(mode="json", exclude_unset=True))


def order_of(plain: dict[str, Any]) -> Order:
    """What an actor was given. Raises ``msgspec.ValidationError``."""
    return msgspec.convert(plain, Order)


def router_names(count: int) -> list[str]:
    """Of the actors of so many routers."""
    return [f"{ROUTER}-{index}" if index else ROUTER for index in range(count)]


def hosted(order: Order, host: str, gpus: tuple[int, ...] = ()) -> ClusterConfig:
    """The cluster as the host with the address ``host`` sees it: its own address is that of every
    node, which is true of those that run there. Raises ``ConfigError``.
    """
    config = config_of(order)
    data: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    data.pop("launcher", None)
    data.pop("ray", None)
    if quality := (data.get("cache") or {}).get("quality"):
        quality.pop("record", None)  # The host writes the order's where it is looked for
    router = data.setdefault("router", {})
    first, *others = order.router_hosts
    router |= {"port": order.router_port}
    if others:  # Where each listens is said at its start
        router.pop("host", None)
        router |= {"hosts": list(order.router_hosts), "replicas": len(order.router_hosts)}
    else:
        listens = config.router.host if config.router.host in WILDCARDS else first
        router |= {"host": listens, "advertise_host": config.router.advertise_host or first}
    for pool in POOLS:
        _host_pool(pool, config, data, host, gpus)
    data["allow_shared_devices"] = True
    return parse(_yaml(data), "the YAML of a host of the Ray cluster")


def _host_pool(
    pool: str, config: ClusterConfig, data: dict[str, Any], host: str, gpus: tuple[int, ...]
) -> None:
    """The pool's section is rewritten."""
    settings = config.pool(pool)
    section = data.setdefault(pool, {})
    section.pop("placement", None)
    is_wild = settings.host in WILDCARDS
    section["host"] = settings.host if is_wild else host
    section["advertise_host"] = host if is_wild else ""
    section.setdefault("transfer", {})["host"] = section["host"]
    placement = settings.placement
    if placement is not None and placement.num_gpus:
        chosen = list(gpus) or list(range(placement.num_gpus))
        section["gpus"] = [chosen] * settings.replicas
    elif config.engine == "vllm":
        section["cpus"] = [list(range(cpus_of(config, pool)))] * settings.replicas


def cpus_of(config: ClusterConfig, pool: str) -> int:
    """CPUs of each of the pool's nodes."""
    placement = config.pool(pool).placement
    return placement.num_cpus if placement is not None else 1


def yaml_of(config: ClusterConfig) -> str:
    """The text that ``splitserve node`` reads on a host."""
    return _yaml(config.model_dump(mode="json", exclude_unset=True))


def differences(running: Order, wanted: ClusterConfig) -> list[str]:
    """Where a configuration differs from that of a cluster that runs: one line per key. The number
    of a pool's nodes may be the one that it was started with, or the one that it has now.
    """
    now, first = config_of(running), parse(running.config)
    ours, theirs = _flat(yaml.safe_load(source_text(wanted))), _flat(yaml.safe_load(running.config))
    found = []
    for pool in POOLS:
        key = f"{pool}.replicas"
        for values in (ours, theirs):
            values.pop(key, None)
            if values.get(pool) == {}:
                del values[pool]
        asked, runs = wanted.pool(pool).replicas, now.pool(pool).replicas
        if asked not in (runs, first.pool(pool).replicas):
            found.append(
                f"{key}: {runs} runs, {asked} is in the YAML; `splitserve scale {pool} {asked}` "
                "changes it"
            )
    return found + [
        f"{key}: {_said(theirs, key)} runs, {_said(ours, key)} is in the YAML"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key, _NOTHING) != theirs.get(key, _NOTHING)
    ]


_NOTHING = object()


def _said(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "nothing"


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    found: dict[str, Any] = {}
    for key, below in value.items():
        found |= _flat(below, f"{path}.{key}" if path else str(key))
    return found


def _yaml(data: object) -> str:
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
