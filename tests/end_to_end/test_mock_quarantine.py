"""A prefill engine that is stopped in the middle of its writes keeps pages of a decode engine; its
own agent ends it, and the pages are back: `splitserve up`, real processes, real bytes.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
from click.testing import CliRunner
from support.bank_client import LONG
from support.mock_cluster import Cluster, alone, prompt_of, running_cluster
from support.mock_engines import POLL_S
from support.standing_still import stand_still
from support.up_process import wait_for

from splitserve.orchestrator.cli.main import main

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from click.testing import Result

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLUSTER = """
name: mock-quarantine
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  replicas: 1
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 1024, enable_faults: true}
  transfer: {transport: TRANSPORT, stream_min_bytes: 4096, lease_s: 3, fence_timeout_s: FENCE}
decode: *pool
supervision: {restart_delay_s: 0.1, drain_timeout_s: 2, stop_timeout_s: 3}
"""
FENCE_TIMEOUT_S = 15.0
"""Much longer than the audit's grace for pages in quarantine: they are shown before they are freed.
"""
PROMPT_BLOCKS = 7
DEADLINE_S = 40.0


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["local", pytest.param("nixl", marks=LONG)]
)
async def cluster(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Cluster]:
    """One node of each pool; the writer's own word ends a transfer."""
    text = CLUSTER.replace("TRANSPORT", request.param).replace("FENCE", str(FENCE_TIMEOUT_S))
    async with running_cluster(tmp_path_factory.mktemp("quarantine"), text) as cluster:
        yield cluster


async def test_a_stopped_writer_is_killed_and_the_pages_come_back(cluster: Cluster) -> None:
    """Its client leaves: the pages are in quarantine, the audit names their owner and its writer,
    and after ``fence_timeout_s`` the writer is another process. Whoever asks meanwhile gets the
    right text.
    """
    prefill, decode = await cluster.engine("prefill-0"), await cluster.engine("decode-0")
    life = cluster.up.node("prefill-0")["incarnation"]
    decode_life = cluster.up.node("decode-0")["incarnation"]
    known = prompt_of(40, start=1)
    assert await cluster.text(known) == alone(known)
    await prefill.faults(hold_at_layer=2)
    asking = asyncio.create_task(cluster.text(prompt_of(200, start=2)))
    await decode.until(lambda s: s.open_transfers == 1, "reservation")
    await prefill.until(lambda s: s.running == 1, "prefill")
    (pid,) = cluster.up.pids(f"--port {prefill.url.rsplit(':', 1)[1]}")
    stand_still(pid)
    asking.cancel()
    held = await decode.until(lambda s: s.quarantined_transfers == 1, "quarantine")
    assert held.quarantined_blocks == PROMPT_BLOCKS
    assert held.free_blocks == decode.idle_blocks - PROMPT_BLOCKS
    (holding,) = held.holdings
    assert (holding.state, holding.peer, holding.blocks) == ("quarantined", life, PROMPT_BLOCKS)
    others = [asyncio.create_task(cluster.text(prompt_of(90, start=10 + n))) for n in range(4)]

    found = await _until(cluster, lambda found: _of(found, "quarantined") is not None)
    difference = _of(found, "quarantined")
    assert difference is not None
    assert (difference["node"], difference["blocks"]) == ("decode-0", PROMPT_BLOCKS)
    assert life in difference["explanation"]
    shown = await _audit(cluster, "--json")
    assert shown.exit_code == 4, shown.output
    assert _of(json.loads(shown.stdout)["differences"], "quarantined") is not None

    await asyncio.to_thread(
        wait_for,
        lambda: cluster.up.node("prefill-0")["incarnation"] not in (life, ""),
        DEADLINE_S,
        "another life",
        cluster.up.story,
    )
    assert pid not in cluster.up.pids("--port")
    assert cluster.up.node("prefill-0")["restarts"] == 1
    await decode.until_idle()
    for number, other in enumerate(others):
        async with asyncio.timeout(DEADLINE_S):
            assert await other == alone(prompt_of(90, start=10 + number)), cluster.up.story()
    assert cluster.up.node("decode-0")["incarnation"] == decode_life
    await (await cluster.engine("prefill-0")).until_idle()
    await decode.until_idle()
    await _until(cluster, lambda found: not found)
    shown = await _audit(cluster)
    assert (shown.exit_code, "nothing differs" in shown.stdout) == (0, True), shown.output
    prompt = prompt_of(150, start=30)
    assert await cluster.text(prompt) == alone(prompt)


async def _audit(cluster: Cluster, *arguments: str) -> Result:
    """`splitserve status --audit` of this cluster."""
    env = {"XDG_STATE_HOME": cluster.up.env["XDG_STATE_HOME"]}
    command = ("status", "--audit", *arguments)
    return await asyncio.to_thread(CliRunner().invoke, main, command, env=env)


async def _until(
    cluster: Cluster, holds: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """The first differences of which that is true."""
    url = str(cluster.client.base_url).removesuffix("/v1/") + "/internal/audit"
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(url) as response:
                found: list[dict[str, Any]] = (await response.json())["differences"]
            if holds(found):
                return found
            await asyncio.sleep(POLL_S)


def _of(found: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next((difference for difference in found if difference["kind"] == kind), None)
