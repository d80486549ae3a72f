"""A simulated outcome beside a measured one: percentiles, relative errors, and rankings."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.tuner.outcome import Outcome, Targets

FIGURES = tuple(itertools.product(("ttft", "itl"), (50, 90)))
"""What is compared: (quantity, percentile)."""


def figure(outcome: Outcome, what: str, percent: int) -> float:
    """That percentile in seconds."""
    take = outcome.ttft_percentile if what == "ttft" else outcome.itl_percentile
    return take(percent)


@dataclass(frozen=True)
class Pair:
    """One split of roles, measured and simulated."""

    prefill: int
    decode: int
    measured: Outcome
    simulated: Sequence[Outcome]
    """With other noise each; a figure is their median."""

    def error(self, what: str, percent: int) -> float:
        """Relative to what was measured."""
        found = figure(self.measured, what, percent)
        told = median(figure(outcome, what, percent) for outcome in self.simulated)
        return abs(told - found) / found

    def goodputs(self, targets: Targets) -> tuple[float, float]:
        """(measured, simulated)."""
        told = median(outcome.goodput(targets) for outcome in self.simulated)
        return self.measured.goodput(targets), told

    def as_dict(self, targets: Targets) -> dict[str, Any]:
        """For the report."""
        told = [described(outcome, targets) for outcome in self.simulated]
        row: dict[str, Any] = {
            "split": f"{self.prefill}:{self.decode}",
            "measured": described(self.measured, targets),
            "simulated": {key: median(one[key] for one in told) for key in told[0]},
        }
        for what, percent in FIGURES:
            row[f"{what}_p{percent}_error"] = round(self.error(what, percent), 4)
        return row


def described(outcome: Outcome, targets: Targets) -> dict[str, Any]:
    """What the report says of an outcome."""
    told = {
        "failed": sum(map(math.isnan, outcome.ttft_s)),
        "goodput_per_s": round(outcome.goodput(targets), 4),
    }
    return told | {
        f"{what}_p{percent}_s": round(figure(outcome, what, percent), 4)
        for what, percent in FIGURES
    }


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b of two rankings of the same things; 1 when both rank them alike."""
    alike = ties_first = ties_second = pairs = 0
    for (a, x), (b, y) in itertools.combinations(zip(first, second, strict=True), 2):
        left, right = _sign(a - b), _sign(x - y)
        alike += left * right
        ties_first += left == 0
        ties_second += right == 0
        pairs += 1
    scale = math.sqrt((pairs - ties_first) * (pairs - ties_second))
    return alike / scale if scale else float(ties_first == ties_second)


def spread(values: Sequence[float]) -> float:
    """How far two of these lie apart as a rule, relative to their median."""
    apart = [abs(a - b) for a, b in itertools.combinations(values, 2)]
    return median(apart) / median(values)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
