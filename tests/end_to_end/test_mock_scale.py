"""Pools grow and shrink while clients ask: real processes, and no request fails."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from support.mock_clients import Clients, retries_of
from support.mock_cluster import Cluster, running_cluster
from support.up_process import kill, wait_for

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CLUSTER = """
name: mock-scale
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 1024, enable_faults: true}
  transfer: {transport: tcp, stream_min_bytes: 4096, lease_s: 30}
decode: *pool
supervision: {restart_delay_s: 0.1, drain_timeout_s: 20, stop_timeout_s: 3}
"""
FIRST = {"prefill-0", "decode-0"}
IN_FLIGHT = 4
COMMAND_LIMIT_S = 120


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One prefill and one decode node behind a router."""
    async with running_cluster(tmp_path_factory.mktemp("scale"), CLUSTER) as cluster:
        yield cluster


async def test_pools_grow_and_shrink_under_load(cluster: Cluster) -> None:
    """Each pool gets a second node, which serves, and loses it again; every client gets its right
    text at the first attempt, and in the end nothing is left of the new nodes.
    """
    before, retries = cluster.up.pids(".agent "), await retries_of(cluster)
    clients = Clients(cluster, long_tokens=60)
    load = [asyncio.create_task(clients.keep_asking()) for _ in range(IN_FLIGHT)]
    for pool in ("decode", "prefill"):
        grown = await _scale(cluster, pool, 2)
        assert grown.returncode == 0, grown.stderr + cluster.up.story()
        assert f"{pool}-1 serves" in grown.stdout
    await _both_have_served(cluster)
    for pool in ("decode", "prefill"):
        shrunk = await _scale(cluster, pool, 1)
        assert shrunk.returncode == 0, shrunk.stderr + cluster.up.story()
        assert f"{pool}-1 is no part of the cluster any more" in shrunk.stdout
    clients.is_over = True
    await asyncio.gather(*load)
    assert clients.answered > IN_FLIGHT
    assert await retries_of(cluster) == retries
    assert _names(cluster) == FIRST
    assert cluster.up.pids(".agent ") == before
    told = await asyncio.to_thread(_router_status, cluster)
    assert set(told["nodes"]) == FIRST
    assert not told["last_death"]
    for name in FIRST:
        await (await cluster.engine(name)).until_idle()


async def test_a_new_node_is_kept_like_the_others(cluster: Cluster) -> None:
    """Its agent is started again after a SIGKILL, a router that is started again knows it, and two
    commands at once are not mixed up.
    """
    first, second = await asyncio.gather(*(_scale(cluster, "decode", 2) for _ in range(2)))
    grown, other = (first, second) if "decode-1 serves" in first.stdout else (second, first)
    assert grown.returncode == 0, grown.stderr + cluster.up.story()
    if other.returncode == 0:
        assert "mock-scale has 2 decode nodes already" in other.stdout
    else:
        assert "another `splitserve scale` of mock-scale is at work" in other.stderr
    life = cluster.up.node("decode-1")["incarnation"]
    kill([cluster.up.node("decode-1")["agent_pid"]])
    await _until_usable(cluster, "decode-1", but=life)
    kill(cluster.up.pids("orchestrator.router"))
    await _until_usable(cluster, "decode-1")
    clients = Clients(cluster)
    load = asyncio.create_task(clients.keep_asking())
    await asyncio.to_thread(wait_for, lambda: clients.answered >= 4, 30, "answers")
    clients.is_over = True
    await load


async def test_down_ends_new_nodes_too(cluster: Cluster) -> None:
    """Nothing of the cluster lives."""
    result = await asyncio.to_thread(cluster.up.run, "down", limit_s=COMMAND_LIMIT_S)
    assert result.returncode == 0, result.stderr
    await asyncio.to_thread(cluster.up.wait_until_nothing_is_left)


async def _scale(
    cluster: Cluster, pool: str, size: int, *more: str
) -> subprocess.CompletedProcess[str]:
    arguments = ("scale", pool, str(size), *more)
    return await asyncio.to_thread(cluster.up.run, *arguments, limit_s=COMMAND_LIMIT_S)


def _names(cluster: Cluster) -> set[str]:
    status = cluster.up.status()
    assert status is not None
    return {node["node"] for node in status["nodes"]}


def _router_status(cluster: Cluster) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{cluster.url}/internal/status", headers=cluster.up.operator()
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


async def _both_have_served(cluster: Cluster) -> None:
    """Requests go to the new nodes."""

    def have_legs() -> bool:
        nodes = _router_status(cluster)["nodes"]
        return all(nodes[name]["placed_legs"] >= 2 for name in ("prefill-1", "decode-1"))

    await asyncio.to_thread(wait_for, have_legs, 30, "legs on the new nodes", cluster.up.story)


async def _until_usable(cluster: Cluster, name: str, but: str = "") -> None:
    def is_usable() -> bool:
        try:
            node = _router_status(cluster)["nodes"].get(name, {})
        except OSError:
            return False
        return bool(node.get("is_usable")) and node["incarnation"] != but

    await asyncio.to_thread(wait_for, is_usable, 60, f"{name} to serve", cluster.up.story)
