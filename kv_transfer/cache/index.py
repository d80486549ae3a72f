"""What is in a tier that this host owns (the arena, the disk), and what goes when room is needed.
Pure.

Keys are chained (``keys.py``): a key stands for its chunk and all chunks before it. So a look-up
need not test every key, and eviction takes children before their parents (``eviction.py``). A chunk
may be here without its parent, whose copy was broken or is in another tier; look-ups then test key
by key.

A chunk's room is counted from ``reserve`` until it is gone *and* nobody reads it: a chunk that is
removed while it is leased is invisible at once, and its last ``release`` says that its place is
free. ``now`` is any clock that does not go backwards; without a time to live it is not looked at.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import takewhile
from typing import TYPE_CHECKING, Generic

from splitserve.kv_transfer.cache.entry import Entry, V
from splitserve.kv_transfer.cache.eviction import Ghosts, LeafOrder, policy_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

CAPACITY = "capacity"
QUOTA = "quota"
EXPIRED = "expired"
REMOVED = "removed"
CLEARED = "cleared"
GHOSTS_FLOOR = 64
"""Keys that are remembered after eviction even when there are fewer chunks."""


def no_quota(_tenant: str) -> int | None:
    """Quotas of a tier without any."""
    return None


class TierIndex(Generic[V]):
    """The chunks of one tier.

    Leased chunks, pinned chunks and those that a chunk of this tier follows are never evicted, so
    those before a held one stay too.
    """

    def __init__(
        self,
        capacity_bytes: int,
        policy: str = "s3fifo",
        ttl_s: float | None = None,
        quotas: Callable[[str], int | None] = no_quota,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.hits = 0
        """Chunks that look-ups have found."""
        self.misses = 0
        """Chunks that they have not found."""
        self.gone: Counter[str] = Counter()
        """Chunks by the reason why they went."""
        self.leased = 0
        """Chunks that readers hold, removed ones among them."""
        self.pinned = 0
        self.pinned_bytes = 0
        self._policy = policy_named(policy)
        self._ttl_s = ttl_s
        self._quotas = quotas
        self._tick = 0
        self._entries: dict[bytes, Entry[V]] = {}
        self._reserved: dict[bytes, Entry[V]] = {}
        self._orphans: Counter[bytes] = Counter()
        """Children of chunks that are neither here nor reserved, by their parent's key."""
        self._overtaken: set[bytes] = set()
        """Reserved chunks that may have published children."""
        self._tenant_bytes: dict[str, int] = {}
        self._order = LeafOrder(self._policy.weights)
        self._tenant_orders: dict[str, LeafOrder] = {}
        """Of the tenants that have come to their quota."""
        self._ghosts = Ghosts()
        self._by_age: OrderedDict[bytes, Entry[V]] = OrderedDict()
        """When chunks have a time to live: in the order in which they were published."""
        self._overdue_pins: dict[bytes, Entry[V]] = {}

    def __len__(self) -> int:
        """Chunks that look-ups can find."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[V]]:
        """Those chunks; none may be added or removed meanwhile."""
        return iter(self._entries.values())

    @property
    def reserved(self) -> int:
        """Chunks that have their room and are not published yet."""
        return len(self._reserved)

    @property
    def used_bytes_by_tenant(self) -> Mapping[str, int]:
        """Tenants that have anything here."""
        return self._tenant_bytes

    # -- looking up ------------------------------------------------------------------------------

    def prefix(self, keys: Sequence[bytes], now: float) -> int:
        """How many of ``keys``, a chain from any of its chunks on, are here from the first one on;
        counts as a use of them. Not all keys are looked at.
        """
        self._tick += 1
        found = self._leading(keys, now) if keys and keys[0] in self._entries else 0
        self.hits += found
        self.misses += len(keys) - found
        if found:
            deepest = self._entries[keys[found - 1]]
            deepest.last_use = self._tick
            deepest.hits += 1
            deepest.own_hits += 1
        return found

    def get(self, key: bytes) -> Entry[V] | None:
        """The chunk, if it is here; no use of it."""
        return self._entries.get(key)

    def is_reserved(self, key: bytes) -> bool:
        """Whether the chunk has its room and is not published yet."""
        return key in self._reserved

    def _leading(self, keys: Sequence[bytes], now: float) -> int:
        """As ``prefix``, for a first key that is here."""
        entries = self._entries
        if self._ttl_s is not None and self._has_overdue(now):
            for index, key in enumerate(keys):
                entry = entries.get(key)
                if entry is None or self._is_overdue(entry, now):
                    return index
            return len(keys)
        if self._orphans or self._overtaken:
            return len(list(takewhile(entries.__contains__, keys)))
        low, high = 1, len(keys)  # keys[low - 1] is here, keys[high] is not
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in entries:
                low = middle
            else:
                high = middle - 1
        return low

    # -- room ------------------------------------------------------------------------------------

    def make_room(
        self, size_bytes: int, tenant: str, parent_key: bytes = b""
    ) -> list[Entry[V]] | None:
        """Afterwards ``size_bytes`` more of this tenant fit; the chunks returned are gone for that,
        and their places are free.

        A tenant that would exceed its quota loses chunks of its own, and only those as far as that
        goes. The chunk ``parent_key`` stays. None, and nothing has changed, when it cannot be: what
        is held, reserved or not released yet leaves too little.
        """
        quota = self._quotas(tenant)
        if size_bytes > self.capacity_bytes or (quota is not None and size_bytes > quota):
            return None
        keep = self._entries.get(parent_key)
        victims: list[tuple[Entry[V], str]] = []
        while quota is not None and self._tenant_bytes.get(tenant, 0) + size_bytes > quota:
            if not self._evict(self._tenant_order(tenant), keep, QUOTA, victims):
                self._undo(victims)
                return None
        while self.used_bytes + size_bytes > self.capacity_bytes:
            if not self._evict(self._order, keep, CAPACITY, victims):
                self._undo(victims)
                return None
        return self._dismiss(victims)

    def shrink(self, tenant: str) -> list[Entry[V]]:
        """The tenant has no more than its quota, or only what cannot go now; the chunks returned
        are gone for that, and their places are free.
        """
        quota = self._quotas(tenant)
        victims: list[tuple[Entry[V], str]] = []
        while quota is not None and self._tenant_bytes.get(tenant, 0) > quota:
            if not self._evict(self._tenant_order(tenant), None, QUOTA, victims):
                break
        return self._dismiss(victims)

    def reserve(
        self, key: bytes, parent_key: bytes, size_bytes: int, tenant: str, value: V
    ) -> Entry[V]:
        """The chunk has its room, which ``make_room`` has made; look-ups do not find it yet.

        It has to be published or withdrawn; the chunk before it stays until then.
        """
        assert key not in self._entries, "a chunk is here already"
        assert key not in self._reserved, "a chunk is reserved already"
        assert self.used_bytes + size_bytes <= self.capacity_bytes, "no room was made"
        self._tick += 1
        entry = Entry(key, parent_key, size_bytes, tenant, value)
        entry.children = self._orphans.pop(key, 0)
        if entry.children:
            self._overtaken.add(key)
        entry.last_use = self._tick
        if self._policy.ghost_level and self._ghosts.take(key):
            entry.hits = self._policy.ghost_level
        self._reserved[key] = entry
        self._count(entry)
        self._link(entry)
        return entry

    def publish(self, entry: Entry[V], now: float, marks: tuple[object, ...] = ()) -> None:
        """Look-ups find the reserved chunk from now on."""
        del self._reserved[entry.key]
        self._overtaken.discard(entry.key)
        if entry.parent_key in self._reserved:
            self._overtaken.add(entry.parent_key)
        self._entries[entry.key] = entry
        entry.is_present = True
        entry.added = now
        entry.marks = marks
        if self._ttl_s is not None:
            self._by_age[entry.key] = entry
        self._offer(entry)

    def withdraw(self, entry: Entry[V]) -> None:
        """The reserved chunk will not come; its place is free."""
        del self._reserved[entry.key]
        self._overtaken.discard(entry.key)
        self._orphan_children(entry)
        self._unlink(entry)
        self._discount(entry)

    def add(
        self,
        key: bytes,
        parent_key: bytes,
        size_bytes: int,
        tenant: str,
        value: V,
        now: float,
        marks: tuple[object, ...] = (),
    ) -> Entry[V]:
        """Reserve and publish."""
        entry = self.reserve(key, parent_key, size_bytes, tenant, value)
        self.publish(entry, now, marks)
        return entry

    # -- holding ---------------------------------------------------------------------------------

    def lease(self, entry: Entry[V], *, is_use: bool = True) -> None:
        """A reader holds the chunk, which is here; counts as one of its uses, or does not."""
        assert entry.is_present, "a chunk that is gone cannot be leased"
        self.leased += not entry.leases
        entry.leases += 1
        entry.uses += is_use

    def release(self, entry: Entry[V]) -> bool:
        """A reader lets go. True when the chunk was removed meanwhile and this was its last reader:
        its place is free now.
        """
        assert entry.leases > 0, "released more often than leased"
        entry.leases -= 1
        if entry.leases:
            return False
        self.leased -= 1
        if entry.is_present:
            self._offer(entry)
            return False
        self._discount(entry)
        return True

    def pin(self, keys: Iterable[bytes]) -> list[Entry[V]]:
        """Those of the chunks that are here stay, past their time to live too, until they are
        unpinned or removed; returns them.
        """
        found = [entry for key in keys if (entry := self._entries.get(key)) is not None]
        for entry in found:
            if not entry.is_pinned:
                entry.is_pinned = True
                self.pinned += 1
                self.pinned_bytes += entry.size_bytes
        return found

    def unpin(self, keys: Iterable[bytes]) -> list[Entry[V]]:
        """Those of the chunks that were pinned may go again; returns them."""
        found = [
            entry
            for key in keys
            if (entry := self._entries.get(key)) is not None and entry.is_pinned
        ]
        for entry in found:
            self._let_go(entry)
            self._offer(entry)
        return found

    # -- removing --------------------------------------------------------------------------------

    def remove(self, key: bytes) -> Entry[V] | None:
        """The chunk is gone, pinned or not; None if it was not here. Its place is free unless it is
        leased (``is_free``).
        """
        entry = self._entries.get(key)
        if entry is not None:
            self._remove(entry, REMOVED)
        return entry

    def clear(self, tenant: str | None = None, *, keep_pinned: bool = True) -> list[Entry[V]]:
        """All published chunks, or all of one tenant's, are gone; returns them. Places of those
        that are leased are not free yet.
        """
        going = [
            entry
            for entry in self._entries.values()
            if (tenant is None or entry.tenant == tenant) and not (keep_pinned and entry.is_pinned)
        ]
        for entry in going:
            self._remove(entry, CLEARED)
        return going

    def expire(self, now: float) -> list[Entry[V]]:
        """Chunks past their time to live are gone; returns them. Places of those that are leased
        are not free yet. Costs one comparison when there are none.
        """
        if self._ttl_s is None or not self._has_overdue(now):
            return []
        going = [entry for entry in self._overdue_pins.values() if not entry.is_pinned]
        while self._by_age:
            entry = next(iter(self._by_age.values()))
            if entry.added + self._ttl_s > now:
                break
            del self._by_age[entry.key]
            if entry.is_pinned:
                self._overdue_pins[entry.key] = entry
            else:
                going.append(entry)
        for entry in going:
            self._remove(entry, EXPIRED)
        return going

    # -- bookkeeping -----------------------------------------------------------------------------

    def _has_overdue(self, now: float) -> bool:
        if self._overdue_pins:
            return True
        assert self._ttl_s is not None
        first = next(iter(self._by_age.values()), None)
        return first is not None and first.added + self._ttl_s <= now

    def _is_overdue(self, entry: Entry[V], now: float) -> bool:
        assert self._ttl_s is not None
        return entry.added + self._ttl_s <= now and not entry.is_pinned

    def _tenant_order(self, tenant: str) -> LeafOrder:
        """This tenant's evictable chunks in order; kept up from the first call on."""
        order = self._tenant_orders.get(tenant)
        if order is None:
            order = self._tenant_orders[tenant] = LeafOrder(self._policy.weights)
            for entry in self._entries.values():
                if entry.tenant == tenant and entry.is_evictable:
                    order.offer(entry)
        return order

    def _offer(self, entry: Entry[V]) -> None:
        """``entry`` may have become evictable."""
        if not (entry.children or entry.leases) and entry.is_evictable:
            self._order.offer(entry)
            if self._tenant_orders and (order := self._tenant_orders.get(entry.tenant)) is not None:
                order.offer(entry)

    def _evict(
        self,
        order: LeafOrder,
        keep: Entry[V] | None,
        reason: str,
        victims: list[tuple[Entry[V], str]],
    ) -> bool:
        """One more victim is out of the index, or none can be."""
        entry = order.take(self._tick, keep)
        if entry is None:
            return False
        del self._entries[entry.key]
        entry.is_present = False
        self._unlink(entry)
        self._discount(entry)
        victims.append((entry, reason))
        return True

    def _dismiss(self, victims: list[tuple[Entry[V], str]]) -> list[Entry[V]]:
        """The victims will not come back."""
        for entry, reason in victims:
            self._forget(entry, reason)
            if self._policy.ghost_level:
                self._ghosts.remember(entry.key, max(GHOSTS_FLOOR, len(self._entries)))
        return [entry for entry, _ in victims]

    def _undo(self, victims: list[tuple[Entry[V], str]]) -> None:
        """The victims are back, in both orders."""
        for entry, _ in reversed(victims):
            self._entries[entry.key] = entry
            entry.is_present = True
            self._count(entry)
            self._link(entry)
            self._offer(entry)

    def _remove(self, entry: Entry[V], reason: str) -> None:
        """``entry`` is out; its room is counted for as long as it is leased."""
        del self._entries[entry.key]
        entry.is_present = False
        self._let_go(entry)
        self._unlink(entry)
        self._forget(entry, reason)
        if not entry.leases:
            self._discount(entry)

    def _let_go(self, entry: Entry[V]) -> None:
        """``entry`` is not pinned."""
        if entry.is_pinned:
            entry.is_pinned = False
            self.pinned -= 1
            self.pinned_bytes -= entry.size_bytes

    def _forget(self, entry: Entry[V], reason: str) -> None:
        """``entry`` will not come back; what follows it is orphaned."""
        self.gone[reason] += 1
        if self._ttl_s is not None:
            self._by_age.pop(entry.key, None)
            self._overdue_pins.pop(entry.key, None)
        self._orphan_children(entry)

    def _orphan_children(self, entry: Entry[V]) -> None:
        if entry.children:
            self._orphans[entry.key] = entry.children

    def _link(self, entry: Entry[V]) -> None:
        """The parent of a chunk that has come knows of it."""
        if not entry.parent_key:
            return
        parent = self._parent(entry)
        if parent is None:
            self._orphans[entry.parent_key] += 1
            return
        parent.children += 1
        parent.hits -= entry.own_hits
        parent.own_hits -= entry.own_hits

    def _unlink(self, entry: Entry[V]) -> None:
        """The parent of a chunk that goes inherits its uses, and may be a leaf now."""
        if not entry.parent_key:
            return
        parent = self._parent(entry)
        if parent is None:
            self._orphans[entry.parent_key] -= 1
            if not self._orphans[entry.parent_key]:
                del self._orphans[entry.parent_key]
            return
        parent.children -= 1
        if entry.last_use > parent.last_use:
            parent.last_use = entry.last_use
        if entry.own_hits:
            parent.hits += entry.own_hits
            parent.own_hits += entry.own_hits
        self._offer(parent)

    def _parent(self, entry: Entry[V]) -> Entry[V] | None:
        return self._entries.get(entry.parent_key) or self._reserved.get(entry.parent_key)

    def _count(self, entry: Entry[V]) -> None:
        self.used_bytes += entry.size_bytes
        held = self._tenant_bytes.get(entry.tenant, 0)
        self._tenant_bytes[entry.tenant] = held + entry.size_bytes

    def _discount(self, entry: Entry[V]) -> None:
        self.used_bytes -= entry.size_bytes
        left = self._tenant_bytes[entry.tenant] - entry.size_bytes
        assert left >= 0, "a tenant has less than nothing"
        if left:
            self._tenant_bytes[entry.tenant] = left
        else:
            del self._tenant_bytes[entry.tenant]
            self._tenant_orders.pop(entry.tenant, None)
