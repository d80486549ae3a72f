"""Arithmetic on page tables: which pages a write may name, which byte ranges it moves.

Everything is numpy: a table has one entry per layer and block, so it can be large, and a write
names thousands of pages. Byte ranges are kept as the kernel's ``struct iovec`` (two unsigned 64-bit
words: address, length), so that the array itself is what ``process_vm_writev``, ``sendmsg`` and
``recvmsg`` take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from splitserve.kv_transfer.transports.base import (
    PageIndices,
    PagePairing,
    Region,
    TransportError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

Int64Array = npt.NDArray[np.int64]

IOVECS_PER_CALL = 1024
"""The kernel's limit (``UIO_MAXIOV``) on the ranges of one call."""
IOVEC_BYTES = 16


def refuse_device_memory(transport: str, regions: Sequence[Region]) -> None:
    """Raise ``TransportError`` unless all of it is host memory."""
    devices = sorted({region.device for region in regions if region.device is not None})
    if devices:
        raise TransportError(
            f"the KV lies on CUDA device {devices[0]}, and the transport {transport!r} copies host "
            "memory only; use the transport 'nixl'"
        )


def check_pairing(
    pairing: PagePairing, own: Sequence[Region], peer: Sequence[Region]
) -> PagePairing:
    """The pairing with contiguous int64 tables.

    Raises ``TransportError`` unless every page lies in registered memory of its side.
    """
    if pairing.page_bytes <= 0:
        raise TransportError(f"a write must move at least one byte, not {pairing.page_bytes}")
    local = np.ascontiguousarray(pairing.local_addresses, dtype=np.int64)
    remote = np.ascontiguousarray(pairing.remote_addresses, dtype=np.int64)
    check_inside("this process", local, pairing.page_bytes, own)
    check_inside("the peer", remote, pairing.page_bytes, peer)
    return PagePairing(local, remote, pairing.page_bytes)


def check_inside(
    whose: str, addresses: Int64Array, page_bytes: int, regions: Sequence[Region]
) -> None:
    """Raise ``TransportError`` unless every page lies inside one of ``regions``."""
    if addresses.ndim != 1:
        raise TransportError(f"the page table of {whose} must have one dimension")
    if addresses.size == 0:
        return
    ordered = sorted(regions, key=lambda region: region.address)
    starts = np.array([region.address for region in ordered], dtype=np.int64)
    ends = np.array([region.address + region.length for region in ordered], dtype=np.int64)
    at = np.searchsorted(starts, addresses, side="right") - 1
    if not len(ordered) or at.min() < 0 or (addresses > ends[at] - page_bytes).any():
        raise TransportError(
            f"the page table of {whose} names memory that it has not registered; "
            "both nodes must agree on the layout"
        )


def wrong_indices(pairing: PagePairing, local: PageIndices, remote: PageIndices) -> str:
    """Why the two index arrays are no write under ``pairing``; empty when they are one."""
    if local.ndim != 1 or local.shape != remote.shape:
        return f"{local.shape} pages here but {remote.shape} pages at the peer"
    if local.size == 0:
        return ""
    if are_outside(local, pairing.local_addresses.size):
        return f"a page index here is outside 0..{pairing.local_addresses.size - 1}"
    if are_outside(remote, pairing.remote_addresses.size):
        return f"a page index at the peer is outside 0..{pairing.remote_addresses.size - 1}"
    return ""


def are_outside(indices: PageIndices, pages: int) -> bool:
    """Whether one of the int64 indices (at least one) is not in ``0..pages - 1``."""
    return bool(indices.view(np.uint64).max() >= pages)  # a negative one is huge as uint64


def merge_pages(
    sides: Sequence[Int64Array], page_bytes: int, merged_bytes: int
) -> tuple[list[Int64Array], Int64Array]:
    """Start addresses per side and common lengths; pages that follow each other are joined.

    Joined are pages that are adjacent on every side. A range holds at most ``merged_bytes``, or one
    page where that is larger. Order is kept.
    """
    count = sides[0].size
    if count <= 1:
        return list(sides), np.full(count, page_bytes, dtype=np.int64)
    follows = np.ones(count, dtype=bool)
    follows[:1] = False
    for addresses in sides:
        follows[1:] &= addresses[1:] - addresses[:-1] == page_bytes
    limit = max(1, merged_bytes // page_bytes)
    if not follows.any():
        return list(sides), np.full(count, page_bytes, dtype=np.int64)
    runs = np.flatnonzero(~follows)
    position = np.arange(count) - np.repeat(runs, np.diff(runs, append=count))
    first = np.flatnonzero(position % limit == 0)
    return [side[first] for side in sides], np.diff(first, append=count) * page_bytes


class ByteRanges:
    """Byte ranges of which a prefix is done, on one or more sides that hold the same lengths.

    The arrays handed to the kernel are consumed in place: what is done is cut off the first range.
    """

    def __init__(self, sides: Sequence[Int64Array], lengths: Int64Array) -> None:
        self._count = lengths.size
        self._table = np.empty((len(sides), self._count, 2), dtype=np.uint64)
        for side, addresses in enumerate(sides):
            self._table[side, :, 0] = addresses
        self._table[:, :, 1] = lengths
        self._base = self._table.ctypes.data
        self._lengths = lengths
        self._ends: Int64Array | None = None
        self._first = 0
        self.total = int(lengths.sum())
        self.done = 0

    @property
    def left(self) -> int:
        """Bytes not yet done."""
        return self.total - self.done

    def window(self, limit_bytes: int) -> int:
        """Number of ranges for the next call: at least one, then what fits the limits."""
        count = self._count - self._first
        if self.left > limit_bytes:
            ends = self._all_ends()
            fitting = int(np.searchsorted(ends, self.done + limit_bytes, side="right"))
            count = max(fitting - self._first, 1)
        return min(count, IOVECS_PER_CALL)

    def pointer(self, side: int = 0) -> int:
        """Address of the next ranges of a side."""
        return self._base + (side * self._count + self._first) * IOVEC_BYTES

    def advance(self, moved: int) -> None:
        """``moved`` more bytes are done."""
        self.done += moved
        if self.done >= self.total:
            self._first = self._count
            return
        ends = self._all_ends()
        self._first = int(np.searchsorted(ends, self.done, side="right"))
        left = int(ends[self._first]) - self.done
        for side in self._table:
            address, length = side[self._first].tolist()
            side[self._first] = (address + length - left, left)

    def _all_ends(self) -> Int64Array:
        if self._ends is None:
            self._ends = np.cumsum(self._lengths)
        return self._ends
