"""The core's one door: facts in, orders out. No I/O, no clock, no randomness.

It holds the nodes, the requests and the waiting queue. What may happen to a request in which phase
is the table in ``lifecycle``; the methods named there are in ``endings``, ``actions`` and
``recovery``; how nodes leave is in ``draining``, how they change roles in ``flipping``. A request
that cannot be placed waits in one bounded queue (``admission``): tenants take turns, and within a
tenant first come is first served; only a request that needs no prefill slot may pass one that waits
for a slot.

How far a prompt is cached where is what nodes and caches have said (``prefix_index``); it may be
out of date, and only the choice of nodes depends on it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.audit import Audit, Difference, find
from splitserve.orchestrator.core.breaker import is_engine_fault
from splitserve.orchestrator.core.deadlines import DeadlineQueue
from splitserve.orchestrator.core.effects import (
    AcceptNode,
    AnnounceDeath,
    Effect,
    RefuseNode,
    Timeline,
)
from splitserve.orchestrator.core.errors import IllegalTransitionError
from splitserve.orchestrator.core.expected_hits import cache_source
from splitserve.orchestrator.core.fencing import Fencing
from splitserve.orchestrator.core.lifecycle import TRANSITIONS, DeadlineKind, Phase, Trigger
from splitserve.orchestrator.core.membership import DECODE, Node, OrderedRole
from splitserve.orchestrator.core.peers import NO_LOAD
from splitserve.orchestrator.core.placement import is_idle
from splitserve.orchestrator.core.probing import Probing
from splitserve.orchestrator.core.requests import Request, is_choosy

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.core.limits import CoreLimits

    Action = Callable[[Request, float, str], list[Effect]]


DEATHS_LIMIT_INCARNATIONS = 100
LISTEN_S = 0.2
"""A router that was stopped or busy for longer than ``node_silence_limit_s`` finds every node's
time over, and what the nodes said meanwhile unread: it reads that first.
"""


class RouterCore(Probing):
    """All decisions of the router."""

    def __init__(self, limits: CoreLimits) -> None:
        super().__init__(limits)
        self.silence = DeadlineQueue[str](limits.node_silence_limit_s)
        self.listening = DeadlineQueue[str](LISTEN_S)
        """Nodes whose time is over and that may have spoken all the same."""
        self.audit = Audit()
        self.fencing = Fencing(self.membership, limits.engine_end_limit_s)
        self.is_stopping = False
        self.wants_marks = False
        """Whether a node or a cache could do something with the marks of a prompt."""
        self._deaths: OrderedDict[str, None] = OrderedDict()
        """The latest incarnations that died, oldest first: a node that joins may have missed it."""
        self._rows: dict[tuple[Phase, Trigger], tuple[Action, tuple[Phase, ...]]] = {
            key: (getattr(self, row.action), row.to) for key, row in TRANSITIONS.items()
        }
        self._handlers: dict[type, Callable[..., list[Effect]]] = {
            ev.NodeJoined: self._on_node_joined,
            ev.NodeReported: self._on_node_reported,
            ev.NodeDisconnected: self._on_node_disconnected,
            ev.NodeDied: self._on_node_died,
            ev.NodePrefixesReported: self._on_node_prefixes_reported,
            ev.OtherRoutersReported: self._on_other_routers_reported,
            ev.CachePrefixesReported: self._on_cache_prefixes_reported,
            ev.CacheLost: self._on_cache_lost,
            ev.DrainRequested: self._on_drain_requested,
            ev.FlipRequested: self._on_flip_requested,
            ev.ForgetRequested: self._on_forget_requested,
            ev.RequestArrived: self._on_request_arrived,
            ev.PrefillAnswered: self._on_prefill_answered,
            ev.PrefillFailed: self._on_prefill_failed,
            ev.FirstDataArrived: self._on_first_data_arrived,
            ev.DecodeRefused: self._on_decode_refused,
            ev.DecodeFailed: self._on_decode_failed,
            ev.DecodeEnded: self._on_decode_ended,
            ev.ClientGone: self._on_client_gone,
            ev.TimePassed: self._on_time_passed,
            ev.RouterDraining: self._on_router_draining,
            ev.RouterStopping: self._on_router_stopping,
        }

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Apply one fact; return the orders that follow, in the order to perform them."""
        effects = self._handlers[type(event)](event, now)
        if self._may_place:
            while self._may_place and self.queue.size:
                self._may_place = False
                effects += self._place_waiting(now)
            self._may_place = False
        if self._breaker_news:
            effects = [*effects, *self._take_breaker_news()]
        if self.peers.has_news:
            first = self.queue.first()
            waiting_tokens = self._tokens_of(first) if first is not None else 0
            effects = [*effects, *self.peers.orders(waiting_tokens)]
        return effects

    def next_deadline(self) -> float | None:
        """When ``TimePassed`` is due, None when nothing is waited for."""
        dues = [queue.next_due() for queue in (*self._waits, self.listening)]
        dues += self.drain_dues.values()
        return min((due for due in dues if due is not None), default=None)

    @property
    def shortest_wait_s(self) -> float:
        """No deadline that is armed from now on is due sooner than this, except that of a drain and
        those that are armed when time has passed.
        """
        return min(queue.duration_s for queue in self._waits)

    @property
    def _waits(self) -> tuple[DeadlineQueue[str], ...]:
        return (*self.deadlines.values(), self.silence, self.returns)

    def differences(self, now: float) -> list[Difference]:
        """What engines hold and the core does not know of, or the other way round, as of their
        latest reports.
        """
        self._look(now)
        return self.audit.differences(now)

    def _look(self, now: float) -> None:
        nodes = self.membership.nodes.values()
        found = find(nodes, self.requests, self.ended, self.limits.lease_s, now)
        self.audit.note(found, now)

    # Nodes

    def _on_node_joined(self, event: ev.NodeJoined, now: float) -> list[Effect]:
        description = event.description
        effects: list[Effect] = []
        known = self.membership.nodes.get(description.node)
        if known and known.description.incarnation != description.incarnation:
            effects += self._lose(known, "its engine was restarted", now)
            known = None
        reason = self.membership.why_refuse(description, event.role)
        if reason:
            self.membership.refused[description.node] = reason
            if known:
                effects += self._lose(known, reason, now)
            effects += self._await_no_more(description.node, now)
            return [*effects, RefuseNode(description.node, reason)]
        self.membership.refused.pop(description.node, None)
        said = OrderedRole(event.role, event.role_epoch)
        role, epoch = self._role_of(description.node, said)
        if known:
            known.description, known.role = description, role
            known.is_connected, known.is_silent = True, False
            self.peers.hear(known, (), NO_LOAD)
        else:
            known = self.membership.nodes[description.node] = Node(description, role)
        known.role_epoch = epoch
        self._weigh_marks()
        self.membership.changed()
        self._hear(description.node, now)
        self._may_place = True
        missed = [AnnounceDeath(incarnation, description.node) for incarnation in self._deaths]
        again = [*self._hear_role(known, said, now), *self._drain_orders(known)]
        return [*effects, AcceptNode(description.node), *missed, *again]

    def _on_node_reported(self, event: ev.NodeReported, now: float) -> list[Effect]:
        state = event.state
        node = self.membership.find(state.node, state.incarnation)
        if node is None:
            return []
        self._hear(node.name, now)
        was_usable, had_blocks, was_idle = node.is_usable, node.free_blocks, is_idle(node)
        node.is_silent = False
        node.note_report(state)
        if node.is_usable != was_usable:
            self.membership.changed()
            self._may_place = True
        elif node.free_blocks != had_blocks or is_idle(node) != was_idle:
            self.membership.touched(node)
            self._may_place = True
        elif not (node.decode_breaker.is_clean and node.prefill_breaker.is_clean):
            self._may_place = True
        if now >= self.audit.due:
            self._look(now)
        effects = self.fencing.weigh(node, self._deaths, now)
        effects += self._hear_role(node, OrderedRole(state.role, state.role_epoch), now)
        self.peers.touch(node, is_due=True)
        if node.is_usable:
            self._has_returned(node)
            return effects
        return [*effects, *self._check_drain(node, now), *self._check_waiting(now)]

    def _on_node_disconnected(self, event: ev.NodeDisconnected, now: float) -> list[Effect]:
        node = self.membership.find(event.node, event.incarnation)
        if node is None:
            return []
        node.is_connected = False
        self.peers.hear(node, (), NO_LOAD)
        self.membership.changed()
        self._look(now)
        return self._check_waiting(now)

    def _on_node_died(self, event: ev.NodeDied, now: float) -> list[Effect]:
        is_news = event.incarnation not in self._deaths
        effects: list[Effect] = [AnnounceDeath(event.incarnation)] if is_news else []
        self._deaths[event.incarnation] = None
        self.fencing.over(event.incarnation)
        while len(self._deaths) > DEATHS_LIMIT_INCARNATIONS:
            self._deaths.popitem(last=False)
        node = self.membership.find(event.node, event.incarnation)
        if node is not None:
            node.phase = "dead"
            why = f"its engine died ({event.cause})"
            effects += self._lose(node, why, now, owed_nothing=event.owed_nothing)
        return [*effects, *self._check_return(event, now, is_news=is_news)]

    def _lose(
        self, node: Node, why: str, now: float, *, owed_nothing: bool = False
    ) -> list[Effect]:
        """Forget a node; every leg on it has failed."""
        del self.membership.nodes[node.name]
        self.peers.hear(node, (), NO_LOAD)
        self.prefixes.drop(node.description.incarnation)
        self._weigh_marks()
        self.drain_dues.pop(node.name, None)
        self.membership.changed()
        self.silence.disarm(node.name)
        self.listening.disarm(node.name)
        reason = f"node {node.name} is lost: {why}"
        lost = (Trigger.PREFILL_NODE_LOST, Trigger.DECODE_NODE_LOST)
        return self._tell_requests_of(node, lost, reason, now, owed_nothing=owed_nothing)

    def _tell_requests_of(
        self,
        node: Node,
        triggers: tuple[Trigger, Trigger],
        reason: str,
        now: float,
        *,
        owed_nothing: bool = False,
    ) -> list[Effect]:
        """Something has happened to a node; ``triggers`` are for requests that it prefills and for
        those that it decodes. ``owed_nothing``: requests with their pages need not hear of it.
        """
        for_prefill, for_decode = triggers
        effects: list[Effect] = []
        for request in list(self.requests.values()):
            choice = request.choice
            if request.phase is Phase.QUEUED:
                trigger = for_decode if node.role == DECODE else for_prefill
            elif choice and choice.decode is node:
                trigger = for_decode
            elif choice and choice.prefill is node:
                if owed_nothing and _has_its_pages(request):
                    continue
                trigger = for_prefill
            else:
                continue
            effects += self._apply(request, trigger, now, reason)
        return effects

    # Prefixes

    def _weigh_marks(self) -> None:
        """Marks are made when a cache takes them, or when nodes say what they have and something
        depends on it: which node of a pool, or whether a prompt is split.
        """
        placement = self.limits.placement
        nodes = self.membership.nodes.values()
        roles = Counter(node.role for node in nodes if node.description.reports_prefixes)
        has_choice = placement.min_uncached_tokens > 0 or max(roles.values(), default=0) > 1
        has_cache = any(node.description.uses_cache for node in nodes)
        self.wants_marks = placement.prefix_routing and (has_cache or (bool(roles) and has_choice))

    def _on_node_prefixes_reported(
        self, event: ev.NodePrefixesReported, now: float
    ) -> list[Effect]:
        if self.membership.find(event.node, event.incarnation) is not None:
            self.prefixes.take(
                event.incarnation,
                is_first=event.is_first,
                added=event.added,
                removed=event.removed,
            )
        return []

    def _on_other_routers_reported(
        self, event: ev.OtherRoutersReported, now: float
    ) -> list[Effect]:
        told = event.told
        node = self.membership.find(told.node, told.incarnation)
        if node is not None and node.is_connected:
            self.peers.hear(node, told.others, told.seen)
            self.membership.touched(node)
            self._may_place = True
        return []

    def _on_cache_prefixes_reported(
        self, event: ev.CachePrefixesReported, now: float
    ) -> list[Effect]:
        self.prefixes.take(
            cache_source(event.host),
            is_first=event.is_first,
            added=event.added,
            removed=event.removed,
        )
        return []

    def _on_cache_lost(self, event: ev.CacheLost, now: float) -> list[Effect]:
        self.prefixes.drop(cache_source(event.host))
        return []

    # Requests

    def _on_request_arrived(self, event: ev.RequestArrived, now: float) -> list[Effect]:
        timeline = Timeline(
            request_id=event.request_id,
            endpoint=event.endpoint,
            tenant=event.tenant,
            streaming=event.streaming,
            prompt_tokens=event.prompt_tokens,
            received=now,
        )
        request = Request(event, timeline)
        assert event.request_id not in self.requests, f"request id {event.request_id} is in use"
        self.requests[event.request_id] = request
        if self.is_stopping:
            return self._end_with_error(
                request, 503, "the router is stopping", now, retry_after_s=5
            )
        if not event.needs_kv:
            self.deadlines[DeadlineKind.REQUEST].arm(request.id, now)
            return self.admit_at_once(request, now)
        is_served = self.membership.usable(DECODE) or self.membership.awaits(DECODE)
        if not is_served or (is_choosy(request) and not self.has_untried_node(request)):
            return self._end_with_error(
                request, 503, self.why_no_node(request), now, retry_after_s=5
            )
        self.deadlines[DeadlineKind.REQUEST].arm(request.id, now)
        if event.pinned is not None:
            return self.admit_probe(request, event.pinned, now)
        return self.admit(request, now)

    def _on_prefill_answered(self, event: ev.PrefillAnswered, now: float) -> list[Effect]:
        request = self._with_prefill_leg(event.request_id, event.attempt)
        if request is None:
            return []
        request.timeline.prefill_answered = now
        request.timeline.prefill_status = event.status
        assert request.choice is not None
        assert request.choice.prefill is not None
        node = request.choice.prefill
        if event.status >= 400:
            reason = f"the prefill node answered {event.status}"
            if is_engine_fault(event.status):
                self.note_fault(node, "prefill", request, now, reason)
            return self._apply(request, Trigger.PREFILL_FAILED, now, reason)
        if not node.prefill_breaker.is_clean:
            self.note_success(node, "prefill", request, now)
        return self._apply(request, Trigger.PREFILL_ANSWERED, now)

    def _on_prefill_failed(self, event: ev.PrefillFailed, now: float) -> list[Effect]:
        request = self._with_prefill_leg(event.request_id, event.attempt)
        if request is None:
            return []
        assert request.choice is not None
        assert request.choice.prefill is not None
        if event.is_engine_fault:
            self.note_fault(request.choice.prefill, "prefill", request, now, event.reason)
        return self._apply(request, Trigger.PREFILL_FAILED, now, event.reason)

    def _on_first_data_arrived(self, event: ev.FirstDataArrived, now: float) -> list[Effect]:
        request = self._with_decode_leg(event.request_id, event.attempt)
        if request is None:
            return []
        assert request.choice is not None
        if not request.choice.decode.decode_breaker.is_clean:
            self.note_success(request.choice.decode, "decode", request, now)
        return self._apply(request, Trigger.FIRST_DATA, now)

    def _on_decode_refused(self, event: ev.DecodeRefused, now: float) -> list[Effect]:
        request = self._with_decode_leg(event.request_id, event.attempt)
        if request is None:
            return []
        request.timeline.status = event.status
        reason = f"the decode node answered {event.status}"
        assert request.choice is not None
        if is_engine_fault(event.status):
            self.note_fault(request.choice.decode, "decode", request, now, reason)
        return self._apply(request, Trigger.DECODE_REFUSED, now, reason)

    def _on_decode_failed(self, event: ev.DecodeFailed, now: float) -> list[Effect]:
        request = self._with_decode_leg(event.request_id, event.attempt)
        if request is None:
            return []
        assert request.choice is not None
        if event.is_engine_fault:
            self.note_fault(request.choice.decode, "decode", request, now, event.reason)
        return self._apply(request, Trigger.DECODE_FAILED, now, event.reason)

    def _on_decode_ended(self, event: ev.DecodeEnded, now: float) -> list[Effect]:
        request = self._with_decode_leg(event.request_id, event.attempt)
        return [] if request is None else self._apply(request, Trigger.DECODE_ENDED, now)

    def _on_client_gone(self, event: ev.ClientGone, now: float) -> list[Effect]:
        request = self.requests.get(event.request_id)
        return [] if request is None else self._apply(request, Trigger.CLIENT_GONE, now)

    def _on_time_passed(self, event: ev.TimePassed, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for kind, queue in self.deadlines.items():
            for request_id in queue.take_due(now):
                request = self.requests[request_id]
                reason = f"router.{kind.value} of {queue.duration_s:g} s is over"
                if kind is DeadlineKind.FIRST_TOKEN:
                    self.note_late(request, now, reason)
                effects += self._apply(request, Trigger.DEADLINE, now, reason)
        for name in self.listening.take_due(now):
            effects += self._fall_silent(self.membership.nodes[name], now)
        for name in self.silence.take_due(now):
            self.listening.arm(name, now)
        return effects + self._drain_time_passed(now)

    def _hear(self, name: str, now: float) -> None:
        self.silence.arm(name, now)
        self.listening.disarm(name)

    def _fall_silent(self, node: Node, now: float) -> list[Effect]:
        """Said again as long as it lasts: another place to go to may have turned up meanwhile."""
        node.is_silent = True
        self.membership.changed()
        self.silence.arm(node.name, now)
        reason = f"node {node.name} has been silent for {self.limits.node_silence_limit_s:g} s"
        self._look(now)
        silent = (Trigger.PREFILL_NODE_SILENT, Trigger.DECODE_NODE_SILENT)
        return self._tell_requests_of(node, silent, reason, now)

    def _on_router_draining(self, event: ev.RouterDraining, now: float) -> list[Effect]:
        self.is_stopping = True
        return []

    def _on_router_stopping(self, event: ev.RouterStopping, now: float) -> list[Effect]:
        self.is_stopping = True
        effects: list[Effect] = []
        for request in list(self.requests.values()):
            effects += self._apply(request, Trigger.STOPPING, now, "the router is stopping")
        return effects

    def _with_decode_leg(self, request_id: str, attempt: int) -> Request | None:
        """The request, unless it is over or this attempt's decode leg was given up."""
        request = self.requests.get(request_id)
        is_current = request and request.decode_attempt == attempt and request.has_decode_leg
        return request if is_current else None

    def _with_prefill_leg(self, request_id: str, attempt: int) -> Request | None:
        """The request, unless it is over or this attempt's prefill leg was given up."""
        request = self.requests.get(request_id)
        is_current = request and request.prefill_attempt == attempt and request.has_prefill_leg
        return request if is_current else None

    def _apply(
        self, request: Request, trigger: Trigger, now: float, reason: str = ""
    ) -> list[Effect]:
        """Do what the table says; the phase afterwards is one that it names."""
        row = self._rows.get((request.phase, trigger))
        if row is None:
            raise IllegalTransitionError(request, trigger)
        action, to = row
        request.story.append((now, trigger, reason))
        effects = action(request, now, reason)
        assert request.phase in to, f"{trigger} led to {request.phase}"
        return effects


def _has_its_pages(request: Request) -> bool:
    """Whether the prefill node owed this request nothing when it owed nothing at all: its leg was
    answered, and no decode leg was sent after it.
    """
    is_answered = request.phase is Phase.LANDING
    return is_answered and request.decode_attempt <= request.prefill_attempt
