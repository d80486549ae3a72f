"""An engine fails while a spare one exists, or not: real processes, real bytes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from support.bank_client import LONG
from support.mock_cluster import Cluster, alone, prompt_of, running_cluster
from support.mock_engines import POLL_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from support.mock_engines import EngineHandle

    from splitserve.kv_transfer.engine_endpoint import EngineStatus

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
decode: *pool
supervision: {restart_delay_s: 0.1, drain_timeout_s: 2, stop_timeout_s: 3}
"""


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["local", pytest.param("tcp", marks=LONG)]
)
async def cluster(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Cluster]:
    """Two prefill and two decode nodes behind a router."""
    text = CLUSTER.replace("TRANSPORT", request.param)
    async with running_cluster(tmp_path_factory.mktemp("ladder"), text) as cluster:
        yield cluster


PREFILL = ("prefill-0", "prefill-1")
DECODE = ("decode-0", "decode-1")


async def test_the_other_prefill_engine_fills_the_reserved_pages(cluster: Cluster) -> None:
    """SIGKILL in the middle of a prefill, some layers written: the decode engine computes one
    token, as if nothing had happened, and the text is right.
    """
    prefills = await _engines(cluster, PREFILL)
    for engine in prefills.values():
        await engine.faults(hold_at_layer=2)
    prompt = prompt_of(150, start=7000)
    before = await _counters(cluster)
    asking = asyncio.create_task(cluster.text(prompt))
    decode = await _where(cluster, DECODE, lambda s: s.open_transfers == 1)
    victim = await _where(cluster, PREFILL, lambda s: s.running == 1)
    (spare,) = set(PREFILL) - {victim}
    await cluster.kill_engine(victim)
    await prefills[spare].until(lambda s: s.running == 1, "the other prefill")
    await prefills[spare].faults()
    async with asyncio.timeout(20):
        assert await asking == alone(prompt)
    gained = await _gained(cluster, before, decode)
    assert gained["retargeted_receives"] == gained["received_transfers"] == 1
    assert gained["prompt_tokens_computed"] == 1
    await _all_idle(cluster)


async def test_without_a_second_one_the_decode_engine_computes_the_prompt(cluster: Cluster) -> None:
    """Both prefill engines are killed, one after the other: the right text all the same."""
    for engine in (await _engines(cluster, PREFILL)).values():
        await engine.faults(hold_at_layer=2)
    prompt = prompt_of(150, start=8000)
    asking = asyncio.create_task(cluster.text(prompt))
    await _where(cluster, DECODE, lambda s: s.open_transfers == 1)
    for _ in PREFILL:
        await cluster.kill_engine(await _where(cluster, PREFILL, lambda s: s.running == 1))
    async with asyncio.timeout(20):
        assert await asking == alone(prompt)
    await _all_idle(cluster)


@pytest.mark.parametrize("moment", ["while P computes", "after the pages have landed"])
async def test_another_decode_engine_gets_the_same_pages(cluster: Cluster, moment: str) -> None:
    """SIGKILL before the first token: the prefill engine computes nothing again, the new decode
    engine one token, and the text is right.
    """
    prefills, decodes = await _engines(cluster, PREFILL), await _engines(cluster, DECODE)
    computing = moment == "while P computes"
    held = prefills if computing else decodes
    for engine in held.values():
        await engine.faults(hold_at_layer=2)
    prompt = prompt_of(150, start=9000 + computing)
    before = await _counters(cluster)
    asking = asyncio.create_task(cluster.text(prompt))
    if computing:
        prefill = await _where(cluster, PREFILL, lambda s: s.running == 1)
        victim = await _where(cluster, DECODE, lambda s: s.open_transfers == 1)
    else:
        victim = await _where(cluster, DECODE, lambda s: s.running == 1)
        prefill = await _where(cluster, PREFILL, lambda s: s.leased_blocks > 0)
    (spare,) = set(DECODE) - {victim}
    await cluster.kill_engine(victim)
    if computing:
        await decodes[spare].until(lambda s: s.open_transfers == 1, "the other reservation")
    for name, engine in held.items():
        if name != victim:
            await engine.faults()
    async with asyncio.timeout(20):
        assert await asking == alone(prompt)
    assert (await _gained(cluster, before, prefill))["prompt_tokens_computed"] == len(prompt)
    gained = await _gained(cluster, before, spare)
    assert (gained["received_transfers"], gained["prompt_tokens_computed"]) == (1, 1)
    await _all_idle(cluster)


async def _engines(cluster: Cluster, names: tuple[str, ...]) -> dict[str, EngineHandle]:
    """All of them, ready."""
    return {name: await cluster.engine(name) for name in names}


async def _where(
    cluster: Cluster, names: tuple[str, ...], holds: Callable[[EngineStatus], bool]
) -> str:
    """The first of the nodes of which that is true, as soon as it is."""
    async with asyncio.timeout(20):
        while True:
            for name in names:
                node = cluster.up.node(name)
                engine = cluster.engines.get(node.get("incarnation", ""))
                if node.get("phase") == "ready" and engine and holds(await engine.status()):
                    return name
            await asyncio.sleep(POLL_S)


async def _counters(cluster: Cluster) -> dict[str, dict[str, float]]:
    """Of every engine."""
    engines = await _engines(cluster, (*PREFILL, *DECODE))
    return {name: dict((await e.status()).counters) for name, e in engines.items()}


async def _gained(
    cluster: Cluster, before: dict[str, dict[str, float]], name: str
) -> dict[str, float]:
    """What an engine that has lived on counted since."""
    after = (await (await cluster.engine(name)).status()).counters
    return {key: after[key] - before[name].get(key, 0) for key in after}


async def _all_idle(cluster: Cluster) -> None:
    """Every engine is ready, without a fault, and holds nothing."""
    for engine in (await _engines(cluster, (*PREFILL, *DECODE))).values():
        await engine.faults()
        await engine.until_idle()
