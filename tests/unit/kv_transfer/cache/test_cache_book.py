"""Single decisions of the cache server's book: events in, effects out."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.book_rig import DISK, KEYS, REDIS, Rig, answers, only, tiers_of
from support.fake_arena import GEOMETRY

from splitserve.kv_transfer.cache.book_effects import (
    AskTier,
    ProbeTier,
    ReadChunk,
    RemoveChunks,
    WriteChunk,
)
from splitserve.kv_transfer.cache.cache_book import EXPIRY_INTERVAL_S
from splitserve.kv_transfer.cache.messages import (
    MESSAGE_LIMIT_BYTES,
    Commit,
    Mark,
    Marks,
    Ready,
    Reserve,
)
from splitserve.kv_transfer.cache.packets import encode
from splitserve.kv_transfer.cache.save_book import IS_THERE, NO_ROOM, PATIENCE_S
from splitserve.kv_transfer.cache.tier_health import FAILURE_LIMIT


@pytest.fixture
def rig() -> Rig:
    """With one engine of one rank."""
    made = Rig()
    assert not made.hello(1)
    return made


# -- engines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 99}, "version"),
        ({"geometry": replace(GEOMETRY, chunk_tokens=8)}, "chunk_tokens"),
        ({"geometry": replace(GEOMETRY, layers=3)}, "models do not share"),
        ({"rank": 5}, "rank 5 of 1"),
        ({"ranks": 3}, "rank 0 of 3"),
    ],
    ids=str,
)
def test_engines_that_cannot_use_the_cache(rig: Rig, changes: dict[str, Any], words: str) -> None:
    """They are told why."""
    assert words in rig.hello(2, **changes)


def test_another_block_size_and_order_are_welcome(rig: Rig) -> None:
    """Their chunks hold the same numbers."""
    assert not rig.hello(2, geometry=replace(GEOMETRY, block_tokens=2, order="vec"))


def test_a_chunk_larger_than_the_arena() -> None:
    """Is refused with what to do, and a smaller one may come later."""
    rig = Rig(slots=1)
    assert "raise the cpu tier's capacity_bytes" in rig.hello(
        1, geometry=replace(GEOMETRY, layers=9)
    )
    assert not rig.hello(1)


def test_who_has_not_said_hello() -> None:
    """May not read or write."""
    rig = Rig()
    with pytest.raises(ValueError, match="hello"):
        rig.open(1, 1, KEYS[0])
    with pytest.raises(ValueError, match="only a worker"):
        rig.reserve(1, KEYS[:1])


# -- saves -----------------------------------------------------------------------------------------


def test_ranks_get_the_same_slots(rig: Rig) -> None:
    """The chunk is there when both have written it, with the checksums of both, layer by layer."""
    for rank in (0, 1):
        assert not rig.hello(10 + rank, rank, 2)
    first, second = (rig.reserve(10 + rank, KEYS[:2], save_id=1) for rank in (0, 1))
    assert first == second
    for rank in (0, 1):
        assert rig.book.arena.index.get(KEYS[0]) is None
        message = Commit(save_id=1, written=((0, bytes([rank]) * 8),))
        rig.book.commit(10 + rank, message, rig.now)
    entry = rig.book.arena.index.get(KEYS[0])
    assert entry is not None
    assert entry.value.pieces == 2
    assert entry.value.checksums == bytes(8) + b"\1" * 8


def test_two_saves_of_a_worker_share_no_slot(rig: Rig) -> None:
    """The second one is told that the chunk is being written; the first one's commit holds."""
    (slot,) = rig.reserve(1, KEYS[:1], save_id=1)
    assert slot >= 0
    assert rig.reserve(1, KEYS[:1], save_id=2) == (IS_THERE,)
    rig.book.commit(1, Commit(save_id=1, written=((0, bytes(8)),)), rig.now)
    assert rig.reserve(1, KEYS[:1], save_id=3) == (IS_THERE,)
    assert rig.book.saves.open_reservations == 0


def test_a_writer_that_is_silent_keeps_its_slot(rig: Rig) -> None:
    """For as long as its connection lives; then it is free, and loads that waited go on."""
    rig.reserve(1, KEYS[:1])
    assert not rig.hello(2)
    assert rig.reserve(2, KEYS[:1]) == (IS_THERE,)
    rig.on_disk(KEYS[0])
    assert rig.open(2, 1, KEYS[0], limit_s=1000.0) == []
    rig.tick(500.0)
    assert rig.book.saves.open_reservations == 1
    effects = rig.book.client_gone(1, rig.now)
    assert rig.book.saves.open_reservations == 0
    assert answers(rig.read(effects)) == ([0], [])


def test_a_rank_that_does_not_come(rig: Rig) -> None:
    """A slot that nobody writes to any more and that is not whole is given up after a while."""
    assert not rig.hello(10, 0, 2)
    rig.reserve(10, KEYS[:1], save_id=1)
    rig.book.commit(10, Commit(save_id=1, written=((0, bytes(8)),)), rig.now)
    rig.tick(PATIENCE_S)
    assert rig.book.saves.open_reservations == 1
    rig.tick(PATIENCE_S)
    assert rig.book.saves.open_reservations == 0
    assert len(rig.arena.free) == 8


def test_room_ends(rig: Rig) -> None:
    """What is reserved is not evicted: the ninth chunk finds no room."""
    assert NO_ROOM not in rig.reserve(1, KEYS[:8])
    assert rig.reserve(1, KEYS[8:9]) == (NO_ROOM,)


@pytest.mark.parametrize(
    "commit",
    [
        Commit(save_id=9, written=((0, bytes(8)),)),
        Commit(save_id=1, written=((1, bytes(8)),)),
        Commit(save_id=1, written=((-1, bytes(8)),)),
        Commit(save_id=1, written=((0, bytes(7)),)),
        Commit(save_id=1, written=(), abandoned=(5,)),
    ],
    ids=str,
)
def test_commits_of_what_was_not_reserved(rig: Rig, commit: Commit) -> None:
    """Are errors of the client; its slots stay its own until it is gone."""
    rig.reserve(1, KEYS[:1], save_id=1)
    with pytest.raises(ValueError, match="commit"):
        rig.book.commit(1, commit, rig.now)
    assert rig.book.saves.open_reservations == 1
    rig.book.client_gone(1, rig.now)
    assert len(rig.arena.free) == 8


@pytest.mark.parametrize(
    "message",
    [
        Reserve(save_id=1, parent=b"", keys=KEYS[5]),
        Reserve(save_id=2, parent=b"short", keys=KEYS[5]),
        Reserve(save_id=2, parent=b"", keys=KEYS[5][:-1]),
    ],
    ids=["id", "parent", "keys"],
)
def test_questions_that_cannot_be(rig: Rig, message: Reserve) -> None:
    """An id in use, a parent or keys of a wrong length."""
    rig.reserve(1, KEYS[:1], save_id=1)
    with pytest.raises(ValueError, match=r"open already|a parent has|no whole number"):
        rig.book.reserve(1, message, rig.now)
    rig.save(1, KEYS[7])
    rig.open(1, 5, KEYS[7])
    with pytest.raises(ValueError, match="open already"):
        rig.open(1, 5, KEYS[7])


# -- loads -----------------------------------------------------------------------------------------


def test_chunks_come_from_the_arena_and_from_below(rig: Rig) -> None:
    """Those in the arena are ready at once, the others when they are read; all are held until they
    are closed.
    """
    rig.save(1, KEYS[0])
    rig.on_disk(KEYS[1])
    effects = rig.open(1, 1, *KEYS[:2])
    assert answers(effects) == ([0], [])
    assert answers(rig.read(effects)) == ([1], [])
    rig.close(1, 1, 0)
    rig.close(1, 1)
    assert rig.book.loads.open_loads == 0


def test_chunks_that_two_want_are_read_once(rig: Rig) -> None:
    """Both get them."""
    assert not rig.hello(2)
    rig.on_disk(KEYS[0])
    effects = rig.open(1, 1, KEYS[0])
    assert only(rig.open(2, 1, KEYS[0]), ReadChunk) == []
    sent = rig.read(effects)
    assert sorted(effect.client for effect in only(sent, Ready)) == [1, 2]


def test_what_is_behind_a_missing_chunk_is_missing(rig: Rig) -> None:
    """And is not read."""
    rig.on_disk(KEYS[0], KEYS[2])
    effects = rig.open(1, 1, *KEYS[:3])
    assert answers(effects) == ([], [1, 2])
    assert len(only(effects, ReadChunk)) == 1


def test_a_chunk_that_is_lost_is_looked_for_below() -> None:
    """In each tier that may have it; then it is missing, and no disk is believed to have it."""
    rig = Rig(redis=True)
    rig.hello(1)
    rig.on_disk(KEYS[0])
    effects = rig.open(1, 1, KEYS[0])
    again = rig.read(effects, found=False)
    assert [read.tier for read in only(again, ReadChunk)] == [REDIS]
    assert answers(rig.read(again, found=False)) == ([], [0])
    assert not rig.book.tiers[0].has(KEYS[0])
    assert len(rig.arena.free) == 8


def test_a_failed_read_loses_nothing(rig: Rig) -> None:
    """The load fails; the disk still has the chunk."""
    rig.on_disk(KEYS[0])
    (read,) = rig.open(1, 1, KEYS[0])
    effects = rig.book.was_read(DISK, read.key, None, 0.0, rig.now, has_failed=True)
    assert answers(effects) == ([], [0])
    assert rig.book.tiers[0].has(KEYS[0])


def test_a_load_ends_in_its_time(rig: Rig) -> None:
    """With what has come; a tier that lets loads wait is left alone, and the server may sleep."""
    rig.on_disk(*KEYS[:5])
    for number in range(FAILURE_LIMIT):
        key = KEYS[number]
        assert only(rig.open(1, number, key, limit_s=1.0), ReadChunk) or number >= 2
        assert answers(rig.tick(1.0)) == ([], [0])
        assert rig.book.next_deadline(rig.now) > rig.now
    assert rig.book.tiers[0].health.is_open
    assert answers(rig.open(1, 99, KEYS[4])) == ([], [0])


def test_an_answered_load_may_stay_open(rig: Rig) -> None:
    """A stopped worker does not keep the server busy, and keeps what it reads."""
    rig.save(1, KEYS[0])
    rig.open(1, 1, KEYS[0], limit_s=1.0)
    assert answers(rig.tick(100.0)) == ([], [])
    assert rig.book.next_deadline(rig.now) > rig.now
    assert rig.book.loads.open_loads == 1
    assert rig.book.arena.is_busy


def test_a_chunk_that_comes_too_late_is_kept_for_nobody(rig: Rig) -> None:
    """Also when the same client has a load of the same number again."""
    rig.on_disk(KEYS[0])
    late = rig.open(1, 1, KEYS[0])
    rig.close(1, 1)
    rig.save(1, KEYS[1])
    rig.open(1, 1, KEYS[1])
    assert answers(rig.read(late)) == ([], [])
    rig.close(1, 1)
    rig.book.was_written(DISK, KEYS[1], "written", rig.now)
    assert not rig.book.arena.is_busy


def test_a_load_larger_than_the_arena() -> None:
    """Goes through it, slot by slot, as its chunks are closed."""
    rig = Rig(slots=2)
    rig.hello(1)
    rig.on_disk(*KEYS[:9])
    waiting, seen = rig.open(1, 1, *KEYS[:9]), []
    for _ in range(20):
        done = rig.read(waiting)
        ready, missing = answers(done)
        assert not missing
        seen += ready
        waiting = only(done, ReadChunk)
        for index in ready:
            waiting += only(rig.close(1, 1, index), ReadChunk)
    assert seen == list(range(9))


def test_a_load_gives_up_when_nobody_will_make_room() -> None:
    """Every slot has a pinned chunk: waiting would help nothing."""
    rig = Rig(slots=2)
    rig.hello(1)
    rig.save(1, *KEYS[:2])
    for key in KEYS[:2]:
        rig.book.was_written(DISK, key, "written", rig.now)
    rig.book.arena.index.pin(KEYS[:2])
    rig.on_disk(KEYS[5])
    assert answers(rig.open(1, 1, KEYS[5])) == ([], [0])


def test_a_load_waits_for_a_slot_that_a_tier_still_reads() -> None:
    """It goes on when the tier has written the chunk."""
    rig = Rig(slots=1)
    rig.hello(1)
    (write,) = only(rig.save(1, KEYS[0]), WriteChunk)
    rig.on_disk(KEYS[5])
    assert rig.open(1, 1, KEYS[5]) == []
    effects = rig.book.was_written(write.tier, write.key, "written", rig.now)
    assert answers(rig.read(effects)) == ([0], [])


def test_a_long_load_is_answered_in_several_messages() -> None:
    """Each fits into a packet."""
    rig = Rig(slots=2000)
    rig.hello(1)
    keys = [bytes(8) + n.to_bytes(24) for n in range(2000)]
    rig.save(1, *keys)
    sent = only(rig.open(1, 1, *keys), Ready)
    assert max(len(encode(effect.message)) for effect in sent) <= MESSAGE_LIMIT_BYTES
    assert answers(sent) == (list(range(2000)), [])


def test_a_broken_chunk_goes_everywhere(rig: Rig) -> None:
    """Out of the arena, at once for look-ups and for good when nobody reads it, and out of every
    tier, one that is writing it included.
    """
    assert not rig.hello(2)
    rig.save(1, KEYS[0])
    rig.open(1, 1, KEYS[0])
    rig.open(2, 1, KEYS[0])
    effects = rig.close(1, 1, 0, broken=(0,))
    assert only(effects, RemoveChunks) == [RemoveChunks(DISK, [KEYS[0]])]
    assert rig.book.counters["broken_chunks"] == 1
    assert tiers_of(rig.look_up(KEYS[0])) == b""
    effects = rig.book.was_written(DISK, KEYS[0], "written", rig.now)
    assert not only(effects, RemoveChunks)  # The order is behind the write already.
    assert not rig.book.tiers[0].has(KEYS[0])
    assert len(rig.arena.free) == 7
    rig.close(2, 1)
    assert len(rig.arena.free) == 8


# -- look-ups --------------------------------------------------------------------------------------


def test_a_lookup_goes_down_the_tiers() -> None:
    """Known ones first; a shared store is asked for the rest, and what follows it may be known."""
    rig = Rig(redis=True)
    rig.hello(1)
    rig.save(1, *KEYS[:2])
    rig.on_disk(KEYS[2], KEYS[5])
    (ask,) = rig.look_up(*KEYS[:7])
    assert ask == AskTier(REDIS, ask.ask_id, KEYS[3:7])
    assert tiers_of(rig.book.asked(ask.ask_id, 2, 0.01, rig.now)) == bytes([0, 0, 1, 2, 2, 1])


def test_a_lookup_is_answered_in_its_time() -> None:
    """With what is known; a store that is late counts as failing, and its answer is ignored."""
    rig = Rig(redis=True)
    rig.hello(1)
    rig.save(1, KEYS[0])
    (ask,) = rig.look_up(*KEYS[:3])
    assert rig.book.next_deadline(rig.now) <= rig.now + 1.0
    assert tiers_of(rig.tick(1.0)) == b"\0"
    assert rig.book.counters["late_lookups"] == 1
    assert rig.book.asked(ask.ask_id, 2, 0.01, rig.now) == []


def test_a_store_that_cannot_be_asked_costs_nothing_afterwards() -> None:
    """After some failures in a row it is not asked; the server tries it by itself, and asks again
    when it answers.
    """
    rig = Rig(redis=True, disk=False)
    rig.hello(1)
    for number in range(FAILURE_LIMIT):
        (ask,) = rig.look_up(KEYS[0])
        opened = rig.book.tier_failed(1, "refused", rig.now)
        assert opened == (number == FAILURE_LIMIT - 1)
        assert tiers_of(rig.book.asked(ask.ask_id, 0, 0.01, rig.now, has_failed=True)) == b""
    assert tiers_of(rig.look_up(KEYS[0])) == b""
    probes = [effect for _ in range(20) for effect in only(rig.tick(0.5), ProbeTier)]
    assert probes == [ProbeTier(1)]
    rig.book.probed(1, 0.01)
    assert len(only(rig.look_up(KEYS[0]), AskTier)) == 1


# -- eviction and marks ----------------------------------------------------------------------------


def test_evicted_chunks_keep_their_slots_until_they_are_below() -> None:
    """A chunk whose write was shed is written when it is evicted; its slot is free after that."""
    rig = Rig(slots=1)
    rig.hello(1)
    rig.book.tiers[0].health.is_open = True
    assert only(rig.save(1, KEYS[0]), WriteChunk) == []
    rig.book.tiers[0].health.is_open = False
    assert rig.reserve(1, KEYS[1:2]) == (NO_ROOM,)
    assert (rig.book.arena.departing, rig.arena.free) == (1, [])
    rig.book.was_written(DISK, KEYS[0], "written", rig.now)
    assert tiers_of(rig.look_up(KEYS[0])) == bytes([DISK])
    assert min(rig.reserve(1, KEYS[1:2])) >= 0


def test_marks_live_as_long_as_their_chunk() -> None:
    """A watcher hears of a mark when its chunk comes, of its end when the last tier has lost it."""
    rig = Rig()
    rig.hello(1)
    assert only(rig.book.watch(50), Marks)[0].message == Marks(is_first=True)
    mark = Mark(b"d" * 16, 4)
    message = Reserve(save_id=1, parent=b"", keys=KEYS[0], marks=((0, mark),))
    rig.book.reserve(1, message, rig.now)
    effects = rig.book.commit(1, Commit(save_id=1, written=((0, bytes(8)),)), rig.now)
    assert [s.message for s in only(effects, Marks)] == [Marks(added=(mark,))]
    assert only(rig.book.watch(51), Marks)[0].message == Marks(is_first=True, added=(mark,))
    rig.book.drop_from_arena(KEYS[0])
    assert rig.book.take_effects() == []
    effects = rig.book.was_written(DISK, KEYS[0], "failed", rig.now)
    assert {s.client for s in only(effects, Marks)} == {50, 51}
    assert only(effects, Marks)[0].message == Marks(removed=(mark.digest,))


def test_time_alone_ends_chunks() -> None:
    """Past their time to live they are not found, and their slots are free."""
    rig = Rig(disk=False)
    rig.book.arena.index._ttl_s = 5.0
    rig.hello(1)
    rig.save(1, KEYS[0])
    rig.tick(5.0 + EXPIRY_INTERVAL_S)
    assert len(rig.arena.free) == 8
