"""Stores of the shared cache that lose, spoil or refuse what was put there, or do not answer: texts
are right, nobody fails, and what is gone comes back.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
import redis
from support.bank_client import LONG
from support.cached_cluster import SLOT, cached_cluster, prompts_of
from support.small_disk import SmallDisk, spoil
from support.store_servers import redis_server

from splitserve.kv_transfer.cache.chunk_format import decode_header
from splitserve.kv_transfer.cache.tiers.base import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.store_servers import StoreServer

PREFIX = b"splitserve:"
WAIT_S = 20.0
"""For hits to come back: the breaker's pauses and a loaded machine."""
CALM_S = 8.0
"""After which a dead store costs nothing any more."""


@pytest.fixture
def free_redis_port(free_port: Callable[[], int]) -> int:
    return free_port()


def _redis_tier(port: int) -> str:
    options = "{timeout_s: '1', connect_timeout_s: '1'}"
    return f"{{type: redis, url: 'redis://127.0.0.1:{port}/0', options: {options}}}"


@pytest.fixture
def evicting(free_redis_port: int, tmp_path: Path) -> Iterator[StoreServer]:
    """A Redis that throws away what was not used for long."""
    policy = ("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    server = redis_server(free_redis_port, tmp_path, *policy)
    yield server
    server.kill()


@pytest.mark.parametrize("prompts", [20, pytest.param(400, marks=LONG)])
async def test_redis_evicts_and_loses_keys(
    tmp_path: Path, evicting: StoreServer, prompts: int
) -> None:
    """A29 (LMCache/LMCache#1467): three times as much as Redis holds, two ranks; then a random half
    of the keys is deleted under load, then every prompt's first chunk, then every last one. Texts
    are right, nobody dies, and chunks are loaded in between.
    """
    tiers = f"[{{type: cpu, capacity_bytes: {40 * SLOT}}}, {_redis_tier(evicting.port)}]"
    asked = prompts_of(prompts, chunks=6, start=100)
    with redis.Redis(port=evicting.port) as client:
        client.config_set("maxmemory", f"{4 * prompts // 20}mb")
        async with cached_cluster(tmp_path, tiers, ranks=2) as cached:
            await cached.texts(asked)
            await cached.texts(asked)
            assert client.info("stats")["evicted_keys"] > 0
            loading = asyncio.create_task(cached.texts(asked))
            keys = client.keys(PREFIX + b"*")
            client.delete(*random.Random(29).sample(keys, len(keys) // 2))
            await loading
            for is_of in (_firsts, _lasts):
                await cached.rest()
                chosen = is_of(client)
                assert chosen
                client.delete(*chosen)
                before = await cached.loaded()
                await cached.texts(asked)
                assert await cached.loaded() > before
            assert await cached.hits("redis") > 0


def _parents(client: redis.Redis) -> dict[bytes, bytes]:
    """Each chunk that is stored, and the one before it."""
    found = {}
    for name in client.keys(PREFIX + b"*"):
        key = bytes.fromhex(name.removeprefix(PREFIX).decode())
        front = client.getrange(name, 0, HEADER_BYTES - 1)
        if front:  # Else evicted since.
            found[key] = decode_header(memoryview(front), key, None).parent
    return found


def _firsts(client: redis.Redis) -> list[bytes]:
    return [PREFIX + key.hex().encode() for key, parent in _parents(client).items() if not parent]


def _lasts(client: redis.Redis) -> list[bytes]:
    parents = _parents(client)
    before_another = set(parents.values())
    return [PREFIX + key.hex().encode() for key in parents if key not in before_another]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk of its own, of 4 MiB."""
    disk = SmallDisk(tmp_path / "disk", 4 << 20)
    yield disk
    disk.close()


async def test_a_disk_that_is_full_and_files_that_are_spoiled(
    tmp_path: Path, disk: SmallDisk
) -> None:
    """A30 (LMCache/LMCache#4991): the disk is full in the middle of each chunk; later some files
    are halved, some empty, in some a byte is flipped, in the header or in the body. The same
    prompts get the right texts, every spoiled chunk is counted, and none of them stays.
    """
    tiers = (
        f"[{{type: cpu, capacity_bytes: {8 * SLOT}}}, "
        f"{{type: disk, capacity_bytes: 3 MiB, path: {disk.folder / 'tier'}}}]"
    )
    asked = prompts_of(8, chunks=4, start=200)
    async with cached_cluster(tmp_path, tiers) as cached:
        with disk.full(cached.server().pid):
            await cached.texts(asked, at_once=2)
            await cached.rest()
            assert not disk.chunk_files
            await cached.texts(asked, at_once=2)
        await _until_on_disk(cached, disk, asked)
        files = disk.chunk_files
        content = {path: path.read_bytes() for path in files}
        for number, path in enumerate(files):
            way, at = _WAYS[number % len(_WAYS)]
            if way:
                spoil(path, way, at)
        await cached.texts(asked, at_once=2)
        await cached.texts(asked, at_once=2)
        stat = await cached.rest()
        assert stat.counters["broken_chunks"] > 0
        for path in disk.chunk_files:
            if path in content:
                way, _ = _WAYS[files.index(path) % len(_WAYS)]
                is_whole = path.stat().st_size == len(content[path])
                assert is_whole or not await _is_asked(cached, asked, path)


_WAYS = (
    ("halved", 0),
    ("flipped", HEADER_BYTES // 2),
    ("", 0),
    ("flipped", HEADER_BYTES + 100),
    ("emptied", 0),
)
