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
        (
            {**GOOD, "output_length": 10**7 + 1},
            ", line 2: Expected `int` <= 10000000 - at `$.output_length`",
        ),
        ({"timestamp": 1}, ", line 2: Object missing required field `input_length`"),
        (
            {**GOOD, "timestamp": 1499},
            ", line 2: this request came at 1.499 s, before that of line 1 at 1.5 s; sort the rows",
        ),
        ("1,2,3", ", line 2: this line has another form than the file's beginning, which is Moonc"),
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


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_azure_rows_are_requests_without_blocks(tmp_path: Path) -> None:
    """Times have any number of digits and count from the first row; the columns may stand in any
    order, quoted, among others, behind a byte order mark.
    """
    rows = ("2023-11-16 18:15:46.6805900,4808,10", "", "2023-11-16 18:15:47.1805901,110,27")
    expected = [TraceRequest(0.0, 4808, 10, ()), TraceRequest(0.5, 110, 27, ())]
    assert list(read_trace(write(tmp_path, AZURE, *rows), 512)) == expected
    header = '\ufeffmodel,GeneratedTokens,"TIMESTAMP",ContextTokens'
    rows = ("x,10,2024-05-10T00:00:00Z,4808", "y,27,2024-05-10 02:00:00.500+02:00,110")
    assert list(read_trace(write(tmp_path, header, *rows), 512)) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("2023-11-16 18:15:45,1,1", "this request came at -1 s, before that of line 2 at 0 s"),
        ("2023-11-16 18:15:46,-1,1", "ContextTokens -1 is not between 0 and 10000000 tokens"),
        ("2023-11-16 18:15:46,1,99999999999", "GeneratedTokens 99999999999 is not between 0 and"),
        ("2023-11-16 18:15:46,1," + "9" * 5000, "GeneratedTokens 99999"),
        ("2023-11-16 18:15:46,1.5,1", "ContextTokens '1.5' is no whole number"),
        ("2023-11-16 18:15:46,,1", "ContextTokens '' is no whole number"),
        ("2023-11-16 18:15:46,1", "2 columns, but the header has 3"),
        ("yesterday,1,1", "TIMESTAMP 'yesterday' is no time such as"),
        ("2023-11-16 18:15:46Z,1,1", "TIMESTAMP '2023-11-16 18:15:46Z': either all times"),
        ('"2023-11-16 18:15:46,1,1', "no CSV"),
        (GOOD, "this line has another form than the file's beginning, which is Azure CSV"),
    ],
)
def test_a_bad_azure_row_is_named(tmp_path: Path, row: object, expected: str) -> None:
    """With its number, the column and what is wrong."""
    path = write(tmp_path, AZURE, "2023-11-16 18:15:46,1,1", row)
    assert refusal(path).startswith(f", line 3: {expected}")


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    """Beside those that are there; a header alone is no trace."""
    path = write(tmp_path, "TIMESTAMP,ContextTokens", "2023-11-16 18:15:46,1")
    expected = ", line 1: the column GeneratedTokens is missing; there are TIMESTAMP, ContextTokens"
    assert refusal(path) == expected
    assert "there are no requests" in refusal(write(tmp_path, AZURE))


LOGGED = {
    "event": "request",
    "received_unix_s": 1_700_000_002.5,
    "prompt_tokens_estimate": 40,
    "prompt_tokens": 33,
    "output_tokens": 7,
    "output_limit_tokens": None,
    "outcome": "ok",
}
LOG_LINE = "2026-01-02 03:04:05,678 INFO splitserve.orchestrator.router.app: listening"


def test_a_routers_log_is_a_trace(tmp_path: Path) -> None:
    """Its requests in the order of arrival, whatever else it says; an answer that never came has
    the length that was allowed, and without a limit the request is left out. So are probes.
    """
    earlier = {**LOGGED, "received_unix_s": 1_700_000_001, "prompt_tokens": None}
    refused = {**LOGGED, "output_tokens": None, "output_limit_tokens": 64}
    unknown = {**LOGGED, "output_tokens": None}
    other = {"event": "other"}
    probe = {**LOGGED, "endpoint": "probe"}
    lines = (LOG_LINE, other, LOGGED, probe, "a trace back", earlier, refused, unknown)
    path = write(tmp_path, *lines)
    assert list(read_trace(path, 512)) == [
        TraceRequest(0.0, 40, 7, ()),
        TraceRequest(1.5, 33, 7, ()),
        TraceRequest(1.5, 33, 64, ()),
    ]
    assert len(list(read_trace(write(tmp_path, LOGGED), 512))) == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({**LOGGED, "output_tokens": -1}, "Expected `int` >= 0 - at `$.output_tokens`"),
        ({"event": "request"}, "Object missing required field `received_unix_s`"),
        ('{"event": "requ', "Input data was truncated"),
        (GOOD, "this line has another form than the file's beginning, which is the log of a"),
    ],
)
def test_a_bad_line_of_a_log_is_named(tmp_path: Path, line: object, expected: str) -> None:
    """With its number; a log without requests is no trace."""
    assert refusal(write(tmp_path, LOGGED, line)).startswith(f", line 2: {expected}")
    assert "there are no requests" in refusal(write(tmp_path, LOG_LINE))


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
