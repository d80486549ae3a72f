"""What the engines hold, compared with what the core believes, and who owns every difference.

``find`` compares once: requests, their legs and transfers on one side, the latest report of each
node on the other. Much of what it finds is only under way, so ``Audit`` remembers since when each
finding has been seen, and a ``Difference`` is one that has lasted longer than its grace.

Blocks that only a prefix cache remembers are free for every engine, so they are never counted.
What the blocks of requests that are being computed should be the core does not know: blocks are
compared on engines that compute nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from splitserve.kv_transfer.holdings import LEASED, QUARANTINED, SENDS
from splitserve.orchestrator.agent.messages import is_of
from splitserve.orchestrator.core.lifecycle import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from splitserve.kv_transfer.holdings import Holding
    from splitserve.orchestrator.agent.messages import NodeState
    from splitserve.orchestrator.core.membership import Node
    from splitserve.orchestrator.core.requests import Request

AUDIT_INTERVAL_S = 1.0
"""Between two looks at all nodes."""
GRACE_S = 10.0
"""Longer than a report is old (up to a second) and an order takes: engines take orders only between
steps, and a step of a long prompt takes seconds on a CPU.
"""
QUARANTINE_GRACE_S = 2.0
"""A writer that runs fences within milliseconds; only one that does not is worth a line."""
NULL_BLOCKS = 1
"""Blocks that an engine never gives away: block 0."""
NAMED_LIMIT_REQUESTS = 3

ENDED = "ended"
MOVED = "moved"
UNKNOWN = "unknown"
QUARANTINE = "quarantined"
BLOCKS = "blocks"
REQUESTS = "requests"
LEG = "leg"
PROMISES = "promises"
SILENT = "silent"

REMEDIES = {
    ENDED: "nothing yet: it goes with the lease at the latest; after that restart the node",
    MOVED: "nothing yet: it goes with the lease at the latest; after that restart the node",
    UNKNOWN: "left by a router before this one: goes with the lease; after that restart the node",
    QUARANTINE: "nothing: its writer is killed after transfer.fence_timeout_s",
    BLOCKS: "restart the node, and report this",
    REQUESTS: "left by a router before this one, or restart the node",
    LEG: "nothing: the request ends with router.first_token_deadline_s at the latest",
    PROMISES: "restart the router, and report this",
    SILENT: "look at the node's log; its engine or agent is stopped, hung or cut off",
}
"""What to do about each kind."""


class Difference(msgspec.Struct, frozen=True):
    """Something that an engine holds and the core does not know of, or the other way round."""

    node: str
    kind: str
    """One of ``REMEDIES``."""
    owner: str
    """The request, or requests, that it belongs or belonged to; the node itself if none is known.
    """
    blocks: int
    since_s: float
    explanation: str
    remedy: str


class EndedRequest(NamedTuple):
    """What is remembered of a request that is over."""

    at: float
    outcome: str


@dataclass(frozen=True)
class Finding:
    """A difference as of now, which may be gone in a moment."""

    node: str
    incarnation: str
    kind: str
    owner: str
    blocks: int
    explanation: str
    grace_s: float = GRACE_S
    subject: str = ""
    """What it is about, beside the owner: a transfer id."""

    @property
    def key(self) -> tuple[str, str, str]:
        """The same for the same thing at every look."""
        return self.incarnation, self.kind, self.subject


class Audit:
    """The findings of the latest look, and since when each has been there."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []
        self._since: dict[tuple[str, str, str], float] = {}
        self.due = 0.0
        """When to look again."""

    def note(self, findings: Iterable[Finding], now: float) -> None:
        """What a look has found; everything else is over."""
        self._findings = list(findings)
        self._since = {f.key: self._since.get(f.key, now) for f in self._findings}
        self.due = now + AUDIT_INTERVAL_S

    def differences(self, now: float) -> list[Difference]:
        """What has lasted longer than its grace, longest first."""
        lasting = [
            Difference(
                finding.node,
                finding.kind,
                finding.owner,
                finding.blocks,
                now - self._since[finding.key],
                finding.explanation,
                REMEDIES[finding.kind],
            )
            for finding in self._findings
            if now - self._since[finding.key] > finding.grace_s
        ]
        return sorted(lasting, key=lambda difference: -difference.since_s)


def find(
    nodes: Iterable[Node],
    requests: Mapping[str, Request],
    ended: Mapping[str, EndedRequest],
    lease_s: float,
    now: float,
) -> Iterator[Finding]:
    """Every difference between the core and the latest reports."""
    legs_on = _legs_by_node(requests.values())
    for node in nodes:
        legs = legs_on.get(node, [])
        yield from _promises(node, legs)
        if not node.is_connected or node.is_silent:
            yield _finding(
                node,
                SILENT,
                node.name,
                f"{node.name} says nothing, so what it holds cannot be compared",
            )
        elif node.state is not None:
            for holding in node.state.holdings:
                if _is_anothers(node, holding.transfer_id):
                    continue
                yield from _transfer(node, holding, requests, ended, lease_s, now)
            yield from _counts(node, node.state, legs)


def _transfer(
    node: Node,
    holding: Holding,
    requests: Mapping[str, Request],
    ended: Mapping[str, EndedRequest],
    lease_s: float,
    now: float,
) -> Iterator[Finding]:
    """Whether a transfer that the engine holds belongs to a request that is there for it."""
    owner = holding.transfer_id.rpartition(".")[0] or holding.transfer_id
    request, past = requests.get(owner), ended.get(owner)
    what = f"the engine {holding.side} for transfer {holding.transfer_id} ({holding.state})"
    if request is not None and _belongs(request, node, holding):
        if holding.state != QUARANTINED:
            return
        kind, why = QUARANTINE, f"request {owner} waits for it"
    elif request is not None:
        kind, why = MOVED, f"request {owner} does not need it any more"
    elif past is not None:
        kind = ENDED
        why = f"request {owner} ended {now - past.at:.0f} s ago ({past.outcome})"
    else:
        kind, why = UNKNOWN, f"no request {owner} is known"
    grace_s = GRACE_S
    if holding.state == QUARANTINED:
        kind, grace_s = QUARANTINE, QUARANTINE_GRACE_S
        what = f"its writer {holding.peer} has not fenced transfer {holding.transfer_id}"
    elif holding.state == LEASED:
        grace_s += lease_s
    yield _finding(
        node,
        kind,
        owner,
        f"{what}; {why}",
        blocks=holding.blocks,
        grace_s=grace_s,
        subject=f"{holding.transfer_id} {holding.side} {holding.request_id}",
    )


def _is_anothers(node: Node, transfer_id: str) -> bool:
    """Whether a router that is there, too, keeps the books of that transfer."""
    routers = node.others.routers if node.others is not None else ()
    return any(is_of(transfer_id, router.name) for router in routers)


def _belongs(request: Request, node: Node, holding: Holding) -> bool:
    """Whether the request still needs what the engine holds."""
    choice = request.choice
    if choice is None or request.transfer_id != holding.transfer_id:
        return False
    if holding.side == SENDS:
        is_wanted = request.has_prefill_leg or request.phase in (Phase.PREFILLING, Phase.LANDING)
        return is_wanted and choice.prefill is node
    return request.has_decode_leg and choice.decode is node


def _counts(node: Node, state: NodeState, legs: list[Request]) -> Iterator[Finding]:
    """Whether the engine's requests and blocks are as many as they should be."""
    computed = state.running + state.waiting
    expected = [r for r in legs if _must_be_computed(r, node)]
    if computed < len(expected):
        yield _finding(
            node,
            LEG,
            _named(expected),
            f"{len(expected)} legs are out to the engine, which computes {computed} requests",
            blocks=node.committed_blocks,
        )
    are_single = not any(r.arrived.alone_because for r in legs)
    of_others = 0
    if node.others is not None:
        of_others = node.others.prefill_legs + node.others.decode_legs
    if computed > len(legs) + of_others and (are_single or not legs):
        yield _finding(
            node,
            REQUESTS,
            _named(legs) or node.name,
            f"the engine computes {computed} requests, {len(legs)} legs are out to it",
        )
    used = (state.total_blocks or node.description.total_blocks) - NULL_BLOCKS - state.free_blocks
    received = sum(h.blocks for h in state.holdings if h.side != SENDS)
    unowned = used - state.leased_blocks - received
    if not computed and not legs and unowned > 0 and not state.holdings_left_out:
        yield _finding(
            node,
            BLOCKS,
            node.name,
            f"{used} blocks are in use and {used - unowned} are held for transfers, though the "
            "engine computes nothing",
            blocks=unowned,
        )


def _promises(node: Node, legs: list[Request]) -> Iterator[Finding]:
    """Whether what the core counts on a node is what its requests have there."""
    held: Counter[str] = Counter()
    for request in legs:
        choice = request.choice
        assert choice is not None
        if request.has_prefill_leg and choice.prefill is node:
            held.update(prefill_legs=1, blocks=choice.prefill_blocks)
        if request.has_decode_leg and choice.decode is node:
            held.update(decode_legs=1, blocks=choice.decode_blocks)
    right = (held["prefill_legs"], held["decode_legs"], held["blocks"])
    counted = (node.prefill_legs, node.decode_legs, node.committed_blocks)
    if counted != right:
        yield _finding(
            node,
            PROMISES,
            _named(legs) or node.name,
            f"the router counts (prefill legs, decode legs, blocks) {counted} on the node, its "
            f"requests have {right}",
            blocks=node.committed_blocks - held["blocks"],
        )


def _legs_by_node(requests: Iterable[Request]) -> dict[Node, list[Request]]:
    """The requests that have a leg out to each node."""
    found: dict[Node, list[Request]] = {}
    for request in requests:
        choice = request.choice
        if choice is None:
            continue
        if request.has_decode_leg:
            found.setdefault(choice.decode, []).append(request)
        if request.has_prefill_leg and choice.prefill is not None:
            found.setdefault(choice.prefill, []).append(request)
    return found


def _must_be_computed(request: Request, node: Node) -> bool:
    """Whether the leg's engine request cannot be over: an answer that has begun to come may be
    complete in the engine, and wait for its reader.
    """
    choice = request.choice
    assert choice is not None
    if request.has_prefill_leg and choice.prefill is node:
        return True
    return request.phase not in (Phase.STREAMING, Phase.TAIL)


def _named(requests: list[Request]) -> str:
    names = [request.id for request in requests[:NAMED_LIMIT_REQUESTS]]
    more = len(requests) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _finding(
    node: Node,
    kind: str,
    owner: str,
    explanation: str,
    *,
    blocks: int = 0,
    grace_s: float = GRACE_S,
    subject: str = "",
) -> Finding:
    incarnation = node.description.incarnation
    return Finding(node.name, incarnation, kind, owner, blocks, explanation, grace_s, subject)
