"""Wishes of operators that take time: reading into the arena, writing to a lower tier, asking and
clearing stores. Pure.

A work is looked after by ``Control``: ``advance`` is called once at its beginning and then in every
turn of the server, so it looks at the books for what has become of what it ordered. ``result`` is
what holds at the moment of asking; a work whose time is over is asked for it just so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from splitserve.kv_transfer.cache.book_effects import ListTier, RemoveChunks
from splitserve.kv_transfer.cache.control_messages import Done, LookedUp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.kv_transfer.cache.book_effects import AskTier, Effect
    from splitserve.kv_transfer.cache.cache_book import CacheBook
    from splitserve.kv_transfer.cache.control_messages import Result
    from splitserve.kv_transfer.cache.index import TierIndex
    from splitserve.kv_transfer.cache.tier_book import TierBook

    Found = tuple[bool, ...] | None
    """Which keys a tier has; None when it could not be asked."""
    Ask = Callable[[TierBook, list[bytes], Callable[[Found], None]], AskTier]

WINDOW_CHUNKS = 16
"""Chunks of one move that are read or written at a time."""


class Work(Protocol):
    """One wish that is being carried out."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""

    def advance(self, now: float) -> list[Effect]:
        """Go on as far as possible now."""

    def give_up(self, now: float) -> list[Effect]:
        """Nobody waits any more: nothing new is begun."""

    def result(self) -> Result:
        """What has been done."""


class LookupWork:
    """Where the chunks of one prompt are."""

    def __init__(self, book: CacheBook, ask: Ask, keys: list[bytes]) -> None:
        self._book = book
        self._ask = ask
        self._keys = keys
        shared = [t for t in book.tiers if t.index is None and t.is_usable]
        self._to_ask = shared if keys else []
        self._waiting = {tier.name for tier in self._to_ask}
        self._found: dict[str, Sequence[bool]] = {}

    @property
    def is_over(self) -> bool:
        return not self._waiting

    def advance(self, now: float) -> list[Effect]:
        asking, self._to_ask = self._to_ask, []
        return [self._ask(t, self._keys, self._answer_of(t.name)) for t in asking]

    def give_up(self, now: float) -> list[Effect]:
        return []

    def result(self) -> LookedUp:
        book, keys = self._book, self._keys
        found: dict[str, Sequence[bool]] = {
            "cpu": [book.arena.index.get(k) is not None for k in keys]
        }
        silent = []
        for tier in book.tiers:
            if tier.index is not None and tier.is_usable:
                found[tier.name] = [tier.index.get(key) is not None for key in keys]
            elif tier.name in self._found:
                found[tier.name] = self._found[tier.name]
            elif keys or not tier.is_usable:
                silent.append(tier.name)
        chunks = _leading([any(here) for here in zip(*found.values(), strict=True)])
        return LookedUp(
            chunks=chunks,
            by_tier={name: _leading(here) for name, here in found.items()},
            pinned=sum(is_pinned(book, key) for key in keys[:chunks]),
            silent=tuple(silent),
        )

    def _answer_of(self, name: str) -> Callable[[Found], None]:
        def answer(found: Found) -> None:
            self._waiting.discard(name)
            if found is not None:
                self._found[name] = found

        return answer


class FetchWork:
    """Chunks are brought into the arena. What comes behind a chunk that is nowhere is of no use
    there, and not brought.
    """

    def __init__(self, book: CacheBook, keys: list[bytes], until: float) -> None:
        self._book = book
        self._keys = keys
        self._until = until
        self._fetch = 0

    @property
    def is_over(self) -> bool:
        return self._fetch > 0 and not self._book.loads.is_fetching(self._fetch)

    def advance(self, now: float) -> list[Effect]:
        if self._fetch:
            return []
        effects = self._book.loads.prefetch(self._keys, self._until, now)
        self._fetch = self._book.loads.latest_prefetch
        return effects + self._book.take_effects()

    def give_up(self, now: float) -> list[Effect]:
        return self._book.loads.stop_fetching(self._fetch, now) + self._book.take_effects()

    def result(self) -> Done:
        index = self._book.arena.index
        there = sum(index.get(key) is not None for key in self._keys)
        missing = len(self._keys) - there
        return Done(chunks=there, bytes=there * self._book.chunk_bytes, missing=missing)


class MoveWork:
    """Chunks are written to a lower tier and (``takes_away``) leave the tiers above. Pinned ones do
    not leave. Those that come from other lower tiers pass through the arena and do not stay there,
    so there may be many more of them than it holds.
    """

    def __init__(
        self,
        book: CacheBook,
        ask: Ask,
        keys: list[bytes],
        target: TierBook,
        until: float,
        *,
        takes_away: bool,
    ) -> None:
        self._book = book
        self._ask = ask
        self._keys = keys
        self._target = target
        self._until = until
        self._above = [tier for tier in book.tiers if tier.number < target.number]
        self._takes_away = takes_away
        self._is_asking = False
        self._there: set[bytes] | None = None
        """What a shared target has said to have."""
        if target.index is not None or not keys:
            self._there = set()
        self._next = 0
        """Chunks before this index are begun."""
        self._coming: dict[bytes, int] = {}
        """Chunks that are to be in the arena, or are and wait until they can be written; the
        numbers of their fetches, which hold them there.
        """
        self._writing: dict[bytes, int] = {}
        """Chunks that are being written, and the same (0: somebody else had begun it)."""
        self._passing: set[bytes] = set()
        """Chunks that were brought into the arena only for this."""
        self._done: set[bytes] = set()
        self._removed: dict[int, list[bytes]] = {}

    @property
    def is_over(self) -> bool:
        begun = self._there is not None and self._next >= len(self._keys)
        return begun and not self._coming and not self._writing

    def advance(self, now: float) -> list[Effect]:
        if self._there is None:
            if self._is_asking:
                return []
            self._is_asking = True
            return [self._ask(self._target, self._keys, self._answered)]
        effects = self._take_up(now)
        while (
            self._next < len(self._keys)
            and len(self._coming) + len(self._writing) < WINDOW_CHUNKS
            and self._target.is_usable
        ):
            effects += self._begin(self._next, now)
            self._next += 1
        effects += self._take_up(now)
        if not self._target.is_usable:
            self._next = len(self._keys)
            effects += self._stop(self._coming, now)
        removed, self._removed = self._removed, {}
        effects += [RemoveChunks(number, keys) for number, keys in removed.items()]
        return effects + self._book.take_effects()

    def give_up(self, now: float) -> list[Effect]:
        effects = self._stop(self._coming, now) + self._stop(self._writing, now)
        return effects + self._book.take_effects()

    def result(self) -> Done:
        chunks = len(self._done)
        return Done(
            chunks=chunks,
            bytes=chunks * self._book.chunk_bytes,
            missing=len(self._keys) - chunks,
        )

    def _answered(self, found: Found) -> None:
        found = found or ()
        self._there = {k for k, is_there in zip(self._keys, found, strict=False) if is_there}

    def _take_up(self, now: float) -> list[Effect]:
        """What was ordered has come, or will not come."""
        loads = self._book.loads
        effects: list[Effect] = []
        for key, fetch in list(self._coming.items()):
            if loads.is_fetching(fetch):
                continue
            entry = self._book.arena.index.get(key)
            if entry is not None and not self._may_write():
                continue
            del self._coming[key]
            if entry is not None and self._book.write_to(self._target, entry):
                self._writing[key] = fetch
            else:
                effects += self._let_go(key, fetch, now)
        for key in [k for k in self._writing if k not in self._target.writing]:
            fetch = self._writing.pop(key)
            if self._target.has(key):
                self._finish(key)
            effects += self._let_go(key, fetch, now)
        return effects

    def _begin(self, index: int, now: float) -> list[Effect]:
        key = self._keys[index]
        assert self._there is not None
        if key in self._target.writing:
            self._writing[key] = 0
        elif key in self._there or self._target.has(key):
            self._finish(key)
        elif self._takes_away and self._is_kept(key):
            return []
        else:
            loads = self._book.loads
            if self._book.arena.index.get(key) is None:
                self._passing.add(key)
            parent = self._keys[index - 1] if index else b""
            effects = loads.prefetch([key], self._until, now, parent=parent, holds=True)
            self._coming[key] = loads.latest_prefetch
            return effects
        return []

    def _may_write(self) -> bool:
        """Whether one more chunk does not have to wait for others to be written."""
        return self._target.can_queue(self._book.chunk_bytes)

    def _stop(self, fetches: dict[bytes, int], now: float) -> list[Effect]:
        """What becomes of these is not waited for any more."""
        effects: list[Effect] = []
        while fetches:
            effects += self._let_go(*fetches.popitem(), now)
        return effects

    def _let_go(self, key: bytes, fetch: int, now: float) -> list[Effect]:
        """The chunk's slot is not needed for this any more: it is free, if the chunk was only
        passing.
        """
        entry = self._book.arena.index.get(key)
        if key in self._passing and entry is not None and not (entry.uses or entry.is_pinned):
            self._book.drop_from_arena(key)
        return self._book.loads.stop_fetching(fetch, now)

    def _finish(self, key: bytes) -> None:
        """The chunk is in the target."""
        if self._takes_away:
            if self._is_kept(key):
                return
            self._book.drop_from_arena(key)
            for tier in self._above:
                if tier.index is None or tier.index.get(key) is not None:
                    tier.forget([key])
                    self._removed.setdefault(tier.number, []).append(key)
        self._done.add(key)

    def _is_kept(self, key: bytes) -> bool:
        return is_pinned(self._book, key, above=self._target.number)


class ClearWork:
    """A tenant's chunks (or everybody's) are removed from some tiers. Copies are counted, one in
    each tier; what is being saved just then stays.
    """

    def __init__(
        self,
        book: CacheBook,
        new_id: Callable[[ClearWork], int],
        tiers: Sequence[TierBook],
        tenant: str | None,
        *,
        arena: bool,
        keep_pinned: bool,
        prefix: bytes,
    ) -> None:
        """``new_id`` gives numbers under which ``cleared`` will be called."""
        self._book = book
        self._tenant = tenant
        self._prefix = prefix
        self._in_arena = arena
        self._keep_pinned = keep_pinned
        self._expected: dict[int, int] = {}
        """How many chunks are known to be removed, by the id of what has not been answered."""
        self._new_id = new_id
        self._tiers = tiers
        self._is_begun = False
        self._chunks = self._bytes = self._missing = 0

    @property
    def is_over(self) -> bool:
        return self._is_begun and not self._expected

    def advance(self, now: float) -> list[Effect]:
        if self._is_begun:
            return []
        self._is_begun = True
        effects: list[Effect] = []
        for tier in self._tiers:
            effects += self._clear(tier)
        if self._in_arena:
            self._book.loads.void(self._tenant)
            gone = self._book.arena.clear(self._tenant, keep_pinned=self._keep_pinned)
            self._chunks += len(gone)
            self._bytes += len(gone) * self._book.chunk_bytes if gone else 0
            self._book.unmark([entry.key for entry in gone])
            effects += self._book.loads.feed(now)
        return effects + self._book.take_effects()

    def cleared(self, clear_id: int, chunks: int, is_complete: bool) -> None:
        """A lower tier has removed so many."""
        expected = self._expected.pop(clear_id)
        self._chunks += chunks
        if not is_complete:
            self._missing += max(1, expected - chunks)

    def give_up(self, now: float) -> list[Effect]:
        return []

    def result(self) -> Done:
        missing = self._missing + sum(max(1, count) for count in self._expected.values())
        return Done(chunks=self._chunks, bytes=self._bytes, missing=missing)

    def _clear(self, tier: TierBook) -> list[Effect]:
        keys, size_bytes = tier.clear(self._tenant, keep_pinned=self._keep_pinned)
        self._book.unmark(keys)
        if tier.index is not None:
            if not keys:
                return []
            self._bytes += size_bytes
            clear_id = self._new_id(self)
            self._expected[clear_id] = len(keys)
            return [RemoveChunks(tier.number, keys, clear_id)]
        if not tier.is_usable:
            self._missing += max(1, len(keys))
            return []
        clear_id = self._new_id(self)
        self._expected[clear_id] = len(keys)
        return [ListTier(tier.number, clear_id, self._prefix)]


def is_pinned(book: CacheBook, key: bytes, *, above: int | None = None) -> bool:
    """Whether some tier (of those above that number) has the chunk pinned."""
    indexes: list[TierIndex[Any]] = [book.arena.index]
    for tier in book.tiers:
        if tier.index is not None and (above is None or tier.number < above):
            indexes.append(tier.index)
    return any((entry := index.get(key)) is not None and entry.is_pinned for index in indexes)


def _leading(found: Sequence[bool]) -> int:
    return found.index(False) if False in found else len(found)
