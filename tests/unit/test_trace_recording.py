"""What a router says of its requests, as lines of a trace that ``read_trace`` takes."""

from __future__ import annotations

import json
import random
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import pytest

from splitserve.kv_transfer.prefix_marks import MARK_BYTES, MARK_OFFSETS
from splitserve.orchestrator.trace_recording import (
    Arrived,
    Began,
    BlockNumbers,
    Ended,
    Lost,
    TraceLines,
    decode_line,
)
from splitserve.orchestrator.traces import read_trace

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 128
"""Tokens, of four bytes: a mark at the end of each of the first blocks."""


def digests_of(text: bytes) -> bytes:
    """Marks as a router would make them."""
    ends = [end for end in MARK_OFFSETS if end <= len(text)]
    return b"".join(blake2b(text[:end], digest_size=MARK_BYTES).digest() for end in ends)


def blocks_of(numbers: BlockNumbers, text: bytes, tokens: int | None = None) -> list[int]:
    return numbers.of(digests_of(text), len(text), tokens or len(text) // 4)


def arrived(name: str, at_s: float, text: bytes = b"") -> Arrived:
    return Arrived(name, at_s, digests_of(text).hex(), len(text))


def lines_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines()]


def test_equal_beginnings_have_equal_numbers() -> None:
    """From 0 on, by first appearance; a partial last block is each prompt's own."""
    numbers = BlockNumbers(BLOCK)
    head, one, other = (random.Random(seed).randbytes(1024) for seed in range(3))
    assert blocks_of(numbers, head + one) == [0, 1, 2, 3]
    assert blocks_of(numbers, head + other) == [0, 1, 4, 5]
    assert blocks_of(numbers, head + one) == [0, 1, 2, 3]
    assert blocks_of(numbers, head + one + b"1234") == [0, 1, 2, 3, 6]
    assert blocks_of(numbers, head) == [0, 1]
    assert blocks_of(numbers, one) == [7, 8]
    assert blocks_of(numbers, b"short", 1) == [9]
    assert blocks_of(numbers, b"", 0) == []


def test_tokens_of_other_lengths_do_not_part_a_beginning() -> None:
    """The next turn of a conversation, in which a token has more bytes on average."""
    numbers = BlockNumbers(BLOCK)
    head, more = random.Random(1).randbytes(6000), random.Random(2).randbytes(3000)
    first = blocks_of(numbers, head, 1600)
    second = blocks_of(numbers, head + more, 2200)
    assert len(first) == 13
    assert len(second) == 18
    # All but the partial block, and what lies behind the last mark
    assert first[:11] == second[:11]
    assert not set(first[12:]) & set(second)


def test_a_prompt_of_fewer_tokens_takes_what_fits() -> None:
    """And marks behind its end do it no harm."""
    numbers = BlockNumbers(BLOCK)
    text = random.Random(3).randbytes(4096)
    assert blocks_of(numbers, text, 1024) == list(range(8))
    assert blocks_of(numbers, text, 200) == [0, 8]
    assert blocks_of(numbers, text, 1024) == list(range(8))


def test_marks_have_a_bound() -> None:
    """Beginnings that come later are not known again; the numbers stay right."""
    numbers = BlockNumbers(BLOCK, limit_marks=2)
    one, other = (random.Random(seed).randbytes(1024) for seed in (4, 5))
    assert blocks_of(numbers, one) == blocks_of(numbers, one) == [0, 1]
    assert blocks_of(numbers, other) == [2, 3]
    assert blocks_of(numbers, other) == [4, 5]


def test_lines_come_in_the_order_of_arrival(tmp_path: Path) -> None:
    """Each as soon as no earlier request is open; times are whole milliseconds from the first."""
    trace = TraceLines(BLOCK)
    assert trace.take(Began(49.0)) == b""
    assert trace.take(arrived("a", 50.0)) == b""
    assert trace.take(arrived("b", 50.0126)) == b""
    assert trace.take(Ended("b", 7, 3, None)) == b""
    assert trace.open_requests == 1
    data = trace.take(Ended("a", 300, 5, 9))
    assert lines_of(data) == [
        {"timestamp": 0, "input_length": 300, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 13, "input_length": 7, "output_length": 3, "hash_ids": [3]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(data)
    assert [request.blocks for request in read_trace(path, BLOCK)] == [(0, 1, 2), (3,)]


def test_what_was_not_answered_counts_with_its_limit() -> None:
    """Without one it is left out, as are ends of requests that came before the recording."""
    trace = TraceLines(BLOCK)
    trace.take(arrived("a", 1.0))
    assert lines_of(trace.take(Ended("a", 7, None, 64)))[0]["output_length"] == 64
    trace.take(arrived("b", 2.0))
    assert trace.take(Ended("b", 7, None, None)) == b""
    assert trace.take(Ended("earlier", 7, 1, None)) == b""
    assert trace.left_out == 1


def test_what_still_runs_can_be_given_up() -> None:
    """Then what waited behind it is written; after the end nobody is taken up. Lost lines are the
    same: nobody knows whose end was among them.
    """
    trace = TraceLines(BLOCK)
    trace.take(arrived("a", 1.0))
    trace.take(arrived("b", 2.0))
    trace.take(Ended("b", 7, 1, None))
    assert len(lines_of(trace.take(Lost(3)))) == 1
    trace.take(arrived("c", 3.0))
    trace.is_closed = True
    assert trace.take(arrived("d", 4.0)) == b""
    assert trace.open_requests == 1
    assert trace.give_up() == b""
    assert (trace.left_out, trace.open_requests) == (2, 0)


def test_the_routers_lines_are_decoded() -> None:
    """By their event; one that is not known is an error."""
    line = b'{"event":"lost","lines":4}\n'
    assert decode_line(line) == Lost(4)
    with pytest.raises(ValueError, match="event"):
        decode_line(b'{"event":"other"}')


def test_no_digest_is_in_a_line() -> None:
    """Nor a part of the text."""
    trace = TraceLines(BLOCK)
    text = b"a secret of many words " * 100
    trace.take(arrived("a", 1.0, text))
    data = trace.take(Ended("a", 575, 1, None))
    assert set(lines_of(data)[0]) == {"timestamp", "input_length", "output_length", "hash_ids"}
    assert max(lines_of(data)[0]["hash_ids"]) == 4
