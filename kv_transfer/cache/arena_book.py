"""What lies in the arena's slots. Pure but for the arena's own list of free slots.

A slot is free, *reserved* for a chunk that an engine or a tier writes, or holds a chunk: one that
look-ups find, one that was removed and somebody still reads, or a *departing* one, which was
evicted and is still being written to a lower tier. It becomes free only when whoever could touch it
has said that it does not, or is gone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.cache.chunk import Chunk
from splitserve.kv_transfer.cache.entry import Entry
from splitserve.kv_transfer.cache.index import TierIndex
from splitserve.kv_transfer.cache.keys import tenant_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DEPARTURES_PER_SLOT_LIMIT = 4
"""Evicted chunks that may stay in their slots for the sake of one slot."""

ArenaEntry = Entry[Chunk]


class ArenaBook:
    """The chunks of the arena. ``on_evicted`` answers whether an evicted chunk's slot is needed
    until ``departed`` is called.
    """

    def __init__(
        self,
        arena: Any,
        *,
        policy: str,
        ttl_s: float | None,
        quotas: Callable[[str], int | None],
        on_evicted: Callable[[ArenaEntry], bool],
    ) -> None:
        self.arena = arena
        self.index: TierIndex[Chunk] = TierIndex(0, policy, ttl_s, quotas)
        self.departing = 0
        self._reserved = 0
        self._leases = 0
        self._on_evicted = on_evicted

    def cut(self, chunk_bytes: int) -> None:
        """Chunks have this size from now on."""
        self.arena.cut(chunk_bytes)
        self._set_capacity()

    @property
    def is_busy(self) -> bool:
        """Whether slots may come free by themselves: somebody holds one, or the memory is not all
        there yet.
        """
        arena = self.arena
        is_growing = arena.touched_bytes < arena.size_bytes and arena.failure is None
        return bool(self._reserved or self._leases or self.departing) or is_growing

    def reserve(self, key: bytes, parent: bytes, blank: Chunk) -> ArenaEntry | None:
        """A slot for a chunk that will be written, in the entry's value; None when all are held.
        Others may go for it. It has to be published or withdrawn.
        """
        slot_bytes = self.arena.slot_bytes
        for _ in range(1 + DEPARTURES_PER_SLOT_LIMIT):
            gone = self.index.make_room(slot_bytes, tenant_of(key).hex(), parent)
            if gone is None:
                return None
            self._see_off(gone)
            if self.index.used_bytes + slot_bytes > self.index.capacity_bytes:
                continue
            offset = self.arena.take()
            if offset is None:
                return None  # The memory is not there yet: the arena has just been made.
            chunk = replace(blank, offset=offset)
            self._reserved += 1
            return self.index.reserve(key, parent, slot_bytes, tenant_of(key).hex(), chunk)
        return None

    def publish(self, entry: ArenaEntry, chunk: Chunk, now: float) -> None:
        """The reserved slot holds a whole chunk, which look-ups find from now on."""
        assert entry.value.offset == chunk.offset
        entry.value = chunk
        self._reserved -= 1
        self.index.publish(entry, now)

    def withdraw(self, entry: ArenaEntry) -> None:
        """The reserved slot is not written any more and holds nothing."""
        self._reserved -= 1
        self.index.withdraw(entry)
        self.arena.give_back(entry.value.offset)

    def lease(self, entry: ArenaEntry, *, is_use: bool = True) -> None:
        """One reader more: the slot keeps its content until ``release``."""
        self._leases += 1
        self.index.lease(entry, is_use=is_use)

    def release(self, entry: ArenaEntry) -> None:
        """One reader less."""
        self._leases -= 1
        if self.index.release(entry):
            self.arena.give_back(entry.value.offset)

    def departed(self, chunk: Chunk) -> None:
        """A departing chunk has been written, or could not be."""
        self.departing -= 1
        self._set_capacity()
        self.arena.give_back(chunk.offset)

    def free(self, entries: Iterable[ArenaEntry]) -> None:
        """These are out of the index: the slots of those that nobody reads are free."""
        for entry in entries:
            if entry.is_free:
                self.arena.give_back(entry.value.offset)

    def drop(self, key: bytes) -> bool:
        """The chunk is not found any more; whether it was there."""
        entry = self.index.remove(key)
        if entry is not None:
            self.free([entry])
        return entry is not None

    def clear(self, tenant: str | None, *, keep_pinned: bool) -> list[ArenaEntry]:
        """All chunks of a tenant (None: of all) are not found any more; returns them."""
        gone = self.index.clear(tenant, keep_pinned=keep_pinned)
        self.free(gone)
        return gone

    def shrink(self, tenant: str) -> None:
        """The tenant has no more than its quota, or only what cannot go now."""
        self._see_off(self.index.shrink(tenant))

    def _see_off(self, evicted: Iterable[ArenaEntry]) -> None:
        """Their slots are free, now or when they have been written to a lower tier."""
        for entry in evicted:
            if self._on_evicted(entry):
                self.departing += 1
                self._set_capacity()
            else:
                self.arena.give_back(entry.value.offset)

    def _set_capacity(self) -> None:
        usable = self.arena.slots - self.departing
        self.index.capacity_bytes = usable * self.arena.slot_bytes
