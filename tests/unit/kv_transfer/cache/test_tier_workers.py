"""A tier's threads: every job has one result, whatever the tier does."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace
from support.cache_rig import until
from support.chunks import PAGES, new_body
from support.memory_tier import MemoryTier

from splitserve.kv_transfer.cache import tier_workers
from splitserve.kv_transfer.cache.chunk import Chunk
from splitserve.kv_transfer.cache.chunk_codec import ChunkCodec
from splitserve.kv_transfer.cache.chunk_format import body_checksums
from splitserve.kv_transfer.cache.tier_workers import (
    Asked,
    Cleared,
    Failed,
    Probed,
    ReadJob,
    TierWorkers,
    WasRead,
    WasWritten,
    WriteJob,
    waker,
)
from splitserve.kv_transfer.cache.tiers.base import HEADER_BYTES, ReadOutcome, TierUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from splitserve.kv_transfer.cache.tiers.base import ChunkBuffers, SharedMemory

KEYS = [bytes(8) + bytes([n]) + bytes(23) for n in range(40)]
ROOM = 2**24
SIZE_BYTES = HEADER_BYTES + PAGES.chunk_bytes


class Tier(MemoryTier):
    """Fails when it is told to, or waits for the test."""

    def __init__(self) -> None:
        super().__init__(ROOM)
        self.fails: Exception | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.may_read = threading.Event()
        self.may_read.set()
        self.is_closed = False
        self.memories: list[SharedMemory] = []
        self.headers_at: list[list[int]] = []
        """Addresses of the headers of each batch."""

    def use_memory(self, memory: SharedMemory) -> None:
        self.memories.append(memory)

    def _check(self) -> None:
        assert self.may_go_on.wait(20)
        if self.fails is not None:
            raise self.fails

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._check()
        return super().contains(keys)

    def read(self, chunks: Sequence[ChunkBuffers]) -> Iterator[tuple[int, ReadOutcome]]:
        assert self.may_read.wait(20)
        at = [ctypes.addressof(ctypes.c_char.from_buffer(chunk.header)) for chunk in chunks]
        self.headers_at.append(at)
        for index, outcome in super().read(chunks):
            if index == 1:
                self._check()
            yield index, outcome

    def write(self, chunks: Sequence[ChunkBuffers]) -> Any:
        self._check()
        return super().write(chunks)

    def close(self) -> None:
        self.is_closed = True


class Rig:
    def __init__(self) -> None:
        self.tier = Tier()
        self.descriptor, wake = waker()
        self.workers = TierWorkers(3, self.tier, ChunkCodec(None), readers=1, wake=wake)
        self.results: list[Any] = []

    def until(self, count: int) -> list[Any]:
        """So many results have come, in a readable descriptor's company."""

        def come() -> bool:
            self.results += self.workers.take_results()
            return len(self.results) >= count

        until(come, f"{count} results")
        assert os.eventfd_read(self.descriptor) > 0
        taken, self.results = self.results, []
        assert len(taken) == count
        return taken

    def write(self, *numbers: int, geometry: Any = PAGES) -> None:
        for number in numbers:
            body = new_body(geometry.chunk_bytes)
            body[:8] = number.to_bytes(8)
            sums = body_checksums(body, geometry, 1)
            chunk = Chunk(0, geometry, 1, sums, (), bytes(32))
            self.workers.write(WriteJob(KEYS[number], b"", chunk, body))

    def read(self, *numbers: int) -> list[memoryview]:
        bodies = [new_body(PAGES.chunk_bytes) for _ in numbers]
        for number, body in zip(numbers, bodies, strict=True):
            self.workers.read(ReadJob(KEYS[number], 4096 * number, body))
        return bodies


@contextmanager
def rig_of() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.tier.may_go_on.set()
    made.workers.stop()
    made.workers.join()
    os.close(made.descriptor)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with rig_of() as made:
        yield made


def test_what_is_written_is_read(rig: Rig) -> None:
    """Into the slot that was given, with geometry and checksums as they were."""
    rig.write(1, 2)
    assert rig.until(2) == [WasWritten(KEYS[n], "written", SIZE_BYTES) for n in (1, 2)]
    bodies = rig.read(1, 2)
    read = rig.until(2)
    assert [(result.key, result.chunk.offset) for result in read] == [
        (KEYS[1], 4096), (KEYS[2], 8192),
    ]  # fmt: skip
    assert [int.from_bytes(body[:8]) for body in bodies] == [1, 2]
    assert read[0].chunk.checksums == body_checksums(bodies[0], PAGES, 1)


def test_headers_are_read_into_memory_that_the_tier_may_map(rig: Rig) -> None:
    """Each of a batch to a place of its own, and the next batch to the same ones again; each chunk
    is still told apart by its own header.
    """
    rig.write(*range(20))
    rig.until(20)
    for batch in (range(10), range(10, 20)):
        rig.tier.may_read.clear()
        rig.read(*batch)
        rig.tier.may_read.set()
        read = rig.until(10)
        assert [(result.key, result.chunk.offset) for result in read] == [
            (KEYS[number], 4096 * number) for number in batch
        ]
    [memory] = rig.tier.memories
    places = set(range(memory.address, memory.address + memory.size_bytes, HEADER_BYTES))
    for batch_at in rig.tier.headers_at:
        assert len(set(batch_at)) == len(batch_at)
        assert places.issuperset(batch_at)


def test_what_is_not_there(rig: Rig) -> None:
    """Is said so; what is not whole is said to be broken, and gone from the tier."""
    rig.write(1, 2, 3)
    rig.until(3)
    content = bytearray(rig.tier.chunks[KEYS[1]])
    content[100] ^= 1
    rig.tier.chunks[KEYS[1]] = bytes(content)
    rig.tier.chunks[KEYS[2]] = rig.tier.chunks[KEYS[2]][:-1]
    rig.read(0, 1, 2, 3)
    found = {result.key: result for result in rig.until(4)}
    assert [found[KEYS[n]].chunk is None for n in range(4)] == [True, True, True, False]
    assert [found[KEYS[n]].was_broken for n in range(4)] == [False, True, True, False]
    assert not any(result.has_failed for result in found.values())
    assert set(rig.tier.chunks) == {KEYS[3]}


def test_a_chunk_of_another_size_is_broken(rig: Rig) -> None:
    """The header is whole, the arena's slots are of another model."""
    small = replace(PAGES, layers=1)
    rig.write(1, geometry=small)
    rig.until(1)
    rig.read(1)
    assert rig.until(1)[0].was_broken


def test_a_tier_that_fails(rig: Rig) -> None:
    """Every job has its result, and the failures are reported; a chunk that could not be read is
    not said to be absent.
    """
    rig.write(1, 2)
    rig.until(2)
    rig.tier.fails = TierUnavailableError("refused")
    rig.workers.ask(5, KEYS)
    failed, asked = rig.until(2)
    assert (failed, asked.ask_id, asked.found) == (Failed("refused"), 5, None)
    rig.workers.probe()
    assert rig.until(1) == [Failed("refused")]
    rig.write(3)
    assert rig.until(2) == [Failed("refused"), WasWritten(KEYS[3], "failed")]
    rig.tier.may_go_on.clear()
    rig.read(1, 2)
    rig.tier.may_go_on.set()
    read = [result for result in rig.until(3) if isinstance(result, WasRead)]
    assert [(result.chunk is None, result.has_failed) for result in read] == [
        (False, False), (True, True),
    ]  # fmt: skip


def test_questions(rig: Rig) -> None:
    """How many of the keys are there from the first one on; whether the tier answers; how many of a
    tenant's chunks were removed.
    """
    rig.write(0, 1, 3)
    rig.until(3)
    rig.workers.ask(7, KEYS[:4])
    (asked,) = rig.until(1)
    assert (asked.ask_id, asked.present) == (7, 2)
    assert asked.found == (True, True, False, True)
    rig.workers.probe()
    assert isinstance(rig.until(1)[0], Probed)
    rig.workers.remove([KEYS[1]])
    rig.workers.clear(9, bytes(8))
    assert rig.until(1) == [Cleared(9, 2, is_complete=True)]
    assert not rig.tier.chunks


def test_a_question_does_not_wait_for_reads(rig: Rig) -> None:
    """Its answer is there while a read takes long."""
    rig.write(1)
    rig.until(1)
    rig.tier.may_read.clear()
    rig.read(1)
    rig.workers.ask(1, KEYS[1:2])
    assert isinstance(rig.until(1)[0], Asked)
    rig.tier.may_read.set()
    assert isinstance(rig.until(1)[0], WasRead)


def test_a_model_whose_checksums_no_header_holds(rig: Rig) -> None:
    """Its chunks are not written to lower tiers; the thread lives."""
    rig.write(1, geometry=replace(PAGES, layers=3000, heads=1, chunk_tokens=16, key_bytes=2,
                                  value_bytes=2))  # fmt: skip
    assert rig.until(1) == [WasWritten(KEYS[1], "refused")]
    rig.write(2)
    assert rig.until(1) == [WasWritten(KEYS[2], "written", SIZE_BYTES)]


def test_a_fault_is_not_kept_secret(rig: Rig) -> None:
    """The server that asks for results hears of a thread that has died."""
    rig.tier.fails = ZeroDivisionError()
    rig.workers.probe()
    with pytest.raises(RuntimeError, match="tier 3 has died"):
        until(lambda: bool(rig.workers.take_results()), "a result")
    rig.tier.fails = None


def test_what_waits_is_written_before_the_end() -> None:
    """Reads are dropped, writes are not; the tier is closed."""
    with rig_of() as rig:
        rig.tier.may_go_on.clear()
        rig.write(*range(20))
        rig.workers.stop()
        rig.tier.may_go_on.set()
        assert rig.workers.join()
        assert len(rig.tier.chunks) == 20
        assert rig.tier.is_closed


def test_a_tier_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left as it is; what waits behind it is not written."""
    monkeypatch.setattr(tier_workers, "STOP_DEADLINE_S", 0.05)
    monkeypatch.setattr(tier_workers, "STOP_MARGIN_S", 0.05)
    with rig_of() as rig:
        rig.tier.may_go_on.clear()
        rig.write(1, 2)
        rig.workers.stop()
        assert not rig.workers.join()
        assert not rig.tier.is_closed
        rig.tier.may_go_on.set()
        until(lambda: not any(t.is_alive() for t in rig.workers._threads), "the threads to end")
        assert set(rig.tier.chunks) == {KEYS[1]}
