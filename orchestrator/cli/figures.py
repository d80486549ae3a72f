"""Figures and bars as a terminal shows them: short, and of a width that is known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

UNKNOWN = "-"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_COUNT_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def duration(ms: float | None) -> str:
    """Milliseconds in at most seven characters: ``0.35 ms``, ``35 ms``, ``1.24 s``, ``12 min``."""
    if ms is None or not math.isfinite(ms):
        return UNKNOWN
    if ms < 999.5:
        return f"{three_digits(ms)} ms"
    seconds = ms / 1000
    if seconds < 599.5:
        return f"{three_digits(seconds)} s"
    return f"{min(seconds / 60, 999):.0f} min"


def age(seconds: float) -> str:
    """Whole seconds, minutes, hours or days in at most four characters."""
    seconds = max(0.0, seconds)
    for factor, unit, limit in ((1, "s", 100), (60, "m", 100), (3600, "h", 48)):
        if seconds / factor < limit:
            return f"{int(seconds / factor)}{unit}"
    return f"{min(int(seconds / 86400), 999)}d"


def count(value: float | None) -> str:
    """A count in at most five characters: ``812``, ``12.3k``."""
    if value is None:
        return UNKNOWN
    for factor, unit in _COUNT_UNITS:
        if value >= factor * 0.99995:
            return f"{three_digits(value / factor)}{unit}"
    return three_digits(value)


def three_digits(value: float) -> str:
    """About three digits, without needless zeros: ``0.35``, ``3.2``, ``35``."""
    if value >= 99.95:
        return f"{value:.0f}"
    text = f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest of the values that at least ``share`` of them do not exceed; None without
    values.
    """
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def gauge(share: float, width: int) -> str:
    """A bar over ``width`` characters, filled from the left to ``share`` of it."""
    return bar(0.0, share, width)


def bar(begin: float, end: float, width: int) -> str:
    """``width`` characters, of which as many are filled as lie between ``begin`` and ``end``, both
    shares of the width, from the character on in which ``begin`` is. What is not nothing is seen:
    it has at least a sliver.
    """
    begin, end = (min(max(share, 0.0), 1.0) for share in (begin, end))
    first = min(int(begin * width), width - 1)
    filled = round((end - begin) * width * 8)
    whole, rest = divmod(max(filled, 1 if end > begin else 0), 8)
    text = " " * first + "█" * whole + (_EIGHTHS[rest] if rest else "")
    return text[:width].ljust(width)


def printable(text: object) -> str:
    """What came from outside, without characters that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def as_lines(text: str) -> list[str]:
    """The same, line by line; tabs are spaces."""
    return [printable(line.expandtabs()) for line in text.splitlines()] or [""]


def fitted(text: str, width: int) -> str:
    """``text`` in exactly ``width`` characters: padded, or cut with an ellipsis."""
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"
