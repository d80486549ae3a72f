"""Seeds of the virtual cluster: no invariant is violated."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

import pytest

from simulation.plan import FAULTS, REQUESTS
from simulation.runs import Result, drain_many, run, run_many

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SEEDS = 2_400
DRAIN_SEEDS = 200
STEPS_PER_SEED = 400
PROCESSES = 2
SHARE_SEEDS = 100
"""What a process is given at one time."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [SEEDS // 2, pytest.param(SEEDS, marks=pytest.mark.long)])
def test_no_seed_violates_an_invariant(summary: Callable[[str], None], seeds: int) -> None:
    """Blocks have one owner, no byte lands in pages that were given back, texts are right, every
    request ends once, and in the end nothing is held. The counts are in the summary.
    """
    total = _together(run_many, seeds)
    for line in total.lines():
        summary(line)
    assert (total.runs, total.outcomes.total()) == (seeds, total.requests)
    assert total.steps >= STEPS_PER_SEED * seeds
    assert total.outcomes["ok"] > total.requests * 0.7
    assert total.continuations > seeds / 20
    assert total.flips > seeds / 4
    assert total.ended_engines > seeds / 40


@pytest.mark.timeout(600)
def test_a_drain_or_a_flip_fails_no_request(summary: Callable[[str], None]) -> None:
    """Nodes restart by order, also the last of a pool, and change their roles, while others are
    slow and preempt: every request is answered.
    """
    total = _together(drain_many, DRAIN_SEEDS)
    drains = total.faults["drain"]
    summary(
        f"{drains:,} drains and {total.flips:,} flips, nothing but slowness beside them: "
        f"{total.requests:,} requests, ok"
    )
    assert (total.runs, total.outcomes) == (DRAIN_SEEDS, {"ok": total.requests})
    assert drains > DRAIN_SEEDS
    assert total.flips > DRAIN_SEEDS / 4


def _together(run_share: Callable[[Iterable[int]], Result], seeds: int) -> Result:
    shares = [range(first, first + SHARE_SEEDS) for first in range(0, seeds, SHARE_SEEDS)]
    spawn = multiprocessing.get_context("spawn")
    total = Result()
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn) as pool:
        for result in pool.map(run_share, shares):
            total.add(result)
    return total


def test_every_seed_has_requests_and_faults() -> None:
    """At least ten requests, and three faults."""
    assert REQUESTS[0] >= 10
    assert FAULTS[0] >= 3


def test_a_seed_gives_the_same_run() -> None:
    """Step for step."""
    assert run(3) == run(3)
