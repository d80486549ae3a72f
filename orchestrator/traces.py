"""Recorded requests of a service: which prompts share what, without their text.

``read_trace`` recognises the format by the file's first line; a file that ends in ``.gz`` is
unpacked. One format is known:

*Mooncake* JSON lines (https://github.com/kvcache-ai/Mooncake): ``timestamp`` in milliseconds,
``input_length`` and ``output_length`` in tokens, ``hash_ids``: one number per block of the prompt,
its last partial one included. The numbers are *chained*: a number stands for its block and all
blocks before it. ``content_ids`` may be added: one number per block that stands for the block's
content alone, wherever it is.
"""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING, Annotated, BinaryIO

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LINE_LIMIT_BYTES = 16 * 1024 * 1024

Count = Annotated[int, Meta(ge=0)]


class TraceRequest(msgspec.Struct, frozen=True):
    """One request."""

    at_s: float
    """Since the trace's beginning."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Chained numbers of the prompt's blocks, in order, a last partial one included."""
    content: tuple[int, ...] = ()
    """Numbers of the same blocks by their content alone; empty when the trace has none."""


class TraceError(Exception):
    """A trace cannot be read or says what cannot be; the message names file and line."""


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: tuple[int, ...]
    content_ids: tuple[int, ...] = ()


def read_trace(path: Path, block_tokens: int) -> Iterator[TraceRequest]:
    """The requests of a trace whose blocks have ``block_tokens`` tokens, in the file's order.

    Raises ``TraceError`` at the first line that is wrong, ``OSError`` when there is no such file.
    """
    chains = _Chains()
    is_empty = True
    with _opened(path) as file:
        for number, line in _lines(path, file):
            if is_empty and not line.startswith(b"{"):
                raise TraceError(
                    f"{path}, line {number}: this is no known format; "
                    "JSON lines with timestamp, input_length, output_length and hash_ids are"
                )
            is_empty = False
            try:
                request = _mooncake_request(line, block_tokens)
                chains.check(request.blocks, number)
            except ValueError as error:  # msgspec's are ValueErrors too
                raise TraceError(f"{path}, line {number}: {error}") from error
            yield request
    if is_empty:
        raise TraceError(f"{path}: there are no requests in this file")


def _opened(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _lines(path: Path, file: BinaryIO | gzip.GzipFile) -> Iterator[tuple[int, bytes]]:
    """(number, text) of each line that is not blank."""
    number = 0
    while True:
        number += 1
        try:
            line = file.readline(LINE_LIMIT_BYTES + 1)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise TraceError(f"{path}: damaged after line {number - 1}: {error}") from error
        if len(line) > LINE_LIMIT_BYTES:
            raise TraceError(f"{path}, line {number}: longer than {LINE_LIMIT_BYTES} bytes")
        if not line:
            return
        if stripped := line.strip():
            yield number, stripped


_decode_mooncake = msgspec.json.Decoder(_MooncakeLine).decode


def _mooncake_request(line: bytes, block_tokens: int) -> TraceRequest:
    """Raises ``ValueError`` that says what is wrong."""
    found = _decode_mooncake(line)
    whole, rest = divmod(found.input_length, block_tokens)
    for name, ids in (("hash_ids", found.hash_ids), ("content_ids", found.content_ids)):
        if len(ids) not in (whole, whole + bool(rest)) and (ids or name == "hash_ids"):
            raise ValueError(
                f"{found.input_length} tokens are {whole + bool(rest)} blocks of {block_tokens}, "
                f"but {name} has {len(ids)}; is the size of blocks right?"
            )
    return TraceRequest(
        found.timestamp / 1000,
        found.input_length,
        found.output_length,
        found.hash_ids,
        found.content_ids,
    )


class _Chains:
    """What came before each block; a chained number can have only one such."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int | None, int]] = {}
        """Block to the block before it, and the line that said so."""

    def check(self, blocks: tuple[int, ...], line: int) -> None:
        """Raises ``ValueError`` when ``blocks`` contradict what earlier lines say."""
        before: int | None = None
        for block in blocks:
            known, known_line = self._before.setdefault(block, (before, line))
            if known != before:
                raise ValueError(
                    f"block {block} comes {_after(before)} here and {_after(known)} in line "
                    f"{known_line}; hash_ids have to stand for all that comes before, too"
                )
            before = block


def _after(block: int | None) -> str:
    return "first" if block is None else f"after block {block}"
