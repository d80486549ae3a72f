"""Everything that a cache server decides: clients' messages and tiers' answers in, effects out.
Pure: owns no socket, thread or clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.cache.arena_book import ArenaBook, ArenaEntry
from splitserve.kv_transfer.cache.book_effects import AskTier, Effect, ProbeTier, Send
from splitserve.kv_transfer.cache.chunk import Chunk
from splitserve.kv_transfer.cache.geometry import ChunkGeometry, same_content
from splitserve.kv_transfer.cache.keys import JoinedKeys, split_keys
from splitserve.kv_transfer.cache.load_book import LoadBook
from splitserve.kv_transfer.cache.mark_book import MarkBook
from splitserve.kv_transfer.cache.messages import (
    PROTOCOL_VERSION,
    Arena,
    CloseChunks,
    Commit,
    Found,
    Hello,
    Lookup,
    OpenChunks,
    Reserve,
    Reserved,
    TierSpeed,
)
from splitserve.kv_transfer.cache.quota_book import QuotaBook
from splitserve.kv_transfer.cache.save_book import SaveBook, Writer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.kv_transfer.cache.chunk_coding import Trial
    from splitserve.kv_transfer.cache.settings import CacheSettings
    from splitserve.kv_transfer.cache.tier_book import TierBook

EXPIRY_INTERVAL_S = 1.0


@dataclass(eq=False)
class PendingLookup:
    """A look-up that waits for a shared tier."""

    client: int
    lookup_id: int
    keys: Sequence[bytes]
    tiers: bytearray
    until: float
    to_ask: list[TierBook]
    asked: TierBook
    asked_at: float


class CacheBook:
    """The state of one host's cache. Every method returns what has to be done, in order."""

    def __init__(
        self, settings: CacheSettings, arena: Any, tiers: Sequence[TierBook], server: str
    ) -> None:
        self.settings = settings
        self.quotas = QuotaBook(settings.quota_bytes)
        self.server = server
        self.tiers = list(tiers)
        self._by_number = {tier.number: tier for tier in self.tiers}
        cpu = next((t for t in settings.tiers if t.type == "cpu"), None)
        self.keeps_in_arena = cpu is not None
        self.arena = ArenaBook(
            arena,
            policy=cpu.eviction if cpu is not None else "lru",
            ttl_s=cpu.ttl_s if cpu is not None else None,
            quotas=lambda tenant: self.quota("cpu", tenant),
            on_evicted=self._evicted,
        )
        self.loads = LoadBook(self.arena, self.tiers, self._used, self._was_brought, self._blank)
        self.saves = SaveBook(self.arena)
        self.geometry: ChunkGeometry | None = None
        self.engines: dict[int, Hello] = {}
        """By client."""
        self.counters: Counter[str] = Counter()
        self.hits: Counter[int] = Counter()
        """Chunks that look-ups have found, by the number of the tier."""
        self.misses: Counter[int] = Counter()
        """Chunks that they have not found in it, nor in one above."""
        self.writers: dict[int, Writer] = {}
        self._pending: dict[int, PendingLookup] = {}
        self._asks = 0
        self._marks = MarkBook(self._is_there)
        self._late: list[Effect] = []
        self._expired_at = 0.0
        self._departing: dict[tuple[int, bytes], ArenaEntry] = {}
        """Evicted chunks that a tier still writes."""
        self._writing: dict[tuple[int, bytes], ArenaEntry] = {}

    def quota(self, tier: str, tenant: str) -> int | None:
        """Bytes that a tenant may hold in a tier; None: no limit but the tier's."""
        return self.quotas.limits(tenant).get(tier)

    @property
    def chunk_bytes(self) -> int:
        """Size of the chunks that the arena was cut for."""
        assert self.geometry is not None
        return self.geometry.chunk_bytes

    # -- engines -------------------------------------------------------------------------------

    def hello(self, client: int, message: Hello) -> Arena:
        """An engine's scheduler or worker has come."""
        refusal = self._why_not(message)
        if not refusal:
            self.engines[client] = message
            if message.rank >= 0:
                self.writers[client] = Writer(
                    client,
                    message.engine,
                    message.rank,
                    message.ranks,
                    message.geometry,
                    message.model,
                )
        return Arena(
            server=self.server,
            size_bytes=self.arena.arena.size_bytes,
            tiers=("cpu", *(tier.name for tier in self.tiers)),
            is_coded=any(tier.codecs.can_code for tier in self.tiers),
            refusal=refusal,
        )

    def client_gone(self, client: int, now: float) -> list[Effect]:
        """A connection has closed: nobody behind it touches the arena any more."""
        self.engines.pop(client, None)
        self.writers.pop(client, None)
        self._marks.client_gone(client)
        for ask_id in [a for a, pending in self._pending.items() if pending.client == client]:
            del self._pending[ask_id]
        self.saves.client_gone(client, now)
        effects = self.loads.client_gone(client, now)
        return effects + self.loads.feed(now) + self._take_late()

    def lookup(self, client: int, message: Lookup, now: float) -> list[Effect]:
        """How many leading chunks are there, and where."""
        keys, found = JoinedKeys(message.keys), bytearray()
        self.counters["lookups"] += 1
        self.counters["chunks_asked"] += len(keys)
        self._walk(keys, found, now)
        shared = [t for t in self.tiers if t.index is None and t.is_usable]
        if len(found) == len(keys) or not shared:
            return [self._answer(client, message.lookup_id, found, len(keys))]
        pending = PendingLookup(
            client, message.lookup_id, keys, found, now + message.limit_s, shared[1:], shared[0],
            now,
        )  # fmt: skip
        return [self._ask(pending, now)]

    def asked(
        self, ask_id: int, present: int, elapsed_s: float, now: float, *, has_failed: bool = False
    ) -> list[Effect]:
        """A shared tier has this many of the keys it was asked for, from the first one on; none
        where it could not be asked (``tier_failed``).
        """
        pending = self._pending.pop(ask_id, None)
        if pending is None:
            return []
        if not has_failed:
            pending.asked.health.answered(elapsed_s)
            # Others remove and evict there: what is computed again has to be written again.
            absent = list(pending.keys[len(pending.tiers) + present :])
            pending.asked.forget(absent)
            self.unmark(absent)
        pending.tiers += bytes([pending.asked.number]) * present
        self._walk(pending.keys, pending.tiers, now)
        return self._ask_next(pending, now)

    def open(self, client: int, message: OpenChunks, now: float) -> list[Effect]:
        """A worker wants to read chunks. Raises ``ValueError`` before any engine has come."""
        if self.geometry is None:
            raise ValueError("chunks are opened before a hello")
        keys, until = split_keys(message.keys), now + message.limit_s
        return self.loads.open(client, message.load_id, keys, until, now) + self._take_late()

    def close(self, client: int, message: CloseChunks, now: float) -> list[Effect]:
        """A worker has read chunks."""
        broken = [
            key
            for index in message.broken
            if (key := self.loads.key_of(client, message.load_id, index)) is not None
        ]
        effects: list[Effect] = []
        for key in broken:
            self.counters["broken_chunks"] += 1
            self.counters["broken_in_arena"] += 1
            effects += self.remove(key)
        effects += self.loads.close(client, message.load_id, message.indices, now)
        return effects + self._take_late()

    def reserve(self, client: int, message: Reserve, now: float) -> list[Effect]:
        """A worker wants to write chunks."""
        writer = self.writers.get(client)
        if writer is None:
            raise ValueError("only a worker may reserve")
        offsets = self.saves.reserve(writer, message, now)
        answer = Send(client, Reserved(save_id=message.save_id, offsets=offsets))
        return [answer, *self._take_late()]

    def commit(self, client: int, message: Commit, now: float) -> list[Effect]:
        """A worker has written chunks."""
        writer = self.writers.get(client)
        if writer is None:
            raise ValueError("only a worker may commit")
        whole = self.saves.commit(client, writer.rank, message, now)
        effects = [effect for entry in whole for effect in self._stored(entry)]
        return effects + self.loads.feed(now) + self._take_late()

    # -- tiers ---------------------------------------------------------------------------------

    def was_read(
        self,
        tier: int,
        key: bytes,
        chunk: Chunk | None,
        elapsed_s: float,
        now: float,
        *,
        has_failed: bool = False,
        size_bytes: int = 0,
    ) -> list[Effect]:
        """A tier has brought a chunk (of that size, as it is stored), or did not have it (whole),
        or has failed: then it may still have it.
        """
        book = self._by_number[tier]
        if chunk is None:
            book.counters["misses"] += 1
            if not has_failed:
                book.forget([key])
                self.unmark([key])
        else:
            book.counters["hits"] += 1
            size = size_bytes or chunk.geometry.chunk_bytes
            book.counters["read_bytes"] += size
            book.health.read(size, elapsed_s)
        return self.loads.was_read(key, chunk, now) + self._take_late()

    def was_written(
        self,
        tier: int,
        key: bytes,
        outcome: str,
        now: float,
        size_bytes: int = 0,
        trials: Sequence[Trial] = (),
    ) -> list[Effect]:
        """As ``TierBook.written``."""
        entry = self._writing.pop((tier, key), None)
        if entry is not None:
            self.arena.release(entry)
        departing = self._departing.pop((tier, key), None)
        if departing is not None:
            self.arena.departed(departing.value)
        written = entry or departing
        parent = written.parent_key if written is not None else b""
        book = self._by_number[tier]
        effects = book.written(key, parent, outcome, now, size_bytes, trials)
        self.unmark([key])
        return effects + self.loads.feed(now) + self._take_late()

    def tier_failed(self, tier: int, reason: str, now: float) -> bool:
        """A call to a tier has failed. True when the tier is left alone from now on."""
        book = self._by_number[tier]
        book.counters["errors"] += 1
        return book.health.failed(reason, now)

    def probed(self, tier: int, elapsed_s: float) -> None:
        """A tier that was left alone answers again."""
        self._by_number[tier].health.answered(elapsed_s)

    def was_broken(self, tier: int) -> None:
        """A tier had a chunk that was not whole; it has been removed there."""
        self._by_number[tier].counters["broken"] += 1
        self.counters["broken_chunks"] += 1

    # -- the router and operators --------------------------------------------------------------

    def watch(self, client: int) -> list[Effect]:
        """A router wants to know which marks there are."""
        return self._marks.watch(client)

    def remove(self, key: bytes) -> list[Effect]:
        """The chunk is in no tier any more."""
        self.arena.drop(key)
        effects: list[Effect] = [tier.remove([key]) for tier in self.tiers]
        self.unmark([key])
        return effects

    def shrink(self, tier: str, tenant: str | None) -> None:
        """The tenant (None: each) has no more in that tier than its quota, or only what cannot go
        now: read, pinned or being written. What that orders is among the next effects.
        """
        book = next((found for found in self.tiers if found.name == tier), None)
        held = (book or self.arena.index).used_bytes_by_tenant
        for name in [tenant] if tenant is not None else list(held):
            if book is None:
                self.arena.shrink(name)
            else:
                self._late += book.shrink(name)

    def drop_from_arena(self, key: bytes) -> None:
        """The chunk leaves the arena only."""
        self.arena.drop(key)
        self.unmark([key])

    def write_to(self, tier: TierBook, entry: ArenaEntry) -> bool:
        """The chunk is being written to a lower tier; False when that is not possible now. The
        order is among the next effects.
        """
        order = tier.write(entry.key, entry.parent_key, entry.value)
        if order is None:
            return False
        self.arena.lease(entry, is_use=False)
        self._writing[tier.number, entry.key] = entry
        self._late.append(order)
        return True

    def unmark(self, keys: Sequence[bytes]) -> None:
        """These have left a tier: the marks of those that are in no other one are void."""
        self._late += self._marks.drop(keys)

    def take_effects(self) -> list[Effect]:
        """Orders that came up while something else was done."""
        return self._take_late()

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """What time alone brings."""
        effects: list[Effect] = []
        for pending in [p for p in self._pending.values() if now >= p.until]:
            self._pending = {a: p for a, p in self._pending.items() if p is not pending}
            self.counters["late_lookups"] += 1
            reason = f"no answer to a look-up within {pending.until - pending.asked_at:.3f} s"
            pending.asked.health.failed(reason, now)
            effects.append(self._answer_pending(pending))
        effects += self.loads.expire(now)
        if now - self._expired_at >= EXPIRY_INTERVAL_S:
            self._expired_at = now
            self.saves.expire(now)
            expired = self.arena.index.expire(now)
            self.arena.free(expired)
            self.unmark([entry.key for entry in expired])
            for tier in self.tiers:
                effects += tier.expire(now)
            effects += self.loads.feed(now)
        effects += [ProbeTier(t.number) for t in self.tiers if t.health.must_probe(now)]
        return effects + self._take_late()

    def next_deadline(self, now: float) -> float:
        """When ``tick`` has to be called at the latest."""
        first = min((p.until for p in self._pending.values()), default=float("inf"))
        return min(first, self.loads.next_deadline(), now + EXPIRY_INTERVAL_S)

    # -- inside --------------------------------------------------------------------------------

    def _why_not(self, message: Hello) -> str:
        if message.version != PROTOCOL_VERSION:
            return (
                f"the cache server speaks version {PROTOCOL_VERSION}, this engine "
                f"{message.version}: restart what is older"
            )
        if not -1 <= message.rank < message.ranks or message.geometry.heads % message.ranks:
            return (
                f"rank {message.rank} of {message.ranks} cannot hold an equal part of the "
                f"{message.geometry.heads} heads of a chunk"
            )
        if message.geometry.chunk_tokens != self.settings.chunk_tokens:
            return (
                f"cache.chunk_tokens is {self.settings.chunk_tokens} in the cache server, "
                f"{message.geometry.chunk_tokens} in this engine: restart both"
            )
        if self.geometry is None:
            return self._cut_for(message.geometry)
        if not same_content(self.geometry, message.geometry):
            return (
                f"this engine's chunks ({message.geometry}) are not of the kind that the arena "
                f"was cut for ({self.geometry}): models do not share a cache server"
            )
        return ""

    def _cut_for(self, geometry: ChunkGeometry) -> str:
        size = self.arena.arena.size_bytes
        if size < geometry.chunk_bytes:
            return (
                f"one chunk of this model has {geometry.chunk_bytes} bytes, the arena only {size}: "
                "raise the cpu tier's capacity_bytes (or cache.staging_bytes), or lower "
                "cache.chunk_tokens"
            )
        self.geometry = geometry
        self.arena.cut(geometry.chunk_bytes)
        return ""

    def _blank(self) -> Chunk:
        """What stands for a chunk that is on its way from a tier."""
        assert self.geometry is not None
        return Chunk(0, self.geometry, 1, b"")

    def _walk(self, keys: Sequence[bytes], found: bytearray, now: float) -> None:
        """Extend ``found`` as far as the tiers whose content is known here reach."""
        while len(found) < len(keys):
            at = len(found)
            rest = keys[at:] if at else keys
            count = self.arena.index.prefix(rest, now)
            number = 0
            if not count:
                for tier in self.tiers:
                    if tier.index is None or not tier.is_usable:
                        continue
                    count = tier.index.prefix(rest, now)
                    number = tier.number
                    if count:
                        break
            if not count:
                return
            found += bytes([number]) * count

    def new_ask(self) -> int:
        """A number for ``AskTier`` that no other question has."""
        self._asks += 1
        return self._asks

    def _ask(self, pending: PendingLookup, now: float) -> AskTier:
        ask_id = self.new_ask()
        pending.asked_at = now
        self._pending[ask_id] = pending
        return AskTier(pending.asked.number, ask_id, list(pending.keys[len(pending.tiers) :]))

    def _ask_next(self, pending: PendingLookup, now: float) -> list[Effect]:
        while pending.to_ask and len(pending.tiers) < len(pending.keys):
            pending.asked = pending.to_ask.pop(0)
            if pending.asked.is_usable:
                return [self._ask(pending, now)]
        return [self._answer_pending(pending)]

    def _answer_pending(self, pending: PendingLookup) -> Send:
        return self._answer(pending.client, pending.lookup_id, pending.tiers, len(pending.keys))

    def _answer(self, client: int, lookup_id: int, found: bytearray, asked: int) -> Send:
        self.counters["chunks_found"] += len(found)
        for number in (0, *(tier.number for tier in self.tiers if tier.is_usable)):
            hits = found.count(number)
            asked -= hits
            self.hits[number] += hits
            self.misses[number] += asked
        speeds = (TierSpeed(0.0, 0.0), *(tier.speed for tier in self.tiers))
        return Send(client, Found(lookup_id=lookup_id, tiers=bytes(found), speeds=speeds))

    def _used(self, entry: ArenaEntry) -> list[Effect]:
        """A chunk in the arena is read again."""
        for tier in self.tiers:
            if tier.settings.admission == "second_use":
                self.write_to(tier, entry)
        return []

    def _was_brought(self, entry: ArenaEntry) -> list[Effect]:
        """A chunk has come up from a lower tier."""
        self.counters["chunks_brought"] += 1
        self._mark(entry)
        return []

    def _stored(self, entry: ArenaEntry) -> list[Effect]:
        """An engine has written a chunk."""
        self._mark(entry)
        for tier in self.tiers:
            if tier.admits(0):
                self.write_to(tier, entry)
        return []

    def _evicted(self, entry: ArenaEntry) -> bool:
        """A chunk leaves the arena; True keeps its slot until a tier that lacks it has it."""
        for tier in self.tiers:
            if not tier.admits(entry.uses) or tier.has(entry.key):
                continue
            order = tier.write(entry.key, entry.parent_key, entry.value)
            if order is not None:
                self._departing[tier.number, entry.key] = entry
                self._late.append(order)
                return True
        self.unmark([entry.key])
        return False

    def _mark(self, entry: ArenaEntry) -> None:
        self._late += self._marks.add(entry.key, entry.value.marks)

    def _is_there(self, key: bytes) -> bool:
        return self.arena.index.get(key) is not None or any(t.has(key) for t in self.tiers)

    def _take_late(self) -> list[Effect]:
        late, self._late = self._late, []
        return late
