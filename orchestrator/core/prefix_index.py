"""Which nodes and host caches have the beginning of which prompts, as far as they have said.

A *source* is one life of an engine (its incarnation) or the cache of a host. Each says which marks
it holds (``kv_transfer/prefix_marks.py``) and how many of its tokens lie before each; a mark stands
for the whole beginning up to it. What is known may be out of date: it may decide where work goes,
never what is computed. The index holds no text and no token, and is filled anew by any source that
is asked to begin again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SOURCE_LIMIT_MARKS = 65_536
"""Marks of one source, about 300 bytes each; what it says beyond that is not taken."""


class Held(NamedTuple):
    """The longest known beginning of a prompt at one source."""

    marks: int
    """How many of the prompt's marks."""
    tokens: int
    """As the source counts them."""


NOTHING_HELD: Mapping[str, Held] = {}


class PrefixIndex:
    """Marks and who holds them."""

    def __init__(self, source_limit_marks: int = SOURCE_LIMIT_MARKS) -> None:
        self._source_limit_marks = source_limit_marks
        self._holders: dict[bytes, dict[str, int]] = {}
        """Mark to tokens by source."""
        self._marks: dict[str, set[bytes]] = {}
        """By source, none of them empty."""

    def __len__(self) -> int:
        return len(self._holders)

    def size_of(self, source: str) -> int:
        """Marks of one source."""
        return len(self._marks.get(source, ()))

    def take(
        self,
        source: str,
        *,
        is_first: bool,
        added: Iterable[tuple[bytes, int]],
        removed: Iterable[bytes],
    ) -> None:
        """A source has said what it holds; with ``is_first`` everything said before is void."""
        if is_first:
            self.drop(source)
        held = self._marks.setdefault(source, set())
        for mark in removed:
            if mark in held:
                held.remove(mark)
                self._forget(source, mark)
        holders, limit = self._holders, self._source_limit_marks
        for mark, tokens in added:
            if mark not in held:
                if len(held) >= limit:
                    continue
                held.add(mark)
            known = holders.get(mark)
            if known is None:
                holders[mark] = {source: tokens}
            else:
                known[source] = tokens
        if not held:
            del self._marks[source]

    def drop(self, source: str) -> None:
        """The source is gone, and with it all that it held."""
        for mark in self._marks.pop(source, ()):
            self._forget(source, mark)

    def longest(self, marks: Sequence[bytes]) -> Mapping[str, Held]:
        """How much each source has of a prompt with these marks; nothing of those that have
        nothing. Looks from the last mark on, each mark once at most; not at all when nobody has the
        first, for what lies behind a lost beginning is of no use.
        """
        holders_of = self._holders.get
        if not marks or holders_of(marks[0]) is None:
            return NOTHING_HELD
        sources = len(self._marks)
        found: dict[str, Held] = {}
        for number in range(len(marks), 0, -1):
            holders = holders_of(marks[number - 1])
            if holders is None:
                continue
            for source, tokens in holders.items():
                if source not in found:
                    found[source] = Held(number, tokens)
            if len(found) == sources:
                break
        return found

    def levels(self, marks: Sequence[bytes]) -> list[tuple[int, Mapping[str, int]]]:
        """(how many of the marks, tokens by source) of each beginning that somebody has, the
        longest first; nothing when nobody has the first mark. Valid until the next report.
        """
        holders_of = self._holders.get
        if not marks or marks[0] not in self._holders:
            return []
        held = [(number, holders_of(mark)) for number, mark in enumerate(marks, 1)]
        return [(number, holders) for number, holders in reversed(held) if holders is not None]

    def _forget(self, source: str, mark: bytes) -> None:
        holders = self._holders[mark]
        del holders[source]
        if not holders:
            del self._holders[mark]
