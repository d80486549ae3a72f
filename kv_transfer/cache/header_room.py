"""Room for the headers of chunks that are being read, as the arena is for their bodies: memory that
is there before the first chunk comes, used again for each of them, and that a tier's own process
can map.
"""

from __future__ import annotations

import os

from splitserve.kv_transfer.cache.arena import Mapping
from splitserve.kv_transfer.cache.tiers.base import HEADER_BYTES, SharedMemory


class HeaderRoom:
    """``headers`` are page-aligned, writable, and whoever's turn it is."""

    def __init__(self, count: int) -> None:
        """Raises ``OSError`` when there is no such memory."""
        size_bytes = count * HEADER_BYTES
        self._descriptor = os.memfd_create("splitserve-headers", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, size_bytes)
        self._memory = Mapping(self._descriptor, size_bytes)
        self._memory.touch(0, size_bytes, writes=True)
        self.headers = [
            self._memory.view[start : start + HEADER_BYTES]
            for start in range(0, size_bytes, HEADER_BYTES)
        ]

    @property
    def shared(self) -> SharedMemory:
        """All of it, for processes that tiers start."""
        return SharedMemory(self._descriptor, self._memory.address, self._memory.size_bytes)

    def close(self) -> None:
        """The memory is given up; nobody uses a header any more. May be repeated."""
        if not self.headers:
            return
        for header in self.headers:
            header.release()
        self.headers.clear()
        self._memory.close()
        os.close(self._descriptor)
