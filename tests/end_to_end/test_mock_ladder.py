"""A prefill engine fails while a spare one exists, or not: real processes, real bytes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from support.mock_cluster import Cluster, alone, prompt_of, running_cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLUSTER = """
name: mock-ladder
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  replicas: 2
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 1024, enable_faults: true}
  transfer: {transport: TRANSPORT, stream_min_bytes: 4096, lease_s: 3, retarget_wait_s: 20}
decode:
  <<: *pool
  replicas: 1
supervision: {restart_delay_s: 0.1, drain_timeout_s: 2, stop_timeout_s: 3}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["tcp", "local"])
async def cluster(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Cluster]:
    """Two prefill nodes and one decode node behind a router."""
    text = CLUSTER.replace("TRANSPORT", request.param)
    async with running_cluster(tmp_path_factory.mktemp("ladder"), text) as cluster:
        yield cluster


async def test_the_other_prefill_engine_fills_the_reserved_pages(cluster: Cluster) -> None:
    """SIGKILL in the middle of a prefill, some layers written: the decode engine computes one
    token, as if nothing had happened, and the text is right.
    """
    decode = await cluster.engine("decode-0")
    prefills = {name: await cluster.engine(name) for name in ("prefill-0", "prefill-1")}
    for engine in prefills.values():
        await engine.faults(hold_at_layer=2)
    before = (await decode.status()).counters
    prompt = prompt_of(150, start=7000)
    asking = asyncio.create_task(cluster.text(prompt))
    await decode.until(lambda s: s.open_transfers == 1, "reservation")
    victim = await _busy(cluster)
    (spare,) = set(prefills) - {victim}
    await cluster.kill_engine(victim)
    await prefills[spare].until(lambda s: s.running == 1, "the other prefill")
    await prefills[spare].faults()
    async with asyncio.timeout(20):
        assert await asking == alone(prompt)
    after = (await decode.status()).counters
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained["retargeted_receives"] == 1
    assert gained["received_transfers"] == 1
    assert gained["prompt_tokens_computed"] == 1
    for engine in (decode, prefills[spare]):
        await engine.until_idle()
    await cluster.engine(victim)


async def test_without_a_second_one_the_decode_engine_computes_the_prompt(cluster: Cluster) -> None:
    """Both prefill engines are killed, one after the other: the right text all the same."""
    decode = await cluster.engine("decode-0")
    for name in ("prefill-0", "prefill-1"):
        await (await cluster.engine(name)).faults(hold_at_layer=2)
    prompt = prompt_of(150, start=8000)
    asking = asyncio.create_task(cluster.text(prompt))
    await decode.until(lambda s: s.open_transfers == 1, "reservation")
    await cluster.kill_engine(await _busy(cluster))
    await cluster.kill_engine(await _busy(cluster))
    async with asyncio.timeout(20):
        assert await asking == alone(prompt)
    await decode.until_idle()
    for name in ("prefill-0", "prefill-1"):
        await cluster.engine(name)


async def _busy(cluster: Cluster) -> str:
    """The prefill node that computes something, as soon as one does."""
    async with asyncio.timeout(20):
        while True:
            for name in ("prefill-0", "prefill-1"):
                if cluster.up.node(name).get("phase") != "ready":
                    continue
                engine = cluster.engines.get(cluster.up.node(name)["incarnation"])
                if engine is not None and (await engine.status()).running:
                    return name
            await asyncio.sleep(0.01)
