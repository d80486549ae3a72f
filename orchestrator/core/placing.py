"""The core's state, and a request's way into it: placing, the promises made then, and giving them
back.

A request's promises (prefill slot, committed blocks) are made in ``_commit`` and given back in
``_give_back_*``, each exactly once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from itertools import islice
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING

from splitserve.orchestrator.core.deadlines import DeadlineQueue
from splitserve.orchestrator.core.effects import (
    CancelLeg,
    Effect,
    FailTransfer,
    StartAlone,
    StartPair,
)
from splitserve.orchestrator.core.expected_hits import NO_HIT, Known
from splitserve.orchestrator.core.fair_queue import FairQueue
from splitserve.orchestrator.core.lifecycle import DeadlineKind, Phase, Trigger
from splitserve.orchestrator.core.membership import DECODE, PREFILL
from splitserve.orchestrator.core.peers import Peers
from splitserve.orchestrator.core.placement import (
    Choice,
    DecodeWant,
    Missing,
    PrefillWant,
    choose_decode,
    choose_prefill,
    decision,
)
from splitserve.orchestrator.core.prefix_index import PrefixIndex
from splitserve.orchestrator.core.requests import is_choosy
from splitserve.orchestrator.core.suspecting import Suspecting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitserve.orchestrator.core.audit import EndedRequest
    from splitserve.orchestrator.core.expected_hits import Hit
    from splitserve.orchestrator.core.limits import CoreLimits
    from splitserve.orchestrator.core.membership import Node
    from splitserve.orchestrator.core.requests import Request

    Candidates = tuple[list[Node], Mapping[str, Hit]]
    """Nodes among which to choose, and what they have of the prompt; of others perhaps too."""

QUEUE_SCAN_LIMIT_REQUESTS = 32
"""How far behind a request that waits for a node's return the queue is searched for others."""


class Placing(Suspecting, ABC):
    """The core's state, and who holds what of it."""

    def __init__(self, limits: CoreLimits) -> None:
        super().__init__(limits)
        self.prefixes = PrefixIndex()
        self.peers = Peers()
        self.requests: dict[str, Request] = {}
        self.queue: FairQueue[Request] = FairQueue(limits.tenant_weights)
        self.deadlines = {
            DeadlineKind.QUEUE: DeadlineQueue[str](limits.queue_timeout_s),
            DeadlineKind.FIRST_TOKEN: DeadlineQueue[str](limits.first_token_deadline_s),
            DeadlineKind.REQUEST: DeadlineQueue[str](limits.request_deadline_s),
        }
        self.ended: OrderedDict[str, EndedRequest] = OrderedDict()
        """The latest requests that are over, for the audit."""
        self._choices = 0
        self._waits_for_slot = False
        """Who is next in the queue lacks a prefill slot: free decode blocks would not help it."""

    @abstractmethod
    def _weigh_marks(self) -> None:
        """Say anew whether marks of prompts are wanted; after nodes or roles have changed."""

    @abstractmethod
    def _apply(
        self, request: Request, trigger: Trigger, now: float, reason: str = ""
    ) -> list[Effect]:
        """Carry out the table's row for ``trigger`` in the request's phase."""

    # Placing

    def _place_waiting(self, now: float) -> list[Effect]:
        """Place waiting requests in their order until something is missing that those behind need
        too. One that waits for a prefill slot is passed by those that need none.
        """
        effects: list[Effect] = []
        queue = self.queue
        self._waits_for_slot = False
        while (request := queue.first()) is not None:
            placed = self._try_place(request, now)
            if not placed:
                self._waits_for_slot = self._missing in ("prefill_slot", "decode_headroom")
                if self._waits_for_return(request):
                    effects += self._place_behind(request, now)
                break
            effects += placed
        while self._waits_for_slot and (request := queue.first_that_may_pass()) is not None:
            placed = self._try_place(request, now)
            if not placed:
                break
            effects += placed
        return effects

    def _waits_for_return(self, request: Request) -> bool:
        """Whether the request waits for what those behind it do not need: a node that restarts,
        since those that are there have failed it, or one of the few nodes that can serve it.
        """
        usable = self.membership.usable(DECODE)
        if is_choosy(request) and len(self.decode_nodes_for(request)) < len(usable):
            return True
        is_last_tried = self._missing == "decode_node" and bool(request.tried)
        return is_last_tried and bool(usable)

    def _place_behind(self, head: Request, now: float) -> list[Effect]:
        """Place the nearest of those that wait behind ``head``."""
        effects: list[Effect] = []
        for request in list(islice(self.queue.values(), QUEUE_SCAN_LIMIT_REQUESTS)):
            if request is head:
                continue
            placed = self._try_place(request, now)
            effects += placed
            if not placed and not self._waits_for_return(request):
                break
        return effects

    def needs_no_slot(self, request: Request) -> bool:
        """Whether the request goes to a decode node alone, whatever prefill nodes there are."""
        arrived = request.arrived
        return bool(arrived.alone_because) or (
            arrived.prompt_tokens < self.limits.placement.min_uncached_tokens
        )

    _missing: Missing = "decode_node"
    """What the latest ``_try_place`` that placed nothing could not find."""

    def _try_place(self, request: Request, now: float) -> list[Effect]:
        """The orders that start the request's legs; none when something is missing (see
        ``_missing``).
        """
        choice = self._choose(request, now)
        if not isinstance(choice, Choice):
            self._missing = choice
            return []
        request.choice = choice
        trigger = Trigger.PLACED_ALONE if choice.prefill is None else Trigger.PLACED_PAIR
        return self._apply(request, trigger, now)

    def _choose(self, request: Request, now: float) -> Choice | Missing:
        arrived, limits = request.arrived, self.limits.placement
        if not arrived.needs_kv:
            return self._choose_at_once(request, now)
        tokens, known = self._tokens_of(request), Known(self.prefixes, arrived)
        decode_nodes, hits = self._decode_candidates(request, tokens, known)
        found = choose_decode(decode_nodes, tokens, request.tried, now, hits)
        if isinstance(found, str):
            return found
        decode, blocks = found
        hit = hits.get(decode.description.incarnation, NO_HIT)
        prefill_nodes = self.membership.usable(PREFILL)
        if arrived.adapter:
            prefill_nodes = [n for n in prefill_nodes if has_same_adapter(n, decode, request)]
        decided = decision(
            arrived.alone_because, arrived.prompt_tokens, limits, bool(prefill_nodes), hit.tokens
        )
        if decided == "alone_no_prefill_node":
            return self._choose_without_prefill(request, now)
        if decided != "split":
            request.timeline.decision = decided
            return Choice(decode, blocks, decode_hit=hit)
        prefill_nodes, hits = self._prefill_candidates(request, prefill_nodes, known)
        place = choose_prefill(prefill_nodes, arrived.prompt_tokens, limits, now, hits)
        if place == "prefill_node":
            return self._choose_without_prefill(request, now)
        if isinstance(place, str):
            return place
        request.timeline.decision = decided
        prefill_hit = hits.get(place[0].description.incarnation, NO_HIT)
        return Choice(decode, blocks, *place, hit, prefill_hit)

    def _decode_candidates(self, request: Request, tokens: int, known: Known) -> Candidates:
        """The decode nodes among which to choose."""
        if is_choosy(request):
            nodes = self._choosy_decode_nodes(request)
            return nodes, known.hits(nodes)
        want = DecodeWant(tokens, request.tried)
        return self.membership.pool(DECODE).among(known, want)

    def _prefill_candidates(self, request: Request, nodes: list[Node], known: Known) -> Candidates:
        """The prefill nodes among which to choose: some of ``nodes``, which may be all of them."""
        pool = self.membership.pool(PREFILL)
        if nodes is not pool.nodes:
            return nodes, known.hits(nodes)
        want = PrefillWant(request.arrived.prompt_tokens, self.limits.placement)
        return pool.among(known, want)

    def decode_nodes_for(self, request: Request) -> list[Node]:
        """The usable decode nodes that can serve the request: with its adapter, or the one that it
        is bound to.
        """
        nodes, arrived = self.membership.usable(DECODE), request.arrived
        if arrived.bound_to:
            nodes = [n for n in nodes if n.description.incarnation == arrived.bound_to]
        if arrived.adapter:
            nodes = [n for n in nodes if arrived.adapter in n.description.adapters]
        return nodes

    def _choosy_decode_nodes(self, request: Request) -> list[Node]:
        """The decode nodes for a choosy request; those whose adapter no prefill node has are left
        out while there are others.
        """
        decode_nodes = self.decode_nodes_for(request)
        if request.arrived.adapter and not request.arrived.alone_because:
            prefill_nodes = self.membership.usable(PREFILL)
            paired = [
                node
                for node in decode_nodes
                if node.description.incarnation not in request.tried
                and any(has_same_adapter(other, node, request) for other in prefill_nodes)
            ]
            decode_nodes = paired or decode_nodes
        return decode_nodes

    def _choose_at_once(self, request: Request, now: float) -> Choice | Missing:
        """The least busy node for what needs no blocks. What a node holds can be asked of it while
        it drains, too.
        """
        nodes = self.decode_nodes_for(request)
        if request.arrived.bound_to:
            holder = self.membership.lives_as(request.arrived.bound_to)
            nodes = [holder] if holder is not None and holder.is_reachable else []
        untried = [n for n in nodes if n.description.incarnation not in request.tried]
        found = choose_decode(untried, 0, (), now)
        request.timeline.decision = "alone_other_endpoint"
        if not isinstance(found, str):
            return Choice(*found)
        if not untried:
            return found
        return Choice(min(untried, key=attrgetter("decode_legs")), 0)

    def hits_of(self, request: Request, nodes: list[Node]) -> Mapping[str, Hit]:
        """What each of those nodes is expected to have of the request's prompt."""
        return Known(self.prefixes, request.arrived).hits(nodes)

    def _choose_without_prefill(self, request: Request, now: float) -> Choice | Missing:
        """A decode node that has room to compute the prompt beside those it computes already."""
        nodes = [n for n in self.decode_nodes_for(request) if self.has_headroom(n, request)]
        if not nodes:
            return "decode_headroom"
        hits = self.hits_of(request, nodes)
        found = choose_decode(nodes, self._tokens_of(request), request.tried, now, hits)
        if isinstance(found, str):
            return found
        is_adapters_fault = request.arrived.adapter and self.membership.usable(PREFILL)
        request.timeline.decision = (
            "alone_adapter" if is_adapters_fault else "alone_no_prefill_node"
        )
        hit = hits.get(found[0].description.incarnation, NO_HIT)
        return Choice(*found, decode_hit=hit)

    def has_headroom(self, node: Node, request: Request) -> bool:
        """Whether a decode node may compute this prompt for want of a prefill node; one prompt it
        may always.
        """
        tokens = node.own_prompt_tokens + request.arrived.prompt_tokens
        if node.others is not None:
            tokens += node.others.own_prompt_tokens
        return not node.own_prompt_tokens or tokens <= self.limits.placement.own_prompt_limit_tokens

    def _tokens_of(self, request: Request) -> int:
        """What the prompt and the allowed answer take at most."""
        output = request.arrived.output_tokens
        if output is None:
            output = self.limits.placement.default_output_tokens
        return request.arrived.prompt_tokens + max(0, output)

    def _commit(self, request: Request, now: float) -> Choice:
        """Count the chosen nodes' slots and blocks as taken; the request is out of the queue."""
        choice = request.choice
        assert choice is not None
        assert not request.has_prefill_leg
        assert not request.has_decode_leg
        if self.queue.size:
            self._serve(request, choice)
        self._choices += 1
        request.attempt += 1
        request.transfer_attempt = request.attempt
        request.tried_prefill.clear()
        timeline = request.timeline
        timeline.attempts, timeline.dispatched = request.attempt, now
        if timeline.first_dispatched is None:
            timeline.first_dispatched = now
        else:
            self._note_redispatch(request, now)
        timeline.prefill_node = ""
        expected = choice.decode_hit if choice.prefill is None else choice.prefill_hit
        timeline.expected_cached_tokens = expected.counted_tokens
        self._commit_decode(request, choice.decode, choice.decode_blocks, now)
        if choice.prefill is not None:
            self._commit_prefill(request, choice.prefill, choice.prefill_blocks, now)
        if request.arrived.streaming:
            self.deadlines[DeadlineKind.FIRST_TOKEN].arm(request.id, now)
        return choice

    def _counted(self, node: Node) -> None:
        """What this router has on the node has changed."""
        self.membership.touched(node)
        self.peers.touch(node)

    @staticmethod
    def _note_redispatch(request: Request, now: float) -> None:
        """Legs leave that replace failed ones."""
        if request.timeline.first_data is None:
            request.timeline.redispatched = now

    def _serve(self, request: Request, choice: Choice) -> None:
        """The request, if it waits, leaves the queue at its tenant's cost: its tokens, but no more
        than fit on a node. One that an engine failed has been paid for.
        """
        most = choice.decode_blocks * choice.decode.description.block_tokens
        cost = 0 if request.attempt else min(self._tokens_of(request), most)
        if self.queue.serve(request.id, request.arrived.tenant, cost):
            self.deadlines[DeadlineKind.QUEUE].disarm(request.id)

    def _commit_decode(self, request: Request, node: Node, blocks: int, now: float) -> None:
        request.decode_attempt = request.attempt
        request.timeline.decode_node = node.name
        node.decode_legs += 1
        node.placed_legs += 1
        if not request.arrived.needs_kv:
            node.placed_at_once += 1
        node.committed_blocks += blocks
        node.chosen_at = self._choices
        self._counted(node)
        request.has_decode_leg = True
        if not node.decode_breaker.is_clean:
            self.note_placed(node, "decode", request, now)

    def _commit_prefill(self, request: Request, node: Node, blocks: int, now: float) -> None:
        request.prefill_attempt = request.attempt
        request.timeline.prefill_node = node.name
        node.prefill_legs += 1
        node.placed_legs += 1
        node.prefill_tokens += _to_prefill(request)
        node.committed_blocks += blocks
        node.chosen_at = self._choices
        self._counted(node)
        request.has_prefill_leg = True
        if not node.prefill_breaker.is_clean:
            self.note_placed(node, "prefill", request, now)

    def start_pair(self, request: Request, now: float, reason: str) -> list[Effect]:
        choice = self._commit(request, now)
        assert choice.prefill is not None
        request.phase = Phase.PREFILLING
        return [
            StartPair(
                request.id,
                request.attempt,
                request.transfer_id,
                choice.prefill.description,
                choice.decode.description,
            )
        ]

    def start_alone(self, request: Request, now: float, reason: str) -> list[Effect]:
        choice = self._commit(request, now)
        self._compute_on(choice.decode, request)
        request.phase = Phase.ALONE
        return [StartAlone(request.id, request.decode_attempt, choice.decode.description)]

    def _compute_on(self, node: Node, request: Request) -> None:
        """The decode node computes the prompt itself, until its first data."""
        assert not request.own_prompt_tokens
        assert request.choice is not None
        uncached = request.arrived.prompt_tokens - request.choice.decode_hit.tokens
        request.own_prompt_tokens = uncached
        node.own_prompt_tokens += request.own_prompt_tokens

    # Giving back

    def _has_computed(self, request: Request) -> None:
        """The decode node does not compute the prompt, or not any more."""
        if request.own_prompt_tokens:
            assert request.choice is not None
            request.choice.decode.own_prompt_tokens -= request.own_prompt_tokens
            self.peers.touch(request.choice.decode)
            request.own_prompt_tokens = 0
            self._may_place = True

    def _cancel_legs(self, request: Request) -> list[Effect]:
        effects = self._cancel_prefill(request)
        effects += self._abandon_transfer(request, "the decode leg was cancelled")
        if request.has_decode_leg:
            self._give_back_decode(request)
            effects.append(CancelLeg(request.id, request.decode_attempt, "decode"))
        return effects

    def _abandon_transfer(self, request: Request, reason: str) -> list[Effect]:
        """Nobody may fetch what the prefill node computed: it need not hold it until its lease
        ends.

        Cancelling the leg is not enough: it may have been answered, and then only the transfer is
        left.
        """
        choice = request.choice
        if choice is None or choice.prefill is None:
            return []
        if request.phase not in (Phase.PREFILLING, Phase.LANDING):
            return []
        return [FailTransfer(choice.prefill.name, request.transfer_id, reason)]

    def _cancel_prefill(self, request: Request) -> list[Effect]:
        if not request.has_prefill_leg:
            return []
        self._give_back_prefill(request)
        return [CancelLeg(request.id, request.prefill_attempt, "prefill")]

    def _give_back_prefill(self, request: Request) -> None:
        choice = request.choice
        assert request.has_prefill_leg
        assert choice is not None
        assert choice.prefill is not None
        choice.prefill.prefill_legs -= 1
        choice.prefill.prefill_tokens -= _to_prefill(request)
        choice.prefill.committed_blocks -= choice.prefill_blocks
        self._counted(choice.prefill)
        request.has_prefill_leg = False
        self._may_place = True
        if not choice.prefill.prefill_breaker.is_clean:
            self.note_over(choice.prefill, "prefill", request)

    def _give_back_decode(self, request: Request) -> None:
        choice = request.choice
        assert request.has_decode_leg
        assert choice is not None
        self._has_computed(request)
        choice.decode.decode_legs -= 1
        if not request.arrived.needs_kv:
            choice.decode.placed_at_once -= 1
        choice.decode.committed_blocks -= choice.decode_blocks
        self._counted(choice.decode)
        request.has_decode_leg = False
        if not self._waits_for_slot or self.queue.passing:
            self._may_place = True
        if not choice.decode.decode_breaker.is_clean:
            self.note_over(choice.decode, "decode", request)

    def _enter_queue(self, request: Request, now: float, *, is_first: bool = False) -> None:
        """Behind the others of its tenant; ``is_first``: before them."""
        if request.timeline.queued is None:
            request.timeline.queued = now
        may_pass = self.needs_no_slot(request)
        if is_first:
            self._waits_for_slot = False
        self.queue.add(
            request.id, request, request.arrived.tenant, may_pass=may_pass, is_first=is_first
        )
        self.deadlines[DeadlineKind.QUEUE].arm(request.id, now)

    def _leave_queue(self, request: Request) -> None:
        if self.queue.discard(request.id, request.arrived.tenant):
            self.deadlines[DeadlineKind.QUEUE].disarm(request.id)
            self._may_place = True

    def _retry_after_s(self, request: Request, now: float) -> int:
        """What the next request of this one's tenant has waited so far: those behind it will hardly
        be faster. Whole seconds, from 1 to ``queue_timeout_s``.
        """
        oldest = self.queue.first_of(request.arrived.tenant) or self.queue.first()
        waited = now - oldest.arrived_at if oldest is not None else 0.0
        return max(1, ceil(min(waited, self.limits.queue_timeout_s)))


def has_same_adapter(node: Node, other: Node, request: Request) -> bool:
    """Whether both nodes have the adapter that the request asks for, if it asks for one, and it is
    the same one.
    """
    name = request.arrived.adapter
    if not name:
        return True
    ours, theirs = node.description.adapters.get(name), other.description.adapters.get(name)
    return ours is not None and theirs is not None and ours.content == theirs.content


def _to_prefill(request: Request) -> int:
    """Prompt tokens that the chosen prefill node has to compute."""
    assert request.choice is not None
    return request.arrived.prompt_tokens - request.choice.prefill_hit.tokens
