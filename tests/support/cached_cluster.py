"""A mock cluster whose engines keep no prefix of their own, so that whatever a prompt need not
compute comes from the host's cache.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from support.bank_client import ask, completion, prompt_of
from support.cache_probe import cache_stat, held
from support.idle_check import IdleCheck
from support.mock_cluster import Cluster, alone, running_cluster
from support.mock_engines import DEADLINE_S, POLL_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from splitserve.kv_transfer.cache.control_messages import Stat

CHUNK_TOKENS = 64
TOKENS = 2
CACHE_PROGRAM = "-m splitserve.kv_transfer.cache "
CACHED = """
name: {name}
engine: mock
model: {{path: mock}}
router: {{port: 0, node_silence_limit_s: 3, first_token_deadline_s: 15, request_deadline_s: 30}}
policy: {policy}
supervision:
  {{restart_delay_s: 0.1, restart_delay_limit_s: 0.2, restart_limit: 1000, stop_timeout_s: 3}}
prefill: &pool
  replicas: {replicas}
  kv_cache_bytes: 4 MiB
  engine_args:
    block_size: 32
    max_model_len: 2048
    max_num_batched_tokens: {step_tokens}
    tensor_parallel_size: {ranks}
    seconds_per_step: {seconds_per_step}
    enable_prefix_caching: false
    enable_faults: true
  transfer: {{transport: tcp, lease_s: 10, deadline_s: 5, retarget_wait_s: 2}}
decode: {{<<: *pool, replicas: 1}}
cache:
  chunk_tokens: 64
  socket_path: {socket}
  staging_bytes: {staging}
  load_timeout_s: 5
  lookup_timeout_s: 1
  tiers: {tiers}
"""
SLOT = 16 * 1024
"""Bytes of one chunk."""


@dataclass
class CachedCluster:
    """The cluster and its cache server."""

    cluster: Cluster
    socket: Path

    async def stat(self) -> Stat:
        """What the cache server says; it has to."""
        stat = await asyncio.to_thread(cache_stat, self.socket)
        assert stat is not None, f"no cache server\n{self.cluster.up.story()}"
        return stat

    async def hits(self, tier: str) -> int:
        """Chunks that a tier has brought so far."""
        (found,) = (t.reads for t in (await self.stat()).tiers if t.name == tier)
        return found

    async def loaded(self) -> float:
        """Chunks that the engines have loaded so far."""
        return await self.counted("loaded_chunks")

    async def counted(self, name: str) -> float:
        """A counter of the engines' ends of the cache, over all engines."""
        total = 0.0
        for node in self.cluster.nodes:
            status = await (await self.cluster.engine(node)).status()
            total += status.counters.get(f"cache_{name}", 0.0)
        return total

    async def rest(self) -> Stat:
        """The cache server holds nothing for anybody, and nothing waits to be written."""
        end = time.monotonic() + DEADLINE_S
        while problems := held(stat := await self.stat()):
            assert time.monotonic() < end, f"{problems}\n{self.cluster.up.story()}"
            await asyncio.sleep(POLL_S)
        return stat

    async def text(self, prompt: list[int]) -> None:
        """The router's answer is the right one."""
        answer = await ask(self.cluster.url, completion(prompt, TOKENS))
        assert answer.text == alone(prompt, TOKENS)

    async def texts(self, prompts: Iterable[list[int]], at_once: int = 4) -> None:
        """Each answer is right; so many are asked for at the same time."""
        places = asyncio.Semaphore(at_once)

        async def one(prompt: list[int]) -> None:
            async with places:
                await self.text(prompt)

        await asyncio.gather(*(one(prompt) for prompt in prompts))

    async def restart_server(self) -> None:
        """The cache server is killed; another one serves, and every engine is connected to it."""
        old = self.server()
        connections = await self.counted("connections")
        self.cluster.killed.add("cache")
        old.kill()
        end = time.monotonic() + 2 * DEADLINE_S
        while await self.counted("connections") < connections + len(self.cluster.nodes):
            assert time.monotonic() < end, self.cluster.up.story()
            await asyncio.sleep(POLL_S)

    def server(self) -> psutil.Process:
        """The cache server's process."""
        (pid,) = self.cluster.up.pids(CACHE_PROGRAM)
        return psutil.Process(pid)


@asynccontextmanager
async def cached_cluster(
    folder: Path,
    tiers: str,
    *,
    ranks: int = 1,
    replicas: int = 1,
    staging: int = 4 * SLOT,
    step_tokens: int = 256,
    seconds_per_step: float = 0.0,
    policy: str = "{}",
) -> AsyncIterator[CachedCluster]:
    """It serves inside; afterwards it is idle, its engines and its cache server have not died, and
    no log tells of a fault.
    """
    socket = folder / "cache.sock"
    text = CACHED.format(
        name=f"cached-{folder.name}"[:40].rstrip("-_").replace("_", "-"), socket=socket,
        staging=staging, tiers=tiers, ranks=ranks, replicas=replicas,
        step_tokens=step_tokens, seconds_per_step=seconds_per_step, policy=policy,
    )  # fmt: skip
    async with running_cluster(folder, text) as cluster:
        check = await IdleCheck.begin(cluster)
        found = CachedCluster(cluster, socket)
        server = found.server()
        yield found
        await check.end()
        await found.rest()
        assert found.server() == server or "cache" in cluster.killed, "the cache server has died"


def prompts_of(count: int, chunks: int, start: int) -> list[list[int]]:
    """Prompts of so many whole chunks and a few tokens more, no two of which share a chunk."""
    return [prompt_of(chunks * CHUNK_TOKENS + 5, number=start + n) for n in range(count)]
