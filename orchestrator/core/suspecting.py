"""What the core concludes about nodes from how legs end: it feeds each node's circuit breakers
(``breaker``) and says when one changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.core.breaker import BreakerState
from splitserve.orchestrator.core.effects import Effect, ReportBreaker
from splitserve.orchestrator.core.lifecycle import Phase
from splitserve.orchestrator.core.membership import Membership

if TYPE_CHECKING:
    from splitserve.orchestrator.core.effects import Leg
    from splitserve.orchestrator.core.limits import CoreLimits
    from splitserve.orchestrator.core.membership import Node
    from splitserve.orchestrator.core.requests import Request


class Suspecting:
    """The core's view of which nodes fail."""

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self.membership = Membership()
        self._may_place = False
        """Something has changed that a waiting request may have waited for."""
        self._breaker_news: list[Effect] = []
        """To be handed out with the effects of the present event."""

    def note_success(self, node: Node, leg: Leg, request: Request, now: float) -> None:
        """The node, whose breaker is not clean, has answered that leg."""
        self.membership.touched(node)
        if node.breaker(leg).success(request.id, now, self.limits.breaker):
            self._may_place = True
            self._report(node, leg)

    def note_fault(self, node: Node, leg: Leg, request: Request, now: float, reason: str) -> None:
        """That leg failed by the node's own fault."""
        self.membership.touched(node)
        if node.breaker(leg).fault(request.id, now, reason, self.limits.breaker):
            self._report(node, leg)

    def note_late(self, request: Request, now: float, reason: str) -> None:
        """The first token did not come in time: by the fault of the node that the request waited
        for.
        """
        choice = request.choice
        assert choice is not None
        if request.phase is Phase.PREFILLING and choice.prefill is not None:
            self.note_fault(choice.prefill, "prefill", request, now, reason)
        else:
            self.note_fault(choice.decode, "decode", request, now, reason)

    def note_placed(self, node: Node, leg: Leg, request: Request, now: float) -> None:
        """A leg goes to the node, whose breaker is not clean."""
        breaker = node.breaker(leg)
        if breaker.state is not BreakerState.CLOSED and breaker.begin_try(
            request.id, now, self.limits.breaker
        ):
            self._report(node, leg)

    def note_over(self, node: Node, leg: Leg, request: Request) -> None:
        """The leg is not out any more, whatever it came to; the node's breaker is not clean."""
        if node.breaker(leg).end_try(request.id):
            self._report(node, leg)

    def _report(self, node: Node, leg: Leg) -> None:
        breaker = node.breaker(leg)
        self._breaker_news.append(
            ReportBreaker(node.name, leg, breaker.state.value, breaker.reason)
        )

    def _take_breaker_news(self) -> list[Effect]:
        news, self._breaker_news = self._breaker_news, []
        return news
