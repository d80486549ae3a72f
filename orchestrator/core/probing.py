"""Probes: requests of an operator that measure certain nodes.

A probe names its nodes and goes there at once or not at all. It never waits, so it takes no turn
from anybody; it is placed only while no request waits and nothing but probes is out to its nodes;
and it is never moved to other nodes, whose times would say nothing. Otherwise it is a request like
others, with the same books and the same end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.core.admission import Admission
from splitserve.orchestrator.core.lifecycle import Trigger
from splitserve.orchestrator.core.placement import Choice

if TYPE_CHECKING:
    from splitserve.orchestrator.core.effects import Effect
    from splitserve.orchestrator.core.events import Pinned
    from splitserve.orchestrator.core.membership import Node
    from splitserve.orchestrator.core.requests import Request

BUSY = 429
UNKNOWN = 404


class Probing(Admission):
    """The way of a request whose nodes are named."""

    def admit_probe(self, request: Request, pinned: Pinned, now: float) -> list[Effect]:
        """Start the probe, or refuse it: 404 for nodes that are not there, 429 while they, or
        others, have something else to do.
        """
        decode = self.membership.nodes.get(pinned.decode)
        prefill = self.membership.nodes.get(pinned.prefill) if pinned.prefill else None
        if decode is None or (pinned.prefill and prefill is None) or prefill is decode:
            known = ", ".join(sorted(self.membership.nodes))
            message = f"a probe names one node, or two that differ, of: {known}"
            return self._end_with_error(request, UNKNOWN, message, now)
        obstacle = self._obstacle(request, decode) or (
            self._obstacle(request, prefill) if prefill else ""
        )
        if obstacle:
            return self._end_with_error(request, BUSY, obstacle, now, retry_after_s=1)
        request.timeline.decision = "probe"
        tokens = request.arrived.prompt_tokens
        request.choice = Choice(
            decode,
            decode.blocks_for(self._tokens_of(request)),
            prefill,
            prefill.blocks_for(tokens) if prefill else 0,
        )
        trigger = Trigger.PLACED_PAIR if prefill else Trigger.PLACED_ALONE
        return self._apply(request, trigger, now)

    def _obstacle(self, request: Request, node: Node) -> str:
        """Why the node cannot be measured now; empty when it can."""
        if self.queue.size:
            return f"{self.queue.size} requests wait for a place"
        if not node.is_usable:
            return f"{node.name} takes no work now"
        probes = sum(_is_probe_on(other, node) for other in self.requests.values())
        legs = node.prefill_legs + node.decode_legs
        if node.others is not None:
            legs += node.others.prefill_legs + node.others.decode_legs
        if legs > probes:
            return f"{legs - probes} requests of clients are on {node.name}"
        if node.free_blocks < node.blocks_for(self._tokens_of(request)):
            return f"{node.name} has {node.free_blocks} free blocks"
        return ""


def _is_probe_on(request: Request, node: Node) -> bool:
    choice = request.choice
    if request.arrived.pinned is None or choice is None:
        return False
    is_prefilled_here = choice.prefill is node and request.has_prefill_leg
    return is_prefilled_here or (choice.decode is node and request.has_decode_leg)
