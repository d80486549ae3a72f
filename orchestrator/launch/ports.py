"""Gives a cluster the ports that its YAML left open (0)."""

from __future__ import annotations

import errno
import random
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from splitserve.orchestrator.config import ConfigError, nodes
from splitserve.orchestrator.config.checks import fixed_ports

if TYPE_CHECKING:
    from collections.abc import Iterable

    from splitserve.orchestrator.config import ClusterConfig, NodeConfig, PoolConfig

FREE_RANGE = range(20_000, 32_000)
"""Where free ports are looked for: below the range from which Linux takes ports for outgoing
connections.
"""
_TRIES = 200
ROOM_NODES = 16
"""So many nodes more than it begins with find the ports behind the pool's own free, as far as this
cluster is concerned.
"""


def is_free(port: int, host: str) -> bool:
    """Whether a listener can be opened on ``host:port`` now, ``host`` being an address or a name.
    Raises ``OSError`` when it cannot be used.
    """
    flags = socket.AI_PASSIVE | socket.AI_NUMERICSERV
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def with_ports(config: ClusterConfig, rng: random.Random | None = None) -> ClusterConfig:
    """The same cluster with every open port filled in, none of them in use now. Fixed ports are
    left as they are.
    """
    picker = _Picker(rng or random.SystemRandom())
    router = config.router
    if router.port == 0:
        hosts = router.hosts or [router.host]
        router = router.model_copy(update={"port": picker.run_of(router.replicas, hosts)})
    pools = {pool: _pool_with_ports(config.pool(pool), picker) for pool in ("prefill", "decode")}
    return config.model_copy(update={"router": router, **pools})


def node_with_ports(node: NodeConfig) -> NodeConfig:
    """The node with every open port filled in, for its machine: its peers learn them from the
    router.
    """
    picker = _Picker(random.SystemRandom())
    ranks = node.settings.engine_args.tensor_parallel_size
    http, control = node.http_port, node.control_port_base
    if not http:
        http = picker.run_of(2, [node.host, "127.0.0.1"])
    if not control:
        control = picker.run_of(ranks, [node.transfer_host])
    endpoint = node.endpoint_port or http + 1
    return replace(node, http_port=http, endpoint_port=endpoint, control_port_base=control)


def taken_ports(config: ClusterConfig, names: Iterable[str]) -> list[str]:
    """One sentence for each port of those nodes that somebody uses now."""
    wanted = {node.name: node for node in nodes(config) if node.name in set(names)}
    return [
        f"port {port} on {host} is in use by another program, and {use} would get it; end that "
        "program, or give the pool other ports in the YAML and start the cluster again"
        for port, host, use in fixed_ports(config)
        if use.partition(" ")[0] in wanted and not is_free(port, host)
    ]


def free_run(hosts: Iterable[str], length: int = 1) -> int:
    """First of ``length`` consecutive ports, of those that ``up`` gives, that are free on all
    ``hosts`` now.
    """
    return _Picker(random.SystemRandom()).run_of(length, hosts)


def _pool_with_ports(settings: PoolConfig, picker: _Picker) -> PoolConfig:
    transfer = settings.transfer
    if settings.port_base == 0:
        hosts = settings.hosts or [settings.host]
        room = 2 * ROOM_NODES
        base = picker.run_of(2 * settings.replicas, [*hosts, "127.0.0.1"], room)
        settings = settings.model_copy(update={"port_base": base})
    if transfer.port_base == 0:
        ranks = settings.engine_args.tensor_parallel_size
        hosts = settings.hosts or [transfer.host]
        base = picker.run_of(settings.replicas * ranks, hosts, ROOM_NODES * ranks)
        transfer = transfer.model_copy(update={"port_base": base})
    return settings.model_copy(update={"transfer": transfer})


class _Picker:
    """Picks runs of free ports and never the same port twice."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: set[int] = set()

    def run_of(self, length: int, hosts: Iterable[str], room: int = 0) -> int:
        """First of ``length`` consecutive ports that are free on all ``hosts``; the ``room`` ports
        behind them are not picked for anything else.
        """
        hosts = set(hosts)
        for _ in range(_TRIES if length + room < len(FREE_RANGE) else 0):
            first = self._rng.randrange(FREE_RANGE.start, FREE_RANGE.stop - length - room)
            run = range(first, first + length)
            roomy = range(first, first + length + room)
            if self._taken.isdisjoint(roomy) and all(
                is_free(port, host) for port in run for host in hosts
            ):
                self._taken.update(roomy)
                return first
        raise ConfigError([f"no {length} free ports in a row in {FREE_RANGE}; give fixed ports"])
