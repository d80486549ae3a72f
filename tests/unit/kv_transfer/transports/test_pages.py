"""Page arithmetic: joining pages into ranges, consuming ranges, refusing what is outside."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import pytest

from splitserve.kv_transfer.transports.pages import IOVECS_PER_CALL, ByteRanges, merge_pages


def test_pages_are_joined_where_they_follow_each_other_on_every_side() -> None:
    """Order is kept; a gap on either side, and the size limit, begin a new range."""
    local = np.array([0, 10, 20, 50, 60, 70, 80], dtype=np.int64)
    remote = np.array([100, 110, 120, 130, 140, 300, 310], dtype=np.int64)
    (here, there), lengths = merge_pages((local, remote), 10, 20)
    assert here.tolist() == [0, 20, 50, 70]
    assert there.tolist() == [100, 120, 130, 300]
    assert lengths.tolist() == [20, 10, 20, 20]


@pytest.mark.parametrize("seed", range(20))
def test_joining_moves_the_same_bytes(seed: int) -> None:
    """Random index sets: the joined ranges, byte by byte, are the pages in their order."""
    generator = np.random.default_rng(seed)
    size = int(generator.integers(0, 30))
    page_bytes = int(generator.integers(1, 9))
    sides = [
        np.sort(generator.integers(0, 20, size)).astype(np.int64) * page_bytes for _ in range(2)
    ]
    starts, lengths = merge_pages(sides, page_bytes, int(generator.integers(1, 40)))
    for side, joined in zip(sides, starts, strict=True):
        expected = [byte for start in side for byte in range(start, start + page_bytes)]
        found = [
            byte
            for start, length in zip(joined, lengths, strict=True)
            for byte in range(start, start + length)
        ]
        assert found == expected


@pytest.mark.parametrize("limit_bytes", [1, 100, 5000, 1 << 30])
def test_ranges_are_consumed_in_order_whatever_the_steps(limit_bytes: int) -> None:
    """Windows respect the limits; partial steps continue inside a range."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 200, 3000)
    starts = np.cumsum(lengths) - lengths + 1000
    ranges = ByteRanges((starts, starts + 7), lengths)
    position = 1000
    while ranges.left:
        count = ranges.window(limit_bytes)
        assert 0 < count <= IOVECS_PER_CALL
        one, other = (table_at(ranges.pointer(side), count) for side in (0, 1))
        offered = int(one[:, 1].sum())
        assert count == 1 or offered <= limit_bytes
        assert int(one[0, 0]) == position
        assert (other[:, 0] == one[:, 0] + 7).all()
        assert (other[:, 1] == one[:, 1]).all()
        moved = int(generator.integers(1, offered + 1))
        ranges.advance(moved)
        position += moved
    assert position == 1000 + lengths.sum()


def table_at(pointer: int, count: int) -> npt.NDArray[np.uint64]:
    """The kernel's view of ``count`` ranges: rows of address and length."""
    words = (ctypes.c_uint64 * (2 * count)).from_address(pointer)
    return np.ctypeslib.as_array(words).reshape(count, 2)
