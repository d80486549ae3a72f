"""How a node leaves without a failed request: it gets no new work, what is out on it ends, and only
then is its agent told that the engine may end.

The core knows which legs are out, the engine what it still holds for peers. The agent is dismissed
when the core counts no leg on the node, and asks its engine after that: a leg that was on its way
when the drain began is seen by one of the two. A node that restarts is expected back, and requests
wait for it as they wait for room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.core.deadlines import DeadlineQueue
from splitserve.orchestrator.core.effects import (
    AnswerDrain,
    AnswerForget,
    DismissNode,
    DrainNode,
    Effect,
)
from splitserve.orchestrator.core.lifecycle import Trigger
from splitserve.orchestrator.core.membership import DECODE, PREFILL, Drain, Returning
from splitserve.orchestrator.core.recovery import Recovery

if TYPE_CHECKING:
    from splitserve.orchestrator.core.events import DrainRequested, ForgetRequested, NodeDied
    from splitserve.orchestrator.core.limits import CoreLimits
    from splitserve.orchestrator.core.membership import Node

DRAINING = "draining"
"""The phase that an agent reports from its drain on."""


class Draining(Recovery):
    """The core's decisions about nodes that are to leave or to restart."""

    def __init__(self, limits: CoreLimits) -> None:
        super().__init__(limits)
        self.drain_dues: dict[str, float] = {}
        """When each draining node goes whatever it owes, by name."""
        self.returns = DeadlineQueue[str](limits.node_return_limit_s)
        """How long requests may wait for a node that restarts."""

    def _on_drain_requested(self, event: DrainRequested, now: float) -> list[Effect]:
        node = self.membership.nodes.get(event.node)
        if node is None:
            known = ", ".join(sorted(self.membership.nodes)) or "none"
            message = f"the router knows no node {event.node!r}; known: {known}"
            return [AnswerDrain(event.ticket, "unknown_node", message)]
        others = [other for other in self.membership.usable(node.role) if other is not node]
        if node.role == DECODE and not others and node.drain is None and not event.is_forced:
            message = f"{node.name} is the last decode node: without it no request is answered"
            return [AnswerDrain(event.ticket, "last_decode_node", message)]
        seconds = event.timeout_s
        if seconds is None:
            seconds = self.limits.request_deadline_s
        self._begin_drain(node, event.restarts, now + seconds)
        message = f"{node.name} gets no new work"
        if node.role == PREFILL and not others:
            message += "; it is the last prefill node: decode nodes compute the prompts themselves"
        answer = AnswerDrain(event.ticket, "draining", message)
        orders = [answer, *self._drain_orders(node), *self._check_drain(node, now)]
        return [*orders, *self._check_waiting(now)]

    def _on_forget_requested(self, event: ForgetRequested, now: float) -> list[Effect]:
        """Of a node that has gone nothing is remembered that another one of its name would meet."""
        name = event.node
        if name in self.membership.nodes or name in self.membership.returning:
            message = f"{name} takes part; drain it before"
            return [AnswerForget(event.ticket, "takes_part", message)]
        self.membership.refused.pop(name, None)
        self.membership.ordered_roles.pop(name, None)
        return [AnswerForget(event.ticket, "forgotten", f"{name} is no part of the cluster")]

    def _begin_drain(self, node: Node, restarts: bool, due: float) -> Drain:
        """The node is draining; a second drain changes what the first one said."""
        drain = node.drain
        if drain is None:
            drain = node.drain = Drain(restarts, due)
        drain.restarts, drain.due, drain.is_inherited = restarts, due, False
        self.drain_dues[node.name] = due
        if restarts:
            incarnation = node.description.incarnation
            self.membership.returning[node.name] = Returning(node.role, incarnation)
        else:
            self.membership.returning.pop(node.name, None)
        self.membership.changed()
        self._may_place = True
        return drain

    def _drain_orders(self, node: Node) -> list[Effect]:
        """What the agent of a draining node has to know, all of it."""
        drain, incarnation = node.drain, node.description.incarnation
        if drain is None:
            return []
        orders: list[Effect] = []
        if not drain.is_inherited:
            orders.append(DrainNode(node.name, incarnation, drain.restarts))
        if drain.is_dismissed or drain.is_overdue:
            orders.append(DismissNode(node.name, incarnation, drain.is_overdue))
        return orders

    def _check_drain(self, node: Node, now: float) -> list[Effect]:
        """Dismiss a draining node on which nothing is out."""
        if node.drain is None and node.phase == DRAINING:
            # Another router drained it, or somebody has stopped its agent
            due = now + self.limits.request_deadline_s
            restarts = node.state is not None and node.state.restarts
            self._begin_drain(node, restarts, due).is_inherited = True
        drain = node.drain
        if drain is None or drain.is_dismissed or node.prefill_legs or node.decode_legs:
            return []
        drain.is_dismissed = True
        self._expect_back(node.name, now)
        return [DismissNode(node.name, node.description.incarnation)]

    def _drain_time_passed(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for name in [name for name, due in self.drain_dues.items() if due <= now]:
            del self.drain_dues[name]
            node = self.membership.nodes[name]
            assert node.drain is not None
            node.drain.is_overdue = True
            self._expect_back(name, now)
            effects.append(DismissNode(name, node.description.incarnation, at_once=True))
        for name in self.returns.take_due(now):
            effects += self._await_no_more(name, now)
        return effects

    def _check_return(self, event: NodeDied, now: float, *, is_news: bool) -> list[Effect]:
        """A restarting node's old engine is gone, as it should be; or its new one has failed."""
        returning = self.membership.returning.get(event.node)
        if returning is None or not is_news:
            return []
        if returning.old_incarnation == event.incarnation:
            self._expect_back(event.node, now)
            return []
        return self._await_no_more(event.node, now)

    def _expect_back(self, name: str, now: float) -> None:
        if name in self.membership.returning:
            self.returns.arm(name, now)

    def _has_returned(self, node: Node) -> None:
        if self.membership.returning.pop(node.name, None) is not None:
            self.returns.disarm(node.name)

    def _await_no_more(self, name: str, now: float) -> list[Effect]:
        """Requests no longer wait for the node."""
        if self.membership.returning.pop(name, None) is None:
            return []
        self.returns.disarm(name)
        return self._check_waiting(now)

    def _check_waiting(self, now: float) -> list[Effect]:
        """Waiting requests end when there is no decode node left for them to wait for."""
        effects: list[Effect] = []
        for request in list(self.queue.values()):
            if not self.has_untried_node(request):
                effects += self._apply(
                    request, Trigger.DECODE_NODE_LOST, now, "no decode node is left for it"
                )
        return effects
