"""Nodes change their roles while clients ask: real processes, no engine restarts, and no request
fails.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
from support.mock_clients import Clients, retries_of
from support.mock_cluster import Cluster, alone, prompt_of, running_cluster
from support.up_process import wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CLUSTER = """
name: mock-flip
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  replicas: 2
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 1024, enable_faults: true}
  transfer: {transport: tcp, stream_min_bytes: 4096, lease_s: 30}
decode: *pool
supervision: {restart_delay_s: 0.1, drain_timeout_s: 5, stop_timeout_s: 3}
"""
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
OWN_ROLES = {name: name.partition("-")[0] for name in NODES}
FLIPS = (
    ("decode-1", "prefill"),
    ("prefill-0", "decode"),
    ("prefill-1", "decode"),
    ("decode-0", "prefill"),
    ("decode-1", "decode"),
    ("prefill-0", "prefill"),
    ("prefill-1", "prefill"),
    ("decode-0", "decode"),
)
"""Each node has its other role for a while; in the middle all four have."""
IN_FLIGHT = 8
LONG_TOKENS = 60
LIMIT_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two prefill and two decode nodes behind a router."""
    async with running_cluster(tmp_path_factory.mktemp("flip"), CLUSTER) as cluster:
        yield cluster


async def test_flips_under_load(cluster: Cluster) -> None:
    """Eight requests at a time, streamed and not, short and long: each gets its right text at its
    first attempt, while nodes change roles until every one has had both. No engine has restarted.
    """
    before, retries = _lives(cluster), await retries_of(cluster)
    clients = Clients(cluster, LONG_TOKENS)
    load = [asyncio.create_task(clients.keep_asking()) for _ in range(IN_FLIGHT)]
    roles = dict(OWN_ROLES)
    for number, (node, role) in enumerate(FLIPS):
        seen = clients.answered
        await _until(lambda seen=seen: clients.answered >= seen + 4, "answers")
        await _flip(cluster, node, role)
        if number in (1, 6):  # Others begin before the one before is over
            await _until_settled(cluster)
        roles[node] = role
        assert {n: s["role"] for n, s in (await _nodes(cluster)).items()} == roles
    clients.is_over = True
    await asyncio.gather(*load)
    assert clients.answered > 2 * len(FLIPS)
    assert await retries_of(cluster) == retries
    assert _lives(cluster) == before
    await _all_idle(cluster)


async def test_nodes_that_all_have_the_other_role(cluster: Cluster) -> None:
    """Pages go from the nodes of the decode pool to those of the prefill pool, which none of them
    has been introduced to at start; every text is right, and the status says what was what.
    """
    for node, role in FLIPS[:4]:
        await _flip(cluster, node, role)
    await _all_idle(cluster)
    before = await _counters(cluster)
    for number in range(8):
        prompt = prompt_of(100 + number, start=200_000 + number)
        assert await cluster.text(prompt) == alone(prompt)
    await _all_idle(cluster)
    after = await _counters(cluster)
    sent, received = (
        {name: after[name].get(key, 0) - before[name].get(key, 0) for name in NODES}
        for key in ("sent_pages", "received_pages")
    )
    assert sent["prefill-0"] == sent["prefill-1"] == 0
    assert received["decode-0"] == received["decode-1"] == 0
    assert sent["decode-0"] > 0
    assert sent["decode-1"] > 0
    assert received["prefill-0"] + received["prefill-1"] == sum(sent.values())
    status = await asyncio.to_thread(cluster.up.status)
    assert status is not None
    assert {n["node"]: (n["role"], n["pool"]) for n in status["nodes"]} == {
        name: ("decode" if pool == "prefill" else "prefill", pool)
        for name, pool in OWN_ROLES.items()
    }
    for node, role in FLIPS[4:]:
        await _flip(cluster, node, role)


async def test_what_a_flipped_node_owes(cluster: Cluster) -> None:
    """A decode node that is held in the middle of a stream becomes a prefill node: the stream is
    still owed, is waited for, and ends with its right text.
    """
    engine = await cluster.engine("decode-1")
    prompts = [prompt_of(150 + number, start=300_000 + number) for number in range(2)]
    await engine.faults(hold_after_tokens=3)
    asking = [asyncio.create_task(cluster.text(prompt)) for prompt in prompts]
    await _until_status(cluster, lambda nodes: nodes["decode-1"]["decode_legs"] == 1)
    flipped = await _run(cluster, "flip", "decode-1", "prefill")
    assert "it still owes 1 decode leg" in flipped
    seen = (await _nodes(cluster))["decode-1"]
    assert (seen["is_flipping"], seen["owed"]["legs"]) == (True, 1)
    assert "decode-1 still owes 1 legs" in await _run(cluster, "status")
    waiting = asyncio.create_task(_run(cluster, "flip", "decode-1", "prefill", "--wait"))
    await _until(lambda: sum(task.done() for task in asking) == 1, "the other stream's end")
    assert not waiting.done()
    await engine.faults()
    assert await asyncio.gather(*asking) == [alone(prompt) for prompt in prompts]
    assert "owes nothing of its old role" in await waiting
    await _flip(cluster, "decode-1", "decode")
    await _all_idle(cluster)


async def test_a_role_outlasts_its_engine_its_agent_and_the_router(cluster: Cluster) -> None:
    """After the death of each the node still has its new role, and texts are right."""
    await _flip(cluster, "decode-1", "prefill")
    await _until_known_to_agent(cluster, "decode-1", "prefill")
    for number, victim in enumerate(("engine", "agent", "router")):
        life = cluster.up.node("decode-1")["incarnation"]
        if victim == "engine":
            await cluster.kill_engine("decode-1")
        elif victim == "agent":
            os.kill(cluster.up.node("decode-1")["agent_pid"], signal.SIGKILL)
        else:
            (pid,) = cluster.up.pids("splitserve.orchestrator.router")
            os.kill(pid, signal.SIGKILL)

        def is_back(nodes: dict[str, Any], life: str = life, victim: str = victim) -> bool:
            all_serve = all(nodes.get(name, {}).get("is_usable") for name in NODES)
            is_same = nodes.get("decode-1", {}).get("incarnation") == life
            return all_serve and is_same == (victim == "router")

        await _until_status(cluster, is_back)
        assert (await _nodes(cluster))["decode-1"]["role"] == "prefill"
        prompt = prompt_of(60, start=400_000 + number)
        assert await cluster.text(prompt) == alone(prompt)
    await _flip(cluster, "decode-1", "decode")


async def test_the_last_decode_node_keeps_its_role(cluster: Cluster) -> None:
    """Also by force: status 2, and the reason."""
    await _flip(cluster, "decode-1", "prefill")
    last = await asyncio.to_thread(cluster.up.run, "flip", "decode-0", "prefill", "--force")
    assert last.returncode == 2
    assert "decode-0 is the last decode node" in last.stderr
    await _flip(cluster, "decode-1", "decode")


async def _flip(cluster: Cluster, node: str, role: str) -> None:
    """Ask the router, as `splitserve flip` does."""
    url = f"{cluster.url}/internal/nodes/{node}/flip"
    async with (
        aiohttp.ClientSession(headers=cluster.up.operator()) as session,
        session.post(url, json={"role": role}) as response,
    ):
        assert response.status == 202, await response.text() + cluster.up.story()


async def _run(cluster: Cluster, *arguments: str) -> str:
    """What a `splitserve` command prints, while this loop goes on."""
    result = await asyncio.to_thread(cluster.up.run, *arguments, limit_s=LIMIT_S)
    assert result.returncode == 0, result.stderr + cluster.up.story()
    return result.stdout


async def _nodes(cluster: Cluster) -> dict[str, Any]:
    """What the router says of its nodes; nothing while there is no router."""
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{cluster.url}/internal/status") as response,
        ):
            found: dict[str, Any] = (await response.json())["nodes"]
            return found
    except aiohttp.ClientConnectionError:
        return {}


async def _until_status(cluster: Cluster, condition: Any) -> None:
    """The router says so."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            if condition(await _nodes(cluster)):
                return
            await asyncio.sleep(0.05)


async def _until_settled(cluster: Cluster) -> None:
    """No node owes anything of a role that it had before."""
    await _until_status(cluster, lambda nodes: not any(n["is_flipping"] for n in nodes.values()))


async def _until(condition: Any, what: str) -> None:
    await asyncio.to_thread(wait_for, condition, LIMIT_S, what)


async def _until_known_to_agent(cluster: Cluster, node: str, role: str) -> None:
    """The agent has written the role down."""
    await _until(lambda: cluster.up.node(node)["role"] == role, "the agent to hear of its role")


async def _counters(cluster: Cluster) -> dict[str, dict[str, float]]:
    """Each engine's own, as they are now: what the router knows is up to half a second old."""
    return {name: (await (await cluster.engine(name)).status()).counters for name in NODES}


def _lives(cluster: Cluster) -> dict[str, Any]:
    """Incarnation and process of each engine."""
    pids = cluster.pids()
    return {name: (cluster.up.node(name)["incarnation"], pids[name]) for name in NODES}


async def _all_idle(cluster: Cluster) -> None:
    """Every engine is ready, without a fault, and holds nothing."""
    for name in NODES:
        engine = await cluster.engine(name)
        await engine.faults()
        await engine.until_idle()
