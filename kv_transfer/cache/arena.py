"""The arena: memory that the cache server owns and the engines of its host map, cut into equal
slots of one chunk each.

It is an unnamed shared-memory file whose descriptor goes to the engines with the server's greeting,
so nothing is left of it when the last process is gone. First touch of fresh memory is many times
slower than a copy, so a thread of the server touches all of it at the beginning, and slots become
usable as it gets ahead; an engine maps the pages of its side the same way.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from heapq import heapify, heappop, heappush

from splitserve.kv_transfer.cache.tiers.base import SharedMemory

TOUCH_STEP_BYTES = 8 << 20
PAGE_BYTES = mmap.PAGESIZE
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23


class Mapping:
    """The arena in this process's memory. ``view`` is all of its bytes."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._map = mmap.mmap(descriptor, size_bytes)
        self.view = memoryview(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor  # It would keep the map from being closed.

    def touch(self, start: int, end: int, *, writes: bool) -> None:
        """The pages of these bytes are there, and mapped here."""
        advice = MADV_POPULATE_WRITE if writes else MADV_POPULATE_READ
        first = start - start % PAGE_BYTES
        self._map.madvise(advice, first, end - first)

    def close(self) -> None:
        """The memory is not mapped any more; views of it must be gone."""
        self.view.release()
        self._map.close()


class Arena:
    """The server's side: the memory and its free slots. ``slot_bytes`` is known once an engine has
    said how large a chunk is.
    """

    def __init__(self, size_bytes: int) -> None:
        """Raises ``OSError`` when there is no such memory."""
        self.size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        self.descriptor = os.memfd_create("splitserve-cache", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.size_bytes)
        self.memory = Mapping(self.descriptor, self.size_bytes)
        self.slot_bytes = 0
        self.slots = 0
        self._free: list[int] = []
        self._ready_bytes = 0
        self._stopping = False
        self._failure: OSError | None = None
        self._toucher = threading.Thread(target=self._touch_all, name="arena-touch", daemon=True)

    @property
    def shared(self) -> SharedMemory:
        """All of it, for processes that tiers start."""
        return SharedMemory(self.descriptor, self.memory.address, self.size_bytes)

    def start(self) -> None:
        """The memory is being touched."""
        self._toucher.start()

    @property
    def touched_bytes(self) -> int:
        """How much of the memory may be used without waiting for the kernel."""
        return self._ready_bytes

    @property
    def failure(self) -> OSError | None:
        """Why the rest of the memory could not be had."""
        return self._failure

    def cut(self, slot_bytes: int) -> None:
        """Slots have this size from now on; they start at whole pages, for direct reads."""
        assert not self.slot_bytes, "the arena is cut already"
        self.slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        self.slots = self.size_bytes // self.slot_bytes
        self._free = [number * self.slot_bytes for number in range(self.slots)]
        heapify(self._free)

    def take(self) -> int | None:
        """The offset of a free slot, None when there is none (yet)."""
        if not self._free or self._free[0] + self.slot_bytes > self._ready_bytes:
            return None
        return heappop(self._free)

    def give_back(self, offset: int) -> None:
        """Nobody reads or writes the slot any more."""
        assert offset % self.slot_bytes == 0
        heappush(self._free, offset)

    @property
    def free_slots(self) -> int:
        """Slots that are not taken, touched or not."""
        return len(self._free)

    def close(self) -> None:
        """The memory is given up."""
        self._stopping = True
        if self._toucher.is_alive():
            self._toucher.join()
        self.memory.close()
        os.close(self.descriptor)

    def _touch_all(self) -> None:
        for start in range(0, self.size_bytes, TOUCH_STEP_BYTES):
            if self._stopping:
                return
            end = min(start + TOUCH_STEP_BYTES, self.size_bytes)
            try:
                self.memory.touch(start, end, writes=True)
            except OSError as error:
                self._failure = error
                return
            self._ready_bytes = end
