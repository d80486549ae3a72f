"""Seeds of the virtual cluster: no invariant is violated, and planted bugs are found."""

from __future__ import annotations

import pytest

from simulation.planted import BUGS
from simulation.runs import run

SEEDS = 200
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
    assert sum(result.ended_engines for result in results) > SEEDS / 40


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
