"""Which nodes are much slower than the others of their role: not what a plan may count on.

A prefill node is measured by what prompts take in what they should take, a decode node by the gaps
between tokens. Medians over the latest legs are compared with the median node of the role.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SLOW = 1.6
"""A node that takes so many times as long as the median node is slow."""
LEGS = 31
"""The latest of each node and role that are remembered."""
LEAST_LEGS = 8
"""Fewer tell nothing."""
NODES_LIMIT = 10_000


class SlowNodes:
    """Remembers the latest legs of each node."""

    def __init__(self) -> None:
        self._legs: dict[tuple[str, str], deque[float]] = {}
        """What each took, by (node, role)."""

    def note(self, node: str, role: str, took: float) -> None:
        """A leg on the node has ended well."""
        known = self._legs.get((node, role))
        if known is None:
            if len(self._legs) >= NODES_LIMIT:
                return
            known = self._legs[node, role] = deque(maxlen=LEGS)
        known.append(took)

    def forget(self, node: str) -> None:
        """The node is another one now: its engine or its role is new."""
        for key in [key for key in self._legs if key[0] == node]:
            del self._legs[key]

    def slow(self, role: str) -> frozenset[str]:
        """The slow nodes among those that have done enough work of that role. Of two nodes neither
        can be told to be the odd one.
        """
        paces = {
            node: median(legs)
            for (node, of), legs in self._legs.items()
            if of == role and len(legs) >= LEAST_LEGS
        }
        if len(paces) < 3:
            return frozenset()
        usual = median(paces.values())
        return frozenset(node for node, pace in paces.items() if pace > SLOW * usual)
