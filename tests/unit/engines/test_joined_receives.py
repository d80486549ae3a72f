"""A request is reported as received once, when all of its parts are."""

from __future__ import annotations

import itertools

import pytest

from splitserve.kv_transfer.cache.orders import CacheNews, CacheOrders, Loaded, LoadOrder
from splitserve.kv_transfer.orders import BeginReceive, StepOrders, TransferResults
from splitserve.orchestrator.engines.joined_receives import JoinedReceives


def receive(name: str) -> BeginReceive:
    return BeginReceive(
        transfer_id="t", request_id=name, attempt=1, peer_incarnation="p", peer_addresses=(),
        first_block=0, block_ids=(1,), prompt_tokens=9, prompt_hash=b"",
    )  # fmt: skip


def load(name: str) -> LoadOrder:
    return LoadOrder(1, name, bytes(32), 0, (1,), 1.0)


def landed(name: str, *, good: bool = True) -> TransferResults:
    names = frozenset([name])
    return TransferResults(frozenset(), names, frozenset() if good else names)


def loaded(name: str, *, good: bool = True) -> CacheNews:
    return CacheNews(loaded=(Loaded(name, 1, 1, int(good), 0, 0.0),))


@pytest.mark.parametrize(
    ("first_good", "second_good"), [*itertools.product([True, False], repeat=2)]
)
@pytest.mark.parametrize("cache_first", [True, False])
def test_both_parts(first_good: bool, second_good: bool, cache_first: bool) -> None:
    """In any order: received with the second one, failed when one of them has."""
    joined = JoinedReceives()
    joined.begin_step(
        StepOrders(receives=(receive("r"),)), CacheOrders(loads=(load("r"), load("other")))
    )
    nothing = (TransferResults(), CacheNews())
    steps = [
        (landed("r", good=first_good), nothing[1]), (nothing[0], loaded("r", good=second_good)),
    ]  # fmt: skip
    if cache_first:
        steps.reverse()
    assert not joined.results(*steps[0]).finished_receiving
    found = joined.results(*steps[1])
    assert found.finished_receiving == {"r"}
    assert bool(found.failed_receiving) == (not (first_good and second_good))
    assert not joined.results(*nothing).finished_receiving


def test_both_parts_at_once() -> None:
    """Reported once."""
    joined = JoinedReceives()
    joined.begin_step(StepOrders(receives=(receive("r"),)), CacheOrders(loads=(load("r"),)))
    assert joined.results(landed("r"), loaded("r")).finished_receiving == {"r"}


@pytest.mark.parametrize("good", [True, False])
def test_one_part_alone(good: bool) -> None:
    """A request that only loads, or only receives, is reported with that; a second load of one that
    had two parts is one part.
    """
    joined = JoinedReceives()
    joined.begin_step(StepOrders(receives=(receive("r"),)), CacheOrders(loads=(load("s"),)))
    assert joined.results(landed("r", good=good), CacheNews()).finished_receiving == {"r"}
    found = joined.results(TransferResults(), loaded("s", good=good))
    assert found.finished_receiving == {"s"}
    assert bool(found.failed_receiving) == (not good)
    joined.begin_step(StepOrders(), CacheOrders(loads=(load("r"),)))
    assert joined.results(TransferResults(), loaded("r")).finished_receiving == {"r"}
