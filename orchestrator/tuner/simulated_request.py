"""A request in the simulator: what was asked, where its legs are, and when what happened."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from splitserve.orchestrator.tuner.node_model import Job
    from splitserve.orchestrator.tuner.station import Station


class SimulatedRequest:
    """One request from its arrival to its end. Only ``Simulation`` changes it."""

    __slots__ = (
        "at_s",
        "blocks",
        "computed",
        "decode_job",
        "decode_node",
        "ended_s",
        "first_s",
        "has_failed",
        "id",
        "output",
        "prefill_job",
        "prefill_node",
        "prompt",
    )

    def __init__(
        self, name: str, at_s: float, prompt: int, output: int, blocks: tuple[int, ...]
    ) -> None:
        self.id = name
        self.at_s = at_s
        self.prompt = prompt
        self.output = output
        self.blocks = blocks
        """Chained numbers of the prompt's trace blocks."""
        self.first_s = math.nan
        self.ended_s = math.nan
        self.has_failed = False
        self.prefill_job: Job | None = None
        self.prefill_node: Station | None = None
        self.decode_job: Job | None = None
        self.decode_node: Station | None = None
        self.computed: Computed | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return not math.isnan(self.ended_s)

    @property
    def ttft_s(self) -> float:
        """NaN while there is none, and when it failed."""
        return math.nan if self.has_failed else self.first_s - self.at_s

    @property
    def itl_s(self) -> float:
        """Mean gap between its tokens; NaN while it has not ended well."""
        if self.has_failed:
            return math.nan
        return (self.ended_s - self.first_s) / max(1, self.output - 1)


class Computed(NamedTuple):
    """How the prefill leg ended."""

    at_s: float
    step_s: float
    """Of the last step."""
    tokens: int
    """Computed in the last step."""
