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


def router_url(config: ClusterConfig) -> str:
    """Where agents and operators reach the router."""
    host = config.router.advertise_host or reachable(config.router.host)
    return f"{scheme_of(config)}://{bracketed(host)}:{config.router.port}"


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
