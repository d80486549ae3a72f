"""What a controller sees of a cluster, what it decides, and how that is said in one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from splitserve.orchestrator.tuner.capacity import Expected
    from splitserve.orchestrator.tuner.forecast import Forecast


class NodeSeen(NamedTuple):
    """A node as it is now."""

    name: str
    role: str
    is_usable: bool = True
    """Whether it gets new work."""
    is_slow: bool = False
    """It does, but is much slower than others, or fails."""
    can_flip: bool = True
    owes: bool = False
    """Something of the role that it had before."""
    legs: int = 0
    """Out to it."""


class Plan(NamedTuple):
    """A split of the usable nodes, and what it would make of the load that is expected."""

    prefill: int
    decode: int
    score: float
    """Share of requests in time, over rates around the forecast."""
    expected: Expected
    """Of the forecast itself."""

    @property
    def carried(self) -> float:
        """Part of the load that the pool with less to spare can do; at most 1."""
        return min(1.0, 1 / max(self.expected.prefill_use, self.expected.decode_use, 1e-9))

    def __str__(self) -> str:
        """As ``3:5``."""
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True)
class Outlook:
    """What is expected, and what the nodes could make of it."""

    forecast: Forecast
    current: Plan
    best: Plan
    is_hopeless: bool
    """No split would meet the targets: plans are judged by what they carry, whenever."""

    @property
    def direction(self) -> int:
        """1: the best split has more prefill nodes than the present one, -1: fewer."""
        best, current = self.best.prefill, self.current.prefill
        return (best > current) - (best < current)

    def kept(self) -> str:
        """Why nothing is changed, in words."""
        kept = f"keeps {self.current}, which {self._serves(self.current)}"
        if not self.direction:
            return kept
        return f"{kept}; {self.best} is not enough better ({_percent(self.best)})"

    def better(self) -> str:
        """Why something else would be better, in words."""
        best, current = self.best, self.current
        return f"{best} {self._serves(best)}, {current} {_percent(current)}"

    def _serves(self, plan: Plan) -> str:
        forecast = self.forecast
        load = (
            f"of {forecast.rate_per_s:.3g} requests/s with prompts of {forecast.prompt_tokens:.0f} "
            f"and answers of {forecast.answer_tokens:.0f} tokens"
        )
        if self.is_hopeless:
            return f"could carry {_percent(plan)} {load} (too late: no split meets the targets)"
        return f"would serve {_percent(plan)} {load} in time"


@dataclass(frozen=True)
class Decision:
    """What to do now, and why."""

    at_s: float
    why: str
    """One line."""
    missed: float
    """Part of the latest requests that were late or failed."""
    outlook: Outlook | None = None
    """None when nothing could be said."""
    node: str = ""
    """Of which the role is to change; empty: none."""
    role: str = ""

    @property
    def is_change(self) -> bool:
        """Whether a node is to change its role."""
        return bool(self.node)


def _percent(plan: Plan) -> str:
    return f"{100 * plan.score:.0f} %"
