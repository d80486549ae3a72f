"""From what routers say of their requests (``router/recordings.py``) to the lines of a trace.

A line can be written when its request has ended and no earlier one is open. Its blocks are numbered
by first appearance, so the file holds no digest. Marks lie at places of the text and blocks at
counts of tokens: where a mark lies in tokens is reckoned from the first prompt that had it, and all
later ones with that mark share the blocks before it. So a shared beginning counts as shared up to
its last mark, less a part of a block.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from splitserve.kv_transfer.prefix_marks import MARK_BYTES, mark_positions, split_digests

MARKS_LIMIT = 4_000_000
"""Marks that are remembered; beginnings that come after that many are not known again."""
NO_BLOCK = -1


class Arrived(msgspec.Struct, frozen=True, tag="arrived", tag_field="event"):
    """A request has come."""

    id: str
    at_s: float
    marks: str
    """In hex."""
    prompt_bytes: int


class Ended(msgspec.Struct, frozen=True, tag="ended", tag_field="event"):
    """It is over."""

    id: str
    input_tokens: int
    output_tokens: int | None
    output_limit_tokens: int | None


class Began(msgspec.Struct, frozen=True, tag="began", tag_field="event"):
    """The router listens to this recorder."""

    at_s: float


class Lost(msgspec.Struct, frozen=True, tag="lost", tag_field="event"):
    """The recorder was too slow for so many lines."""

    lines: int


decode_line = msgspec.json.Decoder(Began | Arrived | Ended | Lost).decode


@dataclass(slots=True)
class _Open:
    """A request whose line is not written."""

    arrived: Arrived
    ended: Ended | None = None


class TraceLines:
    """Makes the lines of one file. Every method returns what can be written now."""

    def __init__(self, block_tokens: int) -> None:
        self.left_out = 0
        """Requests that got no line: without an answer or a limit for it, or lost."""
        self.is_closed = False
        """No further requests are taken up."""
        self._blocks = BlockNumbers(block_tokens)
        self._open: dict[str, _Open] = {}
        """In the order of arrival."""
        self._began_s: float | None = None
        self._latest_ms = 0
        """Timestamp of the latest line: what another router tells late is not dated back."""

    @property
    def open_requests(self) -> int:
        """Requests that run."""
        return sum(request.ended is None for request in self._open.values())

    def take(self, line: Arrived | Ended | Began | Lost) -> bytes:
        """One line of the router."""
        if isinstance(line, Arrived):
            if not self.is_closed:
                self._open[line.id] = _Open(line)
        elif isinstance(line, Ended):
            if line.id in self._open:
                self._open[line.id].ended = line
        elif isinstance(line, Lost):
            return self.give_up()
        return self._ready()

    def give_up(self) -> bytes:
        """Nobody will say how those that run end."""
        running = [name for name, request in self._open.items() if request.ended is None]
        for name in running:
            del self._open[name]
        self.left_out += len(running)
        return self._ready()

    def _ready(self) -> bytes:
        lines = []
        while self._open:
            name, request = next(iter(self._open.items()))
            if request.ended is None:
                break
            del self._open[name]
            line = self._line(request.arrived, request.ended)
            if line is None:
                self.left_out += 1
            else:
                lines.append(msgspec.json.encode(line) + b"\n")
        return b"".join(lines)

    def _line(self, arrived: Arrived, ended: Ended) -> dict[str, object] | None:
        output = ended.output_tokens
        if output is None:
            output = ended.output_limit_tokens
        if output is None:
            return None
        if self._began_s is None:
            self._began_s = arrived.at_s
        digests = bytes.fromhex(arrived.marks)
        at_ms = round((arrived.at_s - self._began_s) * 1000)
        self._latest_ms = max(self._latest_ms, at_ms)
        return {
            # Whole milliseconds, as others' tools expect
            "timestamp": self._latest_ms,
            "input_length": ended.input_tokens,
            "output_length": max(0, output),
            "hash_ids": self._blocks.of(digests, arrived.prompt_bytes, ended.input_tokens),
        }


class BlockNumbers:
    """Numbers of blocks, from 0 on. Every number has one predecessor, so equal numbers mean
    equal beginnings.
    """

    def __init__(self, block_tokens: int, limit_marks: int = MARKS_LIMIT) -> None:
        self._block_tokens = block_tokens
        self._limit_marks = limit_marks
        self._before: list[int] = []
        """By number, the block before it."""
        self._ends: dict[bytes, tuple[int, int]] = {}
        """By mark: (whole blocks before it, the last of them)."""

    def of(self, digests: bytes, prompt_bytes: int, tokens: int) -> list[int]:
        """The numbers of a prompt's blocks, a partial last one included."""
        marks = split_digests(digests) if len(digests) % MARK_BYTES == 0 else []
        known = next((n for n in range(len(marks), 0, -1) if marks[n - 1] in self._ends), 0)
        whole, rest = divmod(tokens, self._block_tokens)
        found = self._path(marks[known - 1], whole) if known else []
        while len(found) < whole + bool(rest):
            self._before.append(found[-1] if found else NO_BLOCK)
            found.append(len(self._before) - 1)
        for mark, at in mark_positions(digests, prompt_bytes, tokens)[known:]:
            if len(self._ends) >= self._limit_marks:
                break
            count = min(at // self._block_tokens, whole)
            self._ends[mark] = (count, found[count - 1] if count else NO_BLOCK)
        return found

    def _path(self, mark: bytes, most: int) -> list[int]:
        """At most so many blocks before a mark that is known."""
        count, block = self._ends[mark]
        found = []
        while block != NO_BLOCK:
            found.append(block)
            block = self._before[block]
        assert len(found) == count
        return found[::-1][:most]
