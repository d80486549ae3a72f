"""Eviction policies: what goes first."""

from __future__ import annotations

import pytest

from splitserve.kv_transfer.cache.entry import Entry
from splitserve.kv_transfer.cache.eviction import (
    POLICIES,
    SPARE_ITEMS,
    Ghosts,
    LeafOrder,
    policy_named,
)
from splitserve.kv_transfer.cache.index import TierIndex


def leaf(name: str, last_use: int, hits: int = 0) -> Entry[None]:
    entry = Entry(name.encode(), b"", 1, "t", None)
    entry.is_present = True
    entry.last_use = last_use
    entry.hits = hits
    return entry


def order_of(policy: str, *leaves: Entry[None]) -> LeafOrder:
    order = LeafOrder(POLICIES[policy].weights)
    for entry in leaves:
        order.offer(entry)
    return order


def names(order: LeafOrder, tick: int) -> list[str]:
    """All leaves in the order in which they go at ``tick``."""
    taken = []
    while (entry := order.take(tick)) is not None:
        taken.append(entry.key.decode())
        entry.is_present = False
    return taken


def test_an_unknown_policy_lists_the_known_ones() -> None:
    """The message is for whoever wrote the name into a YAML."""
    with pytest.raises(ValueError, match=r"no eviction 'fifo'; there are lru, s3fifo"):
        policy_named("fifo")


def test_lru_takes_what_was_not_used_for_longest() -> None:
    """However often it was used before."""
    order = order_of("lru", leaf("b", 5), leaf("a", 2, hits=9), leaf("c", 7))
    assert names(order, 10) == ["a", "b", "c"]


def test_s3fifo_lets_hit_chunks_grow_older() -> None:
    """A chunk with one hit goes when it is twice as old as one on probation, with two three times,
    and from three on four times.
    """
    leaves = leaf("new", 80), leaf("hit", 61, 1), leaf("twice", 41, 2), leaf("often", 21, 7)
    assert names(order_of("s3fifo", *leaves), 100)[0] == "new"
    leaves = leaf("new", 80), leaf("hit", 59, 1), leaf("twice", 39, 2), leaf("often", 19, 7)
    assert names(order_of("s3fifo", *leaves), 100) == ["hit", "twice", "often", "new"]


def test_a_leaf_moves_when_it_was_used_since() -> None:
    """Its item in the order is renewed when it comes to the head, in its queue or a higher one."""
    first, second, third = leaf("first", 1), leaf("second", 2), leaf("third", 3)
    order = order_of("s3fifo", first, second, third)
    first.last_use = 9
    second.last_use, second.hits = 3, 1
    assert names(order, 10) == ["third", "second", "first"]


def test_what_is_not_evictable_is_passed_over() -> None:
    """Read, pinned, followed by another chunk, or gone."""
    read, pinned, inner, gone, free = (leaf(name, n) for n, name in enumerate("rpigf"))
    order = order_of("s3fifo", read, pinned, inner, gone, free)
    read.leases, pinned.is_pinned, inner.children, gone.is_present = 1, True, 1, False
    assert names(order, 10) == ["f"]


def test_the_kept_leaf_goes_only_later() -> None:
    """It is passed over, however often it was offered, and not lost."""
    kept, other = leaf("kept", 1), leaf("other", 2)
    order = order_of("lru", kept, kept, other)
    assert order.take(5, keep=kept) is other
    assert order.take(5, keep=kept) is None
    assert order.take(5) is kept


def test_an_order_stays_small() -> None:
    """Outdated items are dropped when there are more than leaves and spare ones."""
    leaves = [leaf(str(number), number) for number in range(100)]
    order = order_of("s3fifo", *leaves)
    for _ in range(500):
        for entry in leaves:
            order.offer(entry)
        assert len(order) <= 2 * len(leaves) + SPARE_ITEMS
    assert names(order, 200) == [str(number) for number in range(100)]
    assert len(order) == 0


def test_ghosts_are_remembered_up_to_a_limit() -> None:
    """The oldest are forgotten; one that is taken is forgotten too."""
    ghosts = Ghosts()
    for key in (b"a", b"b", b"c", b"b", b"d"):
        ghosts.remember(key, 3)
    assert len(ghosts) == 3
    assert [ghosts.take(key) for key in (b"a", b"b", b"c", b"d", b"d")] == [
        False,
        True,
        True,
        True,
        False,
    ]


def test_what_comes_back_soon_after_eviction_is_not_on_probation() -> None:
    """With ``s3fifo`` it outlives a chunk that came after it; with ``lru`` it does not."""
    expected = {"lru": b"again", "s3fifo": b"new"}
    for policy, victim in expected.items():
        index: TierIndex[None] = TierIndex(2, policy)
        for key in (b"again", b"x", b"y", b"again", b"new"):
            assert index.make_room(1, "t") is not None
            index.add(key, b"", 1, "t", None, 0.0)
        for _ in range(5):
            index.prefix([b"unknown"], 0.0)
        assert [entry.key for entry in index.make_room(1, "t") or ()] == [victim]


def test_a_scan_does_not_flush_what_is_used() -> None:
    """Prompts that come once push each other out; one that is asked for now and then stays."""
    chat = [b"chat0", b"chat1", b"chat2"]
    stays = {}
    for policy in POLICIES:
        index: TierIndex[None] = TierIndex(20, policy)
        for key, parent in zip(chat, [b"", *chat], strict=False):
            index.add(key, parent, 1, "t", None, 0.0)
        for _ in range(3):
            index.prefix(chat, 0.0)
        for number in range(30):
            assert index.make_room(1, "t") is not None
            index.add(f"scan{number}".encode(), b"", 1, "t", None, 0.0)
        stays[policy] = index.prefix(chat, 0.0)
    assert stays == {"lru": 0, "s3fifo": 3}
