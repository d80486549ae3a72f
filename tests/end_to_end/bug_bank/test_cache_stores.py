"""Stores of the shared cache that lose, spoil or refuse what was put there, or do not answer: texts
are right, nobody fails, and what is gone comes back.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import obstore
import pytest
import redis
from obstore.store import S3Store
from support.bank_client import LONG, ask, completion
from support.cached_cluster import SLOT, cached_cluster, prompts_of
from support.mock_cluster import alone
from support.mock_engines import POLL_S
from support.mooncake_store import MooncakePlace
from support.small_disk import SmallDisk, spoil
from support.store_servers import S3Server, redis_server

from splitserve.kv_transfer.cache.chunk_format import decode_header, verify_body
from splitserve.kv_transfer.cache.tiers.base import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from support.cached_cluster import CachedCluster
    from support.store_servers import StoreServer

PREFIX = b"splitserve:"
SLOW: dict[str, Any] = {"step_tokens": 64, "seconds_per_step": 0.02}
"""An engine for which a load of some chunks pays, whatever the machine is doing besides."""
WAIT_S = 40.0
"""For hits to come back: the breaker's pauses and a loaded machine."""
CALM_S = 20.0
"""After which a dead store costs nothing any more."""
CHUNKS = 3
WAYS = (
    ("halved", 0),
    ("flipped", HEADER_BYTES // 2),
    ("flipped", HEADER_BYTES + 100),
    ("emptied", 0),
)


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
        async with cached_cluster(tmp_path, tiers, ranks=2, **SLOW) as cached:
            await cached.texts(asked)
            await _until_stored(cached, asked, lambda: client.info("stats")["evicted_keys"], 1)
            loading = asyncio.create_task(cached.texts(asked))
            keys = client.keys(PREFIX + b"*")
            client.delete(*random.Random(29).sample(keys, len(keys) // 2))
            await loading
            for is_of in (_firsts, _lasts):
                await cached.rest()
                await _until_stored(cached, asked, lambda of=is_of: len(of(client)), 1)
                client.delete(*is_of(client))
                await cached.texts(asked)
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
    """A30 (LMCache/LMCache#4991): the disk is full in the middle of each chunk; later files are
    halved or empty, or a byte of the header or of the body is flipped. The same prompts get the
    right texts, what is spoiled is counted, and after a new start of the server and one more round
    none of it is left.
    """
    tiers = (
        f"[{{type: cpu, capacity_bytes: {8 * SLOT}}}, "
        f"{{type: disk, capacity_bytes: 3 MiB, path: {disk.folder / 'tier'}}}]"
    )
    asked = prompts_of(6, chunks=CHUNKS, start=200)
    async with cached_cluster(tmp_path, tiers, **SLOW) as cached:
        with disk.full(cached.server().pid):
            await cached.texts(asked, at_once=2)
            await cached.rest()
            assert not disk.chunk_files
            await cached.restart_server()
        await _until_stored(cached, asked, lambda: len(disk.chunk_files), 6 * CHUNKS)
        _spoil_some(disk)
        await cached.texts(asked, at_once=2)
        assert (await cached.rest()).counters["broken_chunks"] > 0
        for _ in range(CHUNKS + 1):  # Behind a spoiled chunk of a prompt none is read.
            await cached.restart_server()
            await cached.texts(asked)
            if not (await cached.rest()).counters.get("broken_chunks"):
                break
        for path in disk.chunk_files:
            content = memoryview(path.read_bytes())
            header = decode_header(content[:HEADER_BYTES], bytes.fromhex(path.name), None)
            verify_body(header, content[HEADER_BYTES:])


def _spoil_some(disk: SmallDisk) -> None:
    """Two of three files, each in one of the ways."""
    for number, path in enumerate(disk.chunk_files):
        if number % 3:
            spoil(path, *WAYS[number % len(WAYS)])


async def _until_stored(
    cached: CachedCluster, asked: list[list[int]], count: Callable[[], int], enough: int
) -> None:
    """So many chunks are stored; prompts are asked again until then."""
    end = time.monotonic() + WAIT_S
    while count() < enough:
        assert time.monotonic() < end, f"{count()} chunks\n{cached.cluster.up.story()}"
        await cached.texts(asked, at_once=2)
        await cached.rest()


@pytest.fixture
def s3(free_port: Callable[[], int], tmp_path: Path) -> Iterator[S3Server]:
    """A server of objects with one bucket."""
    server = S3Server(free_port(), tmp_path)
    server.make_bucket("chunks")
    yield server
    server.kill()


async def test_objects_that_somebody_else_removes(tmp_path: Path, s3: S3Server) -> None:
    """A33 (LMCache PR#4745): all objects are removed out of band. The prompts are computed and
    stored again, and when they are asked once more, no read finds nothing.
    """
    access = {"access_key": "me", "secret_key": "mine", "region": "us-east-1"}
    store = S3Store(
        "chunks",
        endpoint=s3.endpoint,
        access_key_id=access["access_key"],
        secret_access_key=access["secret_key"],
        region=access["region"],
        client_options={"allow_http": True},
    )
    tiers = (
        f"[{{type: cpu, capacity_bytes: {4 * SLOT}}}, {{type: s3, url: 's3://chunks/here', "
        "options: {access_key: '${BANK_KEY}', secret_key: '${BANK_KEY}', "
        f"region: us-east-1, endpoint: '{s3.endpoint}'}}}}]"
    )

    def stored() -> list[str]:
        return [str(entry["path"]) for entry in obstore.list(store, "here").collect()]

    asked = prompts_of(10, chunks=2, start=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BANK_KEY", "me")
        async with cached_cluster(tmp_path, tiers, **SLOW) as cached:
            await _until_stored(cached, asked, lambda: len(stored()), 20)
            obstore.delete(store, stored())
            await cached.texts(asked)
            await _until_stored(cached, asked, lambda: len(stored()), 20)
            reads, failed = await cached.hits("s3"), await cached.counted("loads_failed")
            await cached.texts(asked)
            assert await cached.hits("s3") > reads
            assert await cached.counted("loads_failed") == failed


@pytest.fixture
def plain_redis(free_port: Callable[[], int], tmp_path: Path) -> Iterator[StoreServer]:
    server = redis_server(free_port(), tmp_path)
    yield server
    server.kill()


async def test_redis_under_steady_load(tmp_path: Path, plain_redis: StoreServer) -> None:
    """A34 (LMCache/LMCache#1938): under steady load Redis is killed, comes back empty, stands still
    and goes on. Nobody gets an error, first tokens come as fast as without a cache within seconds,
    and hits resume by themselves.
    """
    tiers = f"[{{type: cpu, capacity_bytes: {4 * SLOT}}}, {_redis_tier(plain_redis.port)}]"
    asked = prompts_of(4, chunks=4, start=400)
    async with cached_cluster(tmp_path, tiers, **SLOW) as cached:
        first = [await _took_s(cached, prompt) for prompt in asked]
        without_s = statistics.median(first)
        load = SteadyLoad(cached, asked)
        async with load.running() as running:
            await _hits_resume(cached, running, "redis")
            for fail, mend in (
                (plain_redis.kill, plain_redis.start),
                (plain_redis.stand_still, plain_redis.go_on),
            ):
                fail()
                await load.until_as_fast_as(without_s * 1.5 + 0.1, running)
                await asyncio.to_thread(mend)
                await _hits_resume(cached, running, "redis")


@pytest.fixture
def mooncake(free_port: Callable[[], int], tmp_path: Path) -> Iterator[MooncakePlace]:
    place = MooncakePlace(free_port, tmp_path)
    yield place
    place.master.close()


@pytest.mark.parametrize("stands_still", [False, pytest.param(True, marks=LONG)])
async def test_mooncake_under_steady_load(
    tmp_path: Path, mooncake: MooncakePlace, stands_still: bool
) -> None:
    """Under steady load, with everything sealed, the owner of the store's memory ends and comes
    back empty, then the master, or both stand still and go on. Nobody gets an error, first tokens
    come as fast as without a cache within seconds, and hits resume by themselves.
    """
    (owner,) = mooncake.master.owners
    settings = mooncake.master.tier_settings(options={"timeout_s": "1", "connect_timeout_s": "1"})
    options = ", ".join(f"{name}: '{value}'" for name, value in settings.options.items())
    tier = f"{{type: mooncake, url: '{settings.url}', options: {{{options}}}}}"
    secret = tmp_path / "secret"
    secret.write_text("5a" * 32)
    secret.chmod(0o600)
    sealed = f"\n  encrypt: true\n  secret_file: {secret}"
    tiers = f"[{{type: cpu, capacity_bytes: {4 * SLOT}}}, {tier}]"
    asked = prompts_of(4, chunks=4, start=500)

    def come_back() -> None:
        owner.start()
        mooncake.master.until_segments(1)

    ways: list[tuple[Callable[[], None], Callable[[], None]]] = [
        (owner.kill, come_back),
        (mooncake.server.kill, mooncake.renew),
    ]
    if stands_still:
        ways = [(each.stand_still, each.go_on) for each in (owner, mooncake.server)]
    async with cached_cluster(tmp_path, tiers + sealed, **SLOW) as cached:
        without_s = statistics.median([await _took_s(cached, prompt) for prompt in asked])
        load = SteadyLoad(cached, asked)
        async with load.running() as running:
            await _hits_resume(cached, running, "mooncake")
            for fail, mend in ways:
                fail()
                await load.until_as_fast_as(without_s * 1.5 + 0.1, running)
                await asyncio.to_thread(mend)
                await _hits_resume(cached, running, "mooncake")


async def _took_s(cached: CachedCluster, prompt: list[int]) -> float:
    """Seconds to the first token, which is all that is asked for; the text is right."""
    began = time.monotonic()
    answer = await ask(cached.cluster.url, completion(prompt, 1))
    assert answer.text == alone(prompt, 1)
    return time.monotonic() - began


class SteadyLoad:
    """One request after the other, each of which has to succeed."""

    def __init__(self, cached: CachedCluster, prompts: list[list[int]]) -> None:
        self.took_s: list[float] = []
        self._is_over = False
        self._cached = cached
        self._prompts = prompts

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """It runs inside."""
        task = asyncio.create_task(self._run())
        try:
            yield task
            self._is_over = True
            await task
        finally:
            task.cancel()

    async def _run(self) -> None:
        for prompt in itertools.cycle(self._prompts):
            if self._is_over:
                return
            self.took_s.append(await _took_s(self._cached, prompt))

    async def until_as_fast_as(self, limit_s: float, running: asyncio.Task[None]) -> None:
        """From some moment within ``CALM_S`` on, a whole round of prompts is."""
        end, start = time.monotonic() + CALM_S, len(self.took_s)
        while True:
            latest = self.took_s[start:][-len(self._prompts) :]
            if len(latest) == len(self._prompts) and max(latest) <= limit_s:
                return
            assert not running.done(), running.exception()
            assert time.monotonic() < end, f"{limit_s:.3f} s; {self.took_s[start:]}"
            await asyncio.sleep(POLL_S)


async def _hits_resume(cached: CachedCluster, running: asyncio.Task[None], tier: str) -> None:
    """Chunks are read from that tier."""
    before, end = await cached.hits(tier), time.monotonic() + WAIT_S
    while await cached.hits(tier) < before + 8:
        assert not running.done(), running.exception()
        assert time.monotonic() < end, cached.cluster.up.story()
        await asyncio.sleep(POLL_S)
