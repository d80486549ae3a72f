"""What the cache server answers at once or after a question: stat, lookup, pins, and wishes that
it refuses.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.cache_host import (
    ALICE,
    BOB,
    CHUNK_BYTES,
    DISK,
    ENGINE,
    GEOMETRY,
    MODEL,
    OPERATOR,
    REDIS,
    STORED_BYTES,
    CacheHost,
    chain,
)

from splitserve.kv_transfer.cache.control import LIMIT_S, PIN_LIMIT_SHARE, WORKS_LIMIT
from splitserve.kv_transfer.cache.control_messages import (
    ARGUMENTS,
    TENANTS_LIMIT,
    ChunksWish,
    ClearWish,
    Done,
    EngineStat,
    LookedUp,
    LookupWish,
    QuotaWish,
    Refused,
    Result,
    StatWish,
)
from splitserve.kv_transfer.cache.keys import KEY_BYTES
from splitserve.kv_transfer.cache.messages import (
    KEYS_LIMIT,
    MESSAGE_LIMIT_BYTES,
    CloseChunks,
    Lookup,
    Manage,
    Managed,
    OpenChunks,
)
from splitserve.kv_transfer.cache.settings import TierSettings

KEYS = chain(6)
S3 = TierSettings(type="s3")


def engine_lookup(host: CacheHost, keys: list[bytes]) -> None:
    message = Lookup(lookup_id=1, keys=b"".join(keys), limit_s=1.0)
    host.take(host.book.lookup(ENGINE, message, host.now))
    host.run()


# -- stat ----------------------------------------------------------------------------------------


def test_the_state_of_an_empty_cache() -> None:
    """Before any engine has come: the memory, no slots, every tier, nothing else."""
    host = CacheHost(8, DISK, REDIS, is_cut=False)
    stat = host.stat()
    assert (stat.server, stat.uptime_s, stat.chunk_tokens) == ("life-1", 100.0, 32)
    assert (stat.arena.bytes, stat.arena.slots, stat.arena.slot_bytes) == (8 * CHUNK_BYTES, 0, 0)
    assert [(t.name, t.type, t.state, t.chunks) for t in stat.tiers] == [
        ("cpu", "cpu", "ok", 0),
        ("disk", "disk", "ok", 0),
        ("redis", "redis", "ok", None),
    ]
    assert stat.tenants == stat.engines == ()
    assert all(tier.latency_s is tier.bytes_per_s is None for tier in stat.tiers)


def test_the_state_tells_what_has_happened() -> None:
    """Ten chunks through an arena of eight with a disk below: every figure is what was done."""
    host = CacheHost(8, DISK, REDIS, quotas={ALICE.hex(): {"disk": 50 * STORED_BYTES}})
    first, second = chain(5, ALICE), chain(5, BOB, salt=1)
    host.save(first)
    host.run()
    host.save(second)
    host.run()
    host.chunks("pin", first[:1])
    assert host.in_arena([*first, *second]).count(True) == 8
    engine_lookup(host, [*first, *chain(2, ALICE, salt=9)])
    opened = OpenChunks(load_id=1, keys=b"".join(first), limit_s=5.0)
    host.take(host.book.open(ENGINE, opened, host.now))
    host.run()
    host.hello(client=5, rank=-1)
    stat = host.stat()

    arena, (cpu, disk, redis) = stat.arena, stat.tiers
    assert (arena.slots, arena.slot_bytes, arena.used) == (8, CHUNK_BYTES, 8)
    assert (arena.leased, arena.pinned, arena.reserved) == (5, 1, 0)
    assert (cpu.used_bytes, cpu.chunks, cpu.pinned) == (8 * CHUNK_BYTES, 8, 1)
    assert cpu.capacity_bytes == 8 * CHUNK_BYTES
    # Five of seven chunks were asked for and are there, three of them in the arena
    assert (cpu.hits, cpu.misses, disk.hits, disk.misses) == (3, 4, 2, 2)
    assert (redis.hits, redis.misses) == (0, 2)
    assert (cpu.reads, cpu.read_bytes) == (5, 5 * CHUNK_BYTES)
    assert (cpu.writes, cpu.written_bytes) == (12, 12 * CHUNK_BYTES)
    assert cpu.evictions == 4
    assert (disk.chunks, disk.used_bytes, disk.pinned) == (10, 10 * STORED_BYTES, 1)
    assert (disk.reads, disk.read_bytes) == (2, 2 * CHUNK_BYTES)
    assert (disk.writes, disk.written_bytes) == (10, 10 * STORED_BYTES)
    assert disk.capacity_bytes == DISK.capacity_bytes
    assert disk.bytes_per_s is not None
    assert redis.latency_s is not None
    assert (redis.chunks, redis.used_bytes, redis.writes) == (None, None, 10)
    alice, bob = stat.tenants
    assert alice.tenant == ALICE.hex()
    below = dict.fromkeys(("disk", "redis"), 5 * STORED_BYTES)
    assert alice.used_bytes == {"cpu": 5 * CHUNK_BYTES, **below}
    assert alice.quota_bytes == {"disk": 50 * STORED_BYTES}
    assert bob.used_bytes["cpu"] == 3 * CHUNK_BYTES
    assert bob.quota_bytes == {}
    engines = {EngineStat(engine="engine-1", rank=0, model=MODEL)}
    assert set(stat.engines) == engines | {EngineStat(engine="engine-5", rank=-1, model=MODEL)}
    assert stat.counters["lookups"] == stat.counters["open_loads"] == 1
    assert stat.counters["cpu.gone_capacity"] == 4


def test_the_state_tells_what_is_wrong() -> None:
    """Chunks that were broken in memory or below, a dead store, writes that were too many."""
    host = CacheHost(8, DISK, REDIS, write_limit_chunks=1)
    host.dead.add("redis")
    host.save(KEYS)
    host.run()
    opened = OpenChunks(load_id=1, keys=b"".join(KEYS), limit_s=5.0)
    host.take(host.book.open(ENGINE, opened, host.now))
    host.take(host.book.close(ENGINE, CloseChunks(load_id=1, broken=(2,)), host.now))
    host.book.was_broken(1)
    for _ in range(3):
        engine_lookup(host, chain(3, salt=7))
    host.arena.failure = OSError("no memory")
    cpu, disk, redis = host.stat().tiers
    assert (cpu.broken_removed, disk.broken_removed) == (1, 1)
    assert "no memory" in cpu.trouble
    assert (disk.state, disk.errors, disk.shed) == ("ok", 0, 5)
    assert (redis.state, redis.trouble) == ("breaker open", "the store is gone")
    assert redis.errors >= 3
    assert host.stat().counters["broken_chunks"] == 2


def test_a_large_state_fits_into_an_answer() -> None:
    """Thousands of tenants and engines with long names: those that hold most are told."""
    disks = [TierSettings(type="disk", capacity_bytes=10**9)] * 4
    host = CacheHost(700, *disks, write_limit_chunks=10_000)
    for number in range(600):
        host.save(chain(2 if number == 500 else 1, number.to_bytes(8, "big"), salt=3))
    host.run()
    for number in range(250):
        host.book.engines[number + 10] = msgspec.structs.replace(
            host.book.engines[ENGINE], engine="e" * 530
        )
    request = host.wish("stat", StatWish())
    [managed] = [m for _, m in host.told if isinstance(m, Managed) and m.request_id == request]
    assert len(msgspec.msgpack.encode(managed)) <= MESSAGE_LIMIT_BYTES
    stat = host.answer(request)
    assert stat.tenants[0].tenant == (500).to_bytes(8, "big").hex()
    assert len(stat.tenants) + stat.tenants_left_out == 600
    assert 0 < len(stat.tenants) < TENANTS_LIMIT
    assert stat.counters["clients"] == 251


# -- lookup --------------------------------------------------------------------------------------


def test_a_lookup_tells_all_tiers() -> None:
    """Chunks in the arena, on the disk and in a store, in overlapping runs: the union, and each one
    by itself; looking is no use of them.
    """
    host = CacheHost(20, DISK, REDIS)
    host.save(KEYS)
    host.run()
    for key in KEYS[2:]:
        host.book.drop_from_arena(key)
    host.tier("disk").forget(KEYS[:1] + KEYS[4:])
    del host.stores["redis"][KEYS[3]]
    host.chunks("pin", KEYS[1:2])
    before = host.stat()
    found = host.lookup([*KEYS, *chain(2, salt=8)])
    assert found == LookedUp(chunks=6, by_tier={"cpu": 2, "disk": 0, "redis": 3}, pinned=1)
    after = host.stat()
    assert [(t.hits, t.misses) for t in after.tiers] == [(t.hits, t.misses) for t in before.tiers]
    assert after.counters == before.counters


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_lookup_in_an_empty_cache(is_cut: bool) -> None:
    """Also before the arena is cut, and of no chunks at all."""
    host = CacheHost(4, DISK, REDIS, is_cut=is_cut)
    nothing = LookedUp(chunks=0, by_tier={"cpu": 0, "disk": 0, "redis": 0})
    assert host.lookup(KEYS) == nothing
    assert host.lookup([]).chunks == 0


def test_a_lookup_ends_with_its_time() -> None:
    """A store that does not answer is named; its answer, when it comes, is nobody's."""
    host = CacheHost(20, REDIS, S3)
    host.save(KEYS)
    host.run()
    request = host.wish("lookup", LookupWish(keys=b"".join(KEYS), limit_s=0.5))
    host.work(host.orders.popleft())
    host.turn()
    assert host.answer(request) is None
    assert host.control.next_deadline() == host.now + 0.5
    host.pass_time(0.5)
    assert host.answer(request) == LookedUp(
        chunks=6, by_tier={"cpu": 6, "redis": 6}, silent=("s3",)
    )
    host.run()
    assert host.control.next_deadline() == float("inf")


def test_a_lookup_leaves_out_what_is_dead() -> None:
    """A store that fails is named at once; one whose breaker is open is not asked, nor a disk."""
    host = CacheHost(20, DISK, REDIS)
    host.save(KEYS)
    host.run()
    host.dead.add("redis")
    found = [host.lookup(KEYS) for _ in range(3)]
    assert all(answer.silent == ("redis",) and answer.chunks == 6 for answer in found)
    assert not host.tier("redis").is_usable
    for _ in range(3):
        host.book.tier_failed(1, "disk is gone", host.now)
    request = host.wish("lookup", LookupWish(keys=b"".join(KEYS), limit_s=1.0))
    assert host.answer(request) == LookedUp(chunks=6, by_tier={"cpu": 6}, silent=("disk", "redis"))


def test_questions_that_fail_open_the_breaker() -> None:
    """Those of engines and those of operators alike."""
    host = CacheHost(4, REDIS)
    host.dead.add("redis")
    for _ in range(2):
        engine_lookup(host, KEYS)
    assert host.tier("redis").is_usable
    host.lookup(KEYS)
    assert not host.tier("redis").is_usable


# -- pins ----------------------------------------------------------------------------------------


def test_pinned_chunks_stay_until_they_are_unpinned() -> None:
    """Others go for what comes; afterwards these do."""
    host = CacheHost(6)
    host.save(chain(3))
    assert host.chunks("pin", chain(3)) == Done(chunks=3, bytes=3 * CHUNK_BYTES)
    others = chain(6, salt=2)
    assert host.save(others[:3]) == [True] * 3
    assert host.save(chain(3, salt=4)) == [True] * 3
    assert all(host.in_arena(chain(3)))
    assert not any(host.in_arena(others[:3]))
    assert host.chunks("unpin", chain(3)) == Done(chunks=3, bytes=3 * CHUNK_BYTES)
    host.save(chain(6, salt=5))
    assert not any(host.in_arena(chain(3)))


def test_pins_leave_room_for_engines() -> None:
    """Only so much of a tier is pinned, the beginning of the prompt first; engines save and load in
    the rest.
    """
    host = CacheHost(8, DISK)
    keys = chain(8)
    host.save(keys)
    host.run()
    limit = int(8 * PIN_LIMIT_SHARE)
    assert host.chunks("pin", keys, tier="cpu") == Done(
        chunks=limit, bytes=limit * CHUNK_BYTES, missing=8 - limit
    )
    assert host.stat().arena.pinned == limit
    assert host.save(chain(2, salt=3)) == [True, True]
    host.run()
    assert host.in_arena(keys) == [True] * limit + [False] * (8 - limit)
    host.chunks("pin", keys, tier="cpu")
    assert host.stat().arena.pinned == limit


def test_chunks_are_pinned_where_they_are() -> None:
    """Without a tier: in the arena and on the disk; with one only there; what is nowhere is
    missing.
    """
    host = CacheHost(10, DISK)
    host.save(KEYS)
    host.run()
    host.book.drop_from_arena(KEYS[5])
    assert host.chunks("pin", [*KEYS[4:], *chain(1, salt=9)]) == Done(
        chunks=2, bytes=CHUNK_BYTES + 2 * STORED_BYTES, missing=1
    )
    assert [tier.pinned for tier in host.stat().tiers] == [1, 2]
    assert host.chunks("unpin", KEYS, tier="disk") == Done(chunks=6, bytes=6 * STORED_BYTES)
    assert [tier.pinned for tier in host.stat().tiers] == [1, 0]
    assert host.chunks("pin", KEYS[:1], tier="disk").chunks == 1
    assert [tier.pinned for tier in host.stat().tiers] == [1, 1]


def test_pins_before_the_arena_is_cut() -> None:
    """What the disk has from an earlier life can be pinned."""
    host = CacheHost(10, DISK, is_cut=False)
    host.take(host.tier("disk").filled([(KEYS[0], b"", CHUNK_BYTES)], host.now))
    assert host.chunks("pin", KEYS[:2]) == Done(chunks=1, bytes=CHUNK_BYTES, missing=1)


def test_a_shared_store_takes_no_pins() -> None:
    """It says why. Without a tier its chunks are missing."""
    host = CacheHost(10, REDIS)
    host.save(KEYS)
    host.run()
    refused = host.chunks("pin", KEYS, tier="redis")
    assert isinstance(refused, Refused)
    assert "decides by itself" in refused.error
    for key in KEYS:
        host.book.drop_from_arena(key)
    assert host.chunks("pin", KEYS) == Done(chunks=0, bytes=0, missing=6)


# -- refusals ------------------------------------------------------------------------------------

CHUNKS = ChunksWish(keys=KEYS[0], tier="tape", limit_s=1.0)
REFUSED: list[tuple[str, Any, str]] = [
    ("polish", StatWish(), "there is no 'polish'; known: stat, "),
    ("pin", 5, "cannot be read"),
    *((verb, CHUNKS, "no tier 'tape'; known: cpu, disk, redis") for verb in ("pin", "move")),
    ("unpin", CHUNKS, "no tier 'tape'"),
    ("prefetch", CHUNKS, "no tier 'tape'"),
    ("clear", ClearWish(tenant=None, tier="tape", limit_s=1.0), "no tier 'tape'"),
    ("clear", ClearWish(tenant="al", limit_s=1.0), "no tenant 'al'"),
    ("quota", QuotaWish(tenant="alice"), "no tenant 'alice'"),
    ("quota", QuotaWish(tenant=None, tier="tape"), "no tier 'tape'"),
    ("quota", QuotaWish(tenant="*", changes=True), "give both"),
    ("quota", QuotaWish(tenant=None, tier="cpu", changes=True), "give both"),
    ("quota", QuotaWish(tenant="*", tier="cpu", limit_bytes=-1, changes=True), "cannot be"),
    ("move", ChunksWish(keys=KEYS[0], limit_s=1.0), "say where to move"),
    ("lookup", LookupWish(keys=KEYS[0][1:], limit_s=1.0), "no whole number of keys"),
    ("lookup", LookupWish(keys=KEYS[0], limit_s=float("nan")), "limit_s"),
    ("prefetch", ChunksWish(keys=KEYS[0], limit_s=0.0), "limit_s"),
    ("clear", ClearWish(tenant=None, limit_s=LIMIT_S + 1), "limit_s"),
]


@pytest.mark.parametrize(("verb", "wish", "why"), REFUSED)
def test_a_wish_that_cannot_be_is_refused(verb: str, wish: Any, why: str) -> None:
    """With what, why and what to do; nothing has changed."""
    host = CacheHost(10, DISK, REDIS)
    host.save(KEYS)
    host.run()
    before = host.stat()
    answer = host.ask(verb, wish)
    assert isinstance(answer, Refused)
    assert why in answer.error
    assert host.stat() == before


def test_too_many_keys_are_refused() -> None:
    """One packet could hold a few more."""
    keys = b"".join(n.to_bytes(KEY_BYTES, "big") for n in range(KEYS_LIMIT + 1))
    host = CacheHost(10)
    assert isinstance(host.ask("lookup", LookupWish(keys=keys, limit_s=1.0)), Refused)
    assert host.ask("lookup", LookupWish(keys=keys[KEY_BYTES:], limit_s=1.0)).chunks == 0


def test_what_needs_the_size_of_chunks_is_refused_before_it_is_known() -> None:
    """No engine has come yet: nothing can be read or written."""
    host = CacheHost(10, DISK, is_cut=False)
    host.take(host.tier("disk").filled([(KEYS[0], b"", GEOMETRY.chunk_bytes)], host.now))
    for verb, tier in (("prefetch", ""), ("prefetch", "disk"), ("move", "disk")):
        refused = host.chunks(verb, KEYS[:1], tier=tier)
        assert isinstance(refused, Refused)
        assert "no engine" in refused.error
    assert host.clear() == Done(chunks=0, bytes=CHUNK_BYTES, missing=0)


def test_too_many_operations_at_a_time_are_refused() -> None:
    """And when one has ended another one may begin; those of a client that is gone have ended."""
    host = CacheHost(10, REDIS)
    wish = LookupWish(keys=KEYS[0], limit_s=1.0)
    requests = [host.wish("lookup", wish, client=number) for number in range(WORKS_LIMIT)]
    assert isinstance(host.answer(host.wish("lookup", wish)), Refused)
    assert isinstance(host.answer(host.wish("stat", StatWish())), Result)
    host.take(host.control.client_gone(3, host.now))
    request = host.wish("lookup", wish, client=OPERATOR)
    host.run()
    assert host.answer(request) is not None
    assert [host.answer(number) is None for number in requests].count(True) == 1
    assert host.answer(requests[3]) is None


def test_every_verb_has_an_answer() -> None:
    """Each one that the messages know."""
    host = CacheHost(10, DISK)
    host.save(KEYS)
    host.run()
    wishes = {
        "stat": StatWish(),
        "lookup": LookupWish(keys=KEYS[0], limit_s=1.0),
        "clear": ClearWish(tenant=None, limit_s=1.0),
        "quota": QuotaWish(tenant=None),
    }
    chunks = ChunksWish(keys=KEYS[0], tier="disk", limit_s=1.0)
    for verb in ARGUMENTS:
        assert not isinstance(host.ask(verb, wishes.get(verb, chunks)), Refused)


def test_a_request_number_is_the_clients_own() -> None:
    """Two clients may use the same one."""
    host = CacheHost(10)
    arguments = msgspec.msgpack.encode(StatWish())
    for client in (5, 6):
        message = Manage(request_id=1, verb="stat", arguments=arguments)
        host.take(host.control.handle(client, message, host.now))
    assert [(c, m.request_id) for c, m in host.told] == [(5, 1), (6, 1)]
