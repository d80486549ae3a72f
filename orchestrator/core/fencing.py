"""Writers that owe a fence for too long are ended.

A decode engine names in its reports the engines whose word, or end, it waits for before it may use
its quarantined blocks again. The core has the writer's agent kill the writer's engine; when that
does not lead to a proven death within ``engine_end_limit_s`` (the agent is not connected, or
does not report), the decode node's own agent kills the decode engine, whose memory then is nobody's
any more.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from splitserve.orchestrator.core.effects import AnnounceDeath, Effect, EndEngine

if TYPE_CHECKING:
    from collections.abc import Container

    from splitserve.orchestrator.core.membership import Membership, Node

REPEAT_S = 3.0
"""Between two orders for the same end: one may have been lost with a connection."""
ORDERED_LIMIT_INCARNATIONS = 1_000

WRITER = "writer"
DECODE_NODE = "decode_node"


class Fencing:
    """Since when each writer is overdue, and what was ordered about it."""

    def __init__(self, membership: Membership, engine_end_limit_s: float) -> None:
        self._membership = membership
        self._limit_s = engine_end_limit_s
        self._overdue: dict[str, dict[str, float]] = {}
        """By the decode engine's incarnation and the writer's: since when it has been reported."""
        self._ordered: dict[str, float] = {}
        """By incarnation, writer's or decode engine's: when its end was last ordered."""
        self.ended: Counter[str] = Counter({WRITER: 0, DECODE_NODE: 0})
        """Engines whose end was ordered, by what they were."""

    def weigh(self, reader: Node, dead: Container[str], now: float) -> list[Effect]:
        """What follows from a decode node's report."""
        assert reader.state is not None
        own, named = reader.description.incarnation, reader.state.overdue_writers
        known = self._overdue.pop(own, {})
        if not named:
            return []
        waits = self._overdue[own] = {writer: known.get(writer, now) for writer in named}
        effects: list[Effect] = []
        for incarnation, since in waits.items():
            if incarnation not in dead:
                effects += self._end(reader, incarnation, now - since, now)
            elif self._may_order(f"{own} {incarnation}", now):
                effects.append(AnnounceDeath(incarnation, reader.name))
        return effects

    def over(self, incarnation: str) -> None:
        """The engine is proven dead."""
        self._overdue.pop(incarnation, None)
        self._ordered.pop(incarnation, None)

    def _end(self, reader: Node, incarnation: str, waited_s: float, now: float) -> list[Effect]:
        assert reader.state is not None
        owed = (
            f"owes {reader.name} a fence for some of its {reader.state.quarantined_blocks} "
            "quarantined blocks"
        )
        if waited_s >= self._limit_s:
            own = reader.description.incarnation
            reason = (
                f"{incarnation} {owed}, and its death was not reported within {self._limit_s:g} s"
            )
            return self._order(reader, own, DECODE_NODE, reason, now)
        writer = self._membership.lives_as(incarnation)
        if writer is None or not writer.is_connected:
            return []
        return self._order(writer, incarnation, WRITER, f"it {owed}", now)

    def _order(
        self, node: Node, incarnation: str, what: str, reason: str, now: float
    ) -> list[Effect]:
        is_new = incarnation not in self._ordered
        if not self._may_order(incarnation, now):
            return []
        self.ended[what] += is_new
        return [EndEngine(node.name, incarnation, reason)]

    def _may_order(self, key: str, now: float) -> bool:
        last = self._ordered.get(key)
        if last is not None and now - last < REPEAT_S:
            return False
        while len(self._ordered) >= ORDERED_LIMIT_INCARNATIONS:
            self._ordered.pop(next(iter(self._ordered)))
        self._ordered[key] = now
        return True
