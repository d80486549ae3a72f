"""Which marks of prompts lead to chunks that are in some tier, and who is told so. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.book_effects import Effect, Send
from splitserve.kv_transfer.cache.messages import Mark, Marks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MARKS_PER_MESSAGE = 2_000


class MarkBook:
    """All marks and watchers. ``is_there`` answers whether a chunk is in any tier."""

    def __init__(self, is_there: Callable[[bytes], bool]) -> None:
        self._is_there = is_there
        self._watchers: set[int] = set()
        self._marks: dict[bytes, tuple[Mark, int]] = {}
        """Digest to the mark and the number of chunks that carry it."""
        self._marked: dict[bytes, tuple[Mark, ...]] = {}
        """Key of a chunk that is in some tier to its marks."""

    def watch(self, client: int) -> list[Effect]:
        """A client is told all marks, and from now on what changes."""
        self._watchers.add(client)
        marks = [mark for mark, _ in self._marks.values()]
        parts = [
            tuple(marks[i : i + MARKS_PER_MESSAGE]) for i in range(0, len(marks), MARKS_PER_MESSAGE)
        ] or [()]
        return [
            Send(client, Marks(is_first=number == 0, added=part))
            for number, part in enumerate(parts)
        ]

    def client_gone(self, client: int) -> None:
        """Nobody is told there any more."""
        self._watchers.discard(client)

    def add(self, key: bytes, marks: tuple[Mark, ...]) -> list[Effect]:
        """A chunk with these marks has come."""
        if not marks or key in self._marked:
            return []
        self._marked[key] = marks
        effects: list[Effect] = []
        for mark in marks:
            _, count = self._marks.get(mark.digest, (mark, 0))
            self._marks[mark.digest] = (mark, count + 1)
            if not count:
                effects += self._tell(Marks(added=(mark,)))
        return effects

    def drop(self, keys: Iterable[bytes]) -> list[Effect]:
        """Chunks have left a tier: the marks of those that are in no other one are void."""
        effects: list[Effect] = []
        for key in keys:
            if key not in self._marked or self._is_there(key):
                continue
            for mark in self._marked.pop(key):
                known, count = self._marks[mark.digest]
                if count > 1:
                    self._marks[mark.digest] = (known, count - 1)
                else:
                    del self._marks[mark.digest]
                    effects += self._tell(Marks(removed=(mark.digest,)))
        return effects

    def _tell(self, message: Marks) -> list[Effect]:
        return [Send(watcher, message) for watcher in self._watchers]
