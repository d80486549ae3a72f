"""What can go wrong inside the core itself. Whatever nodes and clients do is an event, never one of
these.

CoreError
└── IllegalTransitionError    something happened to a request that its phase has no row for
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitserve.orchestrator.core.lifecycle import Phase, Trigger


class CoreError(Exception):
    """The core's own promises are broken."""


class IllegalTransitionError(CoreError):
    """The table has no row for this; prints what happened to the request so far, with times."""

    def __init__(
        self, request_id: str, phase: Phase, trigger: Trigger, story: list[tuple[float, str]]
    ) -> None:
        self.request_id, self.phase, self.trigger = request_id, phase, trigger
        super().__init__(
            f"request {request_id} in phase {phase.value!r} cannot take {trigger.value!r};"
            f" its story:\n{tell(story)}"
        )


def tell(story: list[tuple[float, str]]) -> str:
    """The story, one line each, with milliseconds since its first entry."""
    start = story[0][0] if story else 0.0
    return "\n".join(f"  +{(at - start) * 1000:9.1f} ms  {what}" for at, what in story)
