"""Bugs of the router's core."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simulation.planting import method, never, no_effects_of
from splitserve.orchestrator.core.actions import Actions
from splitserve.orchestrator.core.deadlines import DeadlineQueue
from splitserve.orchestrator.core.effects import AnnounceDeath, AnswerError, CancelLeg
from splitserve.orchestrator.core.lifecycle import Phase
from splitserve.orchestrator.core.router_core import RouterCore

if TYPE_CHECKING:
    from simulation.planting import Plant


def _slot_is_kept(real: Any, core: RouterCore, request: Any) -> None:
    """A prefill leg ends without giving its slot back."""
    request.has_prefill_leg = False


def _blocks_are_kept(real: Any, core: RouterCore, request: Any) -> None:
    """A decode leg ends, and its blocks stay promised."""
    node = request.choice.decode
    promised = node.committed_blocks
    real(core, request)
    node.committed_blocks = promised


def _counted_twice(real: Any, core: RouterCore, request: Any, node: Any, blocks: int) -> None:
    """A decode leg is two."""
    real(core, request, node, blocks)
    node.decode_legs += 1


def _any_attempt(real: Any, core: RouterCore, request_id: str, attempt: int) -> Any:
    """The answer of a leg that was given up is taken for the present one's."""
    return core.requests.get(request_id)


def _tries_for_ever(real: Any, core: RouterCore, request: Any, now: float) -> Any:
    """Nobody remembers on which nodes a request has failed."""
    request.tried.clear()
    return real(core, request, now)


def _queues_without_bound(real: Any, core: RouterCore, event: Any, now: float) -> Any:
    """The queue takes everybody."""
    limits = core.limits
    core.limits = replace(limits, queue_limit_requests=10**6)
    effects = real(core, event, now)
    core.limits = limits
    return effects


def _told_twice(real: Any, core: RouterCore, *arguments: Any, **named: Any) -> Any:
    """A client is told of its error twice."""
    effects = real(core, *arguments, **named)
    return effects + [e for e in effects if isinstance(e, AnswerError)]


def late_prefill_death(real: Any, core: RouterCore, request: Any, now: float, reason: str) -> Any:
    """A prefill node that dies after its leg was answered gives the leg back again."""
    core._give_back_prefill(request)
    if request.phase is Phase.PREFILLING:
        request.phase = Phase.LANDING
    return []


BUGS: dict[str, tuple[Plant, int]] = {
    "a cancelled leg is not closed": (
        method(Actions, "_cancel_legs", no_effects_of(CancelLeg)),
        11,
    ),
    "deaths are not announced": (
        method(RouterCore, "_on_node_died", no_effects_of(AnnounceDeath)),
        19,
    ),
    "who was away does not hear of the dead": (
        method(RouterCore, "_on_node_joined", no_effects_of(AnnounceDeath)),
        26,
    ),
    "a prefill slot is not given back": (method(Actions, "_give_back_prefill", _slot_is_kept), 3),
    "a late death gives a leg back twice": (
        method(Actions, "release_prefill", late_prefill_death),
        71,
    ),
    "committed blocks are not given back": (
        method(Actions, "_give_back_decode", _blocks_are_kept),
        1,
    ),
    "a decode leg is counted twice": (method(Actions, "_commit_decode", _counted_twice), 5),
    "an old prefill leg is heard": (method(RouterCore, "_with_prefill_leg", _any_attempt), 86),
    "a failed node is tried for ever": (method(Actions, "_retry", _tries_for_ever), 622),
    "no deadline is armed": (method(DeadlineQueue, "arm", never), 75),
    "the queue has no bound": (
        method(RouterCore, "_on_request_arrived", _queues_without_bound),
        74,
    ),
    "a client is told twice": (method(Actions, "_end_with_error", _told_twice), 6),
}
"""By what is wrong: how to plant it, and a seed that finds it."""
