"""Clients that leave while their request waits for chunks of the shared cache."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from support.bank_client import gone, stream
from support.cached_cluster import SLOT, cached_cluster, prompts_of
from support.mock_engines import POLL_S

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE_S = 20.0
ALWAYS_SPLIT = "{prefix_routing: false}"
"""Also prompts that the decode node could load by itself."""


async def test_a_client_that_leaves_during_a_load(tmp_path: Path) -> None:
    """Both engines wait for a chunk whose file does not let itself be read; the client leaves, and
    later the read ends. Both engines live, hold nothing, and answer the same prompt rightly.
    """
    folder = tmp_path / "disk"
    tiers = (
        f"[{{type: cpu, capacity_bytes: {16 * SLOT}}}, "
        f"{{type: disk, capacity_bytes: 8 MiB, path: {folder}}}]"
    )
    (prompt,) = prompts_of(1, chunks=3, start=700)
    async with cached_cluster(
        tmp_path, tiers, step_tokens=64, seconds_per_step=0.05, policy=ALWAYS_SPLIT
    ) as cached:
        await cached.text(prompt)
        await cached.rest()
        await cached.restart_server()
        files = sorted((folder / "chunks").glob("*/" + "?" * 64))
        assert len(files) == 3
        for path in files:  # Opening such a file waits for somebody who writes.
            path.unlink()
            os.mkfifo(path, 0o600)
        asking = asyncio.create_task(stream(cached.cluster, prompt))
        end = time.monotonic() + DEADLINE_S
        while (await cached.stat()).counters["open_loads"] < 2:
            assert time.monotonic() < end, cached.cluster.up.story()
            await asyncio.sleep(POLL_S)
        await gone(asking)
        for node in cached.cluster.nodes:
            engine = await cached.cluster.engine(node)
            await engine.until(lambda status: status.running == 0, "end of the request")
        writers = [os.open(path, os.O_RDWR) for path in files]
        await cached.text(prompt)
        await cached.rest()
        for writer in writers:
            os.close(writer)
