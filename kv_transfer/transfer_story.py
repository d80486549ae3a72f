"""What happened to a transfer, and the error that tells it.

TransferLifecycleError
└── IllegalTransferError    one of our own promises is broken: no row of the table allows this

Whatever peers say and however late it comes is never one of these.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from enum import Enum

STORY_LIMIT_MOVES = 64
"""Moves that a story keeps; the oldest go first."""


@dataclass
class Moment:
    """The time of the latest call that told a book the time, in seconds of its caller's clock."""

    now: float = 0.0


class Move(NamedTuple):
    """One change of state."""

    at: float
    who: str
    """The prefill rank's address or the decode rank's name; empty for the transfer as a whole."""
    trigger: str
    before: str
    after: str
    reason: str


@dataclass
class Story:
    """The moves of one transfer on one side, in their order. Written by ``Table.move`` alone."""

    transfer_id: str = ""
    attempt: int | None = None
    """None where one story covers every attempt."""
    moment: Moment = field(default_factory=Moment)
    """Of the book that owns the transfer."""
    moves: deque[Move] = field(default_factory=lambda: deque(maxlen=STORY_LIMIT_MOVES))

    def tell(self) -> str:
        """One line for each move, with milliseconds since the first one."""
        first = self.moves[0].at if self.moves else 0.0
        lines = []
        for move in self.moves:
            why = f" ({move.reason})" if move.reason else ""
            who = f"{move.who or 'transfer'}: "
            change = f"{move.before} -> {move.after}"
            at_ms = (move.at - first) * 1000
            lines.append(f"  +{at_ms:9.1f} ms  {who}{change}, {move.trigger}{why}")
        return "\n".join(lines) or "  nothing has happened to it yet"


class TransferLifecycleError(Exception):
    """A transfer's own promises are broken."""


class IllegalTransferError(TransferLifecycleError):
    """The table has no row for this; prints what happened to the transfer so far, with times."""

    def __init__(self, story: Story, who: str, state: Enum, trigger: Enum, to: Enum) -> None:
        self.transfer_id, self.attempt = story.transfer_id, story.attempt
        self.state, self.trigger = state, trigger
        attempt = "" if story.attempt is None else f", attempt {story.attempt}"
        whose = f" ({who})" if who else ""
        super().__init__(
            f"transfer {story.transfer_id}{attempt}{whose} in state {state.value!r} cannot become"
            f" {to.value!r} by {trigger.value!r}; its story:\n{story.tell()}"
        )
