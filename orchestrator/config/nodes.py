"""From a cluster's configuration to the list of its nodes: names, ports and CPUs, the same list in
every process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitserve.orchestrator.config.schema import ClusterConfig, PoolConfig

POOLS = ("prefill", "decode")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class NodeConfig:
    """One node of a resolved cluster: everything its agent must know that is not a secret."""

    name: str
    """``prefill-0``, ``decode-1``, ..."""
    pool: str
    """``prefill`` or ``decode``; also the node's first role."""
    index: int
    settings: PoolConfig
    cpus: tuple[int, ...] | None
    gpus: tuple[int, ...] | None
    http_port: int
    endpoint_port: int
    """Loopback port of the connector's endpoint, for the agent."""
    control_port_base: int
    """Rank r of the engine listens on ``control_port_base + r``."""
    data_port_base: int
    """Rank r receives pages on ``data_port_base + r``; 0: on any port."""
    host: str
    """Where its HTTP server listens."""
    transfer_host: str
    """Where its ranks listen for each other and for pages."""
    advertise_host: str
    """Where the router and other engines find both; empty: where they listen."""
    scheme: str
    """``https`` with ``security.tls``, else ``http``."""
    engine: str = "vllm"
    unpinned_cpus: int = 0
    """Where ``cpus`` is None: how many it may take, whichever they are; 0 when nothing is said."""

    @property
    def engine_url(self) -> str:
        """Base URL of the engine's HTTP server, for its agent."""
        return f"{self.scheme}://{bracketed(reachable(self.host))}:{self.http_port}"

    @property
    def advertised_url(self) -> str:
        """The same, for the router."""
        host = self.advertise_host or reachable(self.host)
        return f"{self.scheme}://{bracketed(host)}:{self.http_port}"

    @property
    def endpoint_address(self) -> str:
        """ZeroMQ address of the connector's endpoint."""
        return f"tcp://{LOOPBACK}:{self.endpoint_port}"

    @property
    def control_addresses(self) -> tuple[str, ...]:
        """ZeroMQ addresses by which peers reach the engine's ranks, in rank order."""
        ranks = range(self.settings.engine_args.tensor_parallel_size)
        host = bracketed(self.advertise_host or self.transfer_host)
        return tuple(f"tcp://{host}:{self.control_port_base + rank}" for rank in ranks)


def nodes(config: ClusterConfig) -> list[NodeConfig]:
    """Every node, prefill first. Ports are 0 where the configuration has not been given its ports
    yet (``launch.ports``).
    """
    return [node for pool in POOLS for node in _nodes_of(pool, config)]


def router_urls(config: ClusterConfig) -> tuple[str, ...]:
    """Where agents and operators reach each router, in their order."""
    router = config.router
    host = router.advertise_host or reachable(router.host)
    hosts = router.hosts or [host] * router.replicas
    return tuple(
        f"{scheme_of(config)}://{bracketed(host)}:{port}"
        for host, port in zip(hosts, router_ports(config), strict=True)
    )


def router_url(config: ClusterConfig) -> str:
    """Where the first of them is reached."""
    return router_urls(config)[0]


def router_ports(config: ClusterConfig) -> tuple[int, ...]:
    """The port of each router: those that share an address take consecutive ones. All 0 where the
    configuration has not been given its ports yet.
    """
    router = config.router
    hosts = router.hosts or [router.host] * router.replicas
    shared = (hosts[:index].count(host) for index, host in enumerate(hosts))
    return tuple(router.port + number if router.port else 0 for number in shared)


def router_hosts(config: ClusterConfig) -> tuple[str, ...]:
    """Where each router listens."""
    router = config.router
    return tuple(router.hosts or [router.host] * router.replicas)


def for_router(config: ClusterConfig, index: int, host: str | None = None) -> ClusterConfig:
    """The cluster as that router sees it: with its own address and port, and as if there were no
    other. ``host`` is where it listens, instead of what the YAML says. Raises ``KeyError``.
    """
    router = config.router
    if index not in range(router.replicas):
        raise KeyError(f"no router {index}; router.replicas is {router.replicas}")
    update: dict[str, object] = {"port": router_ports(config)[index], "replicas": 1, "hosts": None}
    if router.hosts is not None:
        update |= {"host": router.hosts[index], "advertise_host": router.hosts[index]}
    if host is not None:
        update["host"] = host
    return config.model_copy(update={"router": router.model_copy(update=update)})


def scheme_of(config: ClusterConfig) -> str:
    """What the router and the engines speak: ``http`` or ``https``."""
    return "https" if config.security.tls is not None else "http"


def reachable(host: str) -> str:
    """Where a process of the same machine reaches a listener on ``host``."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)


def bracketed(host: str) -> str:
    """An address as URLs write it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def node(config: ClusterConfig, name: str) -> NodeConfig:
    """The node called ``name``; raises ``KeyError`` with the known names."""
    known = {node.name: node for node in nodes(config)}
    if name not in known:
        raise KeyError(f"no node {name!r} in this cluster; known: {', '.join(known)}")
    return known[name]


def _nodes_of(pool: str, config: ClusterConfig) -> list[NodeConfig]:
    settings = config.pool(pool)
    ranks = settings.engine_args.tensor_parallel_size
    base, control = settings.port_base, settings.transfer.port_base
    data = settings.transfer.data_port_base
    hosts = settings.hosts
    return [
        NodeConfig(
            name=f"{pool}-{index}",
            pool=pool,
            index=index,
            settings=settings,
            cpus=_nth(settings.cpus, index),
            gpus=_nth(settings.gpus, index),
            http_port=base + 2 * index if base else 0,
            endpoint_port=base + 2 * index + 1 if base else 0,
            control_port_base=control + index * ranks if control else 0,
            data_port_base=data + index * ranks if data else 0,
            host=hosts[index] if hosts else settings.host,
            transfer_host=hosts[index] if hosts else settings.transfer.host,
            advertise_host="" if hosts else settings.advertise_host,
            scheme=scheme_of(config),
            engine=config.engine_of(pool),
        )
        for index in range(len(hosts[: settings.replicas]) if hosts else settings.replicas)
    ]


def _nth(lists: list[list[int]] | None, index: int) -> tuple[int, ...] | None:
    return tuple(lists[index]) if lists is not None and index < len(lists) else None
