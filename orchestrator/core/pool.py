"""The usable nodes of one role, and the few of them among which a choice has to be made.

In a small pool that is all of them. In a large one most nodes need not be looked at: of nodes that
have equally much of a prompt, only the one that stands first in the ranking can be chosen. So each
*level* of what is held (``PrefixIndex.levels``) gives one candidate, and from the longest level
down the search ends where nothing that is less loaded could make up for what it lacks.

The candidates contain the node that a look at all nodes would choose. There is one exception: of
nodes that are equally loaded and gain equally much by their hosts' caches, the one that has most
itself is chosen, and beyond the first ``TIES_LIMIT_NODES`` of them that is not looked at: what it
decides is only which part comes from the node's own cache and which from its host's.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from splitserve.orchestrator.core.expected_hits import NO_HITS, cache_source, hits_by_levels
from splitserve.orchestrator.core.placement import Least, decode_load, prefill_load
from splitserve.orchestrator.core.ranking import Place, Ranking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from splitserve.orchestrator.core.expected_hits import Hit, Known, Level
    from splitserve.orchestrator.core.membership import Node
    from splitserve.orchestrator.core.placement import DecodeWant, PrefillWant

    May = Callable[[Node, int], bool]
    """Whether a node can take a prompt of which it need not compute so many tokens; one that can is
    still one that can when it has more.
    """
    Want = DecodeWant | PrefillWant

DECODE = "decode"
SMALL_POOL_NODES = 32
"""A look at all of so many nodes is faster than keeping them in order."""
UNABLE_LIMIT_NODES = 8
"""How many of those that may not take the prompt are named when none may."""
TIES_LIMIT_NODES = 32
STEP_COST = 4
"""A step through the ranking takes as long as so many looks at who has something."""


class _Best(NamedTuple):
    """The best candidate so far; compared as a tuple."""

    net: int
    """Its load less what it gains."""
    lacking: int
    """Less is better: minus what it has itself."""
    place: Place


class Pool:
    """Nodes in the order in which they became known. Whoever changes what is counted on one, by
    this router or others, its free blocks or its breakers, says so (``touch``); when one comes,
    goes or changes its role there is a new pool.
    """

    def __init__(self, role: str, nodes: list[Node]) -> None:
        self.nodes = nodes
        """Read only."""
        self._is_decode = role == DECODE
        self._touched: set[Node] = set()
        self._serials: dict[Node, int] = {}
        self._by_load = Ranking()
        """By tokens, for prompts that somebody has the beginning of."""
        self._by_legs = Ranking()
        self._by_room = Ranking()
        """The most free blocks first."""
        self._sizes: set[tuple[int, int, int]] = set()
        """What the blocks follow from that a prompt takes; of one size mostly."""
        self._doubtful: dict[Node, None] = {}
        """In no ranking: where they stand depends on the time."""
        self._sources: dict[Node, tuple[str, str]] = {}
        """A node's own, and its host's cache, "" for none."""
        self._nodes_by_source: dict[str, list[Node]] = {}

    def touch(self, node: Node) -> None:
        """What is counted on the node, its free blocks or one of its breakers has changed."""
        self._touched.add(node)

    def among(self, known: Known, want: Want) -> tuple[list[Node], Mapping[str, Hit]]:
        """The nodes among which to choose, in the order in which they became known, and what they
        (and perhaps others) have of the prompt.
        """
        if len(self.nodes) <= SMALL_POOL_NODES:
            return self.nodes, known.hits(self.nodes)
        self._refresh()
        holder = self._holder(known.levels)
        if holder is None:
            return self._candidates((), want), NO_HITS
        nodes = self._candidates(known.levels, want)
        return nodes, hits_by_levels(known.levels, (*nodes, holder))

    def _candidates(self, levels: Sequence[Level], want: Want) -> list[Node]:
        """Those whose breakers are not clean, and of the others one that may take the prompt, or
        else some that may not.
        """
        best: Node | None = None
        if not self._is_hopeless(levels, want):
            best = self._best(levels, want.may) if levels else _first(self._by_legs, want.may)
        if best is not None:
            found = [best]
        else:
            found = [place.node for place in self._by_legs.places[:UNABLE_LIMIT_NODES]]
        if self._doubtful:
            found += self._doubtful
            found.sort(key=self._serials.__getitem__)
        return found

    def _holder(self, levels: Sequence[Level]) -> Node | None:
        """A node that has something of the prompt; looks for the shortest beginning only, without
        which the rest is of little use.
        """
        if not levels:
            return None
        holders, nodes = levels[-1].holders, self._nodes_by_source
        if len(holders) < len(nodes):
            source = next((source for source in holders if source in nodes), None)
        else:
            source = next((source for source in nodes if source in holders), None)
        return None if source is None else nodes[source][0]

    def _is_hopeless(self, levels: Sequence[Level], want: Want) -> bool:
        """Whether a glance shows that no node whose breaker is clean may take the prompt."""
        roomiest = self._by_room.places
        if not roomiest:
            return True
        blocks = roomiest[0].node.blocks_for(want.tokens) if len(self._sizes) == 1 else 0
        least = Least(self._by_load.places[0].load, self._by_legs.places[0].legs, -roomiest[0].load)
        return want.is_hopeless(least, blocks, levels[0].gain if levels else 0)

    # Keeping the rankings

    def _refresh(self) -> None:
        if not self._serials:
            self._begin()
        for node in self._touched:
            if node in self._serials:
                self._rank(node)
        self._touched.clear()

    def _begin(self) -> None:
        for serial, node in enumerate(self.nodes):
            self._serials[node] = serial
            description = node.description
            cache = cache_source(description.host) if description.uses_cache else ""
            self._sizes.add(
                (description.block_tokens, description.max_model_len, description.total_blocks)
            )
            self._sources[node] = own, _ = description.incarnation, cache
            self._nodes_by_source.setdefault(own, []).append(node)
            if cache:
                self._nodes_by_source.setdefault(cache, []).append(node)
            self._rank(node)

    def _rank(self, node: Node) -> None:
        if self._is_decode:
            breaker, (legs, committed) = node.decode_breaker, decode_load(node)
            load = committed * node.description.block_tokens
        else:
            breaker, (legs, load) = node.prefill_breaker, prefill_load(node)
        if breaker.is_clean:
            self._doubtful.pop(node, None)
            serial = self._serials[node]
            self._by_load.put(Place(load, legs, node.chosen_at, serial, node))
            self._by_legs.put(Place(legs, legs, node.chosen_at, serial, node))
            self._by_room.put(Place(-node.free_blocks, legs, node.chosen_at, serial, node))
        else:
            self._doubtful[node] = None
            self._by_load.remove(node)
            self._by_legs.remove(node)
            self._by_room.remove(node)

    # Looking for the best

    def _best(self, levels: Sequence[Level], may: May) -> Node | None:
        """Of the nodes whose breakers are clean, the one with the least load less what it gains."""
        able = _Able(self._by_load.places, may, levels[0].gain)
        best: _Best | None = None
        least = able.least_load()
        if least is None:
            return None
        for number, level in enumerate(levels):
            if best is not None and best.net + level.gain < least:
                break
            if not level.are_few:
                best, is_done = self._first_of_many(levels, number, able, best)
                if is_done:
                    continue
            few = level.fresh if level.are_few else level.holders
            best = self._best_of(few, levels, number, may, best)
        for place in able.within(best.net if best is not None else None):
            if may(place.node, 0):
                best = _better(best, _Best(place.load, 0, place))
                break
        return best.place.node if best is not None else None

    def _best_of(
        self,
        sources: Iterable[str],
        levels: Sequence[Level],
        number: int,
        may: May,
        best: _Best | None,
    ) -> _Best | None:
        """Looks at each of those sources, which have what the level of that number gives."""
        gain = levels[number].gain
        nodes_of, places = self._nodes_by_source, self._by_load.by_node
        most = inf if best is None else best.net + gain
        for source in sources:
            for node in nodes_of.get(source, ()):
                place = places.get(node)
                if place is None or place.load > most or not may(node, gain):
                    continue
                own, _ = self._sources[node]
                has = gain if source == own else _own_gain(own, levels, number)
                best = _better(best, _Best(place.load - gain, -has, place))
                most = best.net + gain
        return best

    def _first_of_many(
        self, levels: Sequence[Level], number: int, able: _Able, best: _Best | None
    ) -> tuple[_Best | None, bool]:
        """Goes through the ranking until it meets one that has it itself; False when that takes
        longer than a look at each that has it: they are busy, or nodes of the other pool.
        """
        gain, holders, _, _ = levels[number]
        patience, ties = len(holders) // STEP_COST, 0
        places = able.within(best.net + gain if best is not None else None)
        for looked_at, place in enumerate(places):
            if best is not None and place.load > best.net + gain:
                break
            if looked_at > patience:
                return best, False
            own, cache = self._sources[place.node]
            if own in holders:
                if able.may(place.node, gain):
                    return _better(best, _Best(place.load - gain, -gain, place)), True
            elif cache in holders and ties < TIES_LIMIT_NODES and able.may(place.node, gain):
                ties += 1
                lacking = -_own_gain(own, levels, number)
                best = _better(best, _Best(place.load - gain, lacking, place))
        return best, True


class _Able:
    """The places of nodes that may take the prompt if they gain all that can be gained; found on
    the way, and each looked at once.
    """

    def __init__(self, places: Sequence[Place], may: May, most_gain: int) -> None:
        self.may = may
        self._found: list[Place] = []
        self._others = (place for place in places if may(place.node, most_gain))

    def within(self, load: int | None) -> Iterator[Place]:
        """Those with at most that load, the least first; all for None."""
        number = 0
        while True:
            if number == len(self._found):
                place = next(self._others, None)
                if place is None:
                    return
                self._found.append(place)
            place = self._found[number]
            if load is not None and place.load > load:
                return
            yield place
            number += 1

    def least_load(self) -> int | None:
        """None when there is none."""
        first = next(self.within(None), None)
        return None if first is None else first.load


def _own_gain(own: str, levels: Sequence[Level], number: int) -> int:
    """What that source has of the prompt, at most what the level of that number gives."""
    for level in islice(levels, number, None):
        if own in level.holders:
            return level.gain
    return 0


def _first(ranking: Ranking, may: May) -> Node | None:
    return next((place.node for place in ranking.places if may(place.node, 0)), None)


def _better(one: _Best | None, other: _Best) -> _Best:
    """By net load, then by what they have themselves, then as in the ranking."""
    if one is None or _order(other) < _order(one):
        return other
    return one


def _order(best: _Best) -> tuple[int, ...]:
    place = best.place
    return best.net, best.lacking, place.legs, place.chosen_at, place.serial
