"""How much of a prompt each node is expected to have already: from its own prefix cache, or from
the cache of its host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from splitserve.kv_transfer.prefix_marks import tokens_at
from splitserve.orchestrator.core.prefix_index import NOTHING_HELD

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from splitserve.orchestrator.core.events import RequestArrived
    from splitserve.orchestrator.core.membership import Node
    from splitserve.orchestrator.core.prefix_index import Held, PrefixIndex


class Hit(NamedTuple):
    """What one node need not compute of one prompt."""

    tokens: int = 0
    """In the router's count of the prompt's tokens."""
    own_tokens: int = 0
    """Of those, what the node has itself: nothing is loaded for them."""
    counted_tokens: int = 0
    """The same as ``tokens`` in the count of who has them."""


class Level(NamedTuple):
    """Who has the beginning of a prompt up to one mark."""

    gain: int
    """Prompt tokens before the mark."""
    holders: Mapping[str, int]
    """Sources; tokens as each counts them."""
    fresh: Collection[str]
    """Those of the holders that have no longer beginning, if they are few."""
    are_few: bool


FEW_HOLDERS = 32
"""So many are looked at one by one."""
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


class Known:
    """What the index says of one request's prompt, in either form; valid until the next report."""

    def __init__(self, prefixes: PrefixIndex, arrived: RequestArrived) -> None:
        self._prefixes = prefixes
        self._arrived = arrived
        self._held: Mapping[str, Held] | None = None
        self._levels: Sequence[Level] | None = None

    def hits(self, nodes: Iterable[Node]) -> Mapping[str, Hit]:
        """What each of those nodes is expected to have."""
        if self._held is None:
            marks = self._arrived.marks
            self._held = self._prefixes.longest(marks) if marks else NOTHING_HELD
        return expected_hits(self._held, self._arrived, nodes)

    @property
    def levels(self) -> Sequence[Level]:
        """The longest first, without those that nobody has who has no longer one."""
        if self._levels is None:
            arrived = self._arrived
            self._levels = list(_levels(self._prefixes.levels(arrived.marks), arrived))
        return self._levels


def _levels(
    found: Iterable[tuple[int, Mapping[str, int]]], arrived: RequestArrived
) -> Iterator[Level]:
    size, tokens = arrived.prompt_bytes, arrived.prompt_tokens
    longer: set[str] = set()
    known = 0
    """Holders of the level before: who has a beginning has the shorter ones too, except the few
    whose engines have dropped a block in the middle; they cost a guess.
    """
    for marks, holders in found:
        count = len(holders)
        if count == known:
            continue
        gain = tokens_at(marks - 1, size, tokens)
        if count - len(longer) <= FEW_HOLDERS:
            fresh = holders.keys() - longer
            longer |= fresh
            yield Level(gain, holders, fresh, True)
        else:
            yield Level(gain, holders, (), False)
        known = count


def hits_by_levels(levels: Sequence[Level], nodes: Iterable[Node]) -> Mapping[str, Hit]:
    """The same as ``expected_hits`` for a few nodes."""
    hits: Hits = {}
    for node in nodes:
        description = node.description
        own = _longest(levels, description.incarnation)
        shared = (
            _longest(levels, cache_source(description.host)) if description.uses_cache else None
        )
        if own is None and shared is None:
            continue
        own_tokens = own.gain if own is not None else 0
        more = shared if own is None or (shared is not None and shared.gain > own.gain) else own
        assert more is not None
        hits[description.incarnation] = Hit(more.gain, own_tokens, more.counted)
    return hits


class _Longest(NamedTuple):
    gain: int
    counted: int


def _longest(levels: Sequence[Level], source: str) -> _Longest | None:
    for gain, holders, _, _ in levels:
        if source in holders:
            return _Longest(gain, holders[source])
    return None


def _tokens(held: Held | None, arrived: RequestArrived) -> int:
    if held is None:
        return 0
    return tokens_at(held.marks - 1, arrived.prompt_bytes, arrived.prompt_tokens)
