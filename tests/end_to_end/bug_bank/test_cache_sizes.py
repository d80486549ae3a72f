"""An arena that is smaller than a prompt, and the meaning of its size: per host, and no more than
the machine has.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from support.bank_client import LONG
from support.cached_cluster import CACHED, CHUNK_TOKENS, SLOT, cached_cluster, prompts_of
from support.up_process import UpProcess

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

NORMAL_S = 15.0
"""``first_token_deadline_s`` of these clusters."""
LONG_CHUNKS = 12


@pytest.mark.parametrize("arena", ["no cpu tier", pytest.param("cpu tier", marks=LONG)])
async def test_a_prompt_larger_than_the_arena(tmp_path: Path, arena: str) -> None:
    """A31 (LMCache/LMCache#2942): room for four chunks in memory, as staging or as a cpu tier, and
    a prompt of twelve on disk. After a new start of the cache server it is asked for together with
    eight others: all are answered rightly within the normal time, and more of it than fits into
    memory at once was loaded.
    """
    disk = f"{{type: disk, capacity_bytes: 8 MiB, path: {tmp_path / 'disk'}}}"
    cpu = f"{{type: cpu, capacity_bytes: {4 * SLOT}}}, " if arena == "cpu tier" else ""
    large, others = prompts_of(1, LONG_CHUNKS, start=500)[0], prompts_of(8, chunks=3, start=510)
    async with cached_cluster(
        tmp_path, f"[{cpu}{disk}]", step_tokens=CHUNK_TOKENS, seconds_per_step=0.02
    ) as cached:
        end = time.monotonic() + 2 * NORMAL_S
        while len(_chunks_in(tmp_path / "disk")) < LONG_CHUNKS:
            assert time.monotonic() < end, cached.cluster.up.story()
            await cached.text(large)
            await cached.rest()
        await cached.restart_server()
        before = await cached.loaded()
        async with asyncio.timeout(NORMAL_S):
            await cached.texts([large, *others], at_once=9)
        assert await cached.loaded() - before > 4


def _chunks_in(folder: Path) -> list[Path]:
    return list((folder / "chunks").glob("*/" + "?" * 64))


async def test_the_size_is_that_of_the_host(tmp_path: Path) -> None:
    """A32 (LMCache/LMCache#2901): two prefill nodes and a decode node of two ranks each map one
    arena: all processes together hold as much memory of it as was configured, once.
    """
    size = 32 << 20
    tiers = f"[{{type: cpu, capacity_bytes: {size}}}]"
    async with cached_cluster(tmp_path, tiers, ranks=2, replicas=2) as cached:
        await cached.texts(prompts_of(4, chunks=3, start=600))
        stat = await cached.rest()
        assert stat.arena.bytes == size
        assert len({engine.engine for engine in stat.engines}) == 3
        shares = [_arena_bytes(process) for process in cached.cluster.up.processes()]
        assert sum(share > 0 for share in shares) >= 2
        assert size * 0.9 <= sum(shares) <= size * 1.05


def _arena_bytes(process: psutil.Process) -> float:
    """The process's share of the arena's memory: what it shares counts in parts."""
    try:
        maps: Iterable[psutil._pslinux.pmmap_grouped] = process.memory_maps()
    except psutil.Error:
        return 0.0
    return sum(each.pss for each in maps if "splitserve-cache" in each.path)


@pytest.mark.parametrize("kind", ["cpu", "staging"])
def test_more_than_the_machine_has(tmp_path: Path, kind: str) -> None:
    """A32: twice the machine's memory is refused before anything is started, with both numbers."""
    size = 2 * psutil.virtual_memory().total
    disk = f"{{type: disk, capacity_bytes: 1 MiB, path: {tmp_path / 'disk'}}}"
    tiers = f"[{{type: cpu, capacity_bytes: {size}}}]" if kind == "cpu" else f"[{disk}]"
    config = tmp_path / "cluster.yaml"
    config.write_text(
        CACHED.format(
            name="too-large",
            socket=tmp_path / "cache.sock",
            staging=size if kind == "staging" else SLOT,
            tiers=tiers,
            ranks=1,
            replicas=1,
            step_tokens=256,
            seconds_per_step=0.0,
            policy="{}",
        )
    )
    up = UpProcess(config, tmp_path)
    try:
        assert up.wait_for_end(60) == 2, up.output()
    finally:
        up.close()
    key = "cache.tiers[0].capacity_bytes" if kind == "cpu" else "cache.staging_bytes"
    assert key in up.output()
    found = re.search(r"([0-9.]+) GB of cache.* ([0-9.]+) GB available", up.output())
    assert found is not None, up.output()
    assert float(found[1]) == pytest.approx(size / 1e9, rel=0.01)
    assert 0 < float(found[2]) < size / 1e9 / 2
    assert "nothing was started" in up.output()
