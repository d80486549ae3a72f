"""Where a request goes: split over a pair or whole to a decode node, and which nodes.

Nothing here changes a node; the answer is a choice, or the resource that is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from splitserve.orchestrator.core.membership import Node

Missing = Literal["prefill_slot", "decode_blocks", "decode_node"]


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
    """Shorter prompts are not split; 0 splits every prompt that can be split."""
    default_output_tokens: int = 512
    """Tokens reserved for an answer whose length the client did not limit."""
    cooldown_s: float = 1.0
    """Seconds for which a node whose leg broke is the last choice."""


class Choice(NamedTuple):
    """The nodes for one attempt; ``prefill`` is None for a request that goes to a decode node
    alone.
    """

    decode: Node
    decode_blocks: int
    prefill: Node | None = None
    prefill_blocks: int = 0


def decision(
    alone_because: str, prompt_tokens: int, limits: PlacementLimits, has_prefill_node: bool
) -> str:
    """``split``, or ``alone_`` and why."""
    if alone_because:
        return "alone_not_splittable"
    if prompt_tokens < limits.min_uncached_tokens:
        return "alone_short_prompt"
    if not has_prefill_node:
        return "alone_no_prefill_node"
    return "split"


def choose_decode(
    nodes: Iterable[Node], tokens: int, tried: Container[str], now: float
) -> tuple[Node, int] | Missing:
    """The decode node with the fewest requests among those whose free blocks cover ``tokens``, and
    the blocks.
    """
    best: Node | None = None
    best_key: tuple[bool, int, int] | None = None
    missing: Missing = "decode_node"
    for node in nodes:
        if node.description.incarnation in tried:
            continue
        missing = "decode_blocks"
        if node.free_blocks < node.blocks_for(tokens) and not is_idle(node):
            continue
        key = (node.cooling_until > now, node.decode_legs, node.chosen_at)
        if best_key is None or key < best_key:
            best, best_key = node, key
    return missing if best is None else (best, best.blocks_for(tokens))


def choose_prefill(
    nodes: Iterable[Node],
    tokens: int,
    limits: PlacementLimits,
    now: float,
    *,
    ignores_slots: bool = False,
) -> tuple[Node, int] | Missing:
    """The prefill node with the fewest legs among those with a free slot and room for ``tokens``,
    and the blocks. ``ignores_slots``: a decode node has reserved pages already, so the prompt need
    not wait for its turn.
    """
    best: Node | None = None
    best_key: tuple[bool, int, int] | None = None
    for node in nodes:
        fits_in_a_step = node.prefill_tokens + tokens <= limits.prefill_batch_tokens
        has_slot = ignores_slots or node.prefill_legs <= limits.prefill_ahead_requests
        if not (has_slot or fits_in_a_step):
            continue
        if node.free_blocks < node.blocks_for(tokens) and not is_idle(node):
            continue
        key = (node.cooling_until > now, node.prefill_legs, node.chosen_at)
        if best_key is None or key < best_key:
            best, best_key = node, key
    return "prefill_slot" if best is None else (best, best.blocks_for(tokens))


def is_idle(node: Node) -> bool:
    """Whether nothing that the core placed, and nothing that the engine holds for a peer, is on the
    node.

    An idle node takes any request: if it is too large the engine says so better than the router
    could.
    """
    busy = node.state is not None and (
        node.state.leased_blocks or node.state.running or node.state.waiting
    )
    return not (node.prefill_legs or node.decode_legs or busy)
