"""A host's cache in virtual time: hundreds of seeds keep every promise, and each of some planted
bugs is found.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.cache_world import run
from support.fake_arena import Violation

from splitserve.kv_transfer.cache.arena_book import ArenaBook
from splitserve.kv_transfer.cache.cache_book import CacheBook
from splitserve.kv_transfer.cache.load_book import LoadBook
from splitserve.kv_transfer.cache.save_book import SaveBook
from splitserve.kv_transfer.cache.tier_book import TierBook

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = range(400)
PLANTED_SEEDS = range(120)


def test_every_seed_keeps_the_promises(summary: Callable[[str], None]) -> None:
    """No slot is given away while somebody may touch it, chunks are whole when they are found and
    while they are read, every load is answered in its time, the server sleeps when nothing is due,
    and nothing is left when all engines are gone. The stories have something of everything in them.
    """
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        counts += run(seed)
    summary(f"cache book: {len(SEEDS)} seeds, {counts.total()} steps and outcomes {dict(counts)}")
    for needed in ("saved", "abandoned", "no_room", "lost", "late", "die", "look_up"):
        assert counts[needed] > 20, needed


def _two_writers(patch: pytest.MonkeyPatch) -> None:
    """A slot that one of a worker's saves has is given to another one too."""
    room = SaveBook._room

    def planted(self: Any, writer: Any, key: bytes, *rest: Any) -> Any:
        found = self._open.get(key)
        if found is None or writer.client not in found.holders:
            return room(self, writer, key, *rest)
        return found

    patch.setattr(SaveBook, "_room", planted)


def _impatient(patch: pytest.MonkeyPatch) -> None:
    """Room that a stopped worker may still write to is taken back after a while."""

    def planted(self: Any, now: float) -> None:
        for reservation in list(self._open.values()):
            if now - reservation.since > 5:
                reservation.holders.clear()
                reservation.is_void = True
                self._settled(reservation, now)

    patch.setattr(SaveBook, "expire", planted)


def _one_rank_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A chunk is published when its first rank has written it."""
    settled = SaveBook._settled

    def planted(self: Any, reservation: Any, now: float) -> Any:
        if reservation.checksums and not reservation.is_void:
            for rank in range(reservation.ranks):
                reservation.checksums.setdefault(rank, bytes(8))
            reservation.holders.clear()
        return settled(self, reservation, now)

    patch.setattr(SaveBook, "_settled", planted)


def _forgotten_holds(patch: pytest.MonkeyPatch) -> None:
    """What a dead worker was reading stays held."""

    def planted(self: Any, client: int, now: float) -> list[Any]:
        for key in [key for key in self._loads if key[0] == client]:
            self._forget(self._loads[key])
        return []

    patch.setattr(LoadBook, "client_gone", planted)


def _late_answers(patch: pytest.MonkeyPatch) -> None:
    """A chunk that comes for a load which is closed is held for it."""
    patch.setattr(LoadBook, "_is_open", lambda *_: True)


def _no_deadline(patch: pytest.MonkeyPatch) -> None:
    """A load waits for as long as its chunks take."""
    patch.setattr(LoadBook, "expire", lambda *_: [])


def _sleepless(patch: pytest.MonkeyPatch) -> None:
    """The time of a load that is answered and not closed is due for ever."""
    expire = LoadBook.expire

    def planted(self: Any, now: float) -> list[Any]:
        before = {key: load.until for key, load in self._loads.items()}
        effects = expire(self, now)
        for key, load in self._loads.items():
            load.until = before[key]
        return effects

    patch.setattr(LoadBook, "expire", planted)


def _hasty_eviction(patch: pytest.MonkeyPatch) -> None:
    """The slot of an evicted chunk is free while a tier still writes it."""
    evicted = CacheBook._evicted

    def planted(self: Any, entry: Any) -> bool:
        evicted(self, entry)
        return False

    patch.setattr(CacheBook, "_evicted", planted)


def _leaking_release(patch: pytest.MonkeyPatch) -> None:
    """The slot of a chunk that was removed while it was read never comes free."""

    def planted(self: Any, entry: Any) -> None:
        self._leases -= 1
        self.index.release(entry)

    patch.setattr(ArenaBook, "release", planted)


def _revenant(patch: pytest.MonkeyPatch) -> None:
    """A chunk that is removed while a tier writes it counts as written."""
    remove = TierBook.remove

    def planted(self: Any, keys: Any) -> Any:
        order = remove(self, keys)
        self._void.clear()
        return order

    patch.setattr(TierBook, "remove", planted)


def _greedy(patch: pytest.MonkeyPatch) -> None:
    """A chunk that was published keeps the checksums, and the place, of another one."""
    reserve = ArenaBook.reserve

    def planted(self: Any, key: bytes, parent: bytes, blank: Any) -> Any:
        entry = reserve(self, key, parent, blank)
        if entry is not None and len(self.index) % 5 == 4:
            other = next(iter(self.index))
            self.arena.free.append(entry.value.offset)
            entry.value = replace(entry.value, offset=other.value.offset)
        return entry

    patch.setattr(ArenaBook, "reserve", planted)


@pytest.mark.parametrize(
    "plant",
    [
        _two_writers, _impatient, _one_rank_is_enough, _forgotten_holds, _late_answers,
        _no_deadline, _sleepless, _hasty_eviction, _leaking_release, _revenant, _greedy,
    ],
)  # fmt: skip
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some seed fails, because a promise is broken or the book contradicts itself."""
    plant(monkeypatch)
    with pytest.raises((Violation, AssertionError, ValueError, KeyError)):
        _run_all(PLANTED_SEEDS)


def _run_all(seeds: range) -> None:
    for seed in seeds:
        run(seed)
