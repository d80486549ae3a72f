"""Where marks lie in the bytes and the tokens of a prompt."""

from __future__ import annotations

from itertools import pairwise

from splitserve.kv_transfer.prefix_marks import (
    MARK_BYTES,
    MARK_OFFSETS,
    MARKS_LIMIT,
    mark_positions,
    split_digests,
)


def digests(count: int) -> list[bytes]:
    """Different ones."""
    return [number.to_bytes(MARK_BYTES, "big") for number in range(count)]


def test_places_are_fixed_and_bounded() -> None:
    """Every 512 bytes at first, then ever farther apart, never by more than an eighth of what is
    before; fewer than a hundred for four million bytes.
    """
    gaps = [b - a for a, b in pairwise((0, *MARK_OFFSETS))]
    assert MARK_OFFSETS[:18] == (*range(512, 8_193, 512), 9_216, 10_240)
    assert gaps == sorted(gaps)
    assert all(gap <= max(512, at // 8) for at, gap in zip(MARK_OFFSETS, gaps[1:], strict=False))
    assert MARK_OFFSETS[-1] == 2**22
    assert len(MARK_OFFSETS) == MARKS_LIMIT == 88


def test_marks_become_positions_in_proportion() -> None:
    """A prompt of 2,000 bytes and 500 tokens has 128 tokens before its first mark."""
    marks = digests(3)
    positions = mark_positions(b"".join(marks), 2_000, 500)
    assert positions == ((marks[0], 128), (marks[1], 256), (marks[2], 384))


def test_marks_that_do_not_fit_the_prompt_are_none() -> None:
    """A length that is too short for them, or more of them than there are places."""
    assert mark_positions(b"".join(digests(2)), 1_023, 500) == ()
    assert mark_positions(b"".join(digests(89)), 2**30, 500) == ()
    assert mark_positions(b"", 0, 500) == ()
    assert split_digests(b"".join(digests(5))) == digests(5)
