"""The router ends and comes back: the engines live on, nothing leaks, and clients are told."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import psutil
import pytest
import pytest_asyncio
from support.mock_cluster import Cluster, alone, prompt_of, running_cluster
from support.up_process import wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLUSTER = """
name: mock-router-restart
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 1024, enable_faults: true}
  transfer: {transport: tcp, stream_min_bytes: 4096, lease_s: 3}
decode: *pool
supervision: {restart_delay_s: 0.1, restart_limit: 100, drain_timeout_s: 0.5, stop_timeout_s: 3}
"""
NODES = ("prefill-0", "decode-0")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One prefill and one decode node behind a router."""
    async with running_cluster(tmp_path_factory.mktemp("restart"), CLUSTER) as cluster:
        yield cluster


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name)
@pytest.mark.parametrize("moment", ["while P computes", "in the answer"])
async def test_both_engines_are_idle_and_serve_again(
    cluster: Cluster, moment: str, number: signal.Signals
) -> None:
    """Whatever was under way: after SIGKILL the client's connection breaks, after SIGTERM it gets
    an error (an event in a stream, else status 503); both legs are aborted, blocks come back within
    the lease, and the same engine processes serve through the next router.
    """
    engines = [await cluster.engine(name) for name in NODES]
    lives = [cluster.up.node(name)["incarnation"] for name in NODES]
    held, faults = {
        "while P computes": (engines[0], {"hold_at_layer": 2}),
        "in the answer": (engines[1], {"hold_after_tokens": 5}),
    }[moment]
    await held.faults(**faults)
    outcome = asyncio.create_task(stream(cluster, prompt_of(150, start=len(moment) + number)))
    await held.until(lambda s: s.running == 1, "request in the engine")
    await engines[1].until(lambda s: s.running + s.open_transfers > 0, "decode leg")
    (router,) = cluster.up.pids("splitserve.orchestrator.router ")
    psutil.Process(router).send_signal(number)
    async with asyncio.timeout(20):
        status, events = await outcome
    if number is signal.SIGKILL:
        assert events[-1:] in ([], ["broken"])
    else:
        assert (status, events[-1]["error"]["code"]) in ((200, 503), (503, 503))
        assert status == (200 if moment == "in the answer" else 503)
    await held.faults()
    for engine in engines:
        await engine.until_idle()
    await asyncio.to_thread(
        wait_for,
        lambda: cluster.up.pids("splitserve.orchestrator.router ") not in ([], [router]),
        20,
        "another router",
        cluster.up.story,
    )
    prompt = prompt_of(90, start=700 + len(moment) + number)
    assert await served(cluster, prompt) == alone(prompt)
    assert [cluster.up.node(name)["incarnation"] for name in NODES] == lives
    for engine in engines:
        await engine.until_idle()


async def stream(cluster: Cluster, prompt: list[int]) -> tuple[int, list[Any]]:
    """(status, events) of a streamed answer; the last event is ``broken`` when the connection
    broke. Status 0 when there was none.
    """
    url = f"{str(cluster.client.base_url).rstrip('/')}/completions"
    body = {"model": "mock", "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "stream": True}
    status, events = 0, []
    try:
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            status = response.status
            if status != 200:
                return status, [await response.json()]
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip().decode()
                if data:
                    events.append(json.loads(data) if data.startswith("{") else data)
    except aiohttp.ClientError:
        events.append("broken")
    return status, events


async def served(cluster: Cluster, prompt: list[int]) -> str:
    """The answer, as soon as the router is there and knows its nodes."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await cluster.text(prompt)
            except (openai.APIConnectionError, openai.InternalServerError):
                await asyncio.sleep(0.05)
