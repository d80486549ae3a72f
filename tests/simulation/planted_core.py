"""Bugs of the router's core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulation.planting import is_false, method, never, no_effects_of
from splitserve.kv_transfer.held_prefixes import HeldPrefixes
from splitserve.orchestrator.core import actions
from splitserve.orchestrator.core.actions import Actions
from splitserve.orchestrator.core.admission import Admission
from splitserve.orchestrator.core.deadlines import DeadlineQueue
from splitserve.orchestrator.core.draining import Draining
from splitserve.orchestrator.core.effects import AnnounceDeath, AnswerError, CancelLeg
from splitserve.orchestrator.core.fencing import Fencing
from splitserve.orchestrator.core.flipping import Flipping
from splitserve.orchestrator.core.lifecycle import Phase
from splitserve.orchestrator.core.membership import Membership, Node
from splitserve.orchestrator.core.prefix_index import PrefixIndex
from splitserve.orchestrator.core.recovery import Recovery
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


def _headroom_is_kept(real: Any, core: RouterCore, request: Any) -> None:
    """A decode node counts as computing a prompt for ever."""
    request.own_prompt_tokens = 0


def _counted_twice(real: Any, core: RouterCore, request: Any, node: Any, *more: Any) -> None:
    """A decode leg is two."""
    real(core, request, node, *more)
    node.decode_legs += 1


def _any_attempt(real: Any, core: RouterCore, request_id: str, attempt: int) -> Any:
    """The answer of a leg that was given up is taken for the present one's."""
    return core.requests.get(request_id)


def _tries_for_ever(real: Any, core: RouterCore, request: Any, now: float) -> Any:
    """Nobody remembers on which nodes a request has failed."""
    request.tried.clear()
    return real(core, request, now)


def _no_bound(real: Any, admission: Admission, request: Any, now: float) -> list[Any]:
    """Who must wait may wait, however many wait already."""
    if not admission.queue.size:
        return list(real(admission, request, now))
    admission._enter_queue(request, now)
    return []


def _deaths_untold(patch: Any) -> None:
    """No engine hears of the death of another one, also not when it waits for its fence."""
    method(RouterCore, "_on_node_died", no_effects_of(AnnounceDeath))(patch)
    method(Fencing, "weigh", no_effects_of(AnnounceDeath))(patch)


def _away_untold(patch: Any) -> None:
    """Who was away does not hear of the dead, also not when it waits for their fence."""
    method(RouterCore, "_on_node_joined", no_effects_of(AnnounceDeath))(patch)
    method(Fencing, "weigh", no_effects_of(AnnounceDeath))(patch)


def _continued_always(real: Any, core: Recovery, request: Any) -> bool:
    """Streams go on elsewhere also where that is not exact."""
    return core.has_untried_node(request)


def _no_patience(real: Any, core: Draining, node: Any, restarts: bool, due: float) -> None:
    """A drain is over when it begins."""
    real(core, node, restarts, 0.0)


def _keeps_its_work(patch: Any) -> None:
    """A node that drains is chosen as before."""
    patch.setattr(Node, "is_usable", property(lambda n: n.is_connected and not n.is_silent))


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


def _never_anew(real: Any, held: HeldPrefixes, *, from_start: bool) -> Any:
    """An engine tells another router only what is new."""
    return real(held, from_start=False)


def _old_work_goes_on(real: Any, core: Flipping, event: Any, now: float) -> Any:
    """A node that has changed its role is still chosen for the old one."""
    chosen = dict(core.membership._pools)
    effects = real(core, event, now)
    core.membership._pools.update(chosen)
    return effects


def _sends_to_itself(patch: Any) -> None:
    """A node that has changed its role is taken for both ends of a transfer."""
    patch.setattr(actions, "_but", lambda one, nodes: nodes)


BUGS: dict[str, tuple[Plant, int]] = {
    "a cancelled leg is not closed": (
        method(Actions, "_cancel_legs", no_effects_of(CancelLeg)),
        1,
    ),
    "deaths are not announced": (
        _deaths_untold,
        18,
    ),
    "who was away does not hear of the dead": (
        _away_untold,
        372,
    ),
    "a prefill slot is not given back": (method(Actions, "_give_back_prefill", _slot_is_kept), 1),
    "a late death gives a leg back twice": (
        method(Actions, "release_prefill", late_prefill_death),
        41,
    ),
    "committed blocks are not given back": (
        method(Actions, "_give_back_decode", _blocks_are_kept),
        0,
    ),
    "headroom is not given back": (method(Actions, "_has_computed", _headroom_is_kept), 0),
    "a decode leg is counted twice": (method(Actions, "_commit_decode", _counted_twice), 0),
    "an old prefill leg is heard": (method(RouterCore, "_with_prefill_leg", _any_attempt), 38),
    "a failed node is tried for ever": (method(Actions, "_retry", _tries_for_ever), 66),
    "no deadline is armed": (method(DeadlineQueue, "arm", never), 5),
    "the waiting queue has no bound": (method(Admission, "admit", _no_bound), 0),
    "a stream goes on where it must not": (
        method(Recovery, "_can_continue", _continued_always),
        50,
    ),
    "marks of a lost node are kept": (method(PrefixIndex, "drop", never), 11),
    "a new router is told half": (method(HeldPrefixes, "report", _never_anew), 15),
    "a flipped node gets old work": (
        method(Flipping, "_on_flip_requested", _old_work_goes_on),
        3,
    ),
    "a missed role is not told again": (method(Flipping, "_hear_role", never), 23),
    "a flipped node sends to itself": (_sends_to_itself, 23),
    "a client is told twice": (method(Actions, "_end_with_error", _told_twice), 0),
}
"""By what is wrong: how to plant it, and a seed that finds it."""

DRAIN_BUGS: dict[str, tuple[Plant, int]] = {
    "a drain is not patient": (method(Draining, "_begin_drain", _no_patience), 6),
    "a node that restarts is not awaited": (method(Membership, "awaits", is_false), 0),
    "a node that drains gets new work": (_keeps_its_work, 16),
}
"""The same, for the seeds in which nodes only drain and restart: a request fails."""
