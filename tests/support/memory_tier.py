"""A tier in a dictionary: the plainest thing that keeps the interface's promises."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.keys import KEY_BYTES
from splitserve.kv_transfer.cache.tiers.base import (
    HEADER_BYTES,
    ChunkBuffers,
    ReadOutcome,
    SharedMemory,
    StoredChunk,
    TierCapabilities,
    WriteOutcome,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class MemoryTier:
    """Holds at most ``room_bytes``; ``chunks`` (key to header and body) is there to be broken."""

    capabilities = TierCapabilities(name="memory", is_exclusive=True, is_remote=False)

    def __init__(self, room_bytes: int) -> None:
        self.chunks: dict[bytes, bytes] = {}
        self._room_bytes = room_bytes
        self._lock = threading.Lock()

    def use_memory(self, memory: SharedMemory) -> None:
        """Any memory is as good."""

    def check(self) -> None:
        """It always works."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.chunks for key in keys]

    def read(self, chunks: Sequence[ChunkBuffers]) -> Iterator[tuple[int, ReadOutcome]]:
        for index, chunk in enumerate(chunks):
            found = self.chunks.get(chunk.key)
            if found is None:
                yield index, ReadOutcome.ABSENT
            elif not chunk.hold(len(found)):
                self.remove([chunk.key])
                yield index, ReadOutcome.BROKEN
            else:
                chunk.header[:] = found[:HEADER_BYTES]
                chunk.found_body[:] = found[HEADER_BYTES:]
                yield index, ReadOutcome.HIT

    def write(self, chunks: Sequence[ChunkBuffers]) -> list[WriteOutcome]:
        return [self._write(chunk) for chunk in chunks]

    def _write(self, chunk: ChunkBuffers) -> WriteOutcome:
        content = bytes(chunk.header) + bytes(chunk.body)
        with self._lock:
            if len(content) - len(self.chunks.get(chunk.key, b"")) > self.free_bytes():
                return WriteOutcome.FULL
            self.chunks.pop(chunk.key, None)
            self.chunks[chunk.key] = content
        return WriteOutcome.WRITTEN

    def remove(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return sum(self.chunks.pop(key, None) is not None for key in keys)

    def stored(self) -> Iterator[StoredChunk]:
        for key, content in list(self.chunks.items()):
            yield StoredChunk(key, len(content), content[:HEADER_BYTES])

    def listed(self, prefix: bytes) -> Iterator[bytes]:
        yield from [k for k in list(self.chunks) if k.startswith(prefix) and len(k) == KEY_BYTES]

    def free_bytes(self) -> int:
        return self._room_bytes - sum(map(len, self.chunks.values()))

    def clock_unix_s(self) -> None:
        """This host's."""

    def close(self) -> None:
        """There is nothing to give back."""
