"""CPU numbers as the kernel and people write them: ``0-3,6``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def listed(numbers: Iterable[int]) -> str:
    """``0-3,6`` for 0, 1, 2, 3 and 6."""
    ordered = sorted(numbers)
    parts: list[str] = []
    start = 0
    for index, number in enumerate(ordered):
        if index + 1 < len(ordered) and ordered[index + 1] == number + 1:
            continue
        first = ordered[start]
        parts.append(str(first) if first == number else f"{first}-{number}")
        start = index + 1
    return ",".join(parts)


def parsed(text: str) -> frozenset[int]:
    """The numbers of ``0-3,6``. Raises ``ValueError`` for what is no such list."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
