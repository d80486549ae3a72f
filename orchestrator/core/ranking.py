"""Nodes in the order in which they would be chosen, kept from one choice to the next.

A cluster of many nodes changes little between two choices: a leg came to one node, another one has
ended. Only those are moved.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from splitserve.orchestrator.core.membership import Node


class Place(NamedTuple):
    """Where a node stands. Places are compared as tuples; no two are equal up to ``serial``."""

    load: int
    legs: int
    chosen_at: int
    serial: int
    """The order in which the nodes became known: the last tie-breaker."""
    node: Node


class Ranking:
    """Places, the least loaded first; at most one of each node."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        """Read only."""
        self.by_node: dict[Node, Place] = {}
        """Read only."""

    def put(self, place: Place) -> None:
        """The node stands there now, wherever it stood before."""
        old = self.by_node.get(place.node)
        if old == place:
            return
        if old is not None:
            del self.places[bisect_left(self.places, old)]
        insort(self.places, place)
        self.by_node[place.node] = place

    def remove(self, node: Node) -> None:
        """The node has no place."""
        old = self.by_node.pop(node, None)
        if old is not None:
            del self.places[bisect_left(self.places, old)]
