"""The shared cache under a whole cluster of mock engines, whose answers depend on every byte of KV.

The first cluster's engines have no prefix cache of their own: what is not computed came from the
host's cache. The second one's have, and little memory.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest
import pytest_asyncio
from support.mock_cluster import TOKENS, Cluster, alone, prompt_of, running_cluster
from support.mock_engines import POLL_S
from support.standing_still import stand_still

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHUNK, BLOCK = 64, 16
POOL = """
name: mock-cache-test
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  kv_cache_bytes: KV
  engine_args:
    {block_size: 16, max_model_len: 512, enable_faults: true, seconds_per_prompt_token: 0.0003,
     enable_prefix_caching: CACHING}
  transfer: {transport: tcp, stream_min_bytes: 4096, lease_s: 3}
decode: *pool
supervision: {restart_delay_s: 0.1, drain_timeout_s: 2, stop_timeout_s: 3}
cache:
  chunk_tokens: 64
  load_timeout_s: 5
  lookup_timeout_s: 2
  tiers: [{type: cpu, capacity_bytes: 16 MiB}, {type: disk, capacity_bytes: 64 MiB}]
"""
WITHOUT = POOL.replace("KV", "16 MiB").replace("CACHING", "false")
TIGHT = POOL.replace("KV", "288 KiB").replace("CACHING", "true")
LIMIT_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State of the first cluster; outlives a restart of everything."""
    return tmp_path_factory.mktemp("cached")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    """One prefill and one decode node without prefix caches of their own."""
    async with running_cluster(folder, WITHOUT) as cluster:
        for node in cluster.nodes:
            await cluster.engine(node)
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tight(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One prefill and one decode node with 64 blocks each, and prefix caches."""
    async with running_cluster(tmp_path_factory.mktemp("tight"), TIGHT) as cluster:
        yield cluster


async def computed(cluster: Cluster) -> float:
    """Prompt tokens that all engines have computed."""
    return await total(cluster, "prompt_tokens_computed")


async def total(cluster: Cluster, counter: str) -> float:
    statuses = [await (await cluster.engine(node)).status() for node in cluster.nodes]
    return sum(status.counters.get(counter, 0.0) for status in statuses)


async def settle(cluster: Cluster) -> None:
    """All engines are idle, with every block free and nothing held for the cache."""
    for node in cluster.nodes:
        engine = await cluster.engine(node)
        await engine.until_idle()
        await engine.until(lambda s: not s.counters["cache_held_bytes"], "saves to end")


@asynccontextmanager
async def spending(cluster: Cluster, at_most: float) -> AsyncIterator[None]:
    """In this block the engines compute at most so many prompt tokens."""
    await settle(cluster)
    before = await computed(cluster)
    yield
    spent = await computed(cluster) - before
    assert spent <= at_most, f"{spent} prompt tokens were computed"


async def poll(question: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not question():
        assert time.monotonic() < end, what
        await asyncio.sleep(POLL_S)


async def test_the_second_request_hits(cluster: Cluster) -> None:
    """All whole chunks of a prompt that was asked for before come from the cache, on both nodes;
    the answers are those of one engine.
    """
    prompt = prompt_of(5 * CHUNK + 30, start=1)
    assert await cluster.text(prompt) == alone(prompt)
    async with spending(cluster, at_most=31 + 1):
        assert await cluster.text(prompt) == alone(prompt)


async def test_estimates_and_outcomes_are_metrics(cluster: Cluster) -> None:
    """What only grows is a counter, what goes up and down a gauge, each under its node; every
    figure has a family of its own.
    """
    prompt = prompt_of(3 * CHUNK + 5, start=9)
    for _ in range(2):
        await cluster.text(prompt)

    async def shown() -> str:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{cluster.url}/metrics") as response,
        ):
            return await response.text()

    expected = [
        f'splitserve_cache_client_{name}_total{{node="decode-0",role="decode"}}'
        for name in ("load_estimate_seconds", "load_outcome_seconds", "hit_chunks")
    ] + ['splitserve_cache_client_connections_open{node="decode-0",role="decode"}']
    end = time.monotonic() + LIMIT_S
    text = await shown()
    while missing := [line for line in expected if line not in text]:
        assert time.monotonic() < end, missing
        await asyncio.sleep(POLL_S)
        text = await shown()
    assert 'counter="cache_' not in text


async def test_turn_two_hits_the_answer_of_turn_one(cluster: Cluster) -> None:
    """The next turn's prompt is the first one, its answer and more: chunks that reach into the
    answer are hit too.
    """
    prompt = prompt_of(100, start=2)
    answer = await cluster.text(prompt, tokens=60)
    assert answer == alone(prompt, 60)
    turn = [*prompt, *answer.encode("latin-1"), *prompt_of(40, start=3)]
    async with spending(cluster, at_most=len(turn) - 2 * CHUNK + 1):
        assert await cluster.text(turn) == alone(turn)


EDGES = sorted(
    {1, 2, *(n * size + d for size, n in ((BLOCK, 1), (BLOCK, 2), (CHUNK, 1), (CHUNK, 4))
             for d in (-1, 0, 1))}
)  # fmt: skip


async def test_prompts_at_the_edges_of_blocks_and_chunks(cluster: Cluster) -> None:
    """A prompt of each length three times, then with 40 tokens more: right every time, and whole
    chunks are never computed again.
    """
    for length in EDGES:
        prompt = prompt_of(length, start=100 + length)
        longer = [*prompt, *prompt_of(40, start=5)]
        for _ in range(3):
            assert await cluster.text(prompt) == alone(prompt), length
        await settle(cluster)
        whole = length // CHUNK * CHUNK
        async with spending(cluster, at_most=max(1, length - whole) + 1):
            assert await cluster.text(prompt) == alone(prompt), length
        async with spending(cluster, at_most=len(longer) - whole + 1):
            assert await cluster.text(longer) == alone(longer), length


async def test_many_clients_with_the_same_beginning(cluster: Cluster) -> None:
    """24 at once: chunks that many requests compute at the same time are saved once, and nobody's
    answer is wrong.
    """
    common = prompt_of(3 * CHUNK, start=6)
    prompts = [[*common, *prompt_of(10 + 5 * n, start=200 + n)] for n in range(24)]
    prompts += prompts[:8]
    answers = await asyncio.gather(*map(cluster.text, prompts))
    assert answers == [alone(prompt) for prompt in prompts]
    await settle(cluster)
    connections = await total(cluster, "cache_connections")
    assert connections == len(cluster.nodes), "a worker was cut off by the cache server"


async def test_a_client_that_leaves_while_its_prompt_is_loaded(cluster: Cluster) -> None:
    """The cache server is stopped between the look-up and the load, which hangs; the client leaves,
    the server continues, and both engines are idle again.
    """
    prompt = prompt_of(6 * CHUNK, start=7)
    await cluster.text(prompt)
    await settle(cluster)
    engine, pid = await cluster.engine("decode-0"), server_pid(cluster)
    loads = (await engine.status()).counters["cache_load_tokens"]
    await engine.faults(hold_steps=True)
    asking = asyncio.create_task(cluster.text(prompt))
    await engine.until(lambda s: s.waiting == 1, "request")
    answered = time.monotonic() + 0.1  # Of the look-up, which takes a hundredth of that.
    await engine.until(lambda _: time.monotonic() > answered, "answer")
    stand_still(pid)
    try:
        await engine.faults()
        await engine.until(lambda s: s.counters["cache_load_tokens"] > loads, "load")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await engine.until(lambda s: s.running + s.waiting == 0, "abort")
    finally:
        os.kill(pid, signal.SIGCONT)
    await settle(cluster)
    assert await cluster.text(prompt) == alone(prompt)


def server_pid(cluster: Cluster) -> int:
    (pid,) = cluster.up.pids("-m splitserve.kv_transfer.cache ")
    return pid


async def test_the_cache_server_is_killed_under_load(cluster: Cluster) -> None:
    """No request fails and no text is wrong while it is killed twice; afterwards prompts hit again,
    those of before too, from the disk.
    """
    old = prompt_of(5 * CHUNK + 1, start=8)
    await cluster.text(old)
    await settle(cluster)
    prompts = [prompt_of(40 + 23 * (n % 16), start=300 + n % 16) for n in range(120)]
    answers = asyncio.gather(*map(cluster.text, prompts))
    for _ in range(2):
        pid = server_pid(cluster)
        os.kill(pid, signal.SIGKILL)
        await poll(
            lambda dead=pid: (
                cluster.up.pids("-m splitserve.kv_transfer.cache ") not in ([], [dead])
            ),  # type: ignore[misc]
            "no new cache server",
        )
        await asyncio.sleep(0)
    assert await answers == [alone(prompt) for prompt in prompts]
    await settle(cluster)
    await until_hits(cluster, old)


async def until_hits(cluster: Cluster, prompt: list[int]) -> None:
    """Asked again and again, the prompt comes from the cache at last."""
    end = time.monotonic() + LIMIT_S
    while True:
        await settle(cluster)
        before = await computed(cluster)
        assert await cluster.text(prompt) == alone(prompt)
        if await computed(cluster) - before < CHUNK:
            return
        assert time.monotonic() < end, "no hit"


async def test_the_cache_server_is_stopped_for_a_while(cluster: Cluster) -> None:
    """Requests are answered without it, a little later; when it continues prompts hit again."""
    prompt = prompt_of(4 * CHUNK + 1, start=9)
    await cluster.text(prompt)
    await settle(cluster)
    pid = server_pid(cluster)
    stand_still(pid)
    try:
        fresh = [prompt_of(150, start=400 + n) for n in range(4)]
        answers = await asyncio.gather(*map(cluster.text, [prompt, *fresh]))
        assert answers == [alone(each) for each in [prompt, *fresh]]
    finally:
        os.kill(pid, signal.SIGCONT)
    await settle(cluster)
    await until_hits(cluster, prompt)


async def test_a_cluster_that_is_started_again_hits_the_disk(
    cluster: Cluster, folder: Path
) -> None:
    """Everything is stopped and started: what was asked for before comes from the disk. The last
    test of this cluster.
    """
    prompt = prompt_of(5 * CHUNK + 7, start=10)
    await cluster.text(prompt)
    await settle(cluster)
    for engine in cluster.engines.values():
        engine.close()
    cluster.engines.clear()
    cluster.up.interrupt()
    assert await asyncio.to_thread(cluster.up.wait_for_end) == 0, cluster.up.story()
    async with running_cluster(folder, WITHOUT) as again:
        for node in again.nodes:
            await again.engine(node)
        async with spending(again, at_most=8 + 1):
            assert await again.text(prompt) == alone(prompt)
        assert await total(again, "cache_load_chunks_tier_1") >= 5


async def test_several_answers_to_one_prompt(tight: Cluster) -> None:
    """n = 3 with the cache and prefix caches on, cold and again: the same three answers."""
    prompt = prompt_of(3 * CHUNK + 5, start=11)
    for _ in range(3):
        answer = await tight.client.completions.create(
            model="mock", prompt=prompt, max_tokens=TOKENS, n=3, extra_body={"ignore_eos": True}
        )
        assert [choice.text for choice in answer.choices] == [alone(prompt)] * 3
    await settle(tight)


async def test_engines_that_preempt(tight: Cluster) -> None:
    """16 requests whose answers need more blocks than there are, past the router, which would let
    them wait: some are preempted, all are answered rightly, no block stays held.
    """
    engine = await tight.engine("decode-0")
    prompts = [prompt_of(40 + 3 * n, start=500 + n) for n in range(16)]
    for _ in range(2):
        bodies = [
            {"model": "mock", "prompt": prompt, "max_tokens": 90, "ignore_eos": True}
            for prompt in prompts
        ]
        answers = await asyncio.gather(*map(engine.ask, bodies))
        texts = [answer["choices"][0]["text"] for _, answer in answers]
        assert texts == [alone(prompt, 90) for prompt in prompts]
        await settle(tight)
    assert await total(tight, "preemptions") > 0


async def test_edges_after_the_engines_were_started_again(tight: Cluster) -> None:
    """Prompts of A13's lengths, cold, warm in the engines, and warm in the cache alone."""
    prompts = [prompt_of(length, start=600 + length) for length in EDGES]
    for _ in range(2):
        for prompt in prompts:
            assert await tight.text(prompt) == alone(prompt), len(prompt)
    await settle(tight)
    for node in tight.nodes:
        await tight.kill_engine(node)
    for node in tight.nodes:
        await tight.engine(node)
    for prompt in prompts:
        assert await tight.text(prompt) == alone(prompt), len(prompt)
    assert await total(tight, "cache_load_tokens") > 0
