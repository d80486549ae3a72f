"""What has happened to the nodes and to the router itself that an operator may ask about later:
deaths, refusals, changes of roles, drains, breakers, silence. The latest ``KEPT_INCIDENTS`` are
kept, in memory only.

Something that happens again soon is not another incident: the one that is known counts it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from splitserve.orchestrator.core.membership import Node

KEPT_INCIDENTS = 200
REPEAT_S = 60.0
"""An equal incident within this time, with nothing else of its node between, is a repetition."""
COMPARED_INCIDENTS = 16
"""The latest ones, with which a new one is compared."""
TEXT_LIMIT_CHARACTERS = 500

Kind = Literal[
    "router_started",
    "joined",
    "refused",
    "disconnected",
    "silent",
    "heard_again",
    "died",
    "left",
    "engine_ended",
    "breaker_open",
    "breaker_closed",
    "flipped",
    "draining",
    "cache_lost",
    "clock_skew",
]
"""``died``: an engine's end that nobody ordered; ``left``: one that was ordered. ``engine_ended``:
the router had an engine killed that owed a fence.
"""


class Incident(msgspec.Struct, kw_only=True):
    """One thing that happened; only ``Incidents`` changes it."""

    id: str
    """Unique over restarts of the router."""
    kind: Kind
    node: str
    """Empty when it is not about one node."""
    text: str
    at_unix_s: float
    """When it happened last."""
    count: int = 1
    """How often it happened, one within ``REPEAT_S`` of the other."""


class Incidents:
    """The latest incidents of a router. ``on_incident`` is called with each one that is new, and
    again with one that has happened again.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.on_incident: Callable[[Incident], None] | None = None
        self._clock = clock
        self._kept: deque[Incident] = deque(maxlen=KEPT_INCIDENTS)
        self._life = f"{int(clock() * 1000):x}"
        self._count = 0
        self._silent: set[str] = set()
        """Nodes whose silence was noted."""

    def note(self, kind: Kind, node: str, text: str) -> None:
        """That has happened now."""
        now, text = round(self._clock(), 3), text[:TEXT_LIMIT_CHARACTERS]
        incident = self._known(kind, node, text, now)
        if incident is None:
            self._count += 1
            name = f"{self._life}-{self._count:x}"
            incident = Incident(id=name, kind=kind, node=node, text=text, at_unix_s=now)
            self._kept.append(incident)
        else:
            incident.at_unix_s = now
            incident.count += 1
        if self.on_incident is not None:
            self.on_incident(incident)

    def note_silence(self, nodes: Collection[Node]) -> None:
        """Which of all nodes are silent by now, and which have been heard again."""
        silent = {node.name for node in nodes if node.is_silent}
        if silent == self._silent:
            return
        before, self._silent = self._silent, silent
        known = {node.name for node in nodes}
        for name in sorted(silent - before):
            self.note("silent", name, "nothing was heard from its agent for too long")
        for name in sorted((before - silent) & known):
            self.note("heard_again", name, "its agent reports again")

    def shown(self) -> list[dict[str, Any]]:
        """All that are kept, oldest first."""
        return [msgspec.to_builtins(incident) for incident in self._kept]

    def _known(self, kind: Kind, node: str, text: str, now: float) -> Incident | None:
        """The incident that happens again."""
        for number in range(1, min(COMPARED_INCIDENTS, len(self._kept)) + 1):
            incident = self._kept[-number]
            if incident.node == node:
                is_equal = (incident.kind, incident.text) == (kind, text)
                return incident if is_equal and now - incident.at_unix_s < REPEAT_S else None
        return None
