"""A ``CacheBook`` to which a test says what happens, event by event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from splitserve.kv_transfer.cache.book_effects import (
    ReadChunk,
    Send,
)
from splitserve.kv_transfer.cache.cache_book import CacheBook
from splitserve.kv_transfer.cache.chunk import Chunk
from splitserve.kv_transfer.cache.messages import (
    PROTOCOL_VERSION,
    CloseChunks,
    Commit,
    Found,
    Hello,
    Lookup,
    OpenChunks,
    Ready,
    Reserve,
    Reserved,
)
from splitserve.kv_transfer.cache.settings import CacheSettings, TierSettings
from splitserve.kv_transfer.cache.tier_book import TierBook
from support.fake_arena import GEOMETRY, SLOT, FakeArena

if TYPE_CHECKING:
    from collections.abc import Sequence

KEYS = [bytes(8) + bytes([n]) + bytes(23) for n in range(1, 40)]
DISK, REDIS = 1, 2


class Rig:
    """A book with an arena of so many slots, a disk, and a Redis when wanted."""

    def __init__(self, slots: int = 8, *, redis: bool = False, disk: bool = True) -> None:
        self.arena = FakeArena(slots)
        types = ["disk"] * disk + ["redis"] * redis
        tiers = [TierSettings(type=kind, capacity_bytes=2**30) for kind in types]  # type: ignore[arg-type]
        cpu = TierSettings(type="cpu", capacity_bytes=slots * SLOT)
        books = [
            TierBook(
                n + 1, tier, is_exclusive=tier.type == "disk", write_limit_bytes=2**30,
                quotas=lambda _: None,
            )
            for n, tier in enumerate(tiers)
        ]  # fmt: skip
        settings = CacheSettings(socket_path="", chunk_tokens=4, tiers=(cpu, *tiers))
        self.book = CacheBook(settings, self.arena, books, "s")
        self.now = 10.0
        self.count = 0

    def hello(self, client: int, rank: int = 0, ranks: int = 1, **changes: Any) -> str:
        message = Hello(
            version=PROTOCOL_VERSION, engine=f"e{client if ranks == 1 else ''}", rank=rank,
            ranks=ranks, model=bytes(32), geometry=GEOMETRY,
        )  # fmt: skip
        return self.book.hello(client, replace(message, **changes)).refusal

    def reserve(self, client: int, keys: Sequence[bytes], save_id: int = 0) -> tuple[int, ...]:
        self.count += 1
        message = Reserve(save_id=save_id or self.count, parent=b"", keys=b"".join(keys))
        sent = only(self.book.reserve(client, message, self.now), Reserved)
        return sent[0].message.offsets  # type: ignore[no-any-return]

    def save(self, client: int, *keys: bytes) -> list[Any]:
        """Reserve and write; the effects."""
        offsets = self.reserve(client, keys)
        assert min(offsets) >= 0
        written = tuple((index, bytes(8)) for index in range(len(keys)))
        return self.book.commit(client, Commit(save_id=self.count, written=written), self.now)

    def open(self, client: int, load_id: int, *keys: bytes, limit_s: float = 5.0) -> list[Any]:
        message = OpenChunks(load_id=load_id, keys=b"".join(keys), limit_s=limit_s)
        return self.book.open(client, message, self.now)

    def close(self, client: int, load_id: int, *indices: int, **also: Any) -> list[Any]:
        message = CloseChunks(load_id=load_id, indices=indices, **also)
        return self.book.close(client, message, self.now)

    def on_disk(self, *keys: bytes) -> None:
        """The disk has these from an earlier life."""
        self.book.tiers[0].filled([(key, b"", SLOT) for key in keys], self.now)

    def read(self, effects: Sequence[Any], *, found: bool = True) -> list[Any]:
        """The tiers bring what they were asked for."""
        done: list[Any] = []
        for effect in only(effects, ReadChunk):
            chunk = Chunk(effect.offset, GEOMETRY, 1, bytes(8)) if found else None
            done += self.book.was_read(effect.tier, effect.key, chunk, 0.01, self.now)
        return done

    def look_up(self, *keys: bytes) -> list[Any]:
        return self.book.lookup(1, Lookup(lookup_id=7, keys=b"".join(keys), limit_s=1.0), self.now)

    def tick(self, after_s: float) -> list[Any]:
        self.now += after_s
        return self.book.tick(self.now)


def only(effects: Sequence[Any], kind: type) -> list[Any]:
    """Effects of a kind; of a message's kind: the sends of such messages."""
    return [e for e in effects if isinstance(e.message if isinstance(e, Send) else e, kind)]


def tiers_of(effects: Sequence[Any]) -> bytes:
    (sent,) = only(effects, Found)
    return sent.message.tiers  # type: ignore[no-any-return]


def answers(effects: Sequence[Any]) -> tuple[list[int], list[int]]:
    """(indices that are ready, indices that are missing)."""
    sent = [effect.message for effect in only(effects, Ready)]
    return [c.index for m in sent for c in m.chunks], [i for m in sent for i in m.missing]
