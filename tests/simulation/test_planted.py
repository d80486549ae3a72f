"""The seeds find bugs: each planted one is found by some of those that CI runs."""

from __future__ import annotations

import pytest

from simulation.planted import BUGS, DRAIN_BUGS
from simulation.runs import drain_many, run_many
from simulation.test_seeds import DRAIN_SEEDS, SEEDS
from simulation.world import InvariantError

LOOK_SEEDS = 400
"""So many are looked through when the seed that is known to find it does not."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an invariant, or by an assertion of the code itself."""
    plant, known = BUGS[bug]
    assert max(known, LOOK_SEEDS) < SEEDS
    plant(monkeypatch)
    with pytest.raises(InvariantError):
        run_many((known, *range(LOOK_SEEDS)))


@pytest.mark.parametrize("bug", DRAIN_BUGS)
def test_a_drain_that_fails_a_request_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seeds in which nodes only drain and restart."""
    plant, known = DRAIN_BUGS[bug]
    assert known < DRAIN_SEEDS
    plant(monkeypatch)
    with pytest.raises(InvariantError):
        drain_many((known, *range(DRAIN_SEEDS)))
