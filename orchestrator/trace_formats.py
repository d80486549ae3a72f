"""What a line of each known form of a trace says. The forms themselves are described in
``traces.py``.

A ``ValueError`` says what is wrong with a line; whoever reads the file knows its number.
"""

from __future__ import annotations

import csv
import re
from datetime import datetime
from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

LENGTH_LIMIT_TOKENS = 10_000_000
"""No prompt and no answer is longer; a file that says so is damaged or counts something else."""
TIME_LIMIT_MS = 1e14

Count = Annotated[int, Meta(ge=0, le=LENGTH_LIMIT_TOKENS)]

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_LOG_LINE = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ")
"""How the router's log writes everything but its requests."""


class Form(Enum):
    """The forms of traces that are known, as people are told of them."""

    MOONCAKE = "Mooncake JSON lines"
    AZURE = "Azure CSV"
    ROUTER_LOG = "the log of a router"


class TraceRequest(msgspec.Struct, frozen=True):
    """One request."""

    at_s: float
    """Since the trace's beginning."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Chained numbers of the prompt's blocks, in order, a last partial one included; empty when the
    trace has none."""
    content: tuple[int, ...] = ()
    """Numbers of the same blocks by their content alone; empty when the trace has none."""


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0, le=TIME_LIMIT_MS)]
    input_length: Count
    output_length: Count
    hash_ids: tuple[int, ...]
    content_ids: tuple[int, ...] = ()


class _LogLine(msgspec.Struct):
    received_unix_s: Annotated[float, Meta(ge=0)]
    prompt_tokens_estimate: Count
    prompt_tokens: Count | None
    output_tokens: Count | None
    output_limit_tokens: int | None
    endpoint: str = ""


class _Event(msgspec.Struct):
    event: str | None = None


PROBE = "probe"
"""The endpoint of requests that measured nodes: no client has sent them."""

_decode_mooncake = msgspec.json.Decoder(_MooncakeLine).decode
_decode_log = msgspec.json.Decoder(_LogLine).decode
_decode_event = msgspec.json.Decoder(_Event).decode


def form_of(first_line: bytes) -> Form | None:
    """The form of the file that begins with this line, None for none that is known."""
    if first_line.startswith(b"{"):
        return Form.ROUTER_LOG if b'"event"' in first_line else Form.MOONCAKE
    if _LOG_LINE.match(first_line):
        return Form.ROUTER_LOG
    columns = {name.strip().strip(b'"') for name in first_line.split(b",")}
    wanted = {name.encode() for name in AZURE_COLUMNS}
    return Form.AZURE if columns & wanted else None


def mooncake_request(line: bytes, block_tokens: int) -> TraceRequest:
    """The request of a line."""
    if not line.startswith(b"{"):
        raise ValueError(_mixed(Form.MOONCAKE))
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


class AzureReader:
    """Reads the rows below a header; times count from the first one."""

    def __init__(self, header: bytes) -> None:
        names = [name.strip() for name in _cells(header)]
        for name in AZURE_COLUMNS:
            if name not in names:
                raise ValueError(f"the column {name} is missing; there are {', '.join(names)}")
        self._columns = len(names)
        self._places = [names.index(name) for name in AZURE_COLUMNS]
        self._began: datetime | None = None

    def request(self, line: bytes) -> TraceRequest:
        """The request of a row."""
        if line.startswith(b"{"):
            raise ValueError(_mixed(Form.AZURE))
        cells = _cells(line)
        if len(cells) != self._columns:
            raise ValueError(f"{len(cells)} columns, but the header has {self._columns}")
        stamp, prompt, answer = (cells[place].strip() for place in self._places)
        at = _time(stamp)
        if self._began is None:
            self._began = at
        if (at.tzinfo is None) != (self._began.tzinfo is None):
            raise ValueError(f"TIMESTAMP {stamp!r}: either all times have a zone, or none")
        return TraceRequest(
            (at - self._began).total_seconds(),
            _length("ContextTokens", prompt),
            _length("GeneratedTokens", answer),
            (),
        )


def logged_request(line: bytes) -> TraceRequest | None:
    """The request of a line of a router's log, with its time of day; None for a line that is none,
    for a probe, and for a request of which neither the answer's length nor a limit for it is known.
    """
    if not line.startswith(b"{"):
        return None
    event = _decode_event(line).event
    if event is None:
        raise ValueError(_mixed(Form.ROUTER_LOG))
    if event != "request":
        return None
    found = _decode_log(line)
    if found.endpoint == PROBE:
        return None
    prompt = found.prompt_tokens
    if prompt is None:
        prompt = found.prompt_tokens_estimate
    answer = found.output_tokens
    if answer is None:
        if found.output_limit_tokens is None:
            return None
        answer = min(max(0, found.output_limit_tokens), LENGTH_LIMIT_TOKENS)
    return TraceRequest(found.received_unix_s, prompt, answer, ())


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode()], strict=True))
    except csv.Error as error:
        raise ValueError(f"no CSV: {error}") from error


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(
            f"TIMESTAMP {text!r} is no time such as 2023-11-16 18:15:46.680590"
        ) from error


def _length(name: str, text: str) -> int:
    if not (text.isascii() and text.removeprefix("-").isdigit()):
        raise ValueError(f"{name} {text!r} is no whole number")
    length = int(text[:32])
    if not 0 <= length <= LENGTH_LIMIT_TOKENS:
        raise ValueError(f"{name} {text[:32]} is not between 0 and {LENGTH_LIMIT_TOKENS} tokens")
    return length


def _mixed(form: Form) -> str:
    return f"this line has another form than the file's beginning, which is {form.value}"
