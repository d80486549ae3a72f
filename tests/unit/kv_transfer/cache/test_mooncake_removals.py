"""Chunks that leave a Mooncake Store when their last reader has gone."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from splitserve.kv_transfer.cache.tiers import mooncake_removals
from splitserve.kv_transfer.cache.tiers.base import TierUnavailableError
from splitserve.kv_transfer.cache.tiers.mooncake_removals import Removals

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

RETRY_S = 0.005
DEADLINE_S = 30.0


class LeasingStore:
    """Keeps what is leased, unless leases are broken; may be down."""

    def __init__(self, *leased: bytes) -> None:
        self.leased = set(leased)
        self.is_down = False
        self.asked: list[tuple[set[bytes], bool]] = []
        self.was_asked = threading.Event()

    def remove(self, keys: Sequence[bytes], force: bool) -> Collection[bytes]:
        self.asked.append((set(keys), force))
        self.was_asked.set()
        if self.is_down:
            raise TierUnavailableError("down")
        if force:
            self.leased -= set(keys)
        return self.leased & set(keys)

    def until_asked_again(self) -> None:
        self.was_asked.clear()
        assert self.was_asked.wait(DEADLINE_S)


@pytest.fixture
def store() -> LeasingStore:
    return LeasingStore(b"a", b"b")


@pytest.fixture
def removals(store: LeasingStore) -> Iterator[Removals]:
    made = Removals(store.remove, retry_s=RETRY_S)
    yield made
    made.close()


def until_empty(removals: Removals) -> None:
    end = time.monotonic() + DEADLINE_S
    while len(removals):
        assert time.monotonic() < end
        time.sleep(RETRY_S)


def test_they_leave_when_leases_end(store: LeasingStore, removals: Removals) -> None:
    """Each when its own has; until then it counts as gone."""
    assert removals.wait_for([b"a", b"b", b"c"]) == []
    store.until_asked_again()
    store.until_asked_again()
    assert b"a" in removals
    assert b"c" not in removals
    store.leased.discard(b"a")
    store.until_asked_again()
    store.until_asked_again()
    assert b"a" not in removals
    assert b"b" in removals
    store.leased.clear()
    until_empty(removals)
    assert not any(force for _, force in store.asked)
    removals.wait_for([b"d"])
    until_empty(removals)


def test_leases_are_broken_at_last(store: LeasingStore) -> None:
    """Somebody who reads it again and again does not keep it for ever."""
    removals = Removals(store.remove, retry_s=RETRY_S, force_s=5 * RETRY_S)
    removals.wait_for([b"a"])
    until_empty(removals)
    assert store.asked[-1] == ({b"a"}, True)
    removals.close()


def test_a_store_that_is_down_is_asked_again(store: LeasingStore, removals: Removals) -> None:
    """Nothing is forgotten meanwhile."""
    store.is_down = True
    store.leased.clear()
    removals.wait_for([b"a"])
    store.until_asked_again()
    store.until_asked_again()
    assert b"a" in removals
    store.is_down = False
    until_empty(removals)


def test_what_is_claimed_is_not_removed(store: LeasingStore, removals: Removals) -> None:
    """It is the caller's to replace: not even a removal that is under way when it is claimed comes
    after the claim.
    """
    removals.wait_for([b"a"])
    store.until_asked_again()
    assert removals.claim([b"a", b"z"]) == {b"a"}
    count = len(store.asked)
    removals.wait_for([b"b"])
    store.until_asked_again()
    assert all(b"a" not in keys for keys, _ in store.asked[count:])
    assert removals.claim([b"a"]) == set()


def test_there_is_a_bound(
    store: LeasingStore, removals: Removals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beyond it are handed back."""
    monkeypatch.setattr(mooncake_removals, "WAITING_LIMIT_KEYS", 1)
    assert removals.wait_for([b"a", b"b"]) == [b"b"]
    assert removals.wait_for([b"b"]) == [b"b"]


def test_nothing_is_removed_after_the_end(store: LeasingStore, removals: Removals) -> None:
    """The thread has ended."""
    removals.wait_for([b"a"])
    store.until_asked_again()
    removals.close()
    count = len(store.asked)
    assert [t for t in threading.enumerate() if t.name == "mooncake-removals"] == []
    assert len(store.asked) == count
