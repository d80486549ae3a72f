"""A host's cache without a process: the real books, an arena that is a list of slots, and lower
tiers that are dictionaries and answer when they are told to.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.kv_transfer.cache.book_effects import (
    AskTier,
    Effect,
    ListTier,
    ProbeTier,
    ReadChunk,
    RemoveChunks,
    Send,
    WriteChunk,
)
from splitserve.kv_transfer.cache.cache_book import CacheBook
from splitserve.kv_transfer.cache.control import Control
from splitserve.kv_transfer.cache.control_messages import (
    ChunksWish,
    ClearWish,
    Done,
    LookupWish,
    QuotaWish,
    Result,
    StatWish,
)
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.keys import NO_TENANT
from splitserve.kv_transfer.cache.messages import (
    PROTOCOL_VERSION,
    Commit,
    Hello,
    Manage,
    Managed,
    Ready,
    Reserve,
    Reserved,
)
from splitserve.kv_transfer.cache.settings import CacheSettings, TierSettings, tier_names
from splitserve.kv_transfer.cache.tier_book import TierBook
from splitserve.kv_transfer.cache.tiers.base import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from splitserve.kv_transfer.cache.chunk import Chunk

GEOMETRY = ChunkGeometry(
    layers=2,
    chunk_tokens=32,
    block_tokens=16,
    heads=2,
    key_bytes=16,
    value_bytes=16,
    item_bytes=2,
    order="rows",
)
CHUNK_BYTES = GEOMETRY.chunk_bytes
STORED_BYTES = HEADER_BYTES + CHUNK_BYTES
"""Of a chunk in a lower tier."""
MODEL = bytes(range(32))
ALICE, BOB = b"A" * 8, b"B" * 8
OPERATOR, ENGINE = 70, 1
CPU = TierSettings(type="cpu", capacity_bytes=CHUNK_BYTES, eviction="lru")
DISK = TierSettings(type="disk", capacity_bytes=100 * STORED_BYTES, eviction="lru")
REDIS = TierSettings(type="redis")
LIMIT_S = 10.0


def chain(count: int, tenant: bytes = NO_TENANT, salt: int = 0) -> list[bytes]:
    """Keys of a prompt of so many chunks."""
    return [tenant + bytes([salt]) * 20 + n.to_bytes(4, "big") for n in range(count)]


PROMPT = chain(6)


@dataclass
class FakeArena:
    """Slots and nothing in them."""

    size_bytes: int
    slot_bytes: int = 0
    slots: int = 0
    failure: OSError | None = None
    free: list[int] = field(default_factory=list)
    is_touched: bool = True

    def cut(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots = self.size_bytes // slot_bytes
        self.free = [n * slot_bytes for n in range(self.slots)]

    def take(self) -> int | None:
        return self.free.pop(0) if self.free and self.is_touched else None

    def give_back(self, offset: int) -> None:
        assert offset not in self.free
        self.free.append(offset)

    @property
    def free_slots(self) -> int:
        return len(self.free)

    @property
    def touched_bytes(self) -> int:
        return self.size_bytes if self.is_touched else 0


class CacheHost:
    """``stores`` (by the tiers' names) hold what was written; ``run`` lets tiers work."""

    def __init__(
        self,
        slots: int,
        *lower: TierSettings,
        quotas: dict[str, dict[str, int]] | None = None,
        write_limit_chunks: int = 100,
        is_cut: bool = True,
    ) -> None:
        settings = CacheSettings(
            socket_path="/nowhere",
            chunk_tokens=GEOMETRY.chunk_tokens,
            tiers=(CPU, *lower),
            quota_bytes=quotas or {},
        )
        names = tier_names(tier.type for tier in settings.tiers)[1:]
        books = [
            TierBook(
                number,
                tier,
                name=name,
                is_exclusive=tier.type == "disk",
                write_limit_bytes=write_limit_chunks * CHUNK_BYTES,
                quotas=lambda tenant, name=name: self.book.quota(name, tenant),  # type: ignore[misc]
            )
            for number, (name, tier) in enumerate(zip(names, lower, strict=True), 1)
        ]
        self.arena = FakeArena(slots * CHUNK_BYTES)
        self.book = CacheBook(settings, self.arena, books, "life-1")
        self.control = Control(self.book, started=0.0)
        self.stores: dict[str, dict[bytes, Chunk]] = {name: {} for name in names}
        self.dead: set[str] = set()
        """Tiers whose every call fails."""
        self.now = 100.0
        self.orders: deque[Effect] = deque()
        self.told: list[tuple[int, Any]] = []
        """(client, message)"""
        self._saves = 0
        self._requests = 0
        if is_cut:
            self.hello()

    def tier(self, name: str) -> TierBook:
        return next(tier for tier in self.book.tiers if tier.name == name)

    def in_arena(self, keys: Iterable[bytes]) -> list[bool]:
        return [self.book.arena.index.get(key) is not None for key in keys]

    # -- an engine -----------------------------------------------------------------------------

    def hello(self, client: int = ENGINE, rank: int = 0) -> None:
        hello = Hello(
            version=PROTOCOL_VERSION,
            engine=f"engine-{client}",
            rank=rank,
            ranks=1,
            model=MODEL,
            geometry=GEOMETRY,
        )
        assert not self.book.hello(client, hello).refusal

    def save(self, keys: list[bytes], parent: bytes = b"") -> list[bool]:
        """The engine writes these; which of them it could."""
        self._saves += 1
        message = Reserve(save_id=self._saves, parent=parent, keys=b"".join(keys))
        self.take(self.book.reserve(ENGINE, message, self.now))
        [reserved] = [m for _, m in self.told if isinstance(m, Reserved)]
        self.told = [(c, m) for c, m in self.told if m is not reserved]
        given = [n for n, offset in enumerate(reserved.offsets) if offset >= 0]
        if given:
            sums = bytes(8 * GEOMETRY.layers)
            commit = Commit(save_id=self._saves, written=tuple((n, sums) for n in given))
            self.take(self.book.commit(ENGINE, commit, self.now))
        return [offset >= 0 for offset in reserved.offsets]

    def ready(self) -> list[Ready]:
        return [m for _, m in self.told if isinstance(m, Ready)]

    # -- an operator ---------------------------------------------------------------------------

    def wish(self, verb: str, wish: msgspec.Struct, client: int = OPERATOR) -> int:
        """The operator has asked; the number of the request."""
        self._requests += 1
        arguments = msgspec.msgpack.encode(wish)
        message = Manage(request_id=self._requests, verb=verb, arguments=arguments)
        self.take(self.control.handle(client, message, self.now))
        return self._requests

    def answer(self, request: int) -> Any:
        """What has been answered to a request; None when nothing has."""
        found = [m for _, m in self.told if isinstance(m, Managed) and m.request_id == request]
        if not found:
            return None
        [managed] = found
        return msgspec.msgpack.decode(managed.result, type=Result)

    def ask(self, verb: str, wish: msgspec.Struct) -> Any:
        """The answer when all tiers have done their work; it must not need the deadline."""
        request = self.wish(verb, wish)
        self.run()
        answer = self.answer(request)
        assert answer is not None, f"{verb} is not over"
        return answer

    def chunks(self, verb: str, keys: list[bytes], tier: str = "", limit_s: float = LIMIT_S) -> Any:
        return self.ask(verb, ChunksWish(keys=b"".join(keys), tier=tier, limit_s=limit_s))

    def lookup(self, keys: list[bytes]) -> Any:
        return self.ask("lookup", LookupWish(keys=b"".join(keys), limit_s=LIMIT_S))

    def clear(self, tenant: str | None = None, tier: str = "", keep_pinned: bool = True) -> Any:
        wish = ClearWish(tenant=tenant, tier=tier, keep_pinned=keep_pinned, limit_s=LIMIT_S)
        return self.ask("clear", wish)

    def quota(self, tenant: str | None = None, tier: str = "", *limit: int | None) -> Any:
        """Without a limit: what there is."""
        bound = limit[0] if limit else None
        wish = QuotaWish(tenant=tenant, tier=tier, limit_bytes=bound, changes=bool(limit))
        return self.ask("quota", wish)

    def stat(self) -> Any:
        return self.ask("stat", StatWish())

    # -- the server ----------------------------------------------------------------------------

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.told.append((effect.client, effect.message))
            else:
                self.orders.append(effect)

    def turn(self) -> None:
        """What the server does at the end of each of its turns."""
        self.take(self.book.tick(self.now))
        self.take(self.control.tick(self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.turn()

    def run(self, limit: int = 100_000) -> None:
        """Tiers work until nothing is left to do, at most so many orders."""
        while self.orders and limit:
            limit -= 1
            self.work(self.orders.popleft())
            self.turn()

    def work(self, order: Effect) -> None:
        """One tier carries out one order, or fails."""
        assert not isinstance(order, Send)
        tier = self.book.tiers[order.tier - 1]
        store = self.stores[tier.name]
        if tier.name in self.dead:
            self._fail(tier, order)
            return
        book, control = self.book, self.control
        match order:
            case AskTier():
                found = tuple(key in store for key in order.keys)
                present = found.index(False) if False in found else len(found)
                control.asked(order.ask_id, found, 0.002)
                self.take(book.asked(order.ask_id, present, 0.002, self.now))
            case ReadChunk():
                chunk = store.get(order.key)
                brought = None if chunk is None else replace(chunk, offset=order.offset, marks=())
                self.take(book.was_read(order.tier, order.key, brought, 0.001, self.now))
            case WriteChunk():
                store[order.key] = order.chunk
                self.take(book.was_written(order.tier, order.key, "written", self.now))
            case RemoveChunks():
                removed = sum(store.pop(key, None) is not None for key in order.keys)
                book.unmark(order.keys)
                self.take(book.take_effects())
                if order.clear_id:
                    self.take(control.cleared(order.clear_id, removed))
            case ListTier():
                keys = [key for key in store if key.startswith(order.prefix)]
                for key in keys:
                    del store[key]
                self.take(control.cleared(order.clear_id, len(keys)))
            case ProbeTier():
                book.probed(order.tier, 0.001)

    def _fail(self, tier: TierBook, order: Effect) -> None:
        book, control = self.book, self.control
        book.tier_failed(tier.number, "the store is gone", self.now)
        match order:
            case AskTier():
                control.asked(order.ask_id, None, 0.1)
                self.take(book.asked(order.ask_id, 0, 0.1, self.now, has_failed=True))
            case ReadChunk():
                self.take(book.was_read(tier.number, order.key, None, 0.1, self.now))
            case WriteChunk():
                self.take(book.was_written(tier.number, order.key, "failed", self.now))
            case RemoveChunks() | ListTier():
                if not isinstance(order, RemoveChunks) or order.clear_id:
                    self.take(control.cleared(order.clear_id, 0, False))


def done(chunks: int, missing: int = 0) -> Done:
    """The answer about so many chunks of the arena's size."""
    return Done(chunks=chunks, bytes=chunks * CHUNK_BYTES, missing=missing)


def stored(
    *lower: TierSettings, keys: list[bytes] = PROMPT, slots: int = 20, **more: int
) -> CacheHost:
    """A host that has written these to its lower tiers, and has an empty arena."""
    host = CacheHost(slots, *lower, **more)
    for start in range(0, len(keys), slots):
        part = keys[start : start + slots]
        host.save(part, parent=keys[start - 1] if start else b"")
        host.run()
        for key in part:
            host.book.drop_from_arena(key)
    return host
