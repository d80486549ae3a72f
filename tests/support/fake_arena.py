"""The slots of an arena without memory, and who may touch them."""

from __future__ import annotations

from collections import Counter

from splitserve.kv_transfer.cache.geometry import ChunkGeometry

GEOMETRY = ChunkGeometry(
    layers=1, chunk_tokens=4, block_tokens=4, heads=2,
    key_bytes=256, value_bytes=256, item_bytes=2, order="rows",
)  # fmt: skip
SLOT = GEOMETRY.chunk_bytes


class Violation(AssertionError):
    """A promise of the cache was broken."""


class FakeArena:
    """Slots, and who may touch them: ``holders`` (anything) by slot."""

    failure = None

    def __init__(self, slots: int) -> None:
        self.size_bytes = self.touched_bytes = slots * SLOT
        self.slots = slots
        self.slot_bytes = 0
        self.free: list[int] = []
        self.holders: Counter[tuple[int, object]] = Counter()
        self.content: dict[int, tuple[bytes, set[int], int]] = {}
        """Slot to key, ranks that have written it, and how many there have to be."""

    def cut(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.free = [n * slot_bytes for n in range(self.slots)]

    def take(self) -> int | None:
        if not self.free:
            return None
        offset = self.free.pop(0)
        touching = [who for (slot, who), count in self.holders.items() if slot == offset and count]
        if touching:
            raise Violation(f"slot {offset} is given away while {touching} may touch it")
        self.content.pop(offset, None)
        return offset

    def give_back(self, offset: int) -> None:
        if offset in self.free:
            raise Violation(f"slot {offset} is given back twice")
        self.free.append(offset)

    def hold(self, offset: int, who: object) -> None:
        self.holders[offset, who] += 1

    def let_go(self, offset: int, who: object) -> None:
        if self.holders[offset, who] < 1:
            raise Violation(f"{who} touches slot {offset} that is not its own")
        self.holders[offset, who] -= 1

    def let_go_of_all(self, who: object) -> None:
        for place in [place for place in self.holders if place[1] == who]:
            del self.holders[place]

    def has_whole(self, offset: int, key: bytes) -> bool:
        found, ranks, needed = self.content.get(offset, (b"", set(), 1))
        return found == key and len(ranks) == needed
