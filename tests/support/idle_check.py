"""A cluster before and after a test: it holds nothing for anybody, its engines are the same
processes but for those that the test has killed, and nothing has failed in a log.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil

from support.mock_engines import DEADLINE_S, POLL_S

if TYPE_CHECKING:
    from pathlib import Path

    from support.mock_cluster import Cluster

TRACEBACK = b"Traceback (most recent call last)"


@dataclass
class IdleCheck:
    """What was true before the test."""

    cluster: Cluster
    pids: dict[str, int]
    log_bytes: dict[Path, int]

    @classmethod
    async def begin(cls, cluster: Cluster) -> IdleCheck:
        """The cluster is well and idle; from now on its deaths and its logs count."""
        for node in cluster.nodes:
            await (await cluster.engine(node)).faults()
        await until_idle(cluster)
        cluster.killed.clear()
        return cls(
            cluster,
            cluster.pids(),
            {path: path.stat().st_size for path in cluster.up.logs()},
        )

    async def end(self) -> None:
        """It is idle again within the deadline, and nothing has happened that the test did not
        do.
        """
        await until_idle(self.cluster)
        pids = self.cluster.pids()
        for node in set(self.cluster.nodes) - self.cluster.killed:
            assert pids[node] == self.pids[node], f"{node} has died"
        for path in self.cluster.up.logs():
            new = path.read_bytes()[self.log_bytes.get(path, 0) :]
            assert TRACEBACK not in new, f"{path.name}:\n{new.decode(errors='replace')[-4000:]}"


async def until_idle(cluster: Cluster) -> None:
    """Every engine has all of its blocks and owes nothing, the router has no request and has
    promised nothing, every node may get work, and no socket waits to be closed.
    """
    for node in cluster.nodes:
        await (await cluster.engine(node)).until_idle()
    end = time.monotonic() + DEADLINE_S
    while busy := await _busy(cluster):
        assert time.monotonic() < end, f"not idle: {busy}\n{cluster.up.story()}"
        await asyncio.sleep(POLL_S)


async def router_status(cluster: Cluster) -> dict[str, Any]:
    """What the router says of itself and its nodes."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{cluster.url}/internal/status") as response,
    ):
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
    return found


async def until_usable(cluster: Cluster, node: str, *, usable: bool = True) -> None:
    """The router gives the node work, or none."""
    end = time.monotonic() + 2 * DEADLINE_S
    while (await router_status(cluster))["nodes"][node]["is_usable"] != usable:
        assert time.monotonic() < end, f"{node}: not {usable=}\n{cluster.up.story()}"
        await asyncio.sleep(POLL_S)


async def _busy(cluster: Cluster) -> list[str]:
    """What keeps the cluster from being idle, in words."""
    status = await router_status(cluster)
    requests = status["requests"]
    found = [f"{requests[k]} requests {k}" for k in ("waiting", "running") if requests[k]]
    for name in cluster.nodes:
        node = status["nodes"].get(name, {"is_usable": False})
        promised = ("prefill_legs", "decode_legs", "committed_blocks")
        found += [f"{name}: {node[key]} {key}" for key in promised if node.get(key)]
        found += [] if node["is_usable"] else [f"{name} gets no work"]
    return found or _half_closed(cluster)


def _half_closed(cluster: Cluster) -> list[str]:
    """Sockets whose peer has gone and that nobody has closed."""
    found = []
    for process in cluster.up.processes():
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        found += [
            f"pid {process.pid} has not closed {c.laddr} to {c.raddr}"
            for c in connections
            if c.status == psutil.CONN_CLOSE_WAIT
        ]
    return found
