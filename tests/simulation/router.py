"""A router around the real ``RouterCore``: its legs and its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from simulation import prefixes
from simulation.clients import Client, Leg
from simulation.engine import WRONG, Engine, EngineRequest, token
from simulation.params import alone_params, leg_params
from simulation.plan import HEAVY, ROUTER
from simulation.transfers import LEASE_S
from splitserve.kv_transfer.engine_endpoint import GiveUpTransfer, PeerIsDead
from splitserve.kv_transfer.orders import Retarget
from splitserve.kv_transfer.prefix_marks import split_digests
from splitserve.orchestrator.core import effects as ef
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.audit import find
from splitserve.orchestrator.core.lifecycle import Phase
from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.core.placement import PlacementLimits
from splitserve.orchestrator.core.router_core import RouterCore

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.plan import Plan
    from splitserve.kv_transfer.transfer_params import TransferParams
    from splitserve.orchestrator.agent.messages import NodeDescription

CUT_LEG_S = 3.0
"""After this long a leg over a cut connection is broken for both its ends."""
CANCEL_S = 0.1
"""Longest time that a cancelled leg goes on."""
CALM_S = 6.0
"""So long after the last fault every writer has been asked for its fence again, and has answered,
and decode engines have reported it.
"""


def limits_of(plan: Plan) -> CoreLimits:
    """The core's limits in a run."""
    return CoreLimits(
        queue_limit_requests=plan.queue_limit_requests,
        queue_timeout_s=plan.deadline_s * 5 / 12,
        first_token_deadline_s=plan.deadline_s * 8 / 12,
        request_deadline_s=plan.deadline_s,
        node_silence_limit_s=3.0,
        lease_s=LEASE_S,
        placement=PlacementLimits(default_output_tokens=8),
        tenant_weights={HEAVY: 2.0},
    )


class Router:
    """One life of the router after another, and the clients of all of them."""

    def __init__(self, cluster: Cluster, limits: CoreLimits) -> None:
        self.cluster = cluster
        self.limits = limits
        self.world = cluster.world
        self.network = cluster.network
        self.clients: dict[str, Client] = {}
        self.legs: dict[tuple[str, int, str], Leg] = {}
        self.life = 0
        self.is_up = False
        self.continuations = 0
        self.flips = 0
        """Changes of a node's role."""
        self.ended_engines = 0
        """Engines that were to end because of a fence that did not come."""
        self.start()

    def start(self) -> None:
        """A fresh process, which knows nothing."""
        self.life += 1
        self.is_up = True
        self.core = RouterCore(self.limits)
        self._facts: list[ev.Event] = []
        self._is_busy = False
        self._timer_at: float | None = None

    def kill(self) -> None:
        """SIGKILL: the kernel closes every connection."""
        self.is_up = False
        for client in self.clients.values():
            client.outcome = client.outcome or "reset"
        for leg in list(self.legs.values()):
            self._close_leg(leg)

    # -- the core ------------------------------------------------------------------------------

    def hear(self, life: int, event: ev.Event) -> None:
        """A fact from a connection to one life of the router."""
        if self.is_up and life == self.life:
            self.tell(event)

    def tell(self, event: ev.Event) -> None:
        """A fact for the core; its orders are carried out, as ``CoreDriver`` does it."""
        self._facts.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._facts:
                fact = self._facts.pop(0)
                if not isinstance(fact, ev.NodeReported | ev.TimePassed):
                    self.world.note("router: {}", fact)
                for effect in self.core.handle(fact, self.world.now):
                    self._perform(effect)
                self._check_queue()
        finally:
            self._is_busy = False
        self._arm_timer()

    def _check_queue(self) -> None:
        """The queue holds who waits and nobody else, and no more than its bound; those that an
        engine has failed come on top.
        """
        waiting = [r for r in self.core.requests.values() if r.phase is Phase.QUEUED]
        if {r.id for r in waiting} != set(self.core.queue):
            self.world.fail(f"{sorted(self.core.queue)} wait in the queue, not {waiting}")
        count = sum(not request.attempt for request in waiting)
        if count > self.limits.queue_limit_requests:
            self.world.fail(f"{count} requests wait")

    def _arm_timer(self) -> None:
        due = self.core.next_deadline()
        if due is not None and (self._timer_at is None or due < self._timer_at):
            self._timer_at = due
            self.world.at(max(0.0, due - self.world.now), self._time_passed, self.life, due)

    def _time_passed(self, life: int, due: float) -> None:
        if self._timer_at == due and life == self.life:
            self._timer_at = None
            self.hear(life, ev.TimePassed())

    def _perform(self, effect: ef.Effect) -> None:
        order = self.cluster.order
        match effect:
            case ef.StartPair():
                if self._has_everything(effect.request_id, effect.attempt):
                    self.tell(ev.PrefillAnswered(effect.request_id, effect.attempt, 200))
                    return
                self._start_leg(effect, "prefill")
                self._start_leg(effect, "decode")
            case ef.StartPrefill():
                self._start_leg(effect, "prefill")
            case ef.StartDecode():
                self._start_leg(effect, "decode")
            case ef.RetargetTransfer(node, transfer_id, attempt, prefill, reason):
                order(
                    node,
                    Retarget(
                        transfer_id, attempt, prefill.incarnation, prefill.control_addresses, reason
                    ),
                )
            case ef.StartAlone(request_id, attempt, decode):
                if not self._has_everything(request_id, attempt):
                    params = alone_params(self.clients[request_id], attempt)
                    self._send_leg(request_id, attempt, "decode", decode, params)
            case ef.DoubtLeg(request_id, attempt, silence_limit_s):
                leg = self.legs[request_id, attempt, "decode"]
                if self.world.now - leg.heard_at >= silence_limit_s:
                    self._break(leg, "its node is silent")
            case ef.CancelLeg(request_id, attempt, kind):
                self._cancel_leg(self.legs[request_id, attempt, kind])
            case ef.FailTransfer(node, transfer_id, reason):
                order(node, GiveUpTransfer(transfer_id, reason))
            case ef.AnnounceDeath(incarnation, only):
                for name in self.cluster.nodes:
                    if only in ("", name):
                        order(name, PeerIsDead(incarnation))
            case ef.AnswerError(request_id, status, message):
                client = self.clients[request_id]
                client.ends.append(f"{status} {message}")
                if status == 429 and any(
                    leg.request_id == request_id for leg in self.legs.values()
                ):
                    self.world.fail(f"{request_id}, which has had a place, is told that it is full")
                if client.outcome or len(client.ends) > 1:
                    self.world.fail(f"{client.request_id} is told {client.ends}")
            case ef.EndRequest(timeline):
                self._end(timeline)
            case _:
                self._perform_on_node(effect)

    def _perform_on_node(self, effect: ef.Effect) -> None:
        match effect:
            case ef.EndEngine(node, incarnation, reason):
                self.world.note("{} is to end: {}", incarnation, reason)
                calm_since = self.cluster.calm_since
                if not self.cluster.open_faults and self.world.now - calm_since > CALM_S:
                    self.world.fail(f"{incarnation} is to end though nothing is wrong: {reason}")
                self.ended_engines += 1
                self.cluster.end_engine(node, incarnation)
            case ef.DrainNode(node, incarnation):
                self.cluster.begin_drain(node, incarnation)
            case ef.DismissNode(node, incarnation, at_once):
                self.cluster.dismiss(node, incarnation, at_once=at_once)
            case ef.AnswerDrain(verdict=verdict, message=message):
                self.world.note("drain: {}: {}", verdict, message)
            case ef.SetRole(node, role, epoch):
                self.cluster.set_role(node, role, epoch)
            case ef.AnswerFlip(verdict=verdict, message=message):
                self.world.note("flip: {}: {}", verdict, message)
                self.flips += verdict == "flipped"
            case ef.ReportBreaker(node, leg, state, reason):
                self.world.note("{}: breaker of {} legs is {}: {}", node, leg, state, reason)
            case ef.AcceptNode(node):
                if self.cluster.has_prefixes:
                    self.cluster.welcome(node)
            case ef.RefuseNode() | ef.PassRefusal():
                pass
            case _:
                self.world.fail(f"nobody performs {effect}")

    def _has_everything(self, request_id: str, attempt: int) -> bool:
        """Whether only the end of the answer was lost with its engine."""
        client = self.clients[request_id]
        if len(client.tokens) < client.max_tokens:
            return False
        for kind in ("prefill", "decode"):  # The core may cancel what was never sent.
            self.legs[request_id, attempt, kind] = Leg(
                request_id, attempt, kind, "", "", is_over=True
            )
        self.tell(ev.FirstDataArrived(request_id, attempt))
        self.tell(ev.DecodeEnded(request_id, attempt))
        return True

    def _end(self, timeline: ef.Timeline) -> None:
        client = self.clients[timeline.request_id]
        if client.outcome:
            self.world.fail(f"{client.request_id} ends twice")
        client.outcome = timeline.outcome
        took = self.world.now - client.asked_at
        if took > self.limits.request_deadline_s + 1e-6:
            self.world.fail(f"{client.request_id} has taken {took:.3f} s")
        self.continuations += timeline.continuations
        if timeline.attempts > 2 * self.limits.max_attempts**2:
            self.world.fail(f"{client.request_id} was tried {timeline.attempts} times")
        self.world.note("{} ends: {} {}", client.request_id, timeline.outcome, timeline.reason)
        if timeline.outcome == "ok":
            right = [token(client.prompt, n) for n in range(client.max_tokens)]
            if client.tokens != right or client.ends:
                self.world.fail(f"{client.request_id}: {client.tokens} is not {right}")
        elif timeline.outcome == "error" and len(client.ends) != 1:
            self.world.fail(f"{client.request_id} was told {client.ends}")

    # -- legs ----------------------------------------------------------------------------------

    def _start_leg(
        self,
        order: ef.StartPair | ef.StartPrefill | ef.StartDecode,
        role: Literal["prefill", "decode"],
    ) -> None:
        node = order.prefill if role == "prefill" else order.decode
        if order.prefill.node == order.decode.node:
            self.world.fail(f"{order.request_id} is to be sent from {node.node} to itself")
        params = leg_params(order, role, self.clients[order.request_id])
        self._send_leg(order.request_id, order.attempt, role, node, params)

    def _send_leg(
        self,
        request_id: str,
        attempt: int,
        kind: str,
        node: NodeDescription,
        params: TransferParams | None,
    ) -> None:
        leg = Leg(request_id, attempt, kind, node.node, node.incarnation)
        self.legs[request_id, attempt, kind] = leg
        leg.heard_at = self.world.now
        client = self.clients[request_id]
        leg.sent_before = tuple(client.tokens)
        if leg.sent_before and not client.can_continue:
            self.world.fail(f"{request_id} is continued, which is not exact")
        if kind == "decode" and leg.incarnation in client.failed_on:
            self.world.fail(f"{request_id} goes to {leg.incarnation} again, which has failed it")
        if self.core.membership.nodes[node.node].role != kind:
            self.world.fail(f"{request_id}: a new {kind} leg goes to {node.node}")
        if not self.network.send(ROUTER, leg.node, self._arrive, leg, params):
            self.world.at(CUT_LEG_S, self._break, leg, "the connection timed out")

    def _arrive(self, leg: Leg, params: TransferParams | None) -> None:
        engine = self.cluster.nodes[leg.node].engine
        if engine is None:
            self._answer(leg, self._break, leg, "connection refused")
            return
        leg.engine = engine
        client = self.clients[leg.request_id]
        request = EngineRequest(
            id=leg.engine_id,
            prompt=client.prompt_for(leg.kind) + leg.sent_before,
            resumed=len(leg.sent_before),
            max_tokens=1 if leg.kind == "prefill" else client.max_tokens - len(leg.sent_before),
            params=params,
            answer=lambda token: self._answer(leg, self._hear, leg, token),
        )
        engine.process.at(0.0, self._add, leg, engine, request)

    def _add(self, leg: Leg, engine: Engine, request: EngineRequest) -> None:
        if not leg.is_over:
            engine.add(request)

    def _answer(self, leg: Leg, call: Any, *args: Any) -> None:
        if leg.has_lost_bytes:
            return
        if not self.network.send(leg.node, ROUTER, call, *args):
            leg.has_lost_bytes = True
            self.world.at(CUT_LEG_S, self._break, leg, "the connection timed out")

    def _hear(self, leg: Leg, heard: int | None) -> None:
        if leg.is_over:
            return
        if leg.kind == "prefill":
            if heard is None:
                leg.is_over = True
                self.tell(ev.PrefillAnswered(leg.request_id, leg.attempt, 200))
            return
        client = self.clients[leg.request_id]
        if heard is None:
            leg.is_over = True
            self.tell(ev.DecodeEnded(leg.request_id, leg.attempt))
            return
        if heard == WRONG and not leg.is_closing:
            self.world.fail(f"{leg.request_id} gets a token that was computed from wrong pages")
        leg.heard_at = self.world.now
        if not leg.has_data:
            leg.has_data = True
            self.tell(ev.FirstDataArrived(leg.request_id, leg.attempt))
        if leg.is_closing:
            return
        if client.outcome:
            self.world.fail(f"{leg.request_id} gets a token after its end")
        client.tokens.append(heard)

    def broken(self, engine: Engine) -> None:
        """An engine is dead: its host resets the connections."""
        for leg in list(self.legs.values()):
            if leg.engine is engine and not leg.is_over:
                self._answer(leg, self._break, leg, "the connection was reset")

    def reset_leg(self, request_id: str, kind: str) -> None:
        """The connection of a request's leg breaks."""
        for leg in list(self.legs.values()):
            if (leg.request_id, leg.kind) == (request_id, kind):
                self._break(leg, "the connection was reset")

    def _break(self, leg: Leg, reason: str) -> None:
        if leg.is_over:
            return
        if leg.kind == "decode" and not leg.is_closing:
            self.clients[leg.request_id].failed_on.add(leg.incarnation)
        self._close_leg(leg)
        event = ev.PrefillFailed if leg.kind == "prefill" else ev.DecodeFailed
        self.tell(event(leg.request_id, leg.attempt, reason))

    def _cancel_leg(self, leg: Leg) -> None:
        """As a task is cancelled: it ends a moment later."""
        if not leg.is_over:
            leg.is_closing = True
            self.world.at(self.world.random.random() * CANCEL_S, self._close_leg, leg)

    def _close_leg(self, leg: Leg) -> None:
        """The router's end is closed; the engine hears of it, if late."""
        if leg.is_over:
            return
        leg.is_over = True
        if not self.network.send(ROUTER, leg.node, self._hang_up, leg):
            self.world.at(CUT_LEG_S * 2, self._hang_up, leg)

    def _hang_up(self, leg: Leg) -> None:
        engine = leg.engine
        if engine is not None:
            engine.process.at(0.0, engine.abort, leg.engine_id)

    # -- clients -------------------------------------------------------------------------------

    def ask(self, client: Client) -> None:
        """A client's request reaches the router."""
        self.clients[client.request_id] = client
        client.asked_at = self.world.now
        if not self.is_up:
            client.outcome = "refused"
            return
        self.tell(
            ev.RequestArrived(
                request_id=client.request_id,
                endpoint="completions",
                prompt_tokens=len(client.prompt),
                output_tokens=client.max_tokens,
                streaming=client.streaming,
                alone_because="",
                tenant=client.tenant,
                can_continue=client.can_continue,
                marks=tuple(split_digests(client.marks[0])),
                prompt_bytes=client.marks[1],
            )
        )

    def leave(self, request_id: str) -> None:
        """A client closes its connection."""
        if request_id in self.core.requests:
            self.hear(self.life, ev.ClientGone(request_id))

    # -- audits --------------------------------------------------------------------------------

    def check(self) -> None:
        """Promises on nodes are those of the requests that are out, and clients' tokens are right
        so far.
        """
        for client in self.clients.values():
            right = [token(client.prompt, n) for n in range(len(client.tokens))]
            if client.tokens != right:
                self.world.fail(f"{client.request_id}: {client.tokens} is not {right}")
        for node in self.core.membership.nodes.values():
            choices = [(r, r.choice) for r in self.core.requests.values() if r.choice is not None]
            prefill = [r for r, c in choices if r.has_prefill_leg and c.prefill is node]
            decode = [r for r, c in choices if r.has_decode_leg and c.decode is node]
            if (node.prefill_legs, node.decode_legs) != (len(prefill), len(decode)):
                self.world.fail(f"{node.name} counts {node.prefill_legs}, {node.decode_legs} legs")

    def look_at_audit(self) -> None:
        """The audit of an idle cluster finds nothing, without any patience."""
        core = self.core
        nodes = core.membership.nodes.values()
        found = list(find(nodes, core.requests, core.ended, LEASE_S, self.world.now))
        if found:
            self.world.fail(f"the audit finds {found}")
        for node in nodes if self.is_up else ():
            said = self.cluster.nodes[node.name].role
            if said != node.role:
                self.world.fail(f"{node.name} is for {node.role}, and its agent says {said}")
        found_prefixes = prefixes.differences(self.cluster) if self.is_up else []
        if found_prefixes:
            self.world.fail(f"the prefix index is wrong: {found_prefixes}")

    def leftovers(self) -> list[str]:
        """What an idle router must not hold."""
        found = [f"router: {request_id}" for request_id in self.core.requests] if self.is_up else []
        for known in self.core.membership.nodes.values() if self.is_up else ():
            legs = (known.prefill_legs, known.decode_legs)
            tokens = (known.prefill_tokens, known.own_prompt_tokens)
            promised = (*legs, *tokens, known.committed_blocks)
            if any(promised):
                found.append(f"router: {known.name} has legs, tokens and blocks {promised}")
        for difference in self.core.audit.differences(self.world.now) if self.is_up else ():
            found.append(f"audit of {difference.node}: {difference}")
        found += [f"{c.request_id} has no end" for c in self.clients.values() if not c.outcome]
        return found
