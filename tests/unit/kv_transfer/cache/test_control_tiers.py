"""The threads of a tier carry out what operators want: asking, removing, listing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from support.chunks import make_chunk
from support.memory_tier import MemoryTier

from splitserve.kv_transfer.cache.chunk_codec import ChunkCodec
from splitserve.kv_transfer.cache.tier_workers import (
    REMOVE_BATCH_LIMIT,
    Asked,
    Cleared,
    Failed,
    TierWorkers,
)
from splitserve.kv_transfer.cache.tiers.base import TierUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEADLINE_S = 20.0
TAG = b"A" * 8
KEYS = [tag + n.to_bytes(24, "big") for tag in (TAG, b"B" * 8) for n in range(REMOVE_BATCH_LIMIT)]


class BadTier(MemoryTier):
    """Removes so many batches; then it is out of order."""

    def __init__(self, batches: int) -> None:
        super().__init__(1 << 40)
        self.batches = batches
        self.begun = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def remove(self, keys: Sequence[bytes]) -> int:
        self.begun.set()
        assert self.may_go_on.wait(DEADLINE_S)
        if not self.batches:
            raise TierUnavailableError("out of order")
        self.batches -= 1
        return super().remove(keys)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if not self.batches:
            raise TierUnavailableError("out of order")
        return super().contains(keys)


class Workers:
    """A tier's threads, and what they say."""

    def __init__(self, tier: MemoryTier) -> None:
        self._woken = threading.Semaphore(0)
        self.threads = TierWorkers(
            1, tier, ChunkCodec(None), readers=1, wake=lambda: self._woken.release()
        )
        self._results: list[Any] = []

    def until(self, kind: type[Any]) -> list[Any]:
        """All results up to the first of that kind."""
        while not any(isinstance(result, kind) for result in self._results):
            assert self._woken.acquire(timeout=DEADLINE_S)
            self._results += self.threads.take_results()
        results, self._results = self._results, []
        return results


@pytest.fixture
def tier() -> BadTier:
    """With the chunks of two tenants."""
    made = BadTier(100)
    content = make_chunk(1).content
    made.chunks.update(dict.fromkeys(KEYS, content))
    return made


@pytest.fixture
def workers(tier: BadTier) -> Iterator[Workers]:
    made = Workers(tier)
    yield made
    made.threads.stop()
    assert made.threads.join()


def test_each_key_is_answered(workers: Workers) -> None:
    """Not only how many there are from the first one on."""
    workers.threads.ask(7, [KEYS[0], bytes(32), KEYS[1]])
    [asked] = workers.until(Asked)
    assert (asked.ask_id, asked.present, asked.found) == (7, 1, (True, False, True))


def test_a_question_that_fails_has_no_answer(workers: Workers, tier: BadTier) -> None:
    """It is not taken for a tier that has nothing."""
    tier.batches = 0
    workers.threads.ask(7, KEYS[:2])
    failed, asked = workers.until(Asked)
    assert isinstance(failed, Failed)
    assert (asked.present, asked.found) == (0, None)


def test_a_tenants_chunks_are_listed_and_removed(workers: Workers, tier: BadTier) -> None:
    """The others' stay. An empty beginning is everybody's."""
    workers.threads.clear(3, TAG)
    assert workers.until(Cleared) == [Cleared(3, REMOVE_BATCH_LIMIT, True)]
    assert set(tier.chunks) == set(KEYS[REMOVE_BATCH_LIMIT:])
    workers.threads.clear(4, b"")
    assert workers.until(Cleared) == [Cleared(4, REMOVE_BATCH_LIMIT, True)]
    workers.threads.clear(5, b"")
    assert workers.until(Cleared) == [Cleared(5, 0, True)]


@pytest.mark.parametrize("batches", [0, 1])
def test_a_clear_that_fails_says_how_far_it_came(
    workers: Workers, tier: BadTier, batches: int
) -> None:
    """By a list of keys as by a beginning."""
    tier.batches = batches
    workers.threads.remove(KEYS, clear_id=8)
    failed, cleared = workers.until(Cleared)
    assert failed == Failed("out of order")
    assert cleared == Cleared(8, batches * REMOVE_BATCH_LIMIT, False)
    workers.threads.clear(9, b"")
    assert workers.until(Cleared)[-1] == Cleared(9, 0, False)


def test_a_clear_ends_with_the_server(workers: Workers, tier: BadTier) -> None:
    """It is in the middle of many batches: the one under way is the last."""
    tier.may_go_on.clear()
    workers.threads.clear(3, b"")
    assert tier.begun.wait(DEADLINE_S)
    workers.threads.stop()
    tier.may_go_on.set()
    assert workers.threads.join()
    assert workers.until(Cleared) == [Cleared(3, REMOVE_BATCH_LIMIT, False)]
    assert len(tier.chunks) == REMOVE_BATCH_LIMIT
