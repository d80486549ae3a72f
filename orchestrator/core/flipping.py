"""How a node changes its role without a failed request: new work of the old role stops at once, and
new work of the other role may come at once. What is out stays where it is, for one engine computes
legs of both kinds: a request knows its nodes, whatever they are for by now.

The role that a node was told to take outlasts its engine and its agent's connection. The agent says
with every report what it takes the role to be, and by which order, and is told again until it has
obeyed. Orders are numbered, and an agent obeys the first one of a number: where it has obeyed
another router's, or this router is new, the agent's word counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.core.draining import Draining
from splitserve.orchestrator.core.effects import (
    AnswerFlip,
    Effect,
    FlipVerdict,
    LearnRole,
    SetRole,
)
from splitserve.orchestrator.core.membership import DECODE, PREFILL, OrderedRole, Returning

if TYPE_CHECKING:
    from splitserve.orchestrator.core.events import FlipRequested
    from splitserve.orchestrator.core.limits import CoreLimits
    from splitserve.orchestrator.core.membership import Node


class Flipping(Draining):
    """The core's decisions about roles."""

    def __init__(self, limits: CoreLimits) -> None:
        super().__init__(limits)
        self.flips = 0
        """Changes of a role so far."""

    def _on_flip_requested(self, event: FlipRequested, now: float) -> list[Effect]:
        refusal = self._why_not_flip(event)
        if refusal is not None:
            return [AnswerFlip(event.ticket, *refusal)]
        node = self.membership.nodes[event.node]
        is_last = not self._others(node)
        order = OrderedRole(event.role, node.role_epoch + 1)
        self.membership.ordered_roles[node.name] = order
        self._give_role(node, order)
        self.flips += 1
        message = f"{node.name} takes {event.role} work from now on"
        if node.is_flipping:
            message += f"; it still owes {described(node)}"
        if is_last:
            message += "; no prefill node is left: decode nodes compute the prompts themselves"
        answer = AnswerFlip(event.ticket, "flipped", message)
        return [answer, SetRole(node.name, *order), *self._check_waiting(now)]

    def _give_role(self, node: Node, order: OrderedRole) -> None:
        """New work of the node is of that role."""
        node.role, node.role_epoch = order
        node.has_flipped = True
        returning = self.membership.returning.get(node.name)
        if returning is not None:
            back = Returning(order.role, returning.old_incarnation)
            self.membership.returning[node.name] = back
        self.membership.changed()
        self._weigh_marks()
        self._may_place = True

    def _why_not_flip(self, event: FlipRequested) -> tuple[FlipVerdict, str] | None:
        """What is against it, and how to say so; None for nothing."""
        name, role = event.node, event.role
        node = self.membership.nodes.get(name)
        if node is None and name in self.membership.returning:
            return "leaving", f"{name} restarts; flip it when it is back"
        if node is None:
            known = ", ".join(sorted(self.membership.nodes)) or "none"
            return "unknown_node", f"the router knows no node {name!r}; known: {known}"
        if role not in (PREFILL, DECODE):
            return "not_flippable", f"role {role!r} is neither {PREFILL!r} nor {DECODE!r}"
        if node.role == role:
            return "same_role", f"{name} is a {role} node already"
        if node.drain is not None:
            return "leaving", f"{name} is leaving or restarting; it takes no new work of any role"
        if node.description.flip_obstacle:
            obstacle = node.description.flip_obstacle
            return "not_flippable", f"{name} cannot change its role: {obstacle}"
        if self._others(node):
            return None
        if node.role == DECODE:
            return (
                "last_decode_node",
                f"{name} is the last decode node that is usable: without it no request is answered",
            )
        if event.is_forced:
            return None
        return (
            "last_prefill_node",
            f"{name} is the last prefill node that is usable: without it decode nodes compute the "
            "prompts themselves",
        )

    def _others(self, node: Node) -> list[Node]:
        """Usable nodes of the same role."""
        return [other for other in self.membership.usable(node.role) if other is not node]

    def _role_of(self, name: str, said: OrderedRole) -> OrderedRole:
        """The role of a node whose agent says hello: what this router has ordered, unless the agent
        has obeyed a later order, or another one with the same number.
        """
        order = self.membership.ordered_roles.get(name)
        if order is not None and order.epoch > said.epoch:
            return order
        self.membership.ordered_roles.pop(name, None)
        return said

    def _hear_role(self, node: Node, said: OrderedRole, now: float) -> list[Effect]:
        """The agent has told by which order its node has which role."""
        if said.role in ("", node.role):
            node.role_epoch = max(node.role_epoch, said.epoch)
            return []
        if said.epoch < node.role_epoch:
            return [SetRole(node.name, node.role, node.role_epoch)]
        self.membership.ordered_roles.pop(node.name, None)
        self._give_role(node, said)
        return [LearnRole(node.name, said.role), *self._check_waiting(now)]


def described(node: Node) -> str:
    """What the node owes of its old role, in words; empty when nothing."""
    owed, old = node.owed, PREFILL if node.role == DECODE else DECODE
    parts = [
        _counted(owed.legs, f"{old} leg"),
        _counted(owed.transfers, "open transfer"),
        _counted(owed.leased_blocks, "leased block"),
    ]
    return ", ".join(part for part in parts if part)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}" if number else ""
