"""Medians, spread and ratios, and what counts as a difference.

A/A: every system answers each (round, length) twice with different prompts; the two halves of one
system differ by noise only. The half-by-half differences are its A/A spread, and a difference
between systems within it is "no difference".
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Summary:
    """One quantity over its repeats."""

    count: int
    median: float
    low: float
    high: float
    mean: float

    def scaled(self, factor: float) -> Summary:
        """The same in another unit."""
        return Summary(
            self.count,
            *(x * factor for x in (self.median, self.low, self.high, self.mean)),
        )

    def as_dict(self) -> dict[str, float]:
        """For the JSON report, rounded to a ten-thousandth."""
        return {key: round(value, 4) for key, value in asdict(self).items()}

    def text(self, digits: int = 0) -> str:
        """``median [low to high]``."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f} to {self.high:.{digits}f}]"


def summarise(values: Sequence[float]) -> Summary:
    """Median, extremes and mean of at least one value."""
    return Summary(len(values), median(values), min(values), max(values), sum(values) / len(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def aa_spread(first: Sequence[float], second: Sequence[float]) -> float:
    """How far the medians of two halves of one system lie apart by chance.

    The median of |first - second| over the pairs, which were measured in the same round.
    """
    return median(abs(a - b) for a, b in zip(first, second, strict=True))


def aa_ratio_spread(first: Sequence[float], second: Sequence[float]) -> float:
    """``aa_spread`` relative to the median of all values."""
    return aa_spread(first, second) / median([*first, *second])
