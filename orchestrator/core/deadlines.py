"""Deadlines of a few kinds, each with a constant duration, so that the order of arming is the order
of expiry.

Arming and disarming cost one dictionary operation, and a disarmed deadline leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class DeadlineQueue(Generic[K]):
    """Deadlines of one kind: ``duration_s`` after each key was armed."""

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s
        self._due: dict[K, float] = {}

    def __len__(self) -> int:
        return len(self._due)

    def arm(self, key: K, now: float) -> None:
        """The key is due ``duration_s`` from now, whatever was armed before."""
        self._due.pop(key, None)
        self._due[key] = now + self.duration_s

    def disarm(self, key: K) -> None:
        """The key is not due any more."""
        self._due.pop(key, None)

    def next_due(self) -> float | None:
        """When the earliest key is due."""
        for due in self._due.values():
            return due
        return None

    def take_due(self, now: float) -> list[K]:
        """Remove and return the keys that are due, earliest first."""
        taken = []
        for key, due in self._due.items():
            if due > now:
                break
            taken.append(key)
        for key in taken:
            del self._due[key]
        return taken
