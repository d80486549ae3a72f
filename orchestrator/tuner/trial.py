"""What became of a workload with one split of the nodes, in few figures.

A trial keeps how many requests were good in each part of the workload. The parts are the same for
every split, so two splits are compared part by part: what differs between them is then not hidden
behind what differs between busy and quiet times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from splitserve.orchestrator.tuner.outcome import Outcome, Targets

PARTS = 32
"""Into which a workload is cut, in the order of arrival."""


class Split(NamedTuple):
    """How the nodes of a cluster are used."""

    prefill: int
    """0: not disaggregated, every node computes its own prompts."""
    decode: int
    threshold_tokens: int = 0
    """Prompts of which fewer tokens have to be computed are not split."""

    @property
    def is_aggregated(self) -> bool:
        """Whether no request is split."""
        return self.prefill == 0

    @property
    def nodes(self) -> int:
        """All of them."""
        return self.prefill + self.decode

    def __str__(self) -> str:
        """As ``3:5``, ``3:5 from 200 tokens`` or ``8 aggregated``."""
        if self.is_aggregated:
            return f"{self.decode} aggregated"
        rest = f" from {self.threshold_tokens} tokens" if self.threshold_tokens else ""
        return f"{self.prefill}:{self.decode}{rest}"


class Job(NamedTuple):
    """A trial to be made."""

    split: Split
    workload: int = 0
    """Number of the workload, in a list that whoever makes trials has."""
    profile: int = 0
    """Number of the profile, in another such list."""


class Percentiles(NamedTuple):
    """Of times in seconds; NaN when no request was answered."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Trial:
    """One workload on one split."""

    split: Split
    requests: int
    failed: int
    goodput: float
    """Good requests per second."""
    good_in_part: tuple[int, ...]
    requests_in_part: tuple[int, ...]
    ttft: Percentiles
    itl: Percentiles
    strain: float
    """The p90 nearest its target, in that target; above 1 for a target that is missed. Infinite
    when no request was answered.
    """
    busy_prefill: float = math.nan
    """Share of the time in which its prefill nodes computed; NaN without such nodes."""
    busy_decode: float = math.nan

    @property
    def share_good(self) -> float:
        """Of all requests."""
        return sum(self.good_in_part) / self.requests


def trial_of(
    split: Split,
    outcome: Outcome,
    targets: Targets,
    busy: tuple[float, float] = (math.nan, math.nan),
) -> Trial:
    """The figures of ``outcome``; ``busy`` are the shares of prefill and decode nodes."""
    good = outcome.is_good(targets)
    cuts = np.linspace(0, len(good), min(PARTS, len(good)) + 1).astype(int)
    ttft, itl = (
        Percentiles(*(percentile(percent) for percent in (50, 90, 99)))
        for percentile in (outcome.ttft_percentile, outcome.itl_percentile)
    )
    return Trial(
        split=split,
        requests=len(good),
        failed=int(np.isnan(outcome.ttft_s).sum()),
        goodput=outcome.goodput(targets),
        good_in_part=tuple(int(part.sum()) for part in np.split(good, cuts[1:-1])),
        requests_in_part=tuple(int(size) for size in np.diff(cuts)),
        ttft=ttft,
        itl=itl,
        strain=_strain(ttft, itl, targets),
        busy_prefill=busy[0],
        busy_decode=busy[1],
    )


def _strain(ttft: Percentiles, itl: Percentiles, targets: Targets) -> float:
    if math.isnan(ttft.p90):
        return math.inf
    shares = [0.0]
    if targets.ttft_s is not None:
        shares.append(ttft.p90 / targets.ttft_s)
    if targets.itl_s is not None:
        shares.append(itl.p90 / targets.itl_s)
    return max(shares)
