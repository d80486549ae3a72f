"""What became of many requests, measured or simulated, and how much of it was good.

*Goodput* is the number of requests per second of arrivals that met all targets: a first token
within ``ttft_s``, and a mean gap between the following tokens within ``itl_s``
(https://arxiv.org/abs/2401.09670 uses the same two). A request that failed is never good.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Targets:
    """What a client was promised, in seconds; None for no promise."""

    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True)
class Outcome:
    """All requests of a run, one entry per request in each array, in the order of arrival."""

    arrived_s: Floats
    ttft_s: Floats
    """From arrival to the first token; NaN for a request that failed."""
    itl_s: Floats
    """Mean gap between a request's tokens; 0 for an answer of one token, NaN if it failed."""
    ended_s: Floats
    """When it ended, in the clock of ``arrived_s``."""
    gaps_s: Floats = field(default_factory=lambda: np.empty(0))
    """Gaps between single tokens, of all requests; ``gap_counts`` says how often each came."""
    gap_counts: Floats = field(default_factory=lambda: np.empty(0))

    @property
    def span_s(self) -> float:
        """Time of arrivals; 1 when all came at once."""
        if len(self.arrived_s) < 2:
            return 1.0
        return float(self.arrived_s[-1] - self.arrived_s[0]) or 1.0

    def is_good(self, targets: Targets) -> npt.NDArray[np.bool_]:
        """For each request whether it met all targets."""
        good: npt.NDArray[np.bool_] = ~np.isnan(self.ttft_s)
        if targets.ttft_s is not None:
            good &= np.nan_to_num(self.ttft_s, nan=np.inf) <= targets.ttft_s
        if targets.itl_s is not None:
            good &= np.nan_to_num(self.itl_s, nan=np.inf) <= targets.itl_s
        return good

    def goodput(self, targets: Targets) -> float:
        """Good requests per second."""
        return float(self.is_good(targets).sum()) / self.span_s

    def ttft_percentile(self, percent: float) -> float:
        """Of the requests that did not fail; NaN when all failed."""
        return _percentile(self.ttft_s, percent)

    def itl_percentile(self, percent: float) -> float:
        """Of the requests' mean gaps."""
        return _percentile(self.itl_s, percent)


def _percentile(values: Floats, percent: float) -> float:
    known = values[~np.isnan(values)]
    return float(np.percentile(known, percent)) if len(known) else float("nan")
