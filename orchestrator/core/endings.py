"""How a request ends: nothing of it is left behind, and the client is told exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.core.audit import EndedRequest
from splitserve.orchestrator.core.effects import AnswerError, Effect, EndRequest, FailTransfer
from splitserve.orchestrator.core.lifecycle import Phase
from splitserve.orchestrator.core.membership import DECODE
from splitserve.orchestrator.core.placing import Placing

if TYPE_CHECKING:
    from splitserve.orchestrator.core.requests import Request

CLIENT_CLOSED_REQUEST = 499
ENDED_LIMIT_REQUESTS = 10_000
"""Ended requests that are remembered as owners of what engines still hold."""


class Endings(Placing):
    """The actions that end a request."""

    def check_pool(self, request: Request, now: float, reason: str) -> list[Effect]:
        if self.has_untried_node(request):
            return []
        message = self.why_no_node(request)
        if self.decode_nodes_for(request):
            message = "every decode node that is ready has failed this request"
        return self._end_with_error(request, 503, message, now, retry_after_s=5)

    @staticmethod
    def why_no_node(request: Request) -> str:
        """What to tell when no usable decode node can serve the request."""
        if request.arrived.bound_to:
            return "the decode node that holds the earlier response takes no work now"
        if request.arrived.adapter:
            return f"no decode node with the adapter `{request.arrived.adapter}` is ready"
        return "no decode node is ready"

    def has_untried_node(self, request: Request) -> bool:
        """Whether a decode node is usable, or restarts and will be, on which no attempt of the
        request has failed.
        """
        usable = self.decode_nodes_for(request)
        is_there = any(node.description.incarnation not in request.tried for node in usable)
        return is_there or (self.membership.awaits(DECODE) and not request.arrived.bound_to)

    def answer_no_capacity(self, request: Request, now: float, reason: str) -> list[Effect]:
        message = f"no node had room for the request: {reason}"
        return self._end_with_error(request, 503, message, now, self._retry_after_s(request, now))

    def answer_too_late(self, request: Request, now: float, reason: str) -> list[Effect]:
        return self._end_with_error(request, 504, f"the engines were too slow: {reason}", now)

    def answer_stopping(self, request: Request, now: float, reason: str) -> list[Effect]:
        return self._end_with_error(request, 503, "the router is stopping", now, retry_after_s=5)

    def break_stream(self, request: Request, now: float, reason: str) -> list[Effect]:
        message = f"the decode node failed in the middle of the answer: {reason}"
        effects = self._release_at_prefill(request, reason)
        return effects + self._end_with_error(request, 502, message, now)

    def _release_at_prefill(self, request: Request, reason: str) -> list[Effect]:
        """Whether the decode node had let go of the prefill node's pages is not known."""
        choice = request.choice
        if choice is None or choice.prefill is None:
            return []
        return [FailTransfer(choice.prefill.name, request.transfer_id, reason)]

    def cancel(self, request: Request, now: float, reason: str) -> list[Effect]:
        effects = self._cancel_legs(request)
        request.timeline.status = CLIENT_CLOSED_REQUEST
        return effects + self._end(request, "cancelled", "the client closed its connection", now)

    def finish(self, request: Request, now: float, reason: str) -> list[Effect]:
        request.timeline.last_data = now
        self._give_back_decode(request)
        if not request.has_prefill_leg:
            return self._end(request, "ok", "", now)
        request.phase = Phase.TAIL
        return []

    def end_tail(self, request: Request, now: float, reason: str) -> list[Effect]:
        return self._cancel_prefill(request) + self._end(request, "ok", "", now)

    def _end_with_error(
        self,
        request: Request,
        status: int,
        message: str,
        now: float,
        retry_after_s: int | None = None,
    ) -> list[Effect]:
        effects = self._cancel_legs(request)
        request.timeline.status = status
        answer = AnswerError(request.id, status, message, retry_after_s)
        return [*effects, answer, *self._end(request, "error", message, now)]

    def _end(self, request: Request, outcome: str, reason: str, now: float) -> list[Effect]:
        assert not request.has_prefill_leg, "a prefill leg outlived its request"
        assert not request.has_decode_leg, "a decode leg outlived its request"
        if request.phase is Phase.QUEUED:
            self._leave_queue(request)
        for queue in self.deadlines.values():
            queue.disarm(request.id)
        request.phase = Phase.ENDED
        timeline = request.timeline
        timeline.outcome, timeline.reason = outcome, reason
        if timeline.last_data is None:
            timeline.last_data = now
        del self.requests[request.id]
        self.ended[request.id] = EndedRequest(now, outcome)
        while len(self.ended) > ENDED_LIMIT_REQUESTS:
            self.ended.popitem(last=False)
        return [EndRequest(timeline)]
