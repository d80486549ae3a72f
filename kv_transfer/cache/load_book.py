"""Chunks that clients want to read: held in the arena, or on their way into it. Pure.

A load is answered chunk by chunk in its order; what comes behind a chunk that is missing is useless
and is given up with it. Chunks that two clients want are read once. A read that finds no slot takes
that of a chunk which its own load has brought and is done with, so a load may be larger than the
arena (but not that of a prefetch, for which the prompt's beginning is worth most); else it waits
for one until its load's time is over, or gives up when nobody holds any.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.book_effects import Effect, ReadChunk, Send
from splitserve.kv_transfer.cache.keys import tenant_of
from splitserve.kv_transfer.cache.messages import CHUNKS_LIMIT_BYTES, Ready, ReadyChunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from splitserve.kv_transfer.cache.arena_book import ArenaBook, ArenaEntry
    from splitserve.kv_transfer.cache.chunk import Chunk
    from splitserve.kv_transfer.cache.tier_book import TierBook

NOBODY = -1
"""The client of a prefetch."""
READING_SLOTS_SHARE = 4
"""One in so many slots may be read into: a tier that hangs does not get all of them."""
READY_CHUNK_BYTES = 320
"""At most, of a chunk in a message, besides its checksums and frames."""


@dataclass(eq=False)
class Load:
    """What one client wants."""

    client: int
    load_id: int
    keys: list[bytes]
    until: float
    """Infinite when that is over."""
    end: int
    """Chunks from this index on will not come."""
    parent: bytes = b""
    """Key of the chunk before the first one, where it is known."""
    holds: bool = True
    """Whether chunks that are there are kept in place until the load is closed."""
    held: dict[int, ArenaEntry] = field(default_factory=dict)
    """Chunks that the client may read now, by index."""
    wanted: int = 0
    """Chunks before this index are asked for or answered."""
    brought: set[int] = field(default_factory=set)
    """Chunks that a tier has brought for it, and for which it has not given up the slot."""

    def is_over(self) -> bool:
        """Whether nothing will be added."""
        return self.wanted >= self.end


@dataclass(eq=False)
class Reading:
    """A chunk on its way from a tier into a slot."""

    entry: ArenaEntry
    tier: TierBook
    """Which is reading."""
    tiers: deque[TierBook]
    """Tiers to try after this one."""
    waiters: list[tuple[Load, int]] = field(default_factory=list)
    is_void: bool = False
    """What comes is not wanted any more."""


class LoadBook:
    """All loads and reads."""

    def __init__(
        self,
        arena: ArenaBook,
        tiers: Sequence[TierBook],
        on_used: Callable[[ArenaEntry], list[Effect]],
        on_read: Callable[[ArenaEntry], list[Effect]],
        blank: Callable[[], Chunk],
    ) -> None:
        self._arena = arena
        self._tiers = tiers
        self._on_used = on_used
        self._on_read = on_read
        self._blank = blank
        self._loads: dict[tuple[int, int], Load] = {}
        self._reading: dict[bytes, Reading] = {}
        self._starved: dict[tuple[int, int], Load] = {}
        """Loads whose next chunk found no slot."""
        self._prefetches = 0
        self.counters: Counter[str] = Counter()

    @property
    def open_loads(self) -> int:
        """Loads that are not closed."""
        return len(self._loads)

    def open(
        self, client: int, load_id: int, keys: list[bytes], until: float, now: float
    ) -> list[Effect]:
        """A client wants these. Raises ``ValueError`` for a load id that is in use."""
        if (client, load_id) in self._loads:
            raise ValueError(f"load {load_id} is open already")
        load = Load(client, load_id, keys, until, end=len(keys))
        self._loads[client, load_id] = load
        return self._go_on(load, now)

    @property
    def latest_prefetch(self) -> int:
        """The number of the prefetch that was begun last."""
        return self._prefetches

    def is_fetching(self, prefetch: int) -> bool:
        """Whether more may come of a prefetch."""
        load = self._loads.get((NOBODY, prefetch))
        return load is not None and (not load.is_over() or self._is_awaited(load))

    def prefetch(
        self,
        keys: list[bytes],
        until: float,
        now: float,
        *,
        parent: bytes = b"",
        holds: bool = False,
    ) -> list[Effect]:
        """These are brought into the arena for nobody in particular; with ``holds`` they stay there
        until ``stop_fetching``.
        """
        self._prefetches += 1
        load = Load(NOBODY, self._prefetches, keys, until, len(keys), parent, holds)
        self._loads[NOBODY, load.load_id] = load
        return self._go_on(load, now)

    def stop_fetching(self, prefetch: int, now: float) -> list[Effect]:
        """No more chunks are asked for, and none is held; those on their way arrive."""
        return self.close(NOBODY, prefetch, (), now)

    def close(self, client: int, load_id: int, indices: Sequence[int], now: float) -> list[Effect]:
        """The client does not read these any more (none named: nothing of the load)."""
        load = self._loads.get((client, load_id))
        if load is None:
            return []
        for index in list(indices) or list(load.held):
            entry = load.held.pop(index, None)
            if entry is not None:
                self._arena.release(entry)
        if not indices:
            load.end = min(load.end, load.wanted)
            self._forget(load)
        elif load.is_over() and not load.held and not self._is_awaited(load):
            self._forget(load)
        return self.feed(now)

    def key_of(self, client: int, load_id: int, index: int) -> bytes | None:
        """The key behind an index of a load."""
        load = self._loads.get((client, load_id))
        return load.keys[index] if load is not None and 0 <= index < len(load.keys) else None

    def client_gone(self, client: int, now: float) -> list[Effect]:
        """Nobody of this connection reads any more."""
        effects: list[Effect] = []
        for found, load_id in [key for key in self._loads if key[0] == client]:
            effects += self.close(found, load_id, (), now)
        return effects

    def was_read(self, key: bytes, chunk: Chunk | None, now: float) -> list[Effect]:
        """A tier has brought a chunk into its slot, or (None) has not."""
        reading = self._reading[key]
        if reading.is_void:
            chunk = None
            reading.tiers.clear()
        if chunk is None:
            while reading.tiers:
                tier = reading.tiers.popleft()
                if tier.is_usable:
                    reading.tier = tier
                    return [ReadChunk(tier.number, key, reading.entry.value.offset)]
        del self._reading[key]
        if chunk is None:
            self._arena.withdraw(reading.entry)
            self.counters["lost"] += 1
            effects: list[Effect] = []
            for load, index in reading.waiters:
                effects += self._give_up(load, index)
            return effects + self.feed(now)
        entry = reading.entry
        self._arena.publish(entry, chunk, now)
        effects = self._on_read(entry)
        for load, index in reading.waiters:
            load.brought.add(index)
            if index < load.end:
                effects += self._hold(load, index, entry)
        return effects + self.feed(now)

    def void(self, tenant: str | None) -> None:
        """What is being read of this tenant's chunks (None: of everybody's) does not arrive."""
        for key, reading in self._reading.items():
            if tenant is None or tenant_of(key).hex() == tenant:
                reading.is_void = True

    def expire(self, now: float) -> list[Effect]:
        """Loads whose time is over get no more chunks; those they hold stay theirs."""
        effects: list[Effect] = []
        for load in list(self._loads.values()):
            if now < load.until:
                continue
            load.until = float("inf")
            if not load.is_over() or self._is_awaited(load):
                first = min((i for i in range(load.end) if self._is_waiting(load, i)), default=0)
                self.counters["late"] += 1
                self._blame_tier(load, first, now)
                effects += self._give_up(load, first)
        return effects

    def next_deadline(self) -> float:
        """When the first load's time is over."""
        return min((load.until for load in self._loads.values()), default=float("inf"))

    # -- inside --------------------------------------------------------------------------------

    def _go_on(self, load: Load, now: float) -> list[Effect]:
        """Ask for as many of the load's chunks as there are slots for."""
        effects: list[Effect] = []
        ready: list[ReadyChunk] = []
        while load.wanted < load.end:
            index = load.wanted
            key = load.keys[index]
            entry = self._arena.index.get(key)
            if entry is not None:
                load.wanted += 1
                if load.client != NOBODY:
                    effects += self._on_used(entry)
                if load.holds:
                    self._lend(load, index, entry)
                if load.client != NOBODY:
                    ready.append(_ready(index, entry))
                continue
            reading = self._reading.get(key)
            if reading is None:
                started = self._start_reading(load, index)
                if started is None:
                    if self._arena.is_busy:
                        self._starved[load.client, load.load_id] = load
                    else:
                        self.counters["without_room"] += 1
                        effects += self._give_up(load, index)
                    break
                effects += started
                if key not in self._reading:
                    break
                reading = self._reading[key]
            reading.waiters.append((load, index))
            load.wanted += 1
        for part in _parts(ready):
            effects.append(Send(load.client, Ready(load_id=load.load_id, chunks=tuple(part))))
        if not load.holds and not self.is_fetching(load.load_id):
            self._forget(load)
        return effects

    def _start_reading(self, load: Load, index: int) -> list[Effect] | None:
        """The order to read a chunk; None when there is no slot now."""
        key = load.keys[index]
        tiers = deque(
            tier
            for tier in self._tiers
            if tier.is_usable and (tier.index is None or tier.index.get(key) is not None)
        )
        if not tiers:
            return self._give_up(load, index)
        if self._arena.index.is_reserved(key):
            return None  # An engine is writing it.
        if self._reads_enough():
            return None
        parent = load.keys[index - 1] if index else load.parent
        entry = self._arena.reserve(key, parent, self._blank())
        if entry is None and load.client != NOBODY and self._recycle(load, index):
            entry = self._arena.reserve(key, parent, self._blank())
        if entry is None:
            return None
        first = tiers.popleft()
        self._reading[key] = Reading(entry, first, tiers)
        return [ReadChunk(first.number, key, entry.value.offset)]

    def _reads_enough(self) -> bool:
        limit: int = max(1, self._arena.arena.slots // READING_SLOTS_SHARE)
        return len(self._reading) >= limit

    def _blame_tier(self, load: Load, index: int, now: float) -> None:
        """A tier that hangs reports no failure, and its slots are not free before it answers."""
        reading = self._reading.get(load.keys[index]) if index < len(load.keys) else None
        if reading is None and self._reads_enough():
            reading = next(iter(self._reading.values()))  # The oldest one stands in its way.
        if reading is not None:
            reading.tier.health.failed("no answer to a read within the time of its load", now)

    def _recycle(self, load: Load, index: int) -> bool:
        """Drop one chunk before ``index`` that a tier has brought for this load and that no load
        needs any more; False when there is none. Eviction would not take it: a chunk goes after
        those that follow it.
        """
        for number in sorted(load.brought):
            key = load.keys[number]
            entry = self._arena.index.get(key)
            if number < index and (entry is None or not entry.is_held):
                load.brought.discard(number)
                if entry is not None and not self._is_wanted(key):
                    return self._arena.drop(key)
        return False

    def _is_wanted(self, key: bytes) -> bool:
        """Whether some load has yet to ask for the chunk."""
        return any(key in load.keys[load.wanted : load.end] for load in self._loads.values())

    def _hold(self, load: Load, index: int, entry: ArenaEntry) -> list[Effect]:
        if not load.holds:
            if not self.is_fetching(load.load_id):
                self._forget(load)
            return []
        if not self._is_open(load):
            return []
        self._lend(load, index, entry)
        if load.client == NOBODY:
            return []
        return [Send(load.client, Ready(load_id=load.load_id, chunks=(_ready(index, entry),)))]

    def _lend(self, load: Load, index: int, entry: ArenaEntry) -> None:
        self._arena.lease(entry, is_use=load.client != NOBODY)
        load.held[index] = entry
        self.counters["chunks_lent"] += load.client != NOBODY

    def _give_up(self, load: Load, index: int) -> list[Effect]:
        """The load's chunks from ``index`` on will not come."""
        if index >= load.end or not self._is_open(load):
            return []
        missing = tuple(i for i in range(index, load.end) if i not in load.held)
        load.end = index
        self._starved.pop((load.client, load.load_id), None)
        if load.client == NOBODY:
            if not load.holds and not self._is_awaited(load):
                self._forget(load)
            return []
        return [Send(load.client, Ready(load_id=load.load_id, missing=missing))]

    def feed(self, now: float) -> list[Effect]:
        """A slot may be free: loads that wait for one go on."""
        effects: list[Effect] = []
        starved, self._starved = self._starved, {}
        for load in starved.values():
            if (load.client, load.load_id) in self._loads:
                effects += self._go_on(load, now)
        return effects

    def _is_open(self, load: Load) -> bool:
        return self._loads.get((load.client, load.load_id)) is load

    def _is_waiting(self, load: Load, index: int) -> bool:
        if index >= load.wanted:
            return True
        reading = self._reading.get(load.keys[index])
        return reading is not None and (load, index) in reading.waiters

    def _is_awaited(self, load: Load) -> bool:
        return any(self._is_waiting(load, index) for index in range(load.end))

    def _forget(self, load: Load) -> None:
        self._loads.pop((load.client, load.load_id), None)
        self._starved.pop((load.client, load.load_id), None)


def _parts(ready: list[ReadyChunk]) -> Iterator[list[ReadyChunk]]:
    """As many chunks at a time as one message takes."""
    if ready:
        each = READY_CHUNK_BYTES + max(len(c.checksums) + len(c.frames) for c in ready)
        count = max(1, CHUNKS_LIMIT_BYTES // each)
        yield from (ready[start : start + count] for start in range(0, len(ready), count))


def _ready(index: int, entry: ArenaEntry) -> ReadyChunk:
    chunk = entry.value
    return ReadyChunk(
        index=index,
        offset=chunk.offset,
        geometry=chunk.geometry,
        pieces=chunk.pieces,
        checksums=chunk.checksums,
        codec=chunk.codec,
        frames=chunk.frames,
    )
