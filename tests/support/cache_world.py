"""A ``CacheBook`` in virtual time: engines that save, load, stop and die, tiers that answer in any
order, fail or hang, and an arena that knows who may touch which slot. One seed is one story.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.cache.book_effects import (
    AskTier,
    ProbeTier,
    ReadChunk,
    RemoveChunks,
    Send,
    WriteChunk,
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
    Mark,
    Marks,
    OpenChunks,
    Ready,
    Reserve,
    Reserved,
)
from splitserve.kv_transfer.cache.settings import CacheSettings, TierSettings
from splitserve.kv_transfer.cache.tier_book import TierBook
from support.cache_workers import OpenLoad, Worker
from support.fake_arena import GEOMETRY, SLOT, FakeArena, Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

STORED = SLOT + 16 * 1024
CHAINS, DEPTH = 4, 9
LIMIT_S = 4.0
WATCHER = 1_000_000


def key_of(chain: int, depth: int) -> bytes:
    """The chunk at that depth; the first two are the same for two chains each."""
    root = chain // 2 if depth < 2 else chain + 100
    return bytes([root % 2] * 8) + bytes([root, depth]) + bytes(22)


def chain_of(chain: int, first: int, end: int) -> list[bytes]:
    return [key_of(chain, depth) for depth in range(first, end)]


class CacheWorld:
    """The story of one seed."""

    def __init__(self, seed: int, *, slots: int | None = None) -> None:
        self.random = Random(seed)
        self.now = 100.0
        self.slots = slots or self.random.choice([1, 2, 4, 8, 16, 32])
        self.arena = FakeArena(self.slots)
        kinds = self.random.choice([["disk"], ["disk", "redis"], ["redis"], []])
        tiers = [
            TierSettings(
                type=kind,  # type: ignore[arg-type]
                capacity_bytes=self.random.choice([3, 10, 40]) * STORED,
                admission=self.random.choice(["always", "always", "second_use"]),
                ttl_s=self.random.choice([None, None, 30.0]),
            )
            for kind in kinds
        ]
        cpu = TierSettings(
            type="cpu", capacity_bytes=self.slots * SLOT, ttl_s=self.random.choice([None, 20.0])
        )
        settings = CacheSettings(socket_path="", chunk_tokens=4, tiers=(cpu, *tiers))
        books = [
            TierBook(
                number + 1, tier, is_exclusive=tier.type == "disk",
                write_limit_bytes=self.slots // 2 * SLOT, quotas=lambda _: None,
            )
            for number, tier in enumerate(tiers)
        ]  # fmt: skip
        self.book = CacheBook(settings, self.arena, books, "server")
        self.stores: dict[int, set[bytes]] = {book.number: set() for book in books}
        self.jobs: dict[int, list[Any]] = {book.number: [] for book in books}
        self.hanging: set[int] = set()
        self.workers: dict[int, Worker] = {}
        self.looking: dict[tuple[int, int], float] = {}
        self.marks: set[bytes] = set()
        self.fetches: list[int] = []
        self.counts: Counter[str] = Counter()
        self._clients = 0
        self._carry_out(self.book.watch(WATCHER))
        for engine, ranks in (("a", 1), ("b", 2)):
            self.connect(engine, ranks)

    # -- engines -------------------------------------------------------------------------------

    def connect(self, engine: str, ranks: int) -> None:
        for rank in range(ranks):
            self._clients += 1
            worker = Worker(self._clients, engine, rank, ranks)
            answer = self.book.hello(worker.number, Hello(
                version=PROTOCOL_VERSION, engine=engine, rank=rank, ranks=ranks, model=bytes(32),
                geometry=GEOMETRY,
            ))  # fmt: skip
            assert not answer.refusal
            self.workers[worker.number] = worker

    def step(self) -> None:
        """Something happens; then the promises are checked."""
        actions = [
            (4, self.open), (4, self.save), (12, self.hear), (8, self.close), (8, self.commit),
            (14, self.tier_answers), (2, self.look_up), (5, self.time_passes), (1, self.die),
            (0.5, self.stop_or_go_on), (0.7, self.hang_or_recover), (0.5, self.remove),
            (1, self.operate),
        ]  # fmt: skip
        weights, functions = zip(*actions, strict=True)
        (action,) = self.random.choices(functions, weights)
        self.counts[action.__name__] += 1
        action()
        self.check()

    def look_up(self) -> None:
        worker = self._worker()
        if worker is None:
            return
        worker.ids += 1
        keys = chain_of(self.random.randrange(CHAINS), 0, self.random.randint(1, DEPTH))
        message = Lookup(lookup_id=worker.ids, keys=b"".join(keys), limit_s=1.0)
        self.looking[worker.number, worker.ids] = self.now + 1.0
        self._carry_out(self.book.lookup(worker.number, message, self.now))

    def open(self) -> None:
        """All ranks of an engine want the same chunks."""
        chain, end = self.random.randrange(CHAINS), self.random.randint(1, DEPTH)
        keys = chain_of(chain, self.random.randrange(end), end)
        if self.random.random() < 0.7:
            keys = self._known(chain) or keys
        limit_s = self.random.choice([LIMIT_S, LIMIT_S, 0.0])
        for worker in self._ranks():
            worker.ids += 1
            worker.loads[worker.ids] = OpenLoad(keys, self.now + limit_s, set(range(len(keys))))
            message = OpenChunks(load_id=worker.ids, keys=b"".join(keys), limit_s=limit_s)
            self._carry_out(self.book.open(worker.number, message, self.now))

    def _known(self, chain: int) -> list[bytes]:
        """What a look-up would find of a chain from somewhere on."""
        tiers, index = self.book.tiers, self.book.arena.index
        keys = chain_of(chain, 0, DEPTH)
        there = [bool(index.get(k) or any(t.has(k) for t in tiers)) for k in keys]
        first = there.index(True) if True in there else DEPTH
        end = next((i for i in range(first, DEPTH) if not there[i]), DEPTH)
        return keys[first:end]

    def save(self) -> None:
        """All ranks of an engine want to write the same chunks, maybe one of them never asks."""
        chain, end = self.random.randrange(CHAINS), self.random.randint(1, DEPTH)
        first = self.random.randrange(end)
        keys = chain_of(chain, first, end)
        parent = key_of(chain, first - 1) if first else b""
        marks = tuple((i, Mark(key, 4)) for i, key in enumerate(keys) if i % 2)
        for worker in self._ranks():
            if self.random.random() < 0.05:
                break
            worker.ids += 1
            worker.asked[worker.ids] = keys
            message = Reserve(save_id=worker.ids, parent=parent, keys=b"".join(keys), marks=marks)
            self._carry_out(self.book.reserve(worker.number, message, self.now))

    def hear(self) -> None:
        """A worker takes up what it was told."""
        worker = self._worker()
        while worker is not None and worker.inbox:
            message = worker.inbox.popleft()
            match message:
                case Ready():
                    self._hear_ready(worker, message)
                case Reserved():
                    keys = worker.asked.pop(message.save_id)
                    for index, offset in enumerate(message.offsets):
                        if offset >= 0:
                            worker.writing[message.save_id, index] = (keys[index], offset)
            if self.random.random() < 0.3:
                return

    def _hear_ready(self, worker: Worker, message: Ready) -> None:
        load = worker.loads.get(message.load_id)
        for chunk in message.chunks:
            assert load is not None, "a chunk for a load that is closed"
            key = load.keys[chunk.index]
            if not self.arena.has_whole(chunk.offset, key):
                raise Violation(f"slot {chunk.offset} does not hold {key.hex()} when it is read")
            load.reading[chunk.index] = chunk.offset

    def close(self) -> None:
        """A worker is done with some chunks of a load, or with all of it."""
        worker = self._worker()
        if worker is None or not worker.loads:
            return
        load_id = self.random.choice(list(worker.loads))
        load = worker.loads[load_id]
        some = self.random.sample(sorted(load.reading), self.random.randint(0, len(load.reading)))
        broken = tuple(some[:1]) if self.random.random() < 0.05 else ()
        waits = bool(load.unanswered or worker.inbox)
        if waits and not some and self.random.random() < 0.9:
            return
        if not waits or not some:
            del worker.loads[load_id]
            for index in list(load.reading):
                self._stops_reading(worker, load, index)
            # What is on its way to it is released with the load.
            for message in [m for m in worker.inbox if isinstance(m, Ready)]:
                if message.load_id == load_id:
                    worker.inbox.remove(message)
                    for chunk in message.chunks:
                        self.arena.let_go(chunk.offset, worker.number)
            some = []
        for index in some:
            self._stops_reading(worker, load, index)
        message = CloseChunks(load_id=load_id, indices=tuple(some), broken=broken)
        self._carry_out(self.book.close(worker.number, message, self.now))

    def _stops_reading(self, worker: Worker, load: OpenLoad, index: int) -> None:
        offset = load.reading.pop(index)
        if not self.arena.has_whole(offset, load.keys[index]):
            raise Violation(f"slot {offset} has changed while it was read")
        self.arena.let_go(offset, worker.number)

    def commit(self) -> None:
        """A worker has written some chunks of a save, or will not."""
        worker = self._worker()
        if worker is None or not worker.writing:
            return
        save_id = self.random.choice(list(worker.writing))[0]
        mine = [index for save, index in worker.writing if save == save_id]
        some = self.random.sample(mine, self.random.randint(1, len(mine)))
        abandoned = tuple(some) if self.random.random() < 0.15 else ()
        for index in some:
            key, offset = worker.writing.pop((save_id, index))
            if not abandoned:
                self._write(worker, offset, key)
            self.arena.let_go(offset, worker.number)
        sums = () if abandoned else tuple((index, bytes(8)) for index in some)
        message = Commit(save_id=save_id, written=sums, abandoned=abandoned)
        self._carry_out(self.book.commit(worker.number, message, self.now))

    def _write(self, worker: Worker, offset: int, key: bytes) -> None:
        found = self.arena.content.setdefault(offset, (key, set(), worker.ranks))
        if found[0] != key or found[2] != worker.ranks:
            raise Violation(f"two chunks are written into slot {offset}")
        if worker.rank in found[1]:
            raise Violation(f"rank {worker.rank} writes slot {offset} twice")
        found[1].add(worker.rank)

    def die(self) -> None:
        """An engine is killed, stopped or not; all of its ranks go, and it is started again."""
        engine = self.random.choice(["a", "b"])
        self._kill(engine)
        self.connect(engine, 1 if engine == "a" else 2)

    def _kill(self, engine: str) -> None:
        for worker in [w for w in self.workers.values() if w.engine == engine]:
            del self.workers[worker.number]
            for asked in [asked for asked in self.looking if asked[0] == worker.number]:
                del self.looking[asked]
            self.arena.let_go_of_all(worker.number)
            self._carry_out(self.book.client_gone(worker.number, self.now))

    def stop_or_go_on(self) -> None:
        """A worker is stopped in the middle of whatever it does, or continues."""
        worker = self.random.choice(list(self.workers.values()))
        worker.is_stopped = not worker.is_stopped

    # -- the rest of the world -----------------------------------------------------------------

    def remove(self) -> None:
        """Somebody wants a chunk gone, maybe one that is being written."""
        writing = [key for tier in self.book.tiers for key in tier.writing]
        key = key_of(self.random.randrange(CHAINS), self.random.randrange(DEPTH))
        if writing and self.random.random() < 0.5:
            key = self.random.choice(writing)
        self._carry_out([*self.book.remove(key), *self.book.take_effects()])

    def operate(self) -> None:
        """An operator wants chunks to stay, or not any more; brings some up, and lets go of them
        later; clears a tenant's.
        """
        book, loads, chance = self.book, self.book.loads, self.random.random()
        chain = chain_of(self.random.randrange(CHAINS), 0, self.random.randint(1, DEPTH))
        if chance < 0.3:
            index = book.arena.index
            self.random.choice([index.pin, index.unpin, index.unpin])(chain)
        elif chance < 0.6:
            holds = self.random.random() < 0.5
            effects = loads.prefetch(chain, self.now + LIMIT_S, self.now, holds=holds)
            self.fetches.append(loads.latest_prefetch)
            self._carry_out([*effects, *book.take_effects()])
        elif chance < 0.9 and self.fetches:
            self._stop_fetching()
        else:
            tenant = chain[0][:8].hex()
            for tier in book.tiers:
                keys, _ = tier.clear(tenant, keep_pinned=True)
                book.unmark(keys)
                self._carry_out([RemoveChunks(tier.number, keys)])
            loads.void(tenant)
            book.unmark([entry.key for entry in book.arena.clear(tenant, keep_pinned=True)])
            self._carry_out([*loads.feed(self.now), *book.take_effects()])

    def _stop_fetching(self) -> None:
        effects = self.book.loads.stop_fetching(self.fetches.pop(), self.now)
        self._carry_out([*effects, *self.book.take_effects()])

    def hang_or_recover(self) -> None:
        if self.stores:
            self.hanging ^= {self.random.choice(list(self.stores))}

    def tier_answers(self) -> None:
        """One job of a tier ends, in one way or another. Writes and removals keep their order."""
        awake = [tier for tier, jobs in self.jobs.items() if jobs and tier not in self.hanging]
        if awake:
            self._end_job(self.random.choice(awake), self.random.random() < 0.1)

    def _end_job(self, tier: int, fails: bool) -> None:
        jobs, store = self.jobs[tier], self.stores[tier]
        job = self.random.choice(jobs)
        if isinstance(job, WriteChunk | RemoveChunks):
            job = next(j for j in jobs if isinstance(j, WriteChunk | RemoveChunks))
        jobs.remove(job)
        book, now = self.book, self.now
        if fails and not isinstance(job, RemoveChunks):
            book.tier_failed(tier, "planned", now)
        match job:
            case AskTier():
                present = next((i for i, k in enumerate(job.keys) if k not in store), len(job.keys))
                present = 0 if fails else present
                self._carry_out(book.asked(job.ask_id, present, 0.001, now, has_failed=fails))
            case ReadChunk():
                self.arena.let_go(job.offset, ("read", tier, job.key))
                chunk = None
                if not fails and job.key in store:
                    self.arena.content[job.offset] = (job.key, {0}, 1)
                    chunk = Chunk(job.offset, GEOMETRY, 1, bytes(8))
                self._carry_out(book.was_read(tier, job.key, chunk, 0.001, now, has_failed=fails))
            case WriteChunk():
                if not self.arena.has_whole(job.chunk.offset, job.key):
                    raise Violation(f"slot {job.chunk.offset} has changed while it was written")
                self.arena.let_go(job.chunk.offset, ("write", tier, job.key))
                outcome = self.random.choice(["failed", "full"]) if fails else "written"
                if not fails:
                    store.add(job.key)
                self._carry_out(book.was_written(tier, job.key, outcome, now))
            case RemoveChunks():
                store.difference_update(job.keys)
            case ProbeTier() if not fails:
                book.probed(tier, 0.001)

    def time_passes(self) -> None:
        self.now += self.random.choice([0.001, 0.1, 0.5, 1.5, 6.0])
        self._carry_out(self.book.tick(self.now))
        if self.book.next_deadline(self.now) <= self.now:
            raise Violation("the server would not sleep although nothing is due")

    # -- effects and checks --------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Any]) -> None:
        for effect in effects:
            match effect:
                case Send(_, Marks() as marks):
                    self._note_marks(marks)
                case Send():
                    self._tell(effect.client, effect.message)
                case ReadChunk():
                    self.arena.hold(effect.offset, ("read", effect.tier, effect.key))
                    self.jobs[effect.tier].append(effect)
                case WriteChunk():
                    offset = effect.chunk.offset
                    self.arena.hold(offset, ("write", effect.tier, effect.key))
                    self.jobs[effect.tier].append(effect)
                case RemoveChunks():
                    self.jobs[effect.tier].append(effect)
                    self.book.unmark(effect.keys)
                    self._carry_out(self.book.take_effects())
                case _:
                    self.jobs[effect.tier].append(effect)

    def _tell(self, client: int, message: Any) -> None:
        if isinstance(message, Found):
            assert self.looking.pop((client, message.lookup_id)) is not None
            return
        worker = self.workers.get(client)
        if worker is None:
            return
        worker.inbox.append(message)
        if isinstance(message, Reserved):
            for offset in {offset for offset in message.offsets if offset >= 0}:
                self.arena.hold(offset, client)
        if isinstance(message, Ready):
            load = worker.loads.get(message.load_id)
            if message.chunks and load is None:
                raise Violation("a chunk is held for a load that is closed")
            for chunk in message.chunks:
                self.arena.hold(chunk.offset, client)
            if load is not None:
                load.unanswered -= {chunk.index for chunk in message.chunks}
                load.unanswered -= set(message.missing)

    def _note_marks(self, marks: Marks) -> None:
        if marks.is_first:
            self.marks.clear()
        self.marks |= {mark.digest for mark in marks.added}
        self.marks -= set(marks.removed)

    def check(self) -> None:
        """What must hold at any time."""
        index, arena = self.book.arena.index, self.arena
        taken = self.slots - len(arena.free)
        counted = index.used_bytes // SLOT + self.book.arena.departing
        if taken != counted:
            raise Violation(f"{taken} slots are taken and {counted} counted")
        for worker in self.workers.values():
            late = [
                load for load in worker.loads.values()
                if load.unanswered and self.now > load.until + 1e-6
            ]  # fmt: skip
            if late:
                raise Violation(f"a load waits for {late[0].unanswered} past its time")
        if any(self.now > until + 1e-6 for until in self.looking.values()):
            raise Violation("a look-up waits past its time")
        for entry in index:
            if not arena.has_whole(entry.value.offset, entry.key):
                raise Violation(f"{entry.key.hex()} is found before it is whole")

    def drain(self) -> None:
        """Every engine ends, every tier answers: nothing may be left over."""
        for engine in ("a", "b"):
            self._kill(engine)
        while self.fetches:
            self._stop_fetching()
        self.hanging.clear()
        for _ in range(1000):
            busy = [tier for tier, jobs in self.jobs.items() if jobs]
            if busy:
                self._end_job(busy[0], fails=False)
            else:
                self.now += 15.0
                self._carry_out(self.book.tick(self.now))
                if not any(self.jobs.values()):
                    break
        self.check()
        book = self.book
        left = {
            "loads": book.loads.open_loads,
            "reservations": book.saves.open_reservations,
            "departing": book.arena.departing,
            "slots": self.slots - len(self.arena.free) - len(book.arena.index),
            "holders": book.arena.is_busy,
            "look-ups": len(book._pending),
            "writes": sum(len(tier.writing) for tier in book.tiers),
            "marks": len(
                self.marks ^ {m.digest for ms in book._marks._marked.values() for m in ms}
            ),
        }
        if any(left.values()):
            raise Violation(f"left over: { {k: v for k, v in left.items() if v} }")
        for key in book._marks._marked:
            if book.arena.index.get(key) is None and not any(t.has(key) for t in book.tiers):
                raise Violation("a mark stands for a chunk that is nowhere")
        for tier in book.tiers:
            if tier.index is not None and {e.key for e in tier.index} != self.stores[tier.number]:
                raise Violation("a disk holds other chunks than its index says")

    def _worker(self) -> Worker | None:
        running = [worker for worker in self.workers.values() if not worker.is_stopped]
        return self.random.choice(running) if running else None

    def _ranks(self) -> list[Worker]:
        """The ranks of an engine, when all of them run."""
        engine = self.random.choice(["a", "b"])
        ranks = [worker for worker in self.workers.values() if worker.engine == engine]
        return [] if any(worker.is_stopped for worker in ranks) else ranks


def run(seed: int, steps: int = 200) -> Counter[str]:
    """The story of a seed; raises ``Violation``, or whatever the book raises."""
    world = CacheWorld(seed)
    for _ in range(steps):
        world.step()
    world.drain()
    return world.counts + world.book.saves.counters + world.book.loads.counters
