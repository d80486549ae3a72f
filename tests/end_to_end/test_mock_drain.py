"""Nodes leave and restart by order while clients ask: real processes, and no request fails."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from support.mock_clients import IN_FLIGHT, Clients, retries_of
from support.mock_cluster import Cluster, alone, prompt_of, running_cluster
from support.up_process import wait_for

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

CLUSTER = """
name: mock-drain
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  replicas: 2
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 1024, enable_faults: true}
  transfer: {transport: tcp, stream_min_bytes: 4096, lease_s: 30}
decode: *pool
supervision: {restart_delay_s: 0.1, restart_limit: 0, drain_timeout_s: 20, stop_timeout_s: 3}
"""
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
COMMAND_LIMIT_S = 180


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two prefill and two decode nodes behind a router; no engine that dies by itself returns."""
    async with running_cluster(tmp_path_factory.mktemp("drain"), CLUSTER) as cluster:
        yield cluster


async def test_a_rolling_restart_under_load(cluster: Cluster) -> None:
    """Sixteen requests at a time, streamed and not, short and long: each gets its right text, every
    node is another incarnation, and all are idle.
    """
    before, retries = _lives(cluster), await retries_of(cluster)
    clients = Clients(cluster)
    load = [asyncio.create_task(clients.keep_asking()) for _ in range(IN_FLIGHT)]
    result = await _run(cluster, "restart", "--rolling")
    clients.is_over = True
    await asyncio.gather(*load)
    assert result.returncode == 0, result.stderr + cluster.up.story()
    after = _lives(cluster)
    assert not set(before.values()) & set(after.values())
    for name in NODES:
        assert f"{name} serves again" in result.stdout
        assert cluster.up.node(name)["restarts"] == 0
    assert clients.answered > 2 * IN_FLIGHT
    assert await retries_of(cluster) == retries
    await _all_idle(cluster)


async def test_a_prefill_node_waits_for_those_who_fetch_from_it(cluster: Cluster) -> None:
    """The decode engine is held before its first step: the prefill node keeps its pages, and leaves
    when they are acknowledged; then it is started again.
    """
    decodes = [await cluster.engine(name) for name in ("decode-0", "decode-1")]
    prefills = {name: await cluster.engine(name) for name in ("prefill-0", "prefill-1")}
    for engine in decodes:
        await engine.faults(hold_at_layer=1)
    prompt = prompt_of(150, start=100_000)
    asking = asyncio.create_task(cluster.text(prompt))
    holder = await _holder(prefills)
    draining = asyncio.create_task(_run(cluster, "drain", holder, "--wait"))
    for _ in range(3):
        await _draining_report(cluster, holder)
        assert (await prefills[holder].status()).leased_blocks > 0
        assert not draining.done()
    for engine in decodes:
        await engine.faults()
    result = await draining
    assert result.returncode == 0, result.stderr + cluster.up.story()
    assert f"{holder} has left" in result.stdout
    assert await asking == alone(prompt)
    status = cluster.up.run("status").stdout
    assert "left" in status
    assert await cluster.text(prompt) == alone(prompt)
    again = await _run(cluster, "restart", holder)
    assert again.returncode == 0, again.stderr + cluster.up.story()
    await _all_idle(cluster)


async def test_decode_nodes_leave_and_restart_with_their_streams_served(cluster: Cluster) -> None:
    """One leaves; the last one is kept until it is forced, and then requests wait for it; the first
    one is started again. All that time every client gets its right text.
    """
    clients = Clients(cluster)
    load = [asyncio.create_task(clients.keep_asking()) for _ in range(4)]
    left = await _run(cluster, "drain", "decode-1", "--wait")
    refused = await _run(cluster, "restart", "decode-0")
    forced = await _run(cluster, "restart", "decode-0", "--force")
    again = await _run(cluster, "restart", "decode-1")
    clients.is_over = True
    await asyncio.gather(*load)
    for result in (left, forced, again):
        assert result.returncode == 0, result.stderr + cluster.up.story()
    assert refused.returncode == 2
    assert "decode-0 is the only decode node" in refused.stderr
    await _all_idle(cluster)


@pytest.mark.parametrize("node", ["prefill-1", "decode-1"])
async def test_sigterm_of_an_agent_is_a_drain(cluster: Cluster, node: str) -> None:
    """What a service manager sends when it wants a node gone: no request fails, and none has to be
    saved on another node.
    """
    retries = await retries_of(cluster)
    clients = Clients(cluster)
    load = [asyncio.create_task(clients.keep_asking()) for _ in range(4)]
    await asyncio.to_thread(wait_for, lambda: clients.answered >= 4, 20, "answers")
    engine = cluster.process(node)
    os.kill(cluster.up.node(node)["agent_pid"], signal.SIGTERM)
    await asyncio.to_thread(engine.wait, 20)
    clients.is_over = True
    await asyncio.gather(*load)
    assert await retries_of(cluster) == retries
    again = await _run(cluster, "restart", node)
    assert again.returncode == 0, again.stderr + cluster.up.story()
    await _all_idle(cluster)


def _lives(cluster: Cluster) -> dict[str, str]:
    return {name: cluster.up.node(name)["incarnation"] for name in NODES}


async def _run(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A `splitserve` command, while this loop goes on."""
    return await asyncio.to_thread(cluster.up.run, *arguments, limit_s=COMMAND_LIMIT_S)


async def _holder(prefills: dict[str, Any]) -> str:
    """The prefill node that holds what it computed, as soon as one does."""
    async with asyncio.timeout(20):
        while True:
            for name, engine in prefills.items():
                status = await engine.status()
                if status.leased_blocks and not status.running:
                    return name
            await asyncio.sleep(0.01)


async def _draining_report(cluster: Cluster, name: str) -> None:
    """The draining node's agent has asked its engine once more."""
    seen = cluster.up.node(name)["elapsed_s"]

    def has_reported() -> bool:
        now = cluster.up.node(name)
        return now["phase"] == "draining" and now["elapsed_s"] > seen

    await asyncio.to_thread(wait_for, has_reported, 20, "a report", cluster.up.story)


async def _all_idle(cluster: Cluster) -> None:
    """Every engine is ready, without a fault, and holds nothing."""
    for name in NODES:
        engine = await cluster.engine(name)
        await engine.faults()
        await engine.until_idle()
