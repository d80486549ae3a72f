"""What the core remembers of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitserve.orchestrator.core.lifecycle import Phase

if TYPE_CHECKING:
    from splitserve.orchestrator.core.effects import Timeline
    from splitserve.orchestrator.core.events import RequestArrived
    from splitserve.orchestrator.core.lifecycle import Trigger
    from splitserve.orchestrator.core.placement import Choice


@dataclass(eq=False, slots=True)
class Request:
    """One client's request from arrival to its end. Only ``RouterCore`` changes it."""

    arrived: RequestArrived
    timeline: Timeline
    phase: Phase = Phase.QUEUED
    attempt: int = 0
    """Legs are numbered over both kinds; a pair's two share a number."""
    prefill_attempt: int = 0
    decode_attempt: int = 0
    transfer_attempt: int = 0
    """The pair with which the present transfer began; legs that are replaced take part in it."""
    choice: Choice | None = None
    has_prefill_leg: bool = False
    has_decode_leg: bool = False
    own_prompt_tokens: int = 0
    """What its decode node computes of its prompt itself."""
    tried: set[str] = field(default_factory=set)
    """Incarnations of the decode nodes on which an attempt has failed."""
    tried_prefill: set[str] = field(default_factory=set)
    """Incarnations of the prefill nodes that have failed the present decode leg."""
    story: list[tuple[float, Trigger, str]] = field(default_factory=list)
    """What happened after its arrival: when, what, and why."""

    @property
    def arrived_at(self) -> float:
        """When it arrived, in seconds of the core's clock."""
        return self.timeline.received

    @property
    def id(self) -> str:
        """The router's own id of the request; the client's X-Request-Id is another thing."""
        return self.arrived.request_id

    @property
    def transfer_id(self) -> str:
        """Names the transfer between the present legs."""
        return f"{self.arrived.request_id}.{self.transfer_attempt}"


def is_choosy(request: Request) -> bool:
    """Whether not every node can serve the request."""
    return bool(request.arrived.adapter or request.arrived.bound_to)
