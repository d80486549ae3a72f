"""Plans that once failed, named after what went wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from simulation.planted import BUGS
from simulation.record import FOLDER, failure, load, shrunk
from simulation.runs import run_plan

if TYPE_CHECKING:
    from pathlib import Path

SCENARIOS = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_what_once_failed_does_not_fail_again(path: Path) -> None:
    """No invariant is violated."""
    scenario = load(path)
    assert run_plan(scenario.plan).requests == len(scenario.plan.asks)


@pytest.mark.parametrize(
    "path", [path for path in SCENARIOS if load(path).planted], ids=lambda path: path.stem
)
def test_a_scenario_finds_what_it_is_there_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the old behaviour it fails as it did."""
    scenario = load(path)
    BUGS[scenario.planted][0](monkeypatch)
    assert failure(scenario.plan) == scenario.what


def test_a_plan_is_made_as_small_as_it_can_be() -> None:
    """What the failure does not need is left out."""
    plan = load(SCENARIOS[0]).plan
    needed = plan.faults[-1]
    small = shrunk(plan, lambda smaller: needed in smaller.faults)
    assert (small.asks, small.faults) == ((), (needed,))
