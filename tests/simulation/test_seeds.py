"""Seeds of the virtual cluster: no invariant is violated, and planted bugs are found."""

from __future__ import annotations

import pytest

from simulation.planted import BUGS, DRAIN_BUGS
from simulation.runs import DRAINS, FAULTS_AND_DRAINS, run

SEEDS = 200
READY_S = 1.0
"""Every node is known to the router then."""
DRAIN_SEEDS = 100
LOOK_SEEDS = 250
"""A planted bug is found within so many seeds."""


def test_no_seed_violates_an_invariant() -> None:
    """Blocks have one owner, no byte lands in pages that were given back, texts are right, every
    request ends once, and in the end nothing is held.
    """
    results = [run(seed) for seed in range(SEEDS)]
    steps = sum(result.steps for result in results)
    outcomes = {result.seed: result.outcomes for result in results}
    print(f"{len(results)} seeds, {steps:,} steps")
    assert steps > SEEDS * 1000
    assert sum(o.get("ok", 0) for o in outcomes.values()) > SEEDS * 8
    assert all(sum(o.values()) == 16 for o in outcomes.values())


def test_drains_among_faults_violate_no_invariant() -> None:
    """Patient ones and others, while engines die, stop and are cut off."""
    for seed in range(DRAIN_SEEDS):
        run(seed, kinds=FAULTS_AND_DRAINS)


def test_a_drain_fails_no_request() -> None:
    """Nodes restart by order, also the last of a pool, while others are slow: every request is
    answered, and every node has lived on or come back.
    """
    _drain_all(DRAIN_SEEDS)


def test_a_seed_gives_the_same_run() -> None:
    """Step for step."""
    assert run(3) == run(3)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an invariant, or by an assertion of the code itself."""
    BUGS[bug](monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        _run_all(LOOK_SEEDS)


def _run_all(seeds: int) -> None:
    for seed in range(seeds):
        run(seed)


@pytest.mark.parametrize("bug", DRAIN_BUGS)
def test_a_drain_that_fails_a_request_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seeds in which nodes only drain."""
    DRAIN_BUGS[bug](monkeypatch)
    with pytest.raises(AssertionError):
        _drain_all(DRAIN_SEEDS)


def _drain_all(seeds: int) -> None:
    for seed in range(seeds):
        result = run(seed, kinds=DRAINS, begin_s=READY_S)
        assert result.outcomes == {"ok": result.requests}, result
