"""What the cache server does for operators over some time: clear."""

from __future__ import annotations

import pytest
from support.cache_host import (
    ALICE,
    BOB,
    CHUNK_BYTES,
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

from splitserve.kv_transfer.cache.book_effects import ReadChunk, RemoveChunks, WriteChunk
from splitserve.kv_transfer.cache.control_messages import ClearWish, Done, Refused
from splitserve.kv_transfer.cache.messages import (
    Commit,
    Mark,
    Marks,
    OpenChunks,
    Reserve,
)
from splitserve.kv_transfer.cache.settings import TierSettings

KEYS = chain(6)
BOTH_BYTES = len(KEYS) * (CHUNK_BYTES + STORED_BYTES)
"""Of ``KEYS`` in the arena and on the disk."""
A, B = chain(4, ALICE), chain(4, BOB, salt=1)
READ_ONLY = TierSettings(type="redis", admission="never")


def test_one_tenants_chunks_are_cleared_everywhere() -> None:
    """Copies are counted; the others' stay; what others have stored for the tenant goes too."""
    host = CacheHost(20, DISK, REDIS)
    for keys in (A, B, KEYS):
        host.save(keys)
    host.run()
    other = host.stores["redis"][A[0]]
    host.stores["redis"][chain(1, ALICE, salt=8)[0]] = other
    cleared = host.clear(ALICE.hex())
    assert cleared == Done(chunks=4 + 4 + 5, bytes=4 * (CHUNK_BYTES + STORED_BYTES))
    for store in host.stores.values():
        assert set(store) == {*B, *KEYS}
    assert host.in_arena([*A, *B, *KEYS]) == [False] * 4 + [True] * 10
    assert host.clear(ALICE.hex()) == done(0)
    host.save(A)
    host.run()
    assert set(A) <= set(host.stores["redis"])


def test_chunks_without_a_tenant_are_cleared() -> None:
    """Their tag is empty."""
    host = CacheHost(20, DISK)
    host.save(A)
    host.save(KEYS)
    host.run()
    assert host.clear("").chunks == 12
    assert set(host.stores["disk"]) == set(A)


@pytest.mark.parametrize(
    ("tier", "left"),
    [
        ("", {"cpu": 0, "disk": 0, "redis": 0}),
        ("cpu", {"cpu": 0, "disk": 6, "redis": 6}),
        ("disk", {"cpu": 6, "disk": 0, "redis": 6}),
        ("redis", {"cpu": 6, "disk": 6, "redis": 0}),
    ],
)
def test_everything_is_cleared_in_some_tiers(tier: str, left: dict[str, int]) -> None:
    """In all, or only in one."""
    host = CacheHost(20, DISK, REDIS)
    host.save(KEYS)
    host.run()
    assert host.clear(tier=tier).chunks == 18 - sum(left.values())
    assert host.lookup(KEYS).by_tier == left


@pytest.mark.parametrize("keep_pinned", [True, False])
def test_pinned_chunks_are_kept_or_not(keep_pinned: bool) -> None:
    """As the operator wishes; afterwards those that went are not pinned."""
    host = CacheHost(20, DISK)
    host.save(KEYS)
    host.run()
    host.chunks("pin", KEYS[:2])
    host.clear(keep_pinned=keep_pinned)
    left = 2 if keep_pinned else 0
    assert host.in_arena(KEYS).count(True) == len(host.stores["disk"]) == left
    assert [tier.pinned for tier in host.stat().tiers] == [left, left]


@pytest.mark.parametrize("lower", [DISK, REDIS])
def test_what_is_being_written_does_not_survive_a_clear(lower: TierSettings) -> None:
    """The writes are still on their way: they are removed behind them."""
    host = CacheHost(20, lower)
    host.save(A)
    assert len([order for order in host.orders if isinstance(order, WriteChunk)]) == 4
    assert host.clear(ALICE.hex()).missing == 0
    assert not host.stores[lower.type]
    assert host.lookup(A).chunks == 0
    stat = host.stat()
    assert (stat.arena.used, stat.tenants) == (0, ())
    host.save(A)
    host.run()
    assert set(host.stores[lower.type]) == set(A)


def test_a_write_that_fails_leaves_nothing_behind_a_clear() -> None:
    """The chunk, saved again, is written as any other."""
    host = CacheHost(20, DISK)
    host.save(A)
    request = host.wish("clear", ClearWish(tenant=ALICE.hex(), limit_s=LIMIT_S))
    host.dead.add("disk")
    host.work(host.orders.popleft())
    host.dead.clear()
    host.run()
    assert host.answer(request) is not None
    host.save(A)
    host.run()
    assert host.lookup(A).by_tier == {"cpu": 4, "disk": 4}


def test_what_is_being_read_does_not_survive_a_clear() -> None:
    """An engine waits for it: it is missing."""
    host = stored(DISK, keys=A)
    opened = OpenChunks(load_id=1, keys=b"".join(A), limit_s=5.0)
    host.take(host.book.open(ENGINE, opened, host.now))
    assert isinstance(host.orders[0], ReadChunk)
    host.clear(ALICE.hex())
    assert not any(host.in_arena(A))
    assert [chunk for ready in host.ready() for chunk in ready.chunks] == []
    assert sorted(i for ready in host.ready() for i in ready.missing) == [0, 1, 2, 3]
    assert host.stat().arena.used == 0


def test_a_store_that_fails_is_told() -> None:
    """Its chunks are missing, as many as are known; the other tiers are cleared all the same."""
    host = CacheHost(20, DISK, REDIS)
    host.save(KEYS)
    host.run()
    host.dead.add("redis")
    assert host.clear() == Done(chunks=12, bytes=BOTH_BYTES, missing=6)
    assert host.clear().missing == 1
    host.clear()
    assert not host.tier("redis").is_usable
    assert host.clear().missing == 1
    assert not host.orders


def test_a_disk_that_fails_is_told() -> None:
    """What could not be removed is not found any more all the same."""
    host = CacheHost(20, DISK)
    host.save(KEYS)
    host.run()
    host.dead.add("disk")
    assert host.clear() == Done(chunks=6, bytes=BOTH_BYTES, missing=6)
    assert host.lookup(KEYS).chunks == 0


def test_a_clear_ends_with_its_time() -> None:
    """What the disk has not removed by then is missing, and is removed later."""
    host = CacheHost(20, DISK)
    host.save(KEYS)
    host.run()
    request = host.wish("clear", ClearWish(tenant=None, limit_s=1.0))
    host.pass_time(1.0)
    assert host.answer(request).missing == 6
    assert isinstance(host.orders[0], RemoveChunks)
    host.run()
    assert not host.stores["disk"]


def test_a_store_that_is_only_read_is_not_cleared() -> None:
    """It is somebody else's: left out, and refused when it is named."""
    host = CacheHost(20, READ_ONLY)
    host.save(KEYS)
    chunk = host.book.arena.index.get(KEYS[0])
    assert chunk is not None
    host.stores["redis"][KEYS[0]] = chunk.value
    assert host.clear() == done(6)
    assert isinstance(host.clear(tier="redis"), Refused)
    assert list(host.stores["redis"]) == KEYS[:1]


def test_an_empty_cache_is_cleared() -> None:
    """Before the arena is cut too: nothing was there."""
    for is_cut in (True, False):
        host = CacheHost(20, DISK, REDIS, is_cut=is_cut)
        assert host.clear() == done(0)
        assert host.clear(ALICE.hex()) == done(0)


def test_marks_go_with_cleared_chunks() -> None:
    """Routers are told that the prompt's beginning is nowhere any more."""
    host = CacheHost(20, DISK, REDIS)
    mark = Mark(digest=b"m" * 16, tokens=64)
    message = Reserve(save_id=77, parent=b"", keys=b"".join(KEYS), marks=((1, mark),))
    host.save(chain(1, salt=9))
    host.told.clear()
    host.take(host.book.watch(50))
    _save_with_marks(host, message)
    host.run()
    assert [m.added for c, m in host.told if c == 50 and isinstance(m, Marks)] == [(), (mark,)]
    host.clear()
    removed = [m.removed for c, m in host.told if c == 50 and isinstance(m, Marks)]
    assert removed == [(), (), (mark.digest,)]


def _save_with_marks(host: CacheHost, message: Reserve) -> None:
    host.take(host.book.reserve(ENGINE, message, host.now))
    written = tuple((n, bytes(16)) for n in range(len(KEYS)))
    host.take(host.book.commit(ENGINE, Commit(save_id=77, written=written), host.now))
