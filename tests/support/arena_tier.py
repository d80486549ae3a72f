"""The arena as a tier: what a cache server and the engines of its host do for each chunk, in one
object.

The server's part is the real book over the real arena, asked by one thread at a time, as in the
server; the engines' part is copying, outside of that, in a slot that is reserved for its writer or
leased by its reader. A slot holds header and body, one behind the other.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.arena import Arena
from splitserve.kv_transfer.cache.arena_book import ArenaBook
from splitserve.kv_transfer.cache.chunk import Chunk
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.index import no_quota
from splitserve.kv_transfer.cache.keys import KEY_BYTES
from splitserve.kv_transfer.cache.tiers.base import (
    HEADER_BYTES,
    ChunkBuffers,
    ReadOutcome,
    SharedMemory,
    StoredChunk,
    TierCapabilities,
    TierUnavailableError,
    WriteOutcome,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from splitserve.kv_transfer.cache.arena_book import ArenaEntry

TOUCH_LIMIT_S = 60.0
POLL_S = 0.001
BLANK = Chunk(
    offset=0,
    geometry=ChunkGeometry(
        layers=1, chunk_tokens=1, block_tokens=1, heads=1,
        key_bytes=1, value_bytes=1, item_bytes=1, order="rows",
    ),
    pieces=1,
    checksums=b"",
)  # fmt: skip
"""The book does not look into chunks."""


class ArenaTier:
    """``slots`` chunks of up to ``body_limit_bytes``. With ``pins`` a chunk stays until it is
    removed, else room is made by eviction. A key has one writer at a time.
    """

    capabilities = TierCapabilities(name="cpu", is_exclusive=True, is_remote=False)

    def __init__(self, slots: int, body_limit_bytes: int, *, pins: bool = False) -> None:
        slot_bytes = HEADER_BYTES + body_limit_bytes
        self.arena = Arena(slots * slot_bytes)
        self.book = ArenaBook(
            self.arena, policy="s3fifo", ttl_s=None, quotas=no_quota, on_evicted=lambda _: False
        )
        self.book.cut(slot_bytes)
        assert self.arena.slots == slots, "a slot is no whole number of pages"
        self._pins = pins
        self._sizes: dict[int, int] = {}
        """Bytes of what lies in each slot, by its offset."""
        self._lock = threading.Lock()
        self._is_closed = False
        self.arena.start()

    def use_memory(self, memory: SharedMemory) -> None:
        """Any memory is as good."""

    def check(self) -> None:
        """All of the memory is there."""
        end = time.monotonic() + TOUCH_LIMIT_S
        while self.arena.touched_bytes < self.arena.size_bytes:
            if self.arena.failure is not None or time.monotonic() > end:
                raise TierUnavailableError(f"no memory for the arena: {self.arena.failure}")
            time.sleep(POLL_S)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [self.book.index.get(key) is not None for key in keys]

    def read(self, chunks: Sequence[ChunkBuffers]) -> Iterator[tuple[int, ReadOutcome]]:
        for index, chunk in enumerate(chunks):
            yield index, self._read(chunk)

    def _read(self, chunk: ChunkBuffers) -> ReadOutcome:
        entry = self._leased(chunk.key)
        if entry is None:
            return ReadOutcome.ABSENT
        is_whole = chunk.hold(self._sizes[entry.value.offset])
        if is_whole:
            slot = self._slot(entry)
            chunk.header[:] = slot[:HEADER_BYTES]
            chunk.found_body[:] = slot[HEADER_BYTES:]
        with self._lock:
            if not is_whole and entry.is_present:
                self.book.drop(entry.key)
            self.book.release(entry)
        return ReadOutcome.HIT if is_whole else ReadOutcome.BROKEN

    def _leased(self, key: bytes) -> ArenaEntry | None:
        with self._lock:
            entry = self.book.index.get(key)
            if entry is not None:
                self.book.lease(entry)
            return entry

    def write(self, chunks: Sequence[ChunkBuffers]) -> list[WriteOutcome]:
        return [self._write(chunk.key, chunk.header, chunk.body) for chunk in chunks]

    def _write(self, key: bytes, *parts: memoryview | bytes) -> WriteOutcome:
        with self._lock:
            self.book.drop(key)
            entry = self.book.reserve(key, b"", BLANK)
        if entry is None:
            return WriteOutcome.FULL
        self._sizes[entry.value.offset] = sum(map(len, parts))
        self._slot(entry)[:] = b"".join(parts)
        with self._lock:
            self.book.publish(entry, entry.value, time.monotonic())
            if self._pins:
                self.book.index.pin([key])
        return WriteOutcome.WRITTEN

    def put(self, key: bytes, content: bytes) -> None:
        """An engine has the slot and writes this into it. What is no key names no slot."""
        if len(key) == KEY_BYTES:
            assert self._write(key, content) is WriteOutcome.WRITTEN

    def take(self, key: bytes) -> bytes | None:
        """What is stored, which is gone then."""
        entry = self._leased(key)
        if entry is None:
            return None
        content = bytes(self._slot(entry))
        with self._lock:
            self.book.drop(key)
            self.book.release(entry)
        return content

    def remove(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return sum(self.book.drop(key) for key in keys)

    def stored(self) -> Iterator[StoredChunk]:
        with self._lock:
            keys = [entry.key for entry in self.book.index]
        for key in keys:
            entry = self._leased(key)
            if entry is not None:
                slot = self._slot(entry)
                found = StoredChunk(key, len(slot), bytes(slot[:HEADER_BYTES]))
                with self._lock:
                    self.book.release(entry)
                yield found

    def listed(self, prefix: bytes) -> Iterator[bytes]:
        with self._lock:
            keys = [entry.key for entry in self.book.index]
        yield from [key for key in keys if key.startswith(prefix)]

    def free_bytes(self) -> int:
        with self._lock:
            return self.arena.free_slots * self.arena.slot_bytes

    def clock_unix_s(self) -> None:
        """This host's."""

    def close(self) -> None:
        """Nobody holds a slot, all are free or hold a chunk."""
        if self._is_closed:
            return
        self._is_closed = True
        index = self.book.index
        assert (index.reserved, index.leased) == (0, 0)
        assert self.arena.free_slots == self.arena.slots - len(index)
        self.arena.close()

    def _slot(self, entry: ArenaEntry) -> memoryview:
        """As much of the entry's slot as is used."""
        offset = entry.value.offset
        return self.arena.memory.view[offset : offset + self._sizes[offset]]
