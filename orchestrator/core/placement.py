"""Where a request goes: split over a pair or whole to a decode node, and which nodes.

Nothing here changes a node; the answer is a choice, or the resource that is missing.

A prompt goes where its beginning is, but never to a node that is busier than another one by more
tokens than that saves: nodes are compared by the prompt tokens that they hold less those that they
need not compute.

A node whose breaker is shut gets nothing while another one can be waited for; nodes without any
alternative are tried at the rate that the breaker bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

from splitserve.orchestrator.core.breaker import GOOD, SHUT, TO_BE_TRIED
from splitserve.orchestrator.core.expected_hits import NO_HIT, NO_HITS, Hit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from splitserve.orchestrator.core.effects import Leg
    from splitserve.orchestrator.core.membership import Node

Missing = Literal["prefill_slot", "prefill_node", "decode_blocks", "decode_node", "decode_headroom"]


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """The bounds and the policy that placement keeps."""

    prefill_ahead_requests: int = 1
    """Prefill legs beside the running one that a prefill node may hold."""
    prefill_batch_tokens: int = 0
    """Prompt tokens that a prefill node may hold whatever the number of legs: short prompts are
    computed together in one step.
    """
    min_uncached_tokens: int = 0
    """Prompts of which a decode node would compute less are not split; 0 splits every prompt that
    can be split.
    """
    default_output_tokens: int = 512
    """Tokens reserved for an answer whose length the client did not limit."""
    own_prompt_limit_tokens: int = 16_384
    """Prompt tokens that a decode node computes at a time for want of a prefill node."""
    prefix_routing: bool = True
    """Whether it matters where the beginning of a prompt is cached."""


class Choice(NamedTuple):
    """The nodes for one attempt; ``prefill`` is None for a request that goes to a decode node
    alone.
    """

    decode: Node
    decode_blocks: int
    prefill: Node | None = None
    prefill_blocks: int = 0
    decode_hit: Hit = NO_HIT
    """What the decode node need not compute, if it computes the prompt."""
    prefill_hit: Hit = NO_HIT
    """What the prefill node need not compute."""


def decision(
    alone_because: str,
    prompt_tokens: int,
    limits: PlacementLimits,
    has_prefill_node: bool,
    cached_tokens: int = 0,
) -> str:
    """``split``, or ``alone_`` and why; ``cached_tokens`` need not be computed on the decode node
    that was chosen.
    """
    if alone_because:
        return "alone_not_splittable"
    if prompt_tokens < limits.min_uncached_tokens:
        return "alone_short_prompt"
    if prompt_tokens - cached_tokens < limits.min_uncached_tokens:
        return "alone_cached_prefix"
    if not has_prefill_node:
        return "alone_no_prefill_node"
    return "split"


def choose_decode(
    nodes: Iterable[Node],
    tokens: int,
    tried: Collection[str],
    now: float,
    hits: Mapping[str, Hit] = NO_HITS,
) -> tuple[Node, int] | Missing:
    """The decode node with the fewest requests among those whose free blocks cover ``tokens``, and
    the blocks; with ``hits`` the one with the fewest tokens, promised or to be computed. A request
    that has failed on ``tried`` is not used to try another doubtful node.
    """
    best: Node | None = None
    best_key: tuple[int, ...] | None = None
    missing: Missing = "decode_node"
    shut: list[Node] = []
    for node in nodes:
        if tried and node.description.incarnation in tried:
            continue
        breaker = node.decode_breaker
        standing = GOOD if breaker.is_clean else breaker.standing(now)
        if standing == SHUT or (standing == TO_BE_TRIED and tried):
            shut.append(node)
            continue
        missing = "decode_blocks"
        legs, committed = decode_load(node)
        key: tuple[int, ...] = (standing, legs, node.chosen_at)
        if hits:
            hit = hits.get(node.description.incarnation, NO_HIT)
            promised = committed * node.description.block_tokens
            key = (standing, promised - hit.tokens, -hit.own_tokens, *key[1:])
        if best_key is not None and key >= best_key:
            continue
        if has_room(node, tokens):
            best, best_key = node, key
    if missing == "decode_node" and shut:
        missing = "decode_blocks"
        best = _to_try_anyway(shut, "decode", tokens, now)
    return missing if best is None else (best, best.blocks_for(tokens))


def choose_prefill(
    nodes: Iterable[Node],
    tokens: int,
    limits: PlacementLimits,
    now: float,
    hits: Mapping[str, Hit] = NO_HITS,
    *,
    ignores_slots: bool = False,
) -> tuple[Node, int] | Missing:
    """The prefill node with the fewest legs among those with a free slot and room for ``tokens``,
    and the blocks; with ``hits`` the one with the fewest tokens to compute, this prompt's included.
    ``prefill_node`` is missing when the breakers of all are shut.

    ``ignores_slots``: a decode node has reserved pages already, so the prompt need not wait for its
    turn; since another node has failed it, it is not used to try a doubtful one.
    """
    best: Node | None = None
    best_key: tuple[int, ...] | None = None
    missing: Missing = "prefill_node"
    shut: list[Node] = []
    for node in nodes:
        breaker = node.prefill_breaker
        standing = GOOD if breaker.is_clean else breaker.standing(now)
        if standing == SHUT or (standing == TO_BE_TRIED and ignores_slots):
            shut.append(node)
            continue
        missing = "prefill_slot"
        hit = hits.get(node.description.incarnation, NO_HIT) if hits else NO_HIT
        if not (ignores_slots or has_slot(node, tokens, hit.tokens, limits)):
            continue
        legs, load = prefill_load(node)
        key: tuple[int, ...] = (standing, legs, node.chosen_at)
        if hits:
            key = (standing, load - hit.tokens, -hit.own_tokens, *key[1:])
        if best_key is not None and key >= best_key:
            continue
        if has_room(node, tokens):
            best, best_key = node, key
    if missing == "prefill_node" and shut:
        best = _to_try_anyway(shut, "prefill", tokens, now)
    return missing if best is None else (best, best.blocks_for(tokens))


def _to_try_anyway(nodes: Iterable[Node], leg: Leg, tokens: int, now: float) -> Node | None:
    """Of nodes that are shut, the one chosen longest ago of those that may be tried now."""
    may = [
        node for node in nodes if node.breaker(leg).may_try_anyway(now) and has_room(node, tokens)
    ]
    return min(may, key=attrgetter("chosen_at"), default=None)


class Least(NamedTuple):
    """The best that any node of a pool whose breaker is clean has to offer in each respect."""

    load_tokens: int
    legs: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class DecodeWant:
    """Which nodes ``choose_decode`` may choose of those whose breakers are clean."""

    tokens: int
    tried: Collection[str]

    def may(self, node: Node, gain: int) -> bool:
        """Whether it may choose this one; what it gains does not matter."""
        if self.tried and node.description.incarnation in self.tried:
            return False
        return has_room(node, self.tokens)

    def is_hopeless(self, least: Least, blocks: int, gain: int) -> bool:
        """Whether it can choose none, when each would need so many blocks."""
        return least.legs > 0 and least.free_blocks < blocks


@dataclass(frozen=True, slots=True)
class PrefillWant:
    """Which nodes ``choose_prefill`` may choose of those whose breakers are clean."""

    tokens: int
    limits: PlacementLimits

    def may(self, node: Node, gain: int) -> bool:
        """Whether it may choose this one, which need not compute ``gain`` of the prompt."""
        return has_slot(node, self.tokens, gain, self.limits) and has_room(node, self.tokens)

    def is_hopeless(self, least: Least, blocks: int, gain: int) -> bool:
        """Whether it can choose none, when each would need so many blocks and none gains more."""
        if least.legs > 0 and least.free_blocks < blocks:
            return True
        if least.legs <= self.limits.prefill_ahead_requests:
            return False
        return least.load_tokens + self.tokens - gain > self.limits.prefill_batch_tokens


def prefill_load(node: Node) -> tuple[int, int]:
    """(prefill legs, their tokens to compute) of all routers."""
    others = node.others
    if others is None:
        return node.prefill_legs, node.prefill_tokens
    return node.prefill_legs + others.prefill_legs, node.prefill_tokens + others.prefill_tokens


def decode_load(node: Node) -> tuple[int, int]:
    """(decode legs, committed blocks) of all routers."""
    others = node.others
    if others is None:
        return node.decode_legs, node.committed_blocks
    return node.decode_legs + others.decode_legs, node.committed_blocks + others.blocks


def has_slot(node: Node, tokens: int, gain: int, limits: PlacementLimits) -> bool:
    """Whether the prompt's turn on a prefill node has come: few legs are there, or all that there
    is to compute fits in one step. A slot is left to another router that goes first.
    """
    legs, load = prefill_load(node)
    left = 0
    if node.others is not None and not node.others.is_first_for_slot(node.prefill_legs):
        left = 1
    if legs + left <= limits.prefill_ahead_requests:
        return True
    return load + tokens - gain + left * tokens <= limits.prefill_batch_tokens


def has_room(node: Node, tokens: int) -> bool:
    """Whether so many tokens may be placed there: they fit, or the node is idle."""
    blocks, free = node.blocks_for(tokens), node.free_blocks
    if node.others is None:
        return free >= blocks or is_idle(node)
    others, committed = node.others, node.committed_blocks
    left = node.blocks_for(others.left_tokens(committed))
    fits = free >= blocks + left and others.is_part(blocks, free, committed)
    return fits or is_idle(node)


def is_idle(node: Node) -> bool:
    """Whether nothing that a router placed, and nothing that the engine holds for a peer, is on the
    node.

    An idle node takes any request: if it is too large the engine says so better than the router
    could.
    """
    busy = node.state is not None and (
        node.state.leased_blocks or node.state.running or node.state.waiting
    )
    others = node.others
    is_used = others is not None and (others.prefill_legs or others.decode_legs)
    return not (node.prefill_legs or node.decode_legs or busy or is_used)
