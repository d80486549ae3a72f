"""A store that others share loses chunks of its own accord: what the server believes to be there
follows what it hears.
"""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.kv_transfer.cache.book_effects import AskTier
from splitserve.kv_transfer.cache.cache_book import CacheBook
from splitserve.kv_transfer.cache.chunk import Chunk
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.messages import Lookup
from splitserve.kv_transfer.cache.settings import CacheSettings, TierSettings
from splitserve.kv_transfer.cache.tier_book import TierBook

GEOMETRY = ChunkGeometry(
    layers=1,
    chunk_tokens=64,
    block_tokens=32,
    heads=1,
    key_bytes=8,
    value_bytes=8,
    item_bytes=1,
    order="rows",
)
CHUNK = Chunk(0, GEOMETRY, 1, b"")
KEYS = [bytes([number]) * 32 for number in range(3)]


class NoArena:
    """An arena that is never cut: nothing is in it."""

    size_bytes = touched_bytes = slot_bytes = slots = free_slots = 0
    failure = None


@pytest.fixture
def tier() -> TierBook:
    """A shared tier into which this server has written all of ``KEYS``."""
    settings = TierSettings(type="redis", url="redis://h")
    tier = TierBook(
        1, settings, is_exclusive=False, write_limit_bytes=1 << 30, quotas=lambda _: None
    )
    parent = b""
    for key in KEYS:
        assert tier.write(key, parent, CHUNK) is not None
        tier.written(key, parent, "written", 0.0)
        assert tier.write(key, parent, CHUNK) is None
        parent = key
    return tier


@pytest.fixture
def book(tier: TierBook) -> CacheBook:
    settings = CacheSettings(socket_path="/s", chunk_tokens=64, tiers=(tier.settings,))
    return CacheBook(settings, NoArena(), [tier], "server")


def _asked(book: CacheBook, present: int, **how: Any) -> None:
    """The tier is asked for all keys, and has that many."""
    lookup = Lookup(lookup_id=1, keys=b"".join(KEYS), limit_s=1.0)
    (ask,) = book.lookup(7, lookup, 0.0)
    assert isinstance(ask, AskTier)
    book.asked(ask.ask_id, present, 0.001, 0.0, **how)


def test_what_is_gone_is_written_again(book: CacheBook, tier: TierBook) -> None:
    """The store has the first chunk only: the others are not known to be there any more."""
    _asked(book, 1)
    assert [tier.has(key) for key in KEYS] == [True, False, False]
    assert tier.write(KEYS[1], KEYS[0], CHUNK) is not None


def test_a_store_that_cannot_be_asked_may_still_have_them(book: CacheBook, tier: TierBook) -> None:
    """No answer says nothing about the chunks."""
    _asked(book, 0, has_failed=True)
    assert all(tier.has(key) for key in KEYS)


def test_tenants_are_not_charged_for_what_is_gone(book: CacheBook, tier: TierBook) -> None:
    """A tenant's bytes are those of the chunks that it is believed to have."""
    before = sum(tier.written_bytes_by_tenant.values())
    _asked(book, 0)
    assert before > 0
    assert sum(tier.written_bytes_by_tenant.values()) == 0
