"""Restarts: a growing delay, and an end."""

from __future__ import annotations

from splitserve.orchestrator.agent.restart_budget import RestartBudget


def test_delays_double_up_to_the_limit_and_then_end() -> None:
    """Four restarts within the window; the fifth is refused."""
    budget = RestartBudget(delay_s=1, delay_limit_s=3, limit=4, window_s=100)
    assert [budget.take(now) for now in range(5)] == [1, 2, 3, 3, None]


def test_old_restarts_are_forgotten() -> None:
    """After the window a process that dies again is started again, after the first delay."""
    budget = RestartBudget(delay_s=1, delay_limit_s=3, limit=1, window_s=100)
    assert budget.take(0) == 1
    assert budget.take(99) is None
    assert budget.take(100) == 1


def test_a_limit_of_zero_means_never() -> None:
    """`restart_limit: 0` leaves everything down."""
    assert RestartBudget(delay_s=1, delay_limit_s=1, limit=0, window_s=1).take(0) is None
