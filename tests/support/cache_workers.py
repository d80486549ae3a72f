"""What an engine's workers know of their loads and saves, in the cache's virtual time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class OpenLoad:
    keys: list[bytes]
    until: float
    unanswered: set[int]
    reading: dict[int, int] = field(default_factory=dict)
    """Index to slot."""


@dataclass(eq=False)
class Worker:
    """One rank's connection."""

    number: int
    engine: str
    rank: int
    ranks: int
    is_stopped: bool = False
    inbox: deque[Any] = field(default_factory=deque)
    loads: dict[int, OpenLoad] = field(default_factory=dict)
    asked: dict[int, list[bytes]] = field(default_factory=dict)
    """Saves without an answer."""
    writing: dict[tuple[int, int], tuple[bytes, int]] = field(default_factory=dict)
    """(save, index) to key and slot."""
    ids: int = 0
