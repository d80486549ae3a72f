"""Whether a request may wait: one bounded queue that all tenants share.

A tenant may fill the queue while no other wants in. When it is full, a newcomer of a tenant that
holds less of it than another one (for its weight) takes the place of that other tenant's latest
request, which gets the 429; otherwise the newcomer gets it. Requests that an engine has failed wait
here too, on top of the bound: they were admitted, perhaps answered in part, and make room for
nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.core.flipping import Flipping
from splitserve.orchestrator.core.lifecycle import Trigger
from splitserve.orchestrator.core.requests import is_choosy

if TYPE_CHECKING:
    from splitserve.orchestrator.core.effects import Effect
    from splitserve.orchestrator.core.requests import Request


class Admission(Flipping):
    """The way into the queue."""

    def admit(self, request: Request, now: float) -> list[Effect]:
        """Start the request, let it wait, or refuse it or another one."""
        effects: list[Effect] = []
        if not self.queue.size:
            effects = self._try_place(request, now)
            if effects:
                return effects
            self._waits_for_slot = self._missing == "prefill_slot"
        elif self.queue.size >= self.limits.queue_limit_requests:
            refused = self.queue.whom_to_refuse(request.arrived.tenant)
            if refused is None:
                return self.answer_full(request, now, "the queue is full")
            effects = self._apply(
                refused, Trigger.DISPLACED, now, "a tenant that holds less of the queue came"
            )
        self._enter_queue(request, now)
        first = self.queue.first()
        assert first is not None
        self._may_place = self.queue.size > 1 and (
            self.needs_no_slot(request) or first is request or bool(first.tried) or is_choosy(first)
        )
        return effects

    def admit_at_once(self, request: Request, now: float) -> list[Effect]:
        """Start a request that needs no KV, or refuse it: it never waits, and no more of them are
        out together than may wait.
        """
        out = sum(node.placed_at_once for node in self.membership.nodes.values())
        limit = self.limits.queue_limit_requests
        if out >= limit:
            message = f"{limit} such requests are being answered (router.queue_limit_requests)"
            return self._end_with_error(request, 429, message, now, retry_after_s=1)
        effects = self._try_place(request, now)
        if effects:
            return effects
        return self._end_with_error(request, 503, self.why_no_node(request), now, retry_after_s=5)

    def answer_full(self, request: Request, now: float, reason: str) -> list[Effect]:
        message = (
            f"{self.queue.size} requests are waiting already (router.queue_limit_requests): "
            f"{reason}"
        )
        retry_after_s = self._retry_after_s(request, now)
        return self._end_with_error(request, 429, message, now, retry_after_s)
