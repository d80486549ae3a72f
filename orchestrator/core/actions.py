"""What the core does to one request while its legs are out: the other actions that the table in
``lifecycle`` names, and the ladder of replacements behind them.

Every action returns orders and leaves the request in a phase that its row allows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.core.effects import (
    CancelLeg,
    Effect,
    FailTransfer,
    PassRefusal,
    RetargetTransfer,
    StartDecode,
    StartPrefill,
)
from splitserve.orchestrator.core.endings import Endings
from splitserve.orchestrator.core.expected_hits import NO_HIT
from splitserve.orchestrator.core.lifecycle import DeadlineKind, Phase
from splitserve.orchestrator.core.membership import DECODE, PREFILL
from splitserve.orchestrator.core.placement import choose_decode, choose_prefill
from splitserve.orchestrator.core.placing import has_same_adapter

if TYPE_CHECKING:
    from splitserve.orchestrator.core.membership import Node
    from splitserve.orchestrator.core.requests import Request


class Actions(Endings):
    """The actions on a request whose legs are out."""

    def stay(self, request: Request, now: float, reason: str) -> list[Effect]:
        return []

    def release_prefill(self, request: Request, now: float, reason: str) -> list[Effect]:
        if request.has_prefill_leg:
            self._give_back_prefill(request)
        if request.phase is Phase.PREFILLING:
            request.phase = Phase.LANDING
        return []

    def retry_prefill(self, request: Request, now: float, reason: str) -> list[Effect]:
        """The prefill leg will not deliver: another prefill node gets the prompt, and the pages
        that the decode node has reserved; without another one the decode node computes itself.
        """
        choice = request.choice
        assert choice is not None
        assert choice.prefill is not None
        if request.arrived.pinned is not None:
            return self._end_with_error(request, 502, reason, now)
        request.tried_prefill.add(choice.prefill.description.incarnation)
        others = [
            node
            for node in _but(choice.decode, self.membership.usable(PREFILL))
            if node.description.incarnation not in request.tried_prefill
            and has_same_adapter(node, choice.decode, request)
        ]
        tokens, limits = request.arrived.prompt_tokens, self.limits.placement
        hits = self.hits_of(request, others)
        place = choose_prefill(others, tokens, limits, now, hits, ignores_slots=True)
        if isinstance(place, str) or len(request.tried_prefill) >= self.limits.max_attempts:
            return self.compute_on_decode(request, now, reason)
        effects = self._cancel_prefill(request)
        node, blocks = place
        self._choices += 1
        request.attempt += 1
        request.timeline.attempts = request.attempt
        self._note_redispatch(request, now)
        hit = hits.get(node.description.incarnation, NO_HIT)
        request.choice = choice._replace(prefill=node, prefill_blocks=blocks, prefill_hit=hit)
        request.timeline.expected_cached_tokens = hit.counted_tokens
        self._commit_prefill(request, node, blocks, now)
        request.phase = Phase.PREFILLING
        transfer_id, attempt = request.transfer_id, request.attempt
        decode = choice.decode.description
        return [
            *effects,
            RetargetTransfer(decode.node, transfer_id, attempt, node.description, reason),
            StartPrefill(request.id, attempt, transfer_id, node.description, decode),
        ]

    def compute_on_decode(self, request: Request, now: float, reason: str) -> list[Effect]:
        """The prefill leg will not deliver: the decode node is told to stop waiting."""
        assert request.choice is not None
        decode = request.choice.decode
        if not self.has_headroom(decode, request):
            message = (
                f"{reason}; no other prefill node is left, and {decode.name} computes "
                f"{decode.own_prompt_tokens} prompt tokens itself already "
                "(policy.own_prompt_limit_tokens)"
            )
            return self._end_with_error(
                request, 503, message, now, self._retry_after_s(request, now)
            )
        effects = self._cancel_prefill(request)
        self._compute_on(decode, request)
        request.phase = Phase.ALONE
        return [*effects, FailTransfer(request.choice.decode.name, request.transfer_id, reason)]

    def relay(self, request: Request, now: float, reason: str) -> list[Effect]:
        if request.timeline.first_data is None:
            request.timeline.first_data = now
        request.timeline.status = 200
        self.deadlines[DeadlineKind.FIRST_TOKEN].disarm(request.id)
        self._has_computed(request)
        request.phase = Phase.STREAMING
        return []

    def weigh_refusal(self, request: Request, now: float, reason: str) -> list[Effect]:
        """The client's own mistake is passed on; an engine's fault is tried elsewhere while there
        is elsewhere.
        """
        if request.timeline.status >= 500:
            effects = self._retry(request, now)
            if effects is not None:
                return effects
        if request.timeline.first_data is not None:
            message = f"the answer could not be continued: {reason}"
            return self._end_with_error(request, 502, message, now)
        effects = self._cancel_prefill(request)
        effects += self._abandon_transfer(request, "the decode node refused the request")
        effects.append(PassRefusal(request.id, request.decode_attempt))
        self._give_back_decode(request)
        return effects + self._end(request, "refused", reason, now)

    def retry_decode(self, request: Request, now: float, reason: str) -> list[Effect]:
        effects = self._retry(request, now)
        if effects is not None:
            return effects
        message = f"the decode node failed before its first token: {reason}"
        if self.membership.usable(DECODE):
            return self._end_with_error(request, 502, message, now)
        retry_after_s = self._retry_after_s(request, now)
        return self._end_with_error(request, 503, message, now, retry_after_s)

    def _retry(self, request: Request, now: float) -> list[Effect] | None:
        """Cancel both legs and go to a decode node that was not tried; None when there is none."""
        assert request.choice is not None
        request.tried.add(request.choice.decode.description.incarnation)
        if request.arrived.pinned is not None:
            return None
        if len(request.tried) >= self.limits.max_attempts:
            return None
        if not self.has_untried_node(request):
            return None
        moved = self._move_decode(request, now)
        if moved is not None:
            return moved
        return self._begin_anew(request, now)

    def _begin_anew(self, request: Request, now: float) -> list[Effect]:
        """Cancel what is out; the request is placed again, before all that wait."""
        effects = self._cancel_legs(request)
        self.deadlines[DeadlineKind.FIRST_TOKEN].disarm(request.id)
        request.phase = Phase.QUEUED
        self._enter_queue(request, now, is_first=True)
        return effects + self._try_place(request, now)

    def _move_decode(self, request: Request, now: float) -> list[Effect] | None:
        """Another decode node gets the request, and what the prefill node computes or still holds;
        None when there is no such node, or nothing to be had from a prefill node.
        """
        choice = request.choice
        assert choice is not None
        if request.phase not in (Phase.PREFILLING, Phase.LANDING) or choice.prefill is None:
            return None
        prefill = choice.prefill
        if self.membership.find(prefill.name, prefill.description.incarnation) is not prefill:
            return None
        nodes = [
            node
            for node in _but(prefill, self.decode_nodes_for(request))
            if has_same_adapter(node, prefill, request)
        ]
        hits = self.hits_of(request, nodes)
        found = choose_decode(nodes, self._tokens_of(request), request.tried, now, hits)
        if isinstance(found, str):
            return None
        self._give_back_decode(request)
        effects: list[Effect] = [CancelLeg(request.id, request.decode_attempt, "decode")]
        node, blocks = found
        self._choices += 1
        request.attempt += 1
        request.timeline.attempts = request.attempt
        self._note_redispatch(request, now)
        hit = hits.get(node.description.incarnation, NO_HIT)
        request.choice = choice._replace(decode=node, decode_blocks=blocks, decode_hit=hit)
        self._commit_decode(request, node, blocks, now)
        if request.arrived.streaming:
            self.deadlines[DeadlineKind.FIRST_TOKEN].arm(request.id, now)
        start = StartDecode(
            request.id,
            request.attempt,
            request.transfer_id,
            prefill.description,
            node.description,
        )
        return [*effects, start]


def _but(one: Node, nodes: list[Node]) -> list[Node]:
    """Those of ``nodes`` that can be the other end of a transfer of ``one``'s: a node that has
    changed its role meanwhile cannot send pages to itself.
    """
    return [node for node in nodes if node is not one]
