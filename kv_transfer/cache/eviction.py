"""Which chunk goes when room is needed. Pure.

A chunk's KV needs that of all chunks before it, so only *leaves* go: chunks that no other chunk of
the tier follows. A look-up notes its use at the deepest chunk that it found, and that note moves on
to the parent when the chunk goes; every chunk is then as fresh, and has as many hits, as the
look-ups that went through it say, while a look-up costs the same for a thousand chunks as for one.

Leaves are queued by *level*, the number of hits that they had, up to a limit. The heads of the
queues, each the one that was not used for longest, are compared by their age divided by the level's
weight, and the greatest goes. Age is counted in ticks of the index (look-ups and chunks added), not
in seconds: an idle hour makes nothing older.

- ``lru``: one level.
- ``s3fifo``: as in S3-FIFO (https://s3fifo.com) new chunks are on probation, those that are hit
  move up, and a *ghost* list of keys that went lets a chunk that comes back begin on the level of
  hit ones. Its queues are sized by weight and not by share: a fixed share for probation (a tenth
  there) suits objects that are asked for again within moments, but the next turn of a chat comes
  after minutes, when it would have left.

What was tried on an hour of chats (``benchmarks/cache_policy.py``), as hits in those of LRU at
10,000, 20,000 and 50,000 blocks: S3-FIFO as published 0.92, 0.88, 0.98, and with a quarter to nine
tenths of the room on probation at best 0.95, 0.98, 0.99; leaves before parents alone 1.00; deeper
chunks first 0.98, 1.00, 1.00; a fixed bonus of 500 requests for each hit 1.05, 1.04, 1.00, which
fits one size and one load only; weights 1, 2, 3, 4 without ghosts 1.04, 1.04, 1.00, with them 1.10,
1.05, 1.00; steeper ones (1, 3) lose at 50,000.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.entry import Entry

SPARE_ITEMS = 1_024
"""Outdated items that an order may hold beyond as many as there are leaves."""


@dataclass(frozen=True)
class Policy:
    """What sets one way of eviction apart."""

    weights: tuple[float, ...]
    """By level: how many times as old as one on probation a chunk gets before it goes."""
    ghost_level: int
    """Where a chunk begins that went lately; 0: none are remembered."""


POLICIES = {
    "lru": Policy(weights=(1.0,), ghost_level=0),
    "s3fifo": Policy(weights=(1.0, 2.0, 3.0, 4.0), ghost_level=1),
}


def policy_named(name: str) -> Policy:
    """The policy of that name; ``ValueError`` lists those that exist."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"no eviction {name!r}; there are {', '.join(POLICIES)}") from None


class Ghosts:
    """Keys of chunks that were evicted lately."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def remember(self, key: bytes, limit: int) -> None:
        """``key`` is the latest one; no more than ``limit`` are kept."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        while len(self._keys) > limit:
            self._keys.popitem(last=False)

    def take(self, key: bytes) -> bool:
        """Whether ``key`` was remembered; it is not any more."""
        if key not in self._keys:
            return False
        del self._keys[key]
        return True

    def clear(self) -> None:
        """Nothing is remembered."""
        self._keys.clear()


class LeafOrder:
    """Leaves in the order in which they go.

    A chunk is offered when it becomes evictable and not taken back when it is used or held: items
    that do not fit their chunk any more are dropped or renewed when they come to a queue's head,
    and all of them when there are too many.
    """

    def __init__(self, weights: tuple[float, ...]) -> None:
        self._weights = weights
        self._top = len(weights) - 1
        self._queues: list[list[tuple[int, int, Entry[Any]]]] = [[] for _ in weights]
        """By level: (last use, number of the offer, chunk), as heaps."""
        self._offers = 0
        self._items = 0
        self._limit = SPARE_ITEMS

    def __len__(self) -> int:
        """Items, outdated ones included."""
        return self._items

    def offer(self, entry: Entry[Any]) -> None:
        """``entry`` is evictable, by its present use and hits."""
        self._offers += 1
        self._items += 1
        level = entry.hits if entry.hits < self._top else self._top
        heappush(self._queues[level], (entry.last_use, self._offers, entry))
        if self._items > self._limit:
            self._drop_outdated()

    def take(self, tick: int, keep: Entry[Any] | None = None) -> Entry[Any] | None:
        """The chunk that goes first, ``keep`` excepted; it has to be offered again if it stays
        after all. None when no chunk is evictable.
        """
        is_kept = False
        best: list[tuple[int, int, Entry[Any]]] | None = None
        oldest = -1.0
        for level, weight in enumerate(self._weights):
            if not self._queues[level]:
                continue
            head = self._head(level)
            while head is not None and head is keep:
                self._pop(self._queues[level])
                is_kept = True
                head = self._head(level)
            if head is not None and (age := (tick - head.last_use) / weight) > oldest:
                best, oldest = self._queues[level], age
        chosen = self._pop(best) if best is not None else None
        if is_kept and keep is not None:
            self._put(keep)
        return chosen

    def _put(self, entry: Entry[Any]) -> None:
        """As ``offer``, for an item in place of another."""
        self._offers += 1
        self._items += 1
        level = min(entry.hits, self._top)
        heappush(self._queues[level], (entry.last_use, self._offers, entry))

    def _head(self, level: int) -> Entry[Any] | None:
        """First chunk of a queue; items before it that are outdated are gone or in their place.

        A chunk's item is never ahead of its use and hits, so what moves on goes to a later place of
        this queue or to a higher level.
        """
        queue = self._queues[level]
        while queue:
            last_use, _, entry = queue[0]
            if entry.is_evictable:
                if last_use == entry.last_use and (
                    level == entry.hits or level == self._top < entry.hits
                ):
                    return entry
                self._pop(queue)
                self._put(entry)
            else:
                self._pop(queue)
        return None

    def _pop(self, queue: list[tuple[int, int, Entry[Any]]]) -> Entry[Any]:
        self._items -= 1
        return heappop(queue)[2]

    def _drop_outdated(self) -> None:
        """Each evictable chunk has one item, and there are no others."""
        found = {id(item[2]): item for queue in self._queues for item in queue}
        self._queues = [[] for _ in self._weights]
        for _, number, entry in found.values():
            if entry.is_evictable:
                queue = self._queues[min(entry.hits, self._top)]
                queue.append((entry.last_use, number, entry))
        for queue in self._queues:
            heapify(queue)
        self._items = sum(map(len, self._queues))
        self._limit = 2 * self._items + SPARE_ITEMS
