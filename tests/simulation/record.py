"""Makes a scenario of a failing seed: ``python -m simulation.record SEED NAME`` in ``tests/``.

The plan is made smaller while it still fails, and written to ``scenarios/NAME.json``: name it after
what goes wrong. With ``--planted BUG`` the fault is one of ``planted.py``, which brings back what
the code once did; the scenario then shows that it is still found.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from msgspec.structs import replace

from simulation.plan import Plan, random_plan
from simulation.planted import BUGS
from simulation.runs import run_plan
from simulation.world import InvariantError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOLDER = Path(__file__).parent / "scenarios"


class Scenario(msgspec.Struct, frozen=True, omit_defaults=True):
    """A plan that once failed."""

    what: str
    """What went wrong."""
    plan: Plan
    planted: str = ""
    """The bug that makes it fail again."""


def load(path: Path) -> Scenario:
    """A scenario file."""
    return msgspec.json.decode(path.read_bytes(), type=Scenario)


def failure(plan: Plan) -> str:
    """How a plan fails, empty when it does not."""
    try:
        run_plan(plan)
    except InvariantError as error:
        return str(error).splitlines()[0].partition(": ")[2]
    return ""


def shrunk(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """A plan with fewer faults and requests that still fails; none of them can be left out."""
    while True:
        smaller = next((p for p in _smaller(plan) if fails(p)), None)
        if smaller is None:
            return plan
        plan = smaller


def _smaller(plan: Plan) -> Iterator[Plan]:
    for index in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:index] + plan.faults[index + 1 :])
    for index in range(len(plan.asks)):
        yield replace(plan, asks=plan.asks[:index] + plan.asks[index + 1 :])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("name")
    parser.add_argument("--planted", choices=BUGS, default="", metavar="BUG")
    asked = parser.parse_args()
    with pytest.MonkeyPatch.context() as patch:
        if asked.planted:
            BUGS[asked.planted][0](patch)
        plan = random_plan(asked.seed)
        if not failure(plan):
            raise SystemExit(f"seed {asked.seed} does not fail")
        plan = shrunk(plan, lambda smaller: bool(failure(smaller)))
        what = failure(plan)
    path = FOLDER / f"{asked.name}.json"
    scenario = msgspec.json.encode(Scenario(what, plan, asked.planted))
    path.write_bytes(msgspec.json.format(scenario, indent=1) + b"\n")
    print(f"{path}: {len(plan.asks)} requests, {len(plan.faults)} faults: {what}")


if __name__ == "__main__":
    main()
