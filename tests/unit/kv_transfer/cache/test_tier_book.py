"""What the server knows of a lower tier, and when it leaves it alone."""

from __future__ import annotations

import pytest
from support.chunks import PAGES

from splitserve.kv_transfer.cache.book_effects import RemoveChunks
from splitserve.kv_transfer.cache.chunk import Chunk
from splitserve.kv_transfer.cache.settings import TierSettings
from splitserve.kv_transfer.cache.tier_book import FULL_S, TierBook
from splitserve.kv_transfer.cache.tier_health import FAILURE_LIMIT, OPEN_LIMIT_S, OPEN_S, TierHealth
from splitserve.kv_transfer.cache.tiers.base import HEADER_BYTES

STORED = HEADER_BYTES + PAGES.chunk_bytes
CHUNK = Chunk(0, PAGES, 1, b"")


def key(number: int, tenant: int = 0) -> bytes:
    return bytes([tenant] * 8 + [number]) + bytes(23)


def disk(chunks: int, *, waiting: int = 100, quota: int | None = None) -> TierBook:
    return TierBook(
        1, TierSettings(type="disk", capacity_bytes=chunks * STORED), is_exclusive=True,
        write_limit_bytes=waiting * PAGES.chunk_bytes, quotas=lambda _: quota,
    )  # fmt: skip


def shared(quota: int | None = None) -> TierBook:
    return TierBook(
        1, TierSettings(type="redis"), is_exclusive=False, write_limit_bytes=2**30,
        quotas=lambda _: quota,
    )  # fmt: skip


def written(tier: TierBook, number: int, outcome: str = "written", now: float = 0.0) -> list[bytes]:
    """Write a chunk; the keys that have to go for it."""
    assert tier.write(key(number), b"", CHUNK) is not None
    effects = tier.written(key(number), b"", outcome, now)
    return [gone for effect in effects if isinstance(effect, RemoveChunks) for gone in effect.keys]


def test_the_capacity_holds_headers_too() -> None:
    """Three stored chunks fit; the fourth takes the place of another."""
    tier = disk(3)
    assert [written(tier, n) for n in range(3)] == [[], [], []]
    assert len(written(tier, 3)) == 1
    assert tier.index is not None
    assert tier.index.used_bytes == 3 * STORED


def test_what_is_there_or_on_its_way_is_not_written_again() -> None:
    """Neither by a second order nor after it was written."""
    for tier in (disk(3), shared()):
        assert tier.write(key(1), b"", CHUNK) is not None
        assert tier.write(key(1), b"", CHUNK) is None
        tier.written(key(1), b"", "written", 0.0)
        assert tier.write(key(1), b"", CHUNK) is None
        tier.forget([key(1)])
        assert tier.write(key(1), b"", CHUNK) is not None


def test_more_than_may_wait_is_shed() -> None:
    """And counted; at least one may always wait."""
    tier = disk(10, waiting=2)
    orders = [tier.write(key(n), b"", CHUNK) for n in range(4)]
    assert [order is not None for order in orders] == [True, True, False, False]
    assert tier.counters["writes_shed"] == 2
    assert disk(10, waiting=0).write(key(1), b"", CHUNK) is not None


def test_a_full_disk_is_smaller_for_a_while() -> None:
    """The oldest goes so that the next may fit; after a minute the configured capacity is tried."""
    tier = disk(10)
    for number in range(3):
        written(tier, number)
    assert len(written(tier, 3, "full", now=5.0)) == 1
    assert tier.index is not None
    assert tier.index.capacity_bytes < 3 * STORED
    tier.expire(5.0 + FULL_S)
    assert tier.index.capacity_bytes == 10 * STORED


def test_what_was_removed_while_it_was_written_goes() -> None:
    """It is not there afterwards, neither in the index nor in the store."""
    for tier in (disk(3), shared()):
        tier.write(key(1), b"", CHUNK)
        assert tier.remove([key(1)]) == RemoveChunks(1, [key(1)])
        assert tier.written(key(1), b"", "written", 0.0) == []  # The removal waits behind it.
        assert not tier.has(key(1))


def test_a_tenants_quota_of_a_shared_store() -> None:
    """What this host has put there counts."""
    tier = shared(quota=2 * STORED)
    written(tier, 1)
    written(tier, 2)
    assert tier.write(key(3), b"", CHUNK) is None
    assert tier.counters["writes_over_quota"] == 1


def test_an_earlier_lifes_chunks_beyond_the_capacity_go() -> None:
    """A disk that was made smaller keeps what fits."""
    tier = disk(2)
    effects = tier.filled([(key(n), b"", STORED) for n in range(5)], 0.0)
    assert sum(len(e.keys) for e in effects if isinstance(e, RemoveChunks)) == 3
    assert tier.index is not None
    assert len(tier.index) == 2


def test_a_tier_that_is_only_read_admits_nothing() -> None:
    """``always`` takes each chunk, ``second_use`` those that were used, ``never`` none."""
    for admission, fresh, used in (
        ("always", True, True),
        ("second_use", False, True),
        ("never", False, False),
    ):
        settings = TierSettings(type="disk", admission=admission)  # type: ignore[arg-type]
        tier = TierBook(1, settings, is_exclusive=True, write_limit_bytes=1, quotas=lambda _: None)
        assert (tier.admits(0), tier.admits(1)) == (fresh, used)


@pytest.fixture
def health() -> TierHealth:
    return TierHealth(is_remote=True)


def test_failures_in_a_row_open_the_breaker(health: TierHealth) -> None:
    """An answer between them makes it count from the beginning."""
    for _ in range(FAILURE_LIMIT - 1):
        assert not health.failed("x", 0.0)
    health.answered(0.01)
    for _ in range(FAILURE_LIMIT - 1):
        assert not health.failed("x", 0.0)
    assert health.failed("refused", 0.0)
    assert health.is_open
    assert (health.trips, health.last_error) == (1, "refused")


def test_an_open_breaker_is_tried_now_and_then(health: TierHealth) -> None:
    """Once after a while, then after twice as long, at most a minute; one answer closes it."""
    for _ in range(FAILURE_LIMIT):
        health.failed("x", 0.0)
    now, delay = 0.0, OPEN_S
    for _ in range(8):
        assert not health.must_probe(now + delay - 0.01)
        now += delay
        assert health.must_probe(now)
        assert not health.must_probe(now)
        health.failed("x", now)
        delay = min(2 * delay, OPEN_LIMIT_S)
    health.answered(0.1)
    assert not health.is_open
    assert not health.must_probe(1e9)


def test_a_probe_without_an_answer_is_repeated(health: TierHealth) -> None:
    """A tier that hangs is asked again later."""
    for _ in range(FAILURE_LIMIT):
        health.failed("x", 0.0)
    assert health.must_probe(OPEN_S)
    assert health.must_probe(2 * OPEN_S + OPEN_LIMIT_S + 1)


def test_speed_is_an_average(health: TierHealth) -> None:
    """Of what was measured; it moves towards what is measured."""
    for _ in range(50):
        health.answered(0.01)
        health.read(10_000_000, 0.11)
    assert health.latency_s == pytest.approx(0.01, rel=0.05)
    assert health.bytes_per_s == pytest.approx(100e6, rel=0.05)


def test_chunks_that_come_together_are_measured_together(health: TierHealth) -> None:
    """Sixteen out of one call of a millisecond, with next to nothing between them."""
    health.latency_s = 0.0
    for _ in range(50):
        health.read(250_000, 1e-3)
        for _ in range(15):
            health.read(250_000, 1e-6)
    assert health.bytes_per_s == pytest.approx(4e9, rel=0.05)
