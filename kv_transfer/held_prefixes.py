"""Which beginnings of prompts an engine's own prefix cache has, as far as the router's marks name
them. Pure.

A mark is held by the block in which it ends: while that block is in the engine's cache, a prompt
with the same mark finds its beginning there (the engine frees the end of a prompt before its
beginning). The engine does not say when it evicts a block, so each report asks it about some of the
marks, those that were not used or asked about for longest first; what is said of the others may be
out of date.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from splitserve.kv_transfer.prefix_marks import MARK_BYTES, MARKS_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HELD_LIMIT_MARKS = 65_536
"""Marks that are kept for one engine; of more, those unused for longest are forgotten."""
CHECK_LIMIT_MARKS = 200
"""Marks about which one report asks the engine."""
REPORT_LIMIT_MARKS = 2_000
"""Marks that come and that go in one report, each."""


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True, tag="prefixes"):
    """What has come and gone since the report before."""

    is_first: bool = False
    """Everything said before is void: all that is held follows, in this report and the next."""
    added: bytes = b""
    """Concatenated digests."""
    tokens: tuple[int, ...] = ()
    """Tokens before each of those marks."""
    removed: bytes = b""
    """Concatenated digests; they go before the others come."""
    has_more: bool = False
    """The next report can be asked for at once."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for what is no report: it may come from another process."""
        if len(self.added) != MARK_BYTES * len(self.tokens) or len(self.removed) % MARK_BYTES:
            raise ValueError("marks and their tokens do not fit")


NOTHING_HELD = PrefixReport()


class HeldPrefixes:
    """The marks of one engine. Used by one thread; ``is_cached`` is called in it."""

    def __init__(
        self,
        block_tokens: int,
        is_cached: Callable[[bytes], bool],
        limit_marks: int = HELD_LIMIT_MARKS,
    ) -> None:
        self._block_tokens = block_tokens
        self._is_cached = is_cached
        self._limit_marks = limit_marks
        self._held: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        """Mark to its tokens and its block's hash; what was unused for longest comes first."""
        self._unsaid: dict[bytes, None] = {}
        """Held, and in no report yet."""
        self._gone: dict[bytes, None] = {}
        """In a report, and not held any more."""
        self._begins = True

    def __len__(self) -> int:
        return len(self._held)

    def note(self, marks: Sequence[tuple[bytes, int]], block_hashes: Sequence[bytes]) -> None:
        """A request with these marks and these full blocks was computed; those of the blocks that
        are cached hold its marks.
        """
        for mark, tokens in marks[:MARKS_LIMIT]:
            block = (tokens - 1) // self._block_tokens
            if block >= len(block_hashes):
                break
            if tokens < 1:
                continue
            if mark in self._held:
                self._held.move_to_end(mark)
            elif self._is_cached(block_hashes[block]):
                self._held[mark] = (tokens, block_hashes[block])
                if mark in self._gone:  # Said to be held, and its going is not said yet
                    del self._gone[mark]
                else:
                    self._unsaid[mark] = None
        while len(self._held) > self._limit_marks:
            self._forget(next(iter(self._held)))

    def report(self, *, from_start: bool) -> PrefixReport:
        """What is new; with ``from_start`` all that is held, as the first of the reports that say
        so.
        """
        self._check()
        if from_start:
            self._begins = True
            self._unsaid = dict.fromkeys(self._held)
            self._gone = {}
        added = list(islice(self._unsaid, REPORT_LIMIT_MARKS))
        removed = list(islice(self._gone, REPORT_LIMIT_MARKS))
        for mark in added:
            del self._unsaid[mark]
        for mark in removed:
            del self._gone[mark]
        is_first, self._begins = self._begins, False
        return PrefixReport(
            is_first=is_first,
            added=b"".join(added),
            tokens=tuple(self._held[mark][0] for mark in added),
            removed=b"".join(removed),
            has_more=bool(self._unsaid or self._gone),
        )

    def _check(self) -> None:
        """Ask about those that come first; those that are still cached go to the end."""
        for mark in list(islice(self._held, CHECK_LIMIT_MARKS)):
            if self._is_cached(self._held[mark][1]):
                self._held.move_to_end(mark)
            else:
                self._forget(mark)

    def _forget(self, mark: bytes) -> None:
        del self._held[mark]
        if mark in self._unsaid:
            del self._unsaid[mark]
        else:
            self._gone[mark] = None
