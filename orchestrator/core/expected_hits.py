"""How much of a prompt each node is expected to have already: from its own prefix cache, or from
the cache of its host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from splitserve.kv_transfer.prefix_marks import tokens_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from splitserve.orchestrator.core.events import RequestArrived
    from splitserve.orchestrator.core.membership import Node
    from splitserve.orchestrator.core.prefix_index import Held


class Hit(NamedTuple):
    """What one node need not compute of one prompt."""

    tokens: int = 0
    """In the router's count of the prompt's tokens."""
    own_tokens: int = 0
    """Of those, what the node has itself: nothing is loaded for them."""
    counted_tokens: int = 0
    """The same as ``tokens`` in the count of who has them."""


NO_HIT = Hit()
Hits = dict[str, Hit]
"""By incarnation, without those that have nothing."""
NO_HITS: Mapping[str, Hit] = {}


def cache_source(host: str) -> str:
    """The name in the index of a host's cache; no incarnation is named so."""
    return f"cache of {host}"


def expected_hits(
    found: Mapping[str, Held], arrived: RequestArrived, nodes: Iterable[Node]
) -> Mapping[str, Hit]:
    """What those nodes need not compute of the request's prompt, of which ``found`` is held."""
    if not found:
        return NO_HITS
    hits: Hits = {}
    own_hits: dict[Held, Hit] = {}
    """Many nodes have equally much."""
    for node in nodes:
        description = node.description
        own = found.get(description.incarnation)
        shared = found.get(cache_source(description.host)) if description.uses_cache else None
        if shared is None:
            if own is None:
                continue
            hit = own_hits.get(own)
            if hit is None:
                tokens = _tokens(own, arrived)
                hit = own_hits[own] = Hit(tokens, tokens, own.tokens)
            hits[description.incarnation] = hit
            continue
        own_tokens, shared_tokens = _tokens(own, arrived), _tokens(shared, arrived)
        more = own if own is not None and own_tokens >= shared_tokens else shared
        hits[description.incarnation] = Hit(max(own_tokens, shared_tokens), own_tokens, more.tokens)
    return hits


def _tokens(held: Held | None, arrived: RequestArrived) -> int:
    if held is None:
        return 0
    return tokens_at(held.marks - 1, arrived.prompt_bytes, arrived.prompt_tokens)
