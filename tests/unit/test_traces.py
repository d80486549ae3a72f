"""Recorded requests: what is read, and how bad files are told."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from splitserve.orchestrator.traces import LINE_LIMIT_BYTES, TraceError, TraceRequest, read_trace

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {"timestamp": 1500, "input_length": 25, "output_length": 3, "hash_ids": [7, 8, 9]}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def refusal(path: Path, block_tokens: int = 10) -> str:
    with pytest.raises(TraceError) as caught:
        list(read_trace(path, block_tokens))
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(str(path))


def test_a_line_is_a_request(tmp_path: Path) -> None:
    """Blank lines are none; blocks may leave out a partial last one; other keys are ignored."""
    second = {**GOOD, "hash_ids": [7, 8], "content_ids": [1, 2], "more": 1}
    path = write(tmp_path, GOOD, "", second)
    assert list(read_trace(path, 10)) == [
        TraceRequest(1.5, 25, 3, (7, 8, 9)),
        TraceRequest(1.5, 25, 3, (7, 8), (1, 2)),
    ]


def test_packed_files_are_unpacked(tmp_path: Path) -> None:
    """By their name; a damaged one says where it ends."""
    path = tmp_path / "trace.jsonl.gz"
    packed = gzip.compress(json.dumps(GOOD).encode())
    path.write_bytes(packed)
    assert [request.blocks for request in read_trace(path, 10)] == [(7, 8, 9)]
    path.write_bytes(packed[:-9])
    assert "damaged after line" in refusal(path)
    path.write_bytes(packed[:12] + b"\xff\xff" + packed[14:])
    assert "damaged after line 0" in refusal(path)
    path.write_bytes(b"{}")
    assert "damaged after line 0" in refusal(path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"timestamp": 1', ", line 2: Input data was truncated"),
        ({**GOOD, "input_length": -1}, ", line 2: Expected `int` >= 0 - at `$.input_length`"),
        ({**GOOD, "hash_ids": "7"}, ", line 2: Expected `array`, got `str` - at `$.hash_ids`"),
        ({"timestamp": 1}, ", line 2: Object missing required field `input_length`"),
        (
            {**GOOD, "hash_ids": [7]},
            ", line 2: 25 tokens are 3 blocks of 10, but hash_ids has 1; is the size of blocks "
            "right?",
        ),
        ({**GOOD, "content_ids": [7]}, ", line 2: 25 tokens are 3 blocks of 10, but content_ids"),
        (
            {**GOOD, "hash_ids": [7, 9, 8]},
            ", line 2: block 9 comes after block 7 here and after block 8 in line 1; hash_ids have "
            "to stand for all that comes before, too",
        ),
        ({**GOOD, "hash_ids": [8, 1, 2]}, ", line 2: block 8 comes first here and after block 7"),
        ({**GOOD, "hash_ids": [7, 7, 7]}, ", line 2: block 7 comes after block 7 here and first"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, expected: str) -> None:
    """With its number and what is wrong with it."""
    assert refusal(write(tmp_path, GOOD, line)).startswith(expected)


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    """The known format is named; empty files and endless lines are refused."""
    assert "line 1: this is no known format; JSON lines with" in refusal(write(tmp_path, "a,b,c"))
    assert "there are no requests" in refusal(write(tmp_path, "", " "))
    long = write(tmp_path, "{" + " " * LINE_LIMIT_BYTES)
    assert f"line 1: longer than {LINE_LIMIT_BYTES} bytes" in refusal(long)


def test_a_missing_file_is_an_oserror(tmp_path: Path) -> None:
    """The command line tells those."""
    with pytest.raises(FileNotFoundError):
        list(read_trace(tmp_path / "none", 10))
