"""Line charts as one SVG file, for reports on the command line. Plain shapes and texts: every
browser shows them, and no library is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 40, 56, 56
COLOURS = ("#1f5fa8", "#c2571a", "#4b7f3a", "#7b4ba0")
LEGEND_WIDTH = 160
"""Least distance of two curves' names."""
CHARACTER_WIDTH = 6.6
"""Of texts of the usual size, on the average."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    points: tuple[tuple[float, float], ...]
    labels: tuple[str, ...] = ()
    """At the points, in their order; empty ones are left out."""
    is_joined: bool = True
    """Whether a line goes through the points."""
    apart: tuple[tuple[float, float], ...] = ()
    """Points that the line leaves out."""


@dataclass(frozen=True)
class Axis:
    """What is shown along one side."""

    name: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_logarithmic: bool = False

    def share(self, value: float) -> float:
        """Where ``value`` lies: 0 at the low end, 1 at the high one, which others do not pass."""
        low, high = self.low, self.high
        if self.is_logarithmic:
            low, high = math.log(low), math.log(high)
            value = math.log(value) if value > 0 else low
        share = (value - low) / (high - low) if high > low else 0.5
        return min(max(share, 0.0), 1.0)


@dataclass(frozen=True)
class Chart:
    """Curves between two axes."""

    title: str
    x: Axis
    y: Axis
    curves: tuple[Curve, ...]
    marks: tuple[tuple[str, float], ...] = ()
    """(name, x) of dotted upright lines."""
    levels: tuple[tuple[str, float], ...] = ()
    """(name, y) of dashed level lines."""


def svg(charts: Sequence[Chart], columns: int = 1) -> str:
    """The charts side by side, ``columns`` in a row."""
    rows = math.ceil(len(charts) / columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * min(columns, len(charts))} '
        f'{HEIGHT * rows}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, chart in enumerate(charts):
        row, column = divmod(number, columns)
        body = _drawn(chart)
        if len(charts) > 1:
            body = [f'<g transform="translate({column * WIDTH} {row * HEIGHT})">', *body, "</g>"]
        parts += body
    return "\n".join([*parts, "</svg>", ""])


def even_axis(name: str, values: Sequence[float], text: Callable[[float], str]) -> Axis:
    """From 0 to a round number above all finite ``values``, with ticks at round steps."""
    most = max((value for value in values if math.isfinite(value)), default=0.0) or 1.0
    step = 10 ** math.floor(math.log10(most))
    step *= next(factor for factor in (0.2, 0.5, 1, 2) if most / (factor * step) <= 6)
    count = math.ceil(most / step - 1e-9)
    ticks = tuple((step * number, text(step * number)) for number in range(count + 1))
    return Axis(name, 0.0, step * count, ticks)


def log_axis(name: str, values: Sequence[float], text: Callable[[float], str]) -> Axis:
    """Over all ``values`` above 0, with six ticks at even distances."""
    known = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    low, high = min(known), max(known)
    places = [low * (high / low) ** (number / 5) for number in range(6)]
    return Axis(name, low, high, tuple((value, text(value)) for value in places), True)


def _drawn(chart: Chart) -> list[str]:
    def x(value: float) -> float:
        return LEFT + chart.x.share(value) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - chart.y.share(value) * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 22, chart.title, size=14), *_grid(chart, x, y)]
    for name, value in chart.marks:
        across = x(value)
        parts.append(_line(across, TOP, across, HEIGHT - BOTTOM, "#777", "2 3"))
        side, anchor = (4, "start") if across < WIDTH / 2 else (-4, "end")
        parts.append(_text(across + side, HEIGHT - BOTTOM - 6, name, anchor=anchor, colour="#555"))
    for name, value in chart.levels:
        parts.append(_line(LEFT, y(value), WIDTH - RIGHT, y(value), "#333", "6 4"))
        down = y(value) - 5 if y(value) > TOP + 12 else y(value) + 14
        parts.append(_text(LEFT + 4, down, name))
    across = float(LEFT)
    for number, curve in enumerate(chart.curves):
        colour = COLOURS[number % len(COLOURS)]
        parts += _curve(curve, colour, x, y)
        parts.append(_text(across, 42, curve.name, colour=colour))
        across += max(LEGEND_WIDTH, CHARACTER_WIDTH * len(curve.name) + 16)
    return parts


def _grid(chart: Chart, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    """Level lines, the ticks' texts and the axes' names."""
    parts = []
    for value, text in chart.y.ticks:
        parts.append(_line(LEFT, y(value), WIDTH - RIGHT, y(value), "#e4e4e4"))
        parts.append(_text(LEFT - 8, y(value) + 4, text, anchor="end"))
    for value, text in chart.x.ticks:
        parts.append(_text(x(value), HEIGHT - BOTTOM + 18, text, anchor="middle"))
    parts.append(_text(WIDTH / 2, HEIGHT - 12, chart.x.name, anchor="middle"))
    parts.append(
        f'<text x="16" y="{HEIGHT / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {HEIGHT / 2})">{escape(chart.y.name)}</text>'
    )
    return parts


def _curve(
    curve: Curve, colour: str, x: Callable[[float], float], y: Callable[[float], float]
) -> list[str]:
    def known(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(x(across), y(up)) for across, up in points if not math.isnan(across + up)]

    places = known(curve.points)
    parts = []
    if curve.is_joined:
        line = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    places += known(curve.apart)
    parts += [f'<circle cx="{a:.1f}" cy="{d:.1f}" r="3" fill="{colour}"/>' for a, d in places]
    named = zip(curve.points, curve.labels, strict=False)
    parts += [
        _text(x(across) + 5, y(up) - 5, label, colour="#555", size=10)
        for (across, up), label in named
        if label and not math.isnan(across + up)
    ]
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>'
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#222", size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}">{escape(text)}</text>'
    )
