"""The index of one tier: stories and costs. ``test_index_model.py`` has the rest."""

from __future__ import annotations

import pytest

from splitserve.kv_transfer.cache.entry import Entry
from splitserve.kv_transfer.cache.index import CAPACITY, CLEARED, EXPIRED, QUOTA, TierIndex


def chain(name: str, length: int) -> list[bytes]:
    """Keys of a prompt's chunks, as long as real ones."""
    return [f"{name}{position}".encode().rjust(32, b".") for position in range(length)]


def store(index: TierIndex[int], keys: list[bytes], tenant: str = "t", now: float = 0.0) -> int:
    """Look a prompt up and store what is missing, one byte a chunk; returns chunks stored."""
    found = index.prefix(keys, now)
    for position in range(found, len(keys)):
        parent = keys[position - 1] if position else b""
        if index.make_room(1, tenant, parent) is None:
            return position - found
        index.add(keys[position], parent, 1, tenant, position, now)
    return len(keys) - found


def present(index: TierIndex[int], keys: list[bytes]) -> list[bool]:
    return [index.get(key) is not None for key in keys]


def test_a_prompt_is_found_as_far_as_it_is_here() -> None:
    """Look-ups count hits and misses by chunk, and find chunks from the middle on too."""
    index: TierIndex[int] = TierIndex(10)
    keys = chain("a", 5)
    store(index, keys[:3])
    assert index.prefix(keys, 0.0) == 3
    assert index.prefix(keys[1:], 0.0) == 2
    assert index.prefix(keys[3:], 0.0) == 0
    assert index.prefix([], 0.0) == 0
    assert (index.hits, index.misses) == (5, 3 + 2 + 2 + 2)


def test_tails_go_before_their_heads() -> None:
    """The prompt that was not used for longest loses its last chunks first."""
    index: TierIndex[int] = TierIndex(6, "lru")
    old, new = chain("old", 3), chain("new", 3)
    store(index, old)
    store(index, new)
    gone = index.make_room(2, "t")
    assert gone is not None
    assert [entry.key for entry in gone] == [old[2], old[1]]
    assert [entry.value for entry in gone] == [2, 1]
    assert all(entry.is_free for entry in gone)
    assert index.gone == {CAPACITY: 2}


def test_the_chunk_before_the_new_one_stays() -> None:
    """A prompt longer than the tier keeps its beginning and is stored no further."""
    index: TierIndex[int] = TierIndex(3)
    keys = chain("a", 5)
    assert store(index, keys) == 3
    assert present(index, keys) == [True, True, True, False, False]


def test_what_is_read_stays_until_it_is_released() -> None:
    """A removed chunk is invisible at once, its room is counted until its last reader lets go."""
    index: TierIndex[int] = TierIndex(1)
    (key,) = chain("a", 1)
    store(index, [key])
    entry = index.get(key)
    assert entry is not None
    index.lease(entry)
    index.lease(entry)
    assert index.make_room(1, "t") is None
    assert index.remove(key) is entry
    assert not entry.is_free
    assert index.prefix([key], 0.0) == 0
    assert (index.used_bytes, index.make_room(1, "t")) == (1, None)
    assert index.release(entry) is False
    assert index.release(entry) is True
    assert entry.is_free
    assert (index.used_bytes, index.make_room(1, "t")) == (0, [])


def test_a_chunk_may_come_again_while_its_old_copy_is_read() -> None:
    """The new copy is another entry; the old one's end does not touch it."""
    index: TierIndex[int] = TierIndex(2)
    (key,) = chain("a", 1)
    store(index, [key])
    old = index.get(key)
    assert old is not None
    index.lease(old)
    index.remove(key)
    store(index, [key])
    new = index.get(key)
    assert new is not old
    assert index.release(old) is True
    assert index.get(key) is new
    assert index.used_bytes == 1


def test_no_room_changes_nothing() -> None:
    """What would have to go to no avail is all there afterwards, in the same order."""
    index: TierIndex[int] = TierIndex(6, "lru")
    old, held, new = chain("old", 2), chain("held", 2), chain("new", 2)
    for keys in (old, held, new):
        store(index, keys)
    entry = index.get(held[1])
    assert entry is not None
    index.lease(entry)
    assert index.make_room(5, "t") is None
    assert present(index, old + held + new) == [True] * 6
    assert (index.used_bytes, index.gone) == (6, {})
    gone = index.make_room(4, "t")
    assert gone is not None
    assert [entry.key for entry in gone] == [old[1], old[0], new[1], new[0]]


def test_no_room_counts_no_hits() -> None:
    """Uses that a parent has learnt from a child that came back are taken back too."""
    index: TierIndex[int] = TierIndex(3)
    keys, held = chain("a", 2), chain("held", 1)
    store(index, keys)
    store(index, held)
    index.prefix(keys, 0.0)
    entry, parent = index.get(held[0]), index.get(keys[0])
    assert entry is not None
    assert parent is not None
    index.lease(entry)
    for _ in range(3):
        assert index.make_room(3, "t") is None
    index.remove(keys[1])
    assert parent.hits == 1


def test_a_tenant_at_its_quota_loses_its_own_chunks() -> None:
    """Others lose nothing to it, and one below its quota gets the room that others use."""
    quotas = {"small": 2}
    index: TierIndex[int] = TierIndex(6, "lru", quotas=quotas.get)
    big, small = chain("big", 4), chain("small", 4)
    store(index, big, "big")
    for key in small:
        store(index, [key], "small")
    assert present(index, small) == [False, False, True, True]
    assert present(index, big) == [True] * 4
    assert index.gone == {QUOTA: 2}
    assert index.used_bytes_by_tenant == {"big": 4, "small": 2}
    more = chain("more", 5)
    assert store(index, more, "other") == 5
    assert index.used_bytes_by_tenant == {"small": 1, "other": 5}
    assert index.make_room(3, "small") is None, "larger than its quota"


def test_a_smaller_quota_is_met_by_asking_for_nothing() -> None:
    """``make_room(0)`` brings a tenant down to a quota that was lowered."""
    quotas = {"t": 4}
    index: TierIndex[int] = TierIndex(10, quotas=quotas.get)
    store(index, chain("a", 4))
    quotas["t"] = 1
    gone = index.make_room(0, "t")
    assert gone is not None
    assert len(gone) == 3
    assert index.used_bytes == 1


def test_a_lost_parent_hides_its_children_until_it_is_back() -> None:
    """Children of a removed chunk stay, are found when it comes again, and go like others."""
    index: TierIndex[int] = TierIndex(4, "lru")
    keys = chain("a", 4)
    store(index, keys)
    index.remove(keys[1])
    assert index.prefix(keys, 0.0) == 1
    assert index.prefix(keys[2:], 0.0) == 2
    index.add(keys[1], keys[0], 1, "t", 9, 0.0)
    assert index.prefix(keys, 0.0) == 4
    gone = index.make_room(4, "t")
    assert gone is not None
    assert [entry.key for entry in gone] == keys[::-1]


def test_reserved_chunks_have_their_room_and_are_not_found() -> None:
    """Chunks that are published before those in front of them are found when these come."""
    index: TierIndex[int] = TierIndex(3)
    keys = chain("a", 3)
    entries = [
        index.reserve(key, parent, 1, "t", 0)
        for key, parent in zip(keys, [b"", *keys], strict=False)
    ]
    assert (index.used_bytes, index.make_room(1, "t")) == (3, None)
    assert index.is_reserved(keys[1])
    index.publish(entries[0], 0.0)
    index.publish(entries[2], 0.0)
    assert index.prefix(keys, 0.0) == 1
    index.publish(entries[1], 0.0)
    assert index.prefix(keys, 0.0) == 3
    assert not index.is_reserved(keys[1])


def test_withdrawn_chunks_give_their_room_back() -> None:
    """And the chunk before them may go again."""
    index: TierIndex[int] = TierIndex(2)
    keys = chain("a", 2)
    store(index, keys[:1])
    reserved = index.reserve(keys[1], keys[0], 1, "t", 0)
    assert index.make_room(1, "t") is None
    index.withdraw(reserved)
    assert index.make_room(1, "t") == []
    assert index.make_room(2, "t") is not None


def test_old_chunks_are_not_found_and_go() -> None:
    """Past its time to live a chunk is a miss, unless it is pinned."""
    index: TierIndex[int] = TierIndex(10, ttl_s=10.0)
    keys, pinned = chain("a", 2), chain("pinned", 1)
    store(index, keys[:1], now=0.0)
    store(index, pinned, now=0.0)
    store(index, keys, now=6.0)
    index.pin(pinned)
    assert index.expire(9.0) == []
    assert index.prefix(keys, 10.0) == 0
    assert [entry.key for entry in index.expire(10.0)] == [keys[0]]
    assert index.prefix(pinned, 11.0) == 1
    index.unpin(pinned)
    assert index.prefix(pinned, 11.0) == 0
    assert [entry.key for entry in index.expire(11.0)] == pinned
    assert index.gone == {EXPIRED: 2}
    assert present(index, keys) == [False, True]


def test_pinned_chunks_are_never_evicted() -> None:
    """Nor are those before them; clearing takes them only when it is told to."""
    index: TierIndex[int] = TierIndex(3)
    keys = chain("a", 3)
    store(index, keys)
    assert [entry.key for entry in index.pin([keys[1], b"unknown"])] == [keys[1]]
    assert index.make_room(2, "t") is None
    assert [entry.key for entry in index.make_room(1, "t") or ()] == [keys[2]]
    assert [entry.key for entry in index.clear()] == [keys[0]]
    assert [entry.key for entry in index.clear(keep_pinned=False)] == [keys[1]]
    assert index.gone[CLEARED] == 2


def test_marks_go_with_their_chunk() -> None:
    """They are handed back with the chunk when it goes."""
    index: TierIndex[int] = TierIndex(1)
    index.add(b"k", b"", 1, "t", 0, 0.0, marks=("m",))
    assert [entry.marks for entry in index.make_room(1, "t") or ()] == [("m",)]


def test_broken_promises_are_assertions() -> None:
    """Doubles, room that was not made and leases that were not taken are our own faults."""
    index: TierIndex[int] = TierIndex(1)
    entry = index.add(b"k", b"", 1, "t", 0, 0.0)
    with pytest.raises(AssertionError, match="is here already"):
        index.reserve(b"k", b"", 1, "t", 0)
    with pytest.raises(AssertionError, match="no room was made"):
        index.reserve(b"l", b"", 1, "t", 0)
    with pytest.raises(AssertionError, match="released more often"):
        index.release(entry)
    index.remove(b"k")
    with pytest.raises(AssertionError, match="is gone"):
        index.lease(entry)


def test_a_look_up_does_not_look_at_all_keys() -> None:
    """A thousand chunks that are here are found by looking at a few."""
    index: TierIndex[int] = TierIndex(2_000)
    keys = chain("a", 1_000)
    store(index, keys)
    looked_at: list[int] = []

    class Watched(list[bytes]):
        def __getitem__(self, place: int) -> bytes:  # type: ignore[override]
            looked_at.append(place)
            return super().__getitem__(place)

    assert index.prefix(Watched(keys), 0.0) == 1_000
    assert len(looked_at) < 20


def test_entries_have_no_dictionary() -> None:
    """A million of them are held: an entry is its slots alone."""
    assert not hasattr(Entry(b"k", b"", 1, "t", 0), "__dict__")
