"""When a node is taken for broken, and how it comes back."""

from __future__ import annotations

import pytest

from splitserve.orchestrator.core.breaker import (
    DOUBTED,
    GOOD,
    SHUT,
    TO_BE_TRIED,
    Breaker,
    BreakerLimits,
    BreakerState,
    is_engine_fault,
)

LIMITS = BreakerLimits(failures=3, window_s=10.0, open_s=1.0, open_limit_s=8.0)


def fault(breaker: Breaker, now: float, request: str = "r") -> bool:
    """One leg failed."""
    return breaker.fault(request, now, "reset", LIMITS)


def success(breaker: Breaker, now: float, request: str = "r") -> bool:
    """One leg was answered."""
    return breaker.success(request, now, LIMITS)


def opened() -> Breaker:
    """A breaker that opened at 0."""
    breaker = Breaker()
    assert [fault(breaker, 0.0) for _ in range(3)] == [False, False, True]
    return breaker


@pytest.mark.parametrize(
    ("status", "counts"),
    [(s, False) for s in (200, 400, 401, 403, 404, 413, 422, 429, 501)]
    + [(s, True) for s in (500, 502, 503, 504)],
)
def test_which_answers_count(status: int, counts: bool) -> None:
    """4xx is about the request, 429 about load, 501 about what was asked for."""
    assert is_engine_fault(status) == counts


def test_one_fault_makes_the_last_choice_for_a_moment() -> None:
    """For ``open_s``; then it is as good as any."""
    breaker = Breaker()
    fault(breaker, 5.0)
    assert (breaker.standing(5.9), breaker.standing(6.0)) == (DOUBTED, GOOD)
    assert breaker.state is BreakerState.CLOSED


def test_faults_in_a_row_open_it_however_rare_they_are() -> None:
    """A success in between begins the row anew."""
    breaker = Breaker()
    for now in (0.0, 100.0):
        fault(breaker, now)
    success(breaker, 150.0)
    assert breaker.is_clean
    assert [fault(breaker, now) for now in (200.0, 300.0, 400.0)] == [False, False, True]


def test_half_of_the_legs_in_a_window_open_it() -> None:
    """Faults and successes in turn."""
    breaker = Breaker()
    for now in (0.0, 1.0):
        assert not fault(breaker, now)
        success(breaker, now + 0.5)
    assert fault(breaker, 2.0)


def test_few_faults_among_many_legs_do_not_open_it() -> None:
    """One in four, for a long time."""
    breaker = Breaker()
    for now in range(200):
        assert not fault(breaker, now / 10)
        for _ in range(3):
            success(breaker, now / 10)
    assert breaker.state is BreakerState.CLOSED


def test_one_leg_tries_an_open_node_after_the_delay_and_closes_it() -> None:
    """Nothing goes there before, or beside it."""
    breaker = opened()
    assert (breaker.standing(0.9), breaker.standing(1.0)) == (SHUT, TO_BE_TRIED)
    assert breaker.begin_try("r1", 1.0, LIMITS)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.standing(99.0) == SHUT
    assert success(breaker, 2.0, "r1")
    assert breaker.state is BreakerState.CLOSED
    assert breaker.is_clean
    assert breaker.standing(2.0) == GOOD


def test_the_delay_doubles_with_each_try_that_fails() -> None:
    """Up to ``open_limit_s``, and from the beginning after a success."""
    breaker, now, delays = opened(), 0.0, []
    for _ in range(5):
        end = next(n / 2 for n in range(1000) if breaker.standing(now + n / 2) == TO_BE_TRIED)
        delays.append(end)
        now += end
        breaker.begin_try("r", now, LIMITS)
        assert fault(breaker, now)
    assert delays == [1, 2, 4, 8, 8]
    breaker.begin_try("r", now + 8, LIMITS)
    success(breaker, now + 8)
    for _ in range(3):
        fault(breaker, now + 9)
    assert breaker.standing(now + 10) == TO_BE_TRIED


def test_older_legs_neither_close_nor_prolong_it() -> None:
    """They were begun before it opened."""
    breaker = opened()
    assert not success(breaker, 0.5, "older")
    assert not fault(breaker, 0.5, "older")
    assert breaker.state is BreakerState.OPEN
    assert breaker.standing(1.0) == TO_BE_TRIED


def test_a_try_that_says_nothing_lets_the_next_one_try() -> None:
    """Its client left, or the engine refused its request."""
    breaker = opened()
    breaker.begin_try("r1", 1.0, LIMITS)
    assert breaker.end_try("r1")
    assert breaker.standing(1.0) == TO_BE_TRIED
    assert not breaker.end_try("r1")


def test_the_only_node_is_tried_at_a_bounded_rate() -> None:
    """Once every ``open_s``, also while a try is out; any of them closes it."""
    breaker = opened()
    assert not breaker.may_try_anyway(0.9)
    assert breaker.may_try_anyway(1.0)
    breaker.begin_try("r1", 1.0, LIMITS)
    assert not breaker.may_try_anyway(1.9)
    assert breaker.may_try_anyway(2.0)
    assert not breaker.begin_try("r2", 2.0, LIMITS)
    assert not breaker.end_try("r1")
    assert success(breaker, 2.5, "r2")
