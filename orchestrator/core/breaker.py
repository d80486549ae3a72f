"""A circuit breaker: whether new legs of one kind should go to one node, judged by how its legs
ended.

Only an engine's own faults count (``is_engine_fault``, and legs that broke or never began to
answer). A refused request, a full engine, a client that left and a cancelled leg say nothing about
the node.

``CLOSED``: legs go there; for ``open_s`` after a single fault the node is the last choice. After
``failures`` faults in a row, or as many within ``window_s`` when they are at least half of the legs
that ended in it, the breaker is ``OPEN``: no leg goes there while another node can be had. When the
delay is over one leg is let through to try the node (``HALF_OPEN``): its success closes the
breaker, its fault opens it again for twice as long. A node without any alternative is tried once
every ``open_s`` whatever the delay: better a try than an error.

Pure: knows no clock and no node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

HTTP_NOT_IMPLEMENTED = 501


class BreakerState(Enum):
    """What the breaker lets through."""

    CLOSED = "closed"
    HALF_OPEN = "half open"
    OPEN = "open"

    __hash__ = object.__hash__


GOOD, DOUBTED, SHUT = 0, 1, 2
"""Standings of a node, the better ones first: any leg, legs that no good node takes, no leg."""
TO_BE_TRIED = -1
"""The next leg goes there: whether the node serves again must be found out."""


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and how long it stays open."""

    failures: int = 5
    window_s: float = 10.0
    open_s: float = 1.0
    open_limit_s: float = 30.0


def is_engine_fault(status: int) -> bool:
    """Whether an answer with this HTTP status is the engine's fault. 4xx is about the request (429:
    about load), and so is 501.
    """
    return status >= 500 and status != HTTP_NOT_IMPLEMENTED


@dataclass(eq=False, slots=True)
class Breaker:
    """Of one node and one kind of leg. Methods that may change the state say whether they did."""

    state: BreakerState = BreakerState.CLOSED
    reason: str = ""
    """The latest fault; empty when there was none since the breaker was closed."""
    is_clean: bool = True
    """Closed, and nothing to remember: ``standing`` is ``GOOD`` at any time."""
    openings: int = 0
    """How often it has opened."""
    _in_a_row: int = 0
    _window_from: float = 0.0
    _faults: int = 0
    _successes: int = 0
    _doubted_until: float = 0.0
    _delay_s: float = 0.0
    _try_at: float = 0.0
    """When the delay is over."""
    _anyway_at: float = 0.0
    """When the node is tried if it is the only one."""
    _tries: set[str] = field(default_factory=set)
    """Requests whose legs were let through since the breaker opened and have not ended."""

    def standing(self, now: float) -> int:
        """``GOOD``, ``DOUBTED``, ``SHUT`` or ``TO_BE_TRIED``."""
        if self.state is BreakerState.CLOSED:
            return DOUBTED if now < self._doubted_until else GOOD
        if self.state is BreakerState.OPEN and now >= self._try_at:
            return TO_BE_TRIED
        return SHUT

    def may_try_anyway(self, now: float) -> bool:
        """Whether a node without any alternative gets a leg although it is shut."""
        return now >= self._anyway_at

    def begin_try(self, request_id: str, now: float, limits: BreakerLimits) -> bool:
        """A leg goes to a node whose breaker is not closed."""
        assert self.state is not BreakerState.CLOSED
        was = self.state
        self.state = BreakerState.HALF_OPEN
        self._tries.add(request_id)
        self._anyway_at = now + limits.open_s
        return was is not self.state

    def end_try(self, request_id: str) -> bool:
        """A leg that was let through ended and says nothing: the next one may try at once."""
        if request_id not in self._tries:
            return False
        self._tries.discard(request_id)
        if self._tries or self.state is not BreakerState.HALF_OPEN:
            return False
        self.state = BreakerState.OPEN
        return True

    def success(self, request_id: str, now: float, limits: BreakerLimits) -> bool:
        """A leg was answered. While the breaker is not closed only a leg that it let through
        counts: older ones were begun before the faults.
        """
        if self.state is not BreakerState.CLOSED:
            if request_id not in self._tries:
                return False
            self._close()
            return True
        self._in_a_row = 0
        if now >= self._window_from + limits.window_s and now >= self._doubted_until:
            self._close()
        else:
            self._successes += 1
        return False

    def fault(self, request_id: str, now: float, reason: str, limits: BreakerLimits) -> bool:
        """A leg failed by the engine's fault."""
        self.reason = reason
        if self.state is not BreakerState.CLOSED:
            if request_id not in self._tries:
                return False
            self._open(now, min(self._delay_s * 2, limits.open_limit_s), limits)
            return True
        self.is_clean = False
        if now >= self._window_from + limits.window_s:
            self._window_from, self._faults, self._successes = now, 0, 0
        self._in_a_row += 1
        self._faults += 1
        self._doubted_until = now + limits.open_s
        is_often = self._faults >= limits.failures and self._faults >= self._successes
        if self._in_a_row < limits.failures and not is_often:
            return False
        self._open(now, limits.open_s, limits)
        return True

    def _open(self, now: float, delay_s: float, limits: BreakerLimits) -> None:
        self.state = BreakerState.OPEN
        self.openings += 1
        self._tries.clear()
        self._delay_s = delay_s
        self._try_at = now + delay_s
        self._anyway_at = now + limits.open_s

    def _close(self) -> None:
        self.state = BreakerState.CLOSED
        self.reason = ""
        self.is_clean = True
        self._in_a_row = self._faults = self._successes = 0
        self._window_from = self._doubted_until = 0.0
        self._tries.clear()
