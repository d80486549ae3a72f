"""What can go wrong inside the core itself. Whatever nodes and clients do is an event, never one of
these.

CoreError
└── IllegalTransitionError    something happened to a request that its phase has no row for
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitserve.orchestrator.core.lifecycle import Trigger
    from splitserve.orchestrator.core.requests import Request


class CoreError(Exception):
    """The core's own promises are broken."""


class IllegalTransitionError(CoreError):
    """The table has no row for this; prints what happened to the request so far, with times."""

    def __init__(self, request: Request, trigger: Trigger) -> None:
        self.request_id, self.phase, self.trigger = request.id, request.phase, trigger
        super().__init__(
            f"request {request.id} in phase {request.phase.value!r} cannot take"
            f" {trigger.value!r}; its story:\n{tell(request)}"
        )


def tell(request: Request) -> str:
    """The request's story, one line each, with milliseconds since its arrival."""
    lines = ["  +      0.0 ms  arrived"]
    for at, trigger, reason in request.story:
        what = f"{trigger.value}: {reason}" if reason else trigger.value
        lines.append(f"  +{(at - request.arrived_at) * 1000:9.1f} ms  {what}")
    return "\n".join(lines)
