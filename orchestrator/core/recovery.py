"""What becomes of a request whose node falls silent, or breaks in the middle of a stream.

A silent node is not dead: it may be stopped, cut off, or only slow, and may write and answer again
at any moment. So nothing that it was given is used again. The request leaves it only while there is
another place to go to, and takes fresh pages there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.core.actions import Actions
from splitserve.orchestrator.core.effects import DoubtLeg, Effect

if TYPE_CHECKING:
    from splitserve.orchestrator.core.requests import Request


class Recovery(Actions):
    """The actions that take a request to another node."""

    def continue_stream(self, request: Request, now: float, reason: str) -> list[Effect]:
        """Another decode node goes on behind what the client has; without one, or where that would
        not be exact, the stream ends with an error.
        """
        choice = request.choice
        assert choice is not None
        request.tried.add(choice.decode.description.incarnation)
        if not self._can_continue(request):
            return self.break_stream(request, now, reason)
        request.timeline.continuations += 1
        effects = self._release_at_prefill(request, reason)
        return effects + self._begin_anew(request, now)

    def doubt_stream(self, request: Request, now: float, reason: str) -> list[Effect]:
        """The stream may still flow; if it does not, it is continued elsewhere."""
        if not self._can_continue(request):
            return []
        return [DoubtLeg(request.id, request.decode_attempt, self.limits.node_silence_limit_s)]

    def leave_silent_prefill(self, request: Request, now: float, reason: str) -> list[Effect]:
        """Both legs begin anew: the pages that the silent node was granted stay out of use until it
        has fenced or is proven dead.
        """
        assert request.choice is not None
        if not request.choice.decode.is_usable or self._has_moved_enough(request):
            return []
        return self._begin_anew(request, now)

    def leave_silent_decode(self, request: Request, now: float, reason: str) -> list[Effect]:
        """Another decode node gets the request; without one it stays where it is."""
        if self._has_moved_enough(request):
            return []
        return self._retry(request, now) or []

    def _can_continue(self, request: Request) -> bool:
        """Whether the answer can go on elsewhere without the client noticing."""
        assert request.choice is not None
        tried = request.tried | {request.choice.decode.description.incarnation}
        return (
            request.arrived.can_continue
            and len(tried) < self.limits.max_attempts
            and self.has_untried_node(request)
        )

    def _has_moved_enough(self, request: Request) -> bool:
        """Nodes that speak and fall silent in turn must not keep a request moving; a probe never
        moves.
        """
        if request.arrived.pinned is not None:
            return True
        return request.attempt >= 2 * self.limits.max_attempts
