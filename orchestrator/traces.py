"""Recorded requests of a service: which prompts share what, without their text.

``read_trace`` recognises the form by the file's first line; a file that ends in ``.gz`` is
unpacked. These forms are known:

*Mooncake* JSON lines (https://github.com/kvcache-ai/Mooncake): ``timestamp`` in milliseconds,
``input_length`` and ``output_length`` in tokens, ``hash_ids``: one number per block of the prompt,
its last partial one included. The numbers are *chained*: a number stands for its block and all
blocks before it. ``content_ids`` may be added: one number per block that stands for the block's
content alone, wherever it is. ``splitserve record`` writes this form.

*Azure* CSV (https://github.com/Azure/AzurePublicDataset): a header with the columns ``TIMESTAMP``
(ISO 8601), ``ContextTokens`` and ``GeneratedTokens``; others are passed over. It knows no blocks.

*The log of a router* (``router/request_records.py``): its lines with ``"event":"request"``, brought
into the order of arrival. It knows no blocks. A request that was not answered counts with the
answer that it allowed; without such a limit it is left out.
"""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from splitserve.orchestrator.trace_formats import (
    AzureReader,
    Form,
    TraceRequest,
    form_of,
    logged_request,
    mooncake_request,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["LINE_LIMIT_BYTES", "TraceError", "TraceRequest", "read_trace"]

LINE_LIMIT_BYTES = 16 * 1024 * 1024

_KNOWN = (
    "JSON lines with timestamp, input_length, output_length and hash_ids are, CSV with the columns "
    "TIMESTAMP, ContextTokens and GeneratedTokens, and a router's log"
)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TraceError(Exception):
    """A trace cannot be read or says what cannot be; the message names file and line."""


def read_trace(path: Path, block_tokens: int) -> Iterator[TraceRequest]:
    """The requests of a trace whose blocks have ``block_tokens`` tokens, in the order of arrival.

    Raises ``TraceError`` at the first line that is wrong, ``OSError`` when there is no such file.
    """
    with _opened(path) as file:
        lines = _lines(path, file)
        number, first = next(lines, (0, b""))
        if not number:
            raise TraceError(f"{path}: there are no requests in this file")
        first = first.removeprefix(_BYTE_ORDER_MARK)
        form = form_of(first)
        reader = _Reader(path, block_tokens)
        if form is Form.AZURE:
            yield from reader.azure(number, first, lines)
        elif form is Form.MOONCAKE:
            yield from reader.mooncake(number, first, lines)
        elif form is Form.ROUTER_LOG:
            yield from reader.router_log(number, first, lines)
        else:
            raise TraceError(f"{path}, line {number}: this is no known format; {_KNOWN}")
    if not reader.requests:
        raise TraceError(f"{path}: there are no requests in this file")


class _Reader:
    """Reads one file's lines; a fault gets the file's name and the line's number."""

    def __init__(self, path: Path, block_tokens: int) -> None:
        self._path = path
        self._block_tokens = block_tokens
        self._chains = _Chains()
        self._latest = 0.0
        self._latest_line = 0
        self.requests = 0
        """So many were found."""

    def mooncake(
        self, number: int, line: bytes, lines: Iterator[tuple[int, bytes]]
    ) -> Iterator[TraceRequest]:
        while line:
            try:
                request = mooncake_request(line, self._block_tokens)
                self._chains.check(request.blocks, number)
                self._check_order(request, number)
            except ValueError as error:  # msgspec's are ValueErrors too
                raise self._fault(number, error) from error
            yield request
            number, line = next(lines, (0, b""))

    def azure(
        self, number: int, header: bytes, lines: Iterator[tuple[int, bytes]]
    ) -> Iterator[TraceRequest]:
        try:
            rows = AzureReader(header)
            for number, line in lines:
                request = rows.request(line)
                self._check_order(request, number)
                yield request
        except ValueError as error:
            raise self._fault(number, error) from error

    def router_log(
        self, number: int, line: bytes, lines: Iterator[tuple[int, bytes]]
    ) -> Iterator[TraceRequest]:
        found = []
        while line:
            try:
                request = logged_request(line)
            except ValueError as error:
                raise self._fault(number, error) from error
            if request is not None:
                found.append(request)
            number, line = next(lines, (0, b""))
        self.requests = len(found)
        # A line is written when its request ends
        found.sort(key=lambda request: request.at_s)
        for request in found:
            at_s = round(request.at_s - found[0].at_s, 3)
            yield msgspec.structs.replace(request, at_s=at_s)

    def _check_order(self, request: TraceRequest, number: int) -> None:
        if request.at_s < self._latest:
            raise ValueError(
                f"this request came at {request.at_s:g} s, before that of line "
                f"{self._latest_line} at {self._latest:g} s; sort the rows by their time"
            )
        self._latest, self._latest_line = request.at_s, number
        self.requests += 1

    def _fault(self, number: int, error: ValueError) -> TraceError:
        return TraceError(f"{self._path}, line {number}: {error}")


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
