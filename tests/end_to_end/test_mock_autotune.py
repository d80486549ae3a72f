"""The ratio follows the load: real processes whose engines take the time that a profile says, and
prompts for which there are too few prefill nodes.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from support.mock_cluster import Cluster, alone, prompt_of, running_cluster
from support.tuner_profile import FAST

from splitserve.orchestrator.tuner.profile import PrefillTime, exactly, write_profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)

CLUSTER = """
name: mock-autotune-{mode}
engine: mock
model: {{path: mock}}
router: {{port: 0, prefill_batch_tokens: 0}}
prefill: &pool
  replicas: 1
  kv_cache_bytes: 4 MiB
  engine_args: {{block_size: 32, max_model_len: 1024, profile: '{profile}'}}
  transfer: {{transport: tcp, stream_min_bytes: 4096}}
decode: {{<<: *pool, replicas: 2}}
policy:
  autotune:
    mode: {mode}
    profile: '{profile}'
    ttft_ms: 900.0
    itl_ms: 100.0
    window_s: 0.5
    change_interval_s: 60.0
    missed_interval_s: 60.0
    warm_up_s: 1.0
supervision: {{drain_timeout_s: 5, stop_timeout_s: 3}}
"""
PROMPT_TOKENS, ANSWER_TOKENS = 250, 6
IN_FLIGHT = 6
LIMIT_S = 30.0


@asynccontextmanager
async def tuned_cluster(folder: Path, mode: str) -> AsyncIterator[Cluster]:
    """One prefill node, which takes a quarter of a second for a prompt, and two decode nodes."""
    profile = folder / "profile.json"
    blocks = (4 << 20) // (FAST.kv_bytes_per_token * FAST.limits.block_tokens)
    limits = msgspec.structs.replace(FAST.limits, max_model_len=1024, total_blocks=blocks)
    slow = PrefillTime(exactly(0.005), exactly(0.001), exactly(0))
    profile.write_bytes(write_profile(msgspec.structs.replace(FAST, limits=limits, prefill=slow)))
    text = CLUSTER.format(mode=mode, profile=profile)
    async with running_cluster(folder, text) as cluster:
        yield cluster


class Load:
    """Clients that ask for short answers to long prompts, each after the other, until it is over.
    Fails with the first wrong answer.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers = itertools.count(1)
        self.is_over = False

    async def ask(self) -> None:
        """One client."""
        while not self.is_over:
            prompt = prompt_of(PROMPT_TOKENS, start=next(self._numbers))
            stream: Any = await self._cluster.client.completions.create(
                model="mock",
                prompt=prompt,
                max_tokens=ANSWER_TOKENS,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            text = "".join([chunk.choices[0].text async for chunk in stream])
            assert text == alone(prompt, ANSWER_TOKENS)


async def status_when(cluster: Cluster, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The router's status under load, as soon as that holds of it."""
    load = Load(cluster)
    clients = [asyncio.create_task(load.ask()) for _ in range(IN_FLIGHT)]
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(LIMIT_S):
            while True:
                async with session.get(f"{cluster.url}/internal/status") as response:
                    status: dict[str, Any] = await response.json()
                if holds(status):
                    return status
                assert not any(client.done() for client in clients)
                await asyncio.sleep(0.1)
    finally:
        load.is_over = True
        await asyncio.gather(*clients)


def roles(status: dict[str, Any]) -> list[str]:
    """Of all nodes, by name."""
    return [node["role"] for _, node in sorted(status["nodes"].items())]


async def test_on(tmp_path: Path) -> None:
    """A decode node becomes a prefill node, by the line in the status; no request fails, and the
    command line shows what was decided.
    """
    async with tuned_cluster(tmp_path, "on") as cluster:
        status = await status_when(cluster, lambda status: roles(status).count("prefill") == 2)
        change = next(d for d in status["autotune"]["decisions"] if d["node"])
        assert change["role"] == "prefill"
        assert change["why"].startswith(f"{change['node']} becomes prefill: ")
        assert change["plans"]["current"]["split"] == "1:2"
        assert change["forecast"]["prompt_tokens"] == pytest.approx(PROMPT_TOKENS, rel=0.1)
        shown = await asyncio.to_thread(cluster.up.status)
        assert shown is not None
        assert shown["autotune"]["mode"] == "on"
        assert change in shown["autotune"]["decisions"]


async def test_advise(tmp_path: Path) -> None:
    """The same is said, and nothing is done."""
    async with tuned_cluster(tmp_path, "advise") as cluster:
        status = await status_when(
            cluster, lambda status: any(d["node"] for d in status["autotune"]["decisions"])
        )
        assert roles(status) == ["decode", "decode", "prefill"]
        (log,) = [path for path in cluster.up.logs() if path.name == "router.log"]
        assert "autotune advises: decode-" in log.read_text()
