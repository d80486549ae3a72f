"""What every tier must do, with the real stores: a dictionary, the arena, a file system, Redis,
Mooncake, S3.
"""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
from support.chunks import (
    ODD,
    PAGES,
    Chunk,
    empty_like,
    make_chunk,
    new_body,
    unaligned_like,
    verify,
)
from support.mooncake_store import Bystander, Master, MooncakeStore
from support.store_servers import S3Server, StoreServer, redis_server
from support.tier_stores import ArenaStore, DiskStore, MemoryStore, RedisStore, S3Store, Store

from splitserve.kv_transfer.cache.chunk_format import BadChunkError
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.tiers import redis as redis_tier
from splitserve.kv_transfer.cache.tiers.base import (
    ChunkBuffers,
    ReadOutcome,
    Tier,
    WriteOutcome,
    new_header,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HIT, ABSENT, BROKEN = ReadOutcome.HIT, ReadOutcome.ABSENT, ReadOutcome.BROKEN
MIB = 1 << 20
ROOM_BYTES = 2 * MIB
JOIN_S = 60.0


@pytest.fixture(scope="module")
def redis_process(
    free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoreServer]:
    server = redis_server(free_port(), tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def s3_process(
    free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[S3Server]:
    server = S3Server(free_port(), tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def mooncake(
    free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Master, Bystander]]:
    master = Master(free_port, tmp_path_factory.mktemp("mooncake"))
    master.add_owner(64)
    bystander = Bystander(master)
    yield master, bystander
    bystander.close()
    master.close()


STORES = ["memory", "cpu", "disk", "disk-buffered", "redis", "redis-in-pieces"]
STORES += ["mooncake", "s3", "s3-in-parts"]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty one of each kind."""
    made = make_store(request, request.param, tmp_path)
    made.tier.check()
    yield made
    made.tier.close()
    if isinstance(made, RedisStore):
        made.close()


def make_store(request: pytest.FixtureRequest, kind: str, folder: Path) -> Store:
    if kind == "memory":
        return MemoryStore()
    if kind == "cpu":
        return ArenaStore(100, PAGES.chunk_bytes)
    if kind.startswith("redis"):
        if kind == "redis-in-pieces":
            patch = request.getfixturevalue("monkeypatch")
            patch.setattr(redis_tier, "WHOLE_BYTES", 60_000)
            patch.setattr(redis_tier, "PIECE_BYTES", 20_000)
        return RedisStore(request.getfixturevalue("redis_process").port)
    if kind == "mooncake":
        return MooncakeStore(*request.getfixturevalue("mooncake"))
    if kind.startswith("s3"):
        parts = 20_000 if kind == "s3-in-parts" else 8 * MIB
        return S3Store(request.getfixturevalue("s3_process"), parts)
    return DiskStore(folder, "buffered" if kind == "disk-buffered" else "direct")


def read_one(tier: Tier, chunk: Chunk) -> tuple[ReadOutcome, Any]:
    buffers = empty_like(chunk)
    [(index, outcome)] = tier.read([buffers])
    assert index == 0
    return outcome, buffers


def test_bodies_may_be_shorter_where_the_reader_says_so(store: Store) -> None:
    """They are at the beginning of the buffer, and their length is told; a reader that expects
    whole ones takes them for broken, and nobody takes longer ones or a header alone.
    """
    full = make_chunk(1)
    header, body = full.buffers.header, full.buffers.body
    keys = [bytes([number]) * 32 for number in range(5)]
    for key, size in zip(keys, (4096, 8192, len(body)), strict=False):
        assert store.tier.write([ChunkBuffers(key, header, body[:size])]) == [WriteOutcome.WRITTEN]
        room = ChunkBuffers(key, new_header(), new_body(len(body)), may_be_shorter=True)
        assert list(store.tier.read([room])) == [(0, HIT)]
        assert room.body_bytes == size
        assert bytes(room.header) == bytes(header)
        assert bytes(room.found_body) == bytes(body[:size])
    store.tier.write([ChunkBuffers(keys[3], header, body[:4096])])
    store.tier.write([ChunkBuffers(keys[4], header, body)])
    whole = ChunkBuffers(keys[3], new_header(), new_body(len(body)))
    assert list(store.tier.read([whole])) == [(0, BROKEN)]
    small = ChunkBuffers(keys[4], new_header(), new_body(8192), may_be_shorter=True)
    assert list(store.tier.read([small])) == [(0, BROKEN)]
    for key in keys[3:]:
        room = ChunkBuffers(key, new_header(), new_body(len(body)), may_be_shorter=True)
        assert list(store.tier.read([room])) == [(0, ABSENT)]


@pytest.mark.parametrize("geometry", [PAGES, ODD], ids=["pages", "odd"])
def test_what_was_written_is_read(store: Store, geometry: Any) -> None:
    """A dozen chunks, into aligned buffers and into unaligned ones; those that were never written
    are absent between them.
    """
    pieces = (1, geometry.heads)
    chunks = [make_chunk(seed, geometry, pieces=pieces[seed % 2]) for seed in range(12)]
    assert store.tier.write([chunk.buffers for chunk in chunks[:8]]) == [WriteOutcome.WRITTEN] * 8
    assert store.tier.contains([chunk.key for chunk in chunks]) == [True] * 8 + [False] * 4
    for like in (empty_like, unaligned_like):
        order = [9, 0, 7, 10, 3, 2, 11, 1, 4, 5, 8, 6]
        buffers = [like(chunks[number]) for number in order]
        outcomes = dict(store.tier.read(buffers))
        assert sorted(outcomes) == list(range(12))
        for place, number in enumerate(order):
            assert outcomes[place] is (HIT if number < 8 else ABSENT)
            if number < 8:
                assert verify(buffers[place]) == chunks[number].header
                assert buffers[place].body == chunks[number].buffers.body


def test_nothing_is_asked_for(store: Store) -> None:
    """Empty lists are no error."""
    tier = store.tier
    assert tier.contains([]) == list(tier.read([])) == tier.write([]) == []
    assert tier.remove([]) == 0


def test_what_was_removed_is_absent(store: Store) -> None:
    """And is counted once; the others stay."""
    chunks = [make_chunk(seed) for seed in range(4)]
    store.tier.write([chunk.buffers for chunk in chunks[:3]])
    assert store.tier.remove([chunks[0].key, chunks[1].key, chunks[3].key]) == 2
    assert store.tier.remove([chunks[0].key]) == 0
    assert store.tier.contains([chunk.key for chunk in chunks]) == [False, False, True, False]
    assert read_one(store.tier, chunks[0])[0] is ABSENT
    assert read_one(store.tier, chunks[2])[0] is HIT


def test_another_write_replaces(store: Store) -> None:
    """The last bytes are read, though they have another size."""
    first, second = make_chunk(1), make_chunk(1, ODD)
    store.tier.write([first.buffers])
    store.tier.write([second.buffers])
    outcome, buffers = read_one(store.tier, second)
    assert outcome is HIT
    assert verify(buffers) == second.header


def test_a_chunk_that_somebody_removed_is_absent(store: Store) -> None:
    """It was there a moment ago: no error, and it stays absent."""
    chunk = make_chunk(5)
    store.tier.write([chunk.buffers])
    assert store.take(chunk.key) == chunk.content
    assert read_one(store.tier, chunk)[0] is ABSENT
    assert store.tier.contains([chunk.key]) == [False]


@pytest.mark.parametrize("size", [0, 1, 16_384, 30_000, -1, "longer"])
def test_a_chunk_of_another_size_is_broken(store: Store, size: int | str) -> None:
    """Emptied, cut anywhere or too long: it is removed, and its neighbours are read."""
    broken, whole = make_chunk(6), make_chunk(7)
    store.tier.write([whole.buffers])
    store.put(broken.key, broken.content + b"x" if size == "longer" else broken.content[:size])  # type: ignore[misc]
    buffers = [empty_like(whole), empty_like(broken), empty_like(whole)]
    assert dict(store.tier.read(buffers)) == {0: HIT, 1: BROKEN, 2: HIT}
    assert verify(buffers[2]) == whole.header
    assert store.take(broken.key) is None
    assert read_one(store.tier, broken)[0] is ABSENT


@pytest.mark.parametrize("place", [0, 9, 100, 16_380, 16_384, 60_000, -1])
def test_a_flipped_bit_is_found(store: Store, place: int) -> None:
    """Wherever it is: the tier delivers, the reader refuses."""
    chunk = make_chunk(8)
    content = bytearray(chunk.content)
    content[place] ^= 0x10
    store.put(chunk.key, bytes(content))
    outcome, buffers = read_one(store.tier, chunk)
    assert outcome is HIT
    with pytest.raises(BadChunkError):
        verify(buffers)


def test_somebody_elses_bytes_are_found(store: Store) -> None:
    """Of the right size under a chunk's name: noise, and another chunk's content."""
    chunk, other = make_chunk(9), make_chunk(10)
    for content in (os.urandom(len(chunk.content)), other.content):
        store.put(chunk.key, content)
        outcome, buffers = read_one(store.tier, chunk)
        assert outcome is HIT
        with pytest.raises(BadChunkError):
            verify(buffers)


def test_readers_see_one_write_or_the_other(store: Store) -> None:
    """Two writers of one key with different bytes, and a reader meanwhile: never a mixture. A tier
    that reads in parts may miss it.
    """
    versions = [make_chunk(11, content=number) for number in range(2)]
    store.tier.write([versions[0].buffers])
    ended = threading.Event()

    def keep_writing(chunk: Chunk) -> int:
        times = 0
        while not ended.is_set():
            with store.turn:
                assert store.tier.write([chunk.buffers]) == [WriteOutcome.WRITTEN]
            times += 1
        return times

    seen = set()
    with ThreadPoolExecutor(2) as threads:
        writers = [threads.submit(keep_writing, chunk) for chunk in versions]
        try:
            for _ in range(30):
                outcome, buffers = read_one(store.tier, versions[0])
                assert outcome in (HIT, ABSENT)
                if outcome is HIT:
                    seen.add(verify(buffers).checksums)
        finally:
            ended.set()
        assert all(writer.result(JOIN_S) for writer in writers)
    assert read_one(store.tier, versions[0])[0] is HIT
    assert seen <= {chunk.header.checksums for chunk in versions}


def test_calls_from_many_threads(store: Store) -> None:
    """Each thread's chunks are its own."""

    def work(number: int) -> None:
        chunks = [make_chunk(100 + number * 10 + i) for i in range(3)]
        assert store.tier.write([c.buffers for c in chunks]) == [WriteOutcome.WRITTEN] * 3
        buffers = [empty_like(chunk) for chunk in chunks]
        assert dict(store.tier.read(buffers)) == dict.fromkeys(range(3), HIT)
        assert [verify(b) for b in buffers] == [chunk.header for chunk in chunks]
        assert store.tier.remove([chunk.key for chunk in chunks]) == 3

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, number) for number in range(16)]:
            done.result(JOIN_S)


def test_a_read_that_is_given_up(store: Store) -> None:
    """Its iterator is closed after the first chunk: nothing is written to the buffers later, and
    the next read gets its own answers.
    """
    chunks = [make_chunk(seed) for seed in range(20, 28)]
    store.tier.write([chunk.buffers for chunk in chunks])
    buffers = [empty_like(chunk) for chunk in chunks]
    reading = store.tier.read(buffers)
    next(iter(reading))
    reading.close()  # type: ignore[attr-defined]
    for buffer in buffers:
        buffer.body[:] = bytes(len(buffer.body))
    outcome, found = read_one(store.tier, chunks[-1])
    assert outcome is HIT
    assert verify(found) == chunks[-1].header
    assert all(buffer.body == bytes(len(buffer.body)) for buffer in buffers)


def test_only_an_exclusive_tier_lists_what_it_has(store: Store) -> None:
    """With sizes and headers as stored; a shared store says nothing."""
    chunks = [make_chunk(seed, ODD if seed % 2 else PAGES) for seed in range(30, 36)]
    for chunk in chunks:
        store.tier.write([chunk.buffers])
    listed = {(stored.key, stored.size_bytes, stored.header) for stored in store.tier.stored()}
    if store.tier.capabilities.is_exclusive:
        assert listed == {(c.key, len(c.content), c.content[:16_384]) for c in chunks}
    else:
        assert listed == set()


def test_every_tier_lists_what_begins_alike(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks of two tenants: those of one, those of everybody, those of nobody; what somebody
    else keeps there under another name is no chunk. They may be removed while they are listed.
    """
    monkeypatch.setattr(redis_tier, "KEYS_PER_COMMAND", 7)
    kinds = [b"A" * 8, b"B" * 8]
    keys = {tag: {tag + bytes([n]) * 24 for n in range(20)} for tag in kinds}
    like = make_chunk(50, ODD).buffers
    chunks = [ChunkBuffers(key, like.header, like.body) for tag in kinds for key in keys[tag]]
    store.tier.write(chunks)
    store.put(b"A" * 9, b"something else")
    for tag in kinds:
        assert set(store.tier.listed(tag)) == keys[tag]
    assert set(store.tier.listed(b"")) == keys[kinds[0]] | keys[kinds[1]]
    assert list(store.tier.listed(b"C" * 8)) == []
    removed = [key for key in store.tier.listed(kinds[0]) if store.tier.remove([key])]
    assert set(removed) == keys[kinds[0]]
    assert set(store.tier.listed(b"")) == keys[kinds[1]]


def test_a_remote_tier_tells_the_time(store: Store) -> None:
    """Its server's, which runs here; any other has no clock of its own."""
    told = store.tier.clock_unix_s()
    if store.tier.capabilities.is_remote:
        assert told == pytest.approx(time.time(), abs=10)
    else:
        assert told is None


def test_closing_again_is_no_error(store: Store) -> None:
    """Whoever closes it last need not know."""
    store.tier.close()
    store.tier.close()


def full_memory(_: pytest.FixtureRequest, __: Path) -> Iterator[Store]:
    yield MemoryStore(ROOM_BYTES)


def full_arena(_: pytest.FixtureRequest, __: Path) -> Iterator[Store]:
    """Of pinned chunks; others would make room."""
    store = ArenaStore(3, BIG.chunk_bytes, pins=True)
    store.tier.check()
    yield store
    store.tier.close()


def full_disk(_: pytest.FixtureRequest, folder: Path) -> Iterator[Store]:
    """A file system of 2 MiB, or where none may be mounted a limit on the size of each file."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    with small_files() if not mounted else nullcontext():
        store = DiskStore(folder, "direct")
        yield store
        store.tier.close()
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def full_redis(request: pytest.FixtureRequest, _: Path) -> Iterator[Store]:
    """With little ``maxmemory``, and the policy to refuse rather than evict."""
    store = RedisStore(request.getfixturevalue("redis_process").port)
    store._client.config_set("maxmemory-policy", "noeviction")
    used = store._client.info("memory")["used_memory"]
    store._client.config_set("maxmemory", used + ROOM_BYTES)
    yield store
    store._client.config_set("maxmemory", 0)
    store.tier.close()
    store.close()


@contextmanager
def small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES // 2, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


BIG = ChunkGeometry(
    layers=3,
    chunk_tokens=256,
    block_tokens=16,
    heads=4,
    key_bytes=256,
    value_bytes=256,
    item_bytes=2,
    order="rows",
)
"""1.5 MiB: one of them fits where there is room for two."""


@pytest.mark.parametrize("make", [full_memory, full_arena, full_disk, full_redis])
def test_a_full_store_is_an_outcome(
    request: pytest.FixtureRequest, tmp_path: Path, make: Any
) -> None:
    """What does not fit is not there, not even a part of it; when room is made it is written."""
    opened = make(request, tmp_path)
    store = next(opened)
    try:
        small, big = make_chunk(40, ODD), [make_chunk(seed, BIG) for seed in range(41, 45)]
        assert store.tier.write([small.buffers]) == [WriteOutcome.WRITTEN]
        outcomes = store.tier.write([chunk.buffers for chunk in big])
        assert outcomes[-1] is WriteOutcome.FULL
        written = [outcome is WriteOutcome.WRITTEN for outcome in outcomes]
        assert store.tier.contains([chunk.key for chunk in big]) == written
        if isinstance(store, DiskStore):
            there = [small, *itertools.compress(big, written)]
            assert store.names() == {chunk.key.hex() for chunk in there}
        outcome, buffers = read_one(store.tier, small)
        assert outcome is HIT
        assert verify(buffers) == small.header
        store.tier.remove([chunk.key for chunk in big])
        assert store.tier.write([make_chunk(46, ODD).buffers]) == [WriteOutcome.WRITTEN]
    finally:
        assert next(opened, None) is None
