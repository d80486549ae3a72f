"""What the cache server does for operators over some time: prefetch and move."""

from __future__ import annotations

import pytest
from support.cache_host import (
    ALICE,
    DISK,
    ENGINE,
    LIMIT_S,
    REDIS,
    STORED_BYTES,
    CacheHost,
    chain,
    done,
    stored,
)

from splitserve.kv_transfer.cache.control_messages import ChunksWish, Refused
from splitserve.kv_transfer.cache.messages import (
    CloseChunks,
    OpenChunks,
)
from splitserve.kv_transfer.cache.settings import TierSettings

KEYS = chain(6)
LONG = chain(60)
A = chain(4, ALICE)
S3 = TierSettings(type="s3")
NOT_WRITTEN = TierSettings(type="disk", capacity_bytes=100 * STORED_BYTES, admission="never")


# -- prefetch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["", "cpu"])
@pytest.mark.parametrize("lower", [DISK, REDIS])
def test_a_prefetch_brings_chunks_up(lower: TierSettings, tier: str) -> None:
    """From the disk, or a store that is only asked by reading; and they stay below."""
    host = stored(lower)
    assert host.chunks("prefetch", KEYS, tier) == done(6)
    assert all(host.in_arena(KEYS))
    assert len(host.stores[lower.type]) == 6
    assert host.chunks("prefetch", KEYS, tier) == done(6)
    assert host.stat().arena.leased == 0


def test_a_prefetch_of_what_is_nowhere() -> None:
    """Missing at once; chunks before a gap come, those behind it are of no use."""
    host = stored(DISK)
    assert host.chunks("prefetch", chain(3, salt=9)) == done(0, missing=3)
    assert host.chunks("prefetch", []) == done(0)
    host.tier("disk").forget(KEYS[3:4])
    assert host.chunks("prefetch", KEYS) == done(3, missing=3)
    assert host.in_arena(KEYS) == [True] * 3 + [False] * 3


def test_a_chunk_that_a_store_lacks_ends_a_prefetch_last() -> None:
    """It is known first that the fourth chunk is not there: the three before it are waited for."""
    host = stored(REDIS)
    del host.stores["redis"][KEYS[3]]
    request = host.wish("prefetch", ChunksWish(keys=b"".join(KEYS), limit_s=LIMIT_S))
    orders = list(host.orders)
    host.orders.clear()
    for order in [orders[3], *orders[4:]]:
        host.work(order)
        host.turn()
    assert host.answer(request) is None
    for order in orders[:3]:
        host.work(order)
        host.turn()
    assert host.answer(request) is not None
    assert host.in_arena(KEYS[:4]) == [True] * 3 + [False]


def test_a_prefetch_ends_with_its_time() -> None:
    """The arena is full of what engines read: what has come is told, and the rest is given up."""
    host = stored(DISK, slots=6)
    others = chain(4, salt=5)
    host.save(others)
    host.run()
    opened = OpenChunks(load_id=1, keys=b"".join(others), limit_s=100.0)
    host.take(host.book.open(ENGINE, opened, host.now))
    wish = ChunksWish(keys=b"".join(KEYS), limit_s=2.0)
    request = host.wish("prefetch", wish)
    host.run()
    host.pass_time(1.9)
    assert host.answer(request) is None
    host.pass_time(0.2)
    assert host.answer(request) == done(2, missing=4)
    host.take(host.book.close(ENGINE, CloseChunks(load_id=1), host.now))
    host.pass_time(2.0)
    assert not host.orders


def test_a_prefetch_waits_for_room() -> None:
    """Slots that become free in time are used for it."""
    host = stored(DISK, slots=6)
    host.save(chain(4, salt=5))
    host.run()
    opened = OpenChunks(load_id=1, keys=b"".join(chain(4, salt=5)), limit_s=100.0)
    host.take(host.book.open(ENGINE, opened, host.now))
    request = host.wish("prefetch", ChunksWish(keys=b"".join(KEYS), limit_s=LIMIT_S))
    host.run()
    host.take(host.book.close(ENGINE, CloseChunks(load_id=1), host.now))
    host.run()
    assert host.answer(request) == done(6)


def test_a_prefetch_waits_for_the_arena_to_be_touched() -> None:
    """At the beginning there are no slots yet; when there are, nobody has to say so."""
    host = stored(DISK)
    host.arena.is_touched = False
    request = host.wish("prefetch", ChunksWish(keys=b"".join(KEYS), limit_s=LIMIT_S))
    host.arena.is_touched = True
    host.pass_time(1.0)
    host.run()
    assert host.answer(request) == done(6)


def test_a_prefetch_larger_than_the_arena() -> None:
    """The prompt's beginning is there afterwards, and it is known at once that there is no room for
    more; what is pinned is not room.
    """
    host = stored(DISK, keys=LONG, slots=8)
    assert host.chunks("prefetch", LONG) == done(8, missing=52)
    assert host.in_arena(LONG) == [True] * 8 + [False] * 52
    host.chunks("pin", LONG[:6], "cpu")
    host.save(chain(5, salt=1))
    host.run()
    for key in chain(5, salt=1):
        host.book.drop_from_arena(key)
    assert host.chunks("prefetch", chain(5, salt=1)) == done(2, missing=3)
    assert host.in_arena(LONG[:6]) == [True] * 6


def test_a_prefetch_from_a_dead_tier() -> None:
    """It is not read; the tier below it is."""
    host = stored(DISK, REDIS)
    for _ in range(3):
        host.book.tier_failed(1, "disk is gone", host.now)
    assert host.chunks("prefetch", KEYS) == done(6)
    for _ in range(3):
        host.book.tier_failed(2, "redis is gone", host.now)
    for key in KEYS:
        host.book.drop_from_arena(key)
    assert host.chunks("prefetch", KEYS) == done(0, missing=6)


def test_a_prefetch_into_a_lower_tier() -> None:
    """From the store below it, and from the arena above it; what is there already is left."""
    host = stored(NOT_WRITTEN, REDIS)
    host.chunks("prefetch", KEYS[:2])
    assert host.chunks("prefetch", [*KEYS, *chain(1, salt=9)], "disk") == done(6, missing=1)
    assert set(host.stores["disk"]) == set(host.stores["redis"]) == set(KEYS)
    before = host.tier("disk").counters["writes_written"]
    assert host.chunks("prefetch", KEYS, "disk") == done(6)
    assert host.tier("disk").counters["writes_written"] == before


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_prefetch_into_a_lower_tier_passes_through_the_arena(slots: int) -> None:
    """Chunks do not stay there, so there may be many more than it holds."""
    host = stored(NOT_WRITTEN, REDIS, keys=LONG, slots=slots)
    host.chunks("prefetch", LONG[: slots - 1])
    assert host.chunks("prefetch", LONG, "disk") == done(60)
    assert host.in_arena(LONG).count(True) <= slots - 1
    assert len(host.stores["redis"]) == len(host.stores["disk"]) == 60
    assert host.stat().arena.leased == 0


def test_nobody_waits_for_a_prefetch() -> None:
    """Its client has gone: no more chunks are read, and nothing is answered."""
    host = stored(DISK, keys=LONG, slots=60)
    wish = ChunksWish(keys=b"".join(LONG), tier="cpu", limit_s=LIMIT_S)
    request = host.wish("prefetch", wish, client=9)
    host.take(host.control.client_gone(9, host.now))
    host.run()
    assert host.answer(request) is None
    assert host.control.next_deadline() == float("inf")
    assert host.stat().arena.reserved == 0


def test_operators_do_not_use_chunks() -> None:
    """A tier for what engines use again gets nothing that was only written below, prefetched or
    moved; what an engine has read it gets.
    """
    host = CacheHost(6, DISK, TierSettings(type="redis", admission="second_use"))
    host.save(KEYS)
    host.run()
    host.chunks("prefetch", KEYS)
    host.chunks("move", KEYS[3:], "disk")
    host.chunks("prefetch", KEYS)
    host.save(chain(6, salt=1))
    host.run()
    assert len(host.stores["disk"]) == 12
    assert not host.stores["redis"]
    opened = OpenChunks(load_id=1, keys=b"".join(KEYS[:3]), limit_s=5.0)
    host.take(host.book.open(ENGINE, opened, host.now))
    host.run()
    host.take(host.book.close(ENGINE, CloseChunks(load_id=1), host.now))
    host.save(chain(6, salt=2))
    host.run()
    assert set(host.stores["redis"]) == set(KEYS[:3])


def test_a_load_that_is_read_for_long_is_over_once() -> None:
    """Its reader has its chunks and goes on after its time: nothing is left to wake up for."""
    host = stored(DISK)
    opened = OpenChunks(load_id=1, keys=b"".join([*KEYS, *chain(1, salt=9)]), limit_s=1.0)
    host.take(host.book.open(ENGINE, opened, host.now))
    host.run()
    host.pass_time(2.0)
    assert host.book.next_deadline(host.now) > host.now
    assert host.stat().arena.leased == 6
    host.take(host.book.close(ENGINE, CloseChunks(load_id=1), host.now))
    assert host.stat().arena.leased == 0


# -- move ----------------------------------------------------------------------------------------


def test_a_move_writes_what_is_not_there_and_frees_the_arena() -> None:
    """More chunks than may wait to be written: they are written a few at a time, none is shed."""
    host = CacheHost(60, NOT_WRITTEN, write_limit_chunks=3)
    host.save(LONG)
    assert host.chunks("move", LONG, "disk") == done(60)
    assert set(host.stores["disk"]) == set(LONG)
    stat = host.stat()
    assert (stat.arena.used, stat.arena.leased, stat.tiers[1].shed) == (0, 0, 0)
    assert host.lookup(LONG).by_tier == {"cpu": 0, "disk": 60}


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_move_by_way_of_a_small_arena(slots: int) -> None:
    """From the disk into a store, many more chunks than the arena holds: the disk has none left."""
    host = stored(DISK, S3, keys=LONG, slots=slots)
    host.stores["s3"].clear()
    host.tier("s3").forget(LONG)
    assert host.chunks("move", LONG, "s3") == done(60)
    assert set(host.stores["s3"]) == set(LONG)
    assert not host.stores["disk"]
    stat = host.stat()
    assert (stat.arena.used, stat.tiers[1].chunks) == (0, 0)


def test_a_move_of_what_is_there_already() -> None:
    """Only the copies above go; a store is asked what it has from others."""
    host = CacheHost(20, DISK, REDIS)
    host.save(KEYS)
    host.run()
    host.tier("redis").clear(None, keep_pinned=False)
    writes = host.tier("redis").counters["writes_written"]
    assert host.chunks("move", KEYS, "redis") == done(6)
    assert host.tier("redis").counters["writes_written"] == writes
    assert not host.stores["disk"]
    assert not any(host.in_arena(KEYS))
    assert host.chunks("move", chain(2, salt=9), "redis") == done(0, missing=2)


def test_a_move_upwards_is_a_prefetch() -> None:
    """In the arena nothing is above."""
    host = stored(DISK)
    assert host.chunks("move", KEYS, "cpu") == done(6)
    assert all(host.in_arena(KEYS))


@pytest.mark.parametrize("lower", [DISK, NOT_WRITTEN])
def test_pinned_chunks_are_not_moved(lower: TierSettings) -> None:
    """They stay where they are pinned, whether there is a copy below or not."""
    host = CacheHost(20, lower)
    host.save(KEYS)
    host.run()
    host.chunks("pin", KEYS[:2], "cpu")
    assert host.chunks("move", KEYS, "disk") == done(4, missing=2)
    assert host.in_arena(KEYS) == [True, True] + [False] * 4


def test_a_moved_chunk_that_is_read_keeps_its_slot() -> None:
    """No look-up finds it; its reader ends in peace."""
    host = CacheHost(20, DISK)
    host.save(KEYS)
    host.run()
    opened = OpenChunks(load_id=1, keys=b"".join(KEYS), limit_s=5.0)
    host.take(host.book.open(ENGINE, opened, host.now))
    assert host.chunks("move", KEYS, "disk") == done(6)
    assert host.stat().arena.used == 6
    host.take(host.book.close(ENGINE, CloseChunks(load_id=1), host.now))
    assert host.stat().arena.used == 0


def test_a_move_to_a_dead_tier() -> None:
    """Refused where that is known; one that dies meanwhile takes no more, and nothing is lost."""
    host = CacheHost(60, NOT_WRITTEN)
    host.save(LONG)
    request = host.wish("move", ChunksWish(keys=b"".join(LONG), tier="disk", limit_s=LIMIT_S))
    host.run(limit=10)
    host.dead.add("disk")
    host.run()
    there = len(host.stores["disk"])
    assert host.answer(request) == done(there, missing=60 - there)
    assert host.in_arena(LONG).count(True) == 60 - there
    refused = host.chunks("move", LONG, "disk")
    assert isinstance(refused, Refused)
    assert "the store is gone" in refused.error


def test_a_move_that_a_quota_forbids() -> None:
    """What the tenant may not hold there stays in the arena."""
    host = CacheHost(20, REDIS, quotas={ALICE.hex(): {"redis": 2 * STORED_BYTES}})
    host.save(A)
    host.run()
    assert host.chunks("move", A, "redis") == done(2, missing=2)
    assert host.in_arena(A) == [False, False, True, True]


def test_a_move_ends_with_its_time() -> None:
    """The tier writes too slowly: what it has is told; no more is begun, and slots come back."""
    host = CacheHost(60, NOT_WRITTEN, write_limit_chunks=3)
    host.save(LONG)
    request = host.wish("move", ChunksWish(keys=b"".join(LONG), tier="disk", limit_s=1.0))
    host.run(limit=20)
    host.pass_time(1.0)
    assert host.answer(request) == done(20, missing=40)
    host.run()
    assert len(host.stores["disk"]) < 40
    assert host.stat().arena.leased == 0
