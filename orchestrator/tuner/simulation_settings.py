"""What a simulation assumes beyond its profile, and what an observer sees of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from splitserve.orchestrator.core.limits import CoreLimits

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class SimulationSettings:
    """What a run assumes beyond the profile."""

    limits: CoreLimits = field(default_factory=CoreLimits)
    """Of the router. Nodes never fall silent, whatever these say."""
    prefix_caching: bool = True
    """Whether nodes keep and share the prompts of a trace that names blocks."""
    trace_block_tokens: int = 512
    """Tokens of the trace's blocks."""
    noise: float = 0.0
    """Relative spread of the time of a step."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """By node, those that are not as fast as the profile says, 1; 0.5 takes twice as long."""


class NodeView(NamedTuple):
    """A node as an observer sees it."""

    name: str
    role: str
    running: int
    """Prompts that are computed and sequences that decode."""
    waiting: int
    """Legs that the engine has not begun."""
    parked: int
    """Decode legs whose prompt has not landed."""
    free_blocks: int
    busy_s: float
    """Seconds of steps since the beginning."""


class EndedRequest(NamedTuple):
    """What an observer learns of a request that has ended."""

    arrived_s: float
    ended_s: float
    ttft_s: float
    """NaN when it failed."""
    itl_s: float
    input_tokens: int
    output_tokens: int
