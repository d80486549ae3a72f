"""What only a Mooncake Store does: owners of memory that are gone, leases, a client in a process of
its own, and ports that anybody may reach.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from support.chunks import Chunk, empty_like, make_chunk, verify
from support.mooncake_store import LEASE_S, MIB, Bystander, Master, MooncakeStore
from support.store_servers import POLL_S, START_DEADLINE_S

from splitserve.kv_transfer.cache.arena import Arena
from splitserve.kv_transfer.cache.chunk import Chunk as CacheChunk
from splitserve.kv_transfer.cache.chunk_codec import ChunkCodec
from splitserve.kv_transfer.cache.chunk_format import BadChunkError
from splitserve.kv_transfer.cache.header_room import HeaderRoom
from splitserve.kv_transfer.cache.sealing import Sealer
from splitserve.kv_transfer.cache.settings import TierSettings
from splitserve.kv_transfer.cache.tiers import registry
from splitserve.kv_transfer.cache.tiers.base import (
    HEADER_BYTES,
    ChunkBuffers,
    ReadOutcome,
    TierConfigError,
    TierUnavailableError,
    WriteOutcome,
    new_header,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from splitserve.kv_transfer.cache.tiers.mooncake import MooncakeTier

HIT, ABSENT = ReadOutcome.HIT, ReadOutcome.ABSENT
WRITTEN, FULL = WriteOutcome.WRITTEN, WriteOutcome.FULL
HASTY = {"timeout_s": "0.5", "connect_timeout_s": "0.5"}
HASTY_LIMIT_S = 0.5 + 1 + 1
"""For the master, for an owner (whole seconds), and then the process is ended."""
SLACK_S = 15.0
PROBE_S = 0.3


@pytest.fixture(scope="module")
def master(
    free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Master]:
    made = Master(free_port, tmp_path_factory.mktemp("mooncake"))
    made.add_owner(32)
    yield made
    made.close()


@pytest.fixture(scope="module")
def bystander(master: Master) -> Iterator[Bystander]:
    made = Bystander(master)
    yield made
    made.close()


@pytest.fixture
def store(master: Master, bystander: Bystander) -> Iterator[MooncakeStore]:
    made = MooncakeStore(master, bystander)
    yield made
    made.tier.close()


def until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + START_DEADLINE_S
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(POLL_S)


def pid_of(tier: MooncakeTier) -> int:
    """Of the process with Mooncake's client."""
    return tier.client_pid()


def read_all(tier: Any, chunks: list[Chunk]) -> list[ReadOutcome]:
    """Outcomes in order; every hit has the right bytes."""
    buffers = [empty_like(chunk) for chunk in chunks]
    outcomes = dict(tier.read(buffers))
    for index, chunk in enumerate(chunks):
        if outcomes[index] is HIT:
            assert verify(buffers[index]) == chunk.header
            assert buffers[index].body == chunk.buffers.body
    return [outcomes[index] for index in range(len(chunks))]


def test_what_lies_in_shared_memory_is_moved_in_place(store: MooncakeStore) -> None:
    """Small bodies and one larger than a call, written out of the arena and read into other places
    of it, some of which have room for more, headers into memory of theirs; a client that ran before
    maps both, and has memory of its own only for headers that lie elsewhere.
    """
    arena, room = Arena(48 * MIB), HeaderRoom(5)
    tier: Any = store.tier
    tier.check()
    pid = pid_of(tier)
    tier.use_memory(arena.shared)
    tier.use_memory(room.shared)
    sizes = [4096, 2 * MIB, 9 * MIB, 40_000, 40_000]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    written, read = [], []
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        key, header = os.urandom(32), new_header()
        header[:] = os.urandom(HEADER_BYTES)
        body = arena.memory.view[start : start + size]
        body[:] = os.urandom(size)
        written.append(ChunkBuffers(key, header, body))
        start, space = start + number * MIB + 16 * MIB, size + number // 2 * 1000
        body = arena.memory.view[start : start + space]
        read.append(ChunkBuffers(key, room.headers[number], body, may_be_shorter=space > size))
    assert tier.write(written) == [WRITTEN] * len(sizes)
    assert dict(tier.read(read)) == dict.fromkeys(range(len(sizes)), HIT)
    for put, got in zip(written, read, strict=True):
        assert put.header == got.header
        assert put.body == got.found_body
    maps = [line for line in _maps_of(pid) if "memfd:" in line]
    sizes_of = {line.split("memfd:")[1].split()[0]: _length(line) for line in maps}
    assert sizes_of["splitserve-cache"] == arena.size_bytes
    assert sizes_of["splitserve-headers"] == 5 * HEADER_BYTES
    assert sizes_of["splitserve-mooncake"] <= MIB
    tier.close()
    for chunk in (*written, *read):
        chunk.body.release()
    arena.close()
    room.close()


def _maps_of(pid: int) -> list[str]:
    with open(f"/proc/{pid}/maps") as file:
        return file.readlines()


def _length(line: str) -> int:
    begin, end = line.split()[0].split("-")
    return int(end, 16) - int(begin, 16)


def test_an_owner_that_is_killed_costs_misses(free_port: Callable[[], int], tmp_path: Path) -> None:
    """Of two: what it had is absent, without an error and at once; what the other one has is read.
    When the master has noticed, everything can be written again.
    """
    master = Master(free_port, tmp_path)
    try:
        owners = [master.add_owner(32) for _ in range(2)]
        tier = registry.create(master.tier_settings())
        chunks = [make_chunk(seed) for seed in range(24)]
        assert tier.write([chunk.buffers for chunk in chunks]) == [WRITTEN] * 24
        assert read_all(tier, chunks) == [HIT] * 24
        owners[0].kill()
        began = time.monotonic()
        outcomes = read_all(tier, chunks)
        assert time.monotonic() - began < SLACK_S
        assert set(outcomes) == {HIT, ABSENT}
        master.until_segments(1)
        kept = read_all(tier, chunks)
        assert all(
            outcome is HIT for outcome, had in zip(kept, outcomes, strict=True) if had is HIT
        )
        assert tier.write([chunk.buffers for chunk in chunks]) == [WRITTEN] * 24
        assert read_all(tier, chunks) == [HIT] * 24
        tier.close()
    finally:
        master.close()


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "new"])
def test_an_owner_that_stands_still_costs_the_timeout(
    free_port: Callable[[], int], tmp_path: Path, is_known: bool
) -> None:
    """Whether the client has met it before or not (then its own call would take a minute): an error
    soon, and when the owner goes on nothing is written to the buffers any more.
    """
    master = Master(free_port, tmp_path)
    try:
        owner = master.add_owner(32)
        chunk = make_chunk(50)
        tier = registry.create(master.tier_settings(options=HASTY))
        assert tier.write([chunk.buffers]) == [WRITTEN]
        if not is_known:
            tier.close()
            tier = registry.create(master.tier_settings(options=HASTY))
            assert tier.contains([chunk.key]) == [True]
        buffers = empty_like(chunk)
        owner.stand_still()
        try:
            began = time.monotonic()
            with pytest.raises(TierUnavailableError, match=r"mooncake://.*cannot be reached"):
                list(tier.read([buffers]))
            assert time.monotonic() - began < HASTY_LIMIT_S + SLACK_S
        finally:
            owner.go_on()
        until(lambda: tier.write([chunk.buffers]) == [WRITTEN], "nothing is taken any more")
        assert buffers.body == bytes(len(buffers.body))
        assert read_all(tier, [chunk]) == [HIT]
        tier.close()
    finally:
        master.close()


def test_a_client_that_dies_is_started_again(store: MooncakeStore) -> None:
    """One call may fail; the next ones have a new process, and what was stored is there."""
    tier: Any = store.tier
    chunk = make_chunk(60)
    tier.write([chunk.buffers])
    first = pid_of(tier)
    os.kill(first, signal.SIGKILL)
    until(lambda: not _runs(first), "it does not die")
    with pytest.raises(TierUnavailableError, match="has ended"):
        tier.contains([chunk.key])
    assert read_all(tier, [chunk]) == [HIT]
    assert pid_of(tier) != first


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_client_gets_no_secrets(store: MooncakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs none; Mooncake's own variables it gets."""
    monkeypatch.setenv("SPLITSERVE_CACHE_SECRET", "5a" * 32)
    monkeypatch.setenv("MC_GID_INDEX", "0")
    tier: Any = store.tier
    names = set(psutil.Process(pid_of(tier)).environ())
    assert "MC_GID_INDEX" in names
    assert not [name for name in names if name.startswith("SPLITSERVE_")]


def test_nothing_is_left_of_a_closed_tier(store: MooncakeStore) -> None:
    """The process is gone."""
    tier: Any = store.tier
    tier.check()
    pid = pid_of(tier)
    tier.close()
    assert not psutil.pid_exists(pid)


def test_nobody_reaches_the_client(store: MooncakeStore) -> None:
    """It maps the arena, and Mooncake's ports have no authentication: none of them answers, not
    even on loopback.
    """
    tier: Any = store.tier
    tier.check()
    sockets = psutil.Process(pid_of(tier)).net_connections("tcp")
    ports = {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN}
    assert ports
    for port in ports:
        with socket.socket() as probe:
            probe.settimeout(PROBE_S)
            with pytest.raises(TimeoutError):
                probe.connect(("127.0.0.1", port))


def test_a_chunk_that_is_read_leaves_later(store: MooncakeStore, master: Master) -> None:
    """Somebody else holds a lease: for this tier the chunk is gone at once, the other one still
    gets its bytes, and when the lease has ended it has left the store.
    """
    chunk, other = make_chunk(70), make_chunk(71)
    store.tier.write([chunk.buffers, other.buffers])
    name = store.name(chunk.key)
    assert store.bystander.get(name) == chunk.content
    assert store.tier.remove([chunk.key]) == 1
    assert store.tier.remove([chunk.key]) == 0
    assert store.tier.contains([chunk.key, other.key]) == [False, True]
    assert read_all(store.tier, [chunk, other]) == [ABSENT, HIT]
    assert set(store.tier.listed(b"")) == {other.key}
    assert name in master.ask("get_all_keys")
    until(lambda: name not in master.ask("get_all_keys"), f"still there after {LEASE_S} s")
    assert store.tier.contains([other.key]) == [True]


def test_a_chunk_that_is_to_leave_is_written_again(store: MooncakeStore) -> None:
    """With other bytes: these are what is read, here and by others."""
    first, second = make_chunk(72), make_chunk(72, content=1)
    store.tier.write([first.buffers])
    assert read_all(store.tier, [first]) == [HIT]
    assert store.tier.remove([first.key]) == 1
    assert store.tier.write([second.buffers]) == [WRITTEN]
    assert read_all(store.tier, [second]) == [HIT]
    assert store.bystander.get(store.name(first.key)) == second.content


def test_a_chunk_that_is_read_is_not_replaced(store: MooncakeStore) -> None:
    """While somebody holds a lease on it the same key's other bytes stay; a reader never gets a
    mixture.
    """
    first, second = make_chunk(73), make_chunk(73, content=1)
    store.tier.write([first.buffers])
    assert store.bystander.get(store.name(first.key)) == first.content
    assert store.tier.write([second.buffers]) == [WRITTEN]
    assert store.bystander.get(store.name(first.key)) == first.content


def test_what_the_store_holds_is_sealed(store: MooncakeStore) -> None:
    """Whoever gets at it sees nothing of the KV, and what they change is no chunk any more."""
    plain = make_chunk(75)
    codec = ChunkCodec(Sealer(bytes(range(32))))
    said = plain.header
    described = CacheChunk(0, said.geometry, said.pieces, said.checksums, (), said.model)
    header, body = codec.sealed(plain.key, b"", described, plain.buffers.body)
    assert store.tier.write([ChunkBuffers(plain.key, header, body)]) == [WRITTEN]
    content = store.bystander.get(store.name(plain.key))
    assert content is not None
    runs = {plain.content[at : at + 16] for at in range(HEADER_BYTES, len(plain.content), 16)}
    assert not any(content[at : at + 16] in runs for at in range(0, len(content), 16))
    buffers = empty_like(plain)
    assert dict(store.tier.read([buffers])) == {0: HIT}
    assert codec.opened(plain.key, 0, buffers.header, buffers.body).checksums == said.checksums
    assert buffers.body == plain.buffers.body
    store.put(plain.key, content[:-1] + bytes([content[-1] ^ 1]))
    assert dict(store.tier.read([buffers])) == {0: HIT}
    with pytest.raises(BadChunkError, match="seal"):
        codec.opened(plain.key, 0, buffers.header, buffers.body)


def test_a_full_store_is_an_outcome(free_port: Callable[[], int], tmp_path: Path) -> None:
    """What does not fit is not there; when room is made it is written. The store makes some by
    itself, of what nobody has read for long.
    """
    master = Master(free_port, tmp_path)
    try:
        master.add_owner(16)
        tier = registry.create(master.tier_settings())
        bodies = [memoryview(bytearray(os.urandom(3 * MIB))) for _ in range(8)]
        chunks = [ChunkBuffers(os.urandom(32), new_header(), body) for body in bodies]
        outcomes = tier.write(chunks)
        assert set(outcomes) == {WRITTEN, FULL}
        keys = [chunk.key for chunk in chunks]
        there = tier.contains(keys)
        pairs = zip(outcomes, there, strict=True)
        assert not any(is_there for outcome, is_there in pairs if outcome is FULL)
        assert tier.remove(keys) == sum(there) > 0
        until(lambda: tier.write([chunks[-1]]) == [WRITTEN], "no room when leases have ended")
        tier.close()
    finally:
        master.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"capacity_bytes": 1 << 40}, r"1099511627776 bytes, but the store has 33554432"),
        ({"options": {"admin_port": "1"}}, "at its metrics port 1; .*option admin_port"),
    ],
)
def test_what_start_up_tells(master: Master, changes: dict[str, Any], said: str) -> None:
    """What was configured and what is."""
    tier = registry.create(master.tier_settings(**changes))
    with pytest.raises(TierUnavailableError, match=said):
        tier.check()
    tier.close()


def test_a_store_without_memory(free_port: Callable[[], int], tmp_path: Path) -> None:
    """A master alone keeps nothing, and start-up says what is missing."""
    master = Master(free_port, tmp_path)
    tier = registry.create(master.tier_settings())
    try:
        assert tier.free_bytes() == 0
        with pytest.raises(TierUnavailableError, match="has no memory; start a client"):
            tier.check()
        assert tier.write([make_chunk(80).buffers]) == [FULL]
    finally:
        tier.close()
        master.close()


def test_a_tier_that_only_reads_writes_nothing(master: Master) -> None:
    """``admission: never``: the check leaves the number of writes as it is."""

    def puts() -> str:
        found = re.search(r"^master_put_start_requests_total \d+", master.ask("metrics"), re.M)
        batch = re.search(
            r"^master_batch_put_start_requests_total \d+", master.ask("metrics"), re.M
        )
        assert batch is not None
        return f"{found} {batch[0]}"

    before = puts()
    tier = registry.create(master.tier_settings(admission="never"))
    tier.check()
    tier.close()
    assert puts() == before


def test_a_master_by_ipv6(free_port: Callable[[], int], tmp_path: Path) -> None:
    """Its address has brackets in the URL, and chunks go both ways."""
    master = Master(free_port, tmp_path, address="::1")
    try:
        master.add_owner(16)
        tier = registry.create(master.tier_settings())
        tier.check()
        chunk = make_chunk(85)
        assert tier.write([chunk.buffers]) == [WRITTEN]
        assert read_all(tier, [chunk]) == [HIT]
        tier.close()
    finally:
        master.close()


def test_free_bytes_shrink(store: MooncakeStore) -> None:
    """By what is written."""
    before = store.tier.free_bytes()
    store.tier.write([make_chunk(90).buffers])
    after = store.tier.free_bytes()
    assert before is not None
    assert after is not None
    assert before - after >= len(make_chunk(90).content)


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra."""
    module = "splitserve.kv_transfer.cache.tiers.mooncake"
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(TierConfigError, match=re.escape("pip install 'splitserve[mooncake]'")):
        registry.create(TierSettings(type="mooncake", url="mooncake://host"))


def test_a_library_that_cannot_be_loaded(
    master: Master, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own message, and Debian's packages: it links to what a wheel cannot bring along."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    reason = "libibverbs.so.1: cannot open shared object file"
    (tmp_path / "mooncake" / "store.py").write_text(f"raise ImportError({reason!r})\n")
    tier = registry.create(master.tier_settings())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(TierConfigError, match=f"{reason}; Debian .*libibverbs1"):
        tier.check()
    tier.close()
