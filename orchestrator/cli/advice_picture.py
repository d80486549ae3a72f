"""The hit-rate curve as an SVG picture."""

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


@dataclass(frozen=True)
class Curve:
    """One line of the picture."""

    name: str
    points: tuple[tuple[float, float], ...]
    """(size, share of prefill that is saved, 0 to 1), by size."""


def svg(
    title: str,
    curves: Sequence[Curve],
    ceiling: float,
    marks: Sequence[tuple[str, float]],
    size_text: Callable[[float], str],
) -> str:
    """Share of prefill saved against the cache's size, which has a logarithmic axis.

    ``ceiling`` is what no cache exceeds, ``marks`` are sizes with a name.
    """
    sizes = [size for curve in curves for size, _ in curve.points] + [size for _, size in marks]
    least, most = math.log(min(sizes)), math.log(max(sizes))
    top_share = max(math.ceil(ceiling * 10) / 10, 0.1)

    def x(size: float) -> float:
        share = (math.log(size) - least) / (most - least) if most > least else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - share / top_share * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, size=14),
        *_grid(x, y, top_share, sizes, size_text),
    ]
    for name, size in marks:
        parts.append(_line(x(size), TOP, x(size), HEIGHT - BOTTOM, "#777", "2 3"))
        side, anchor = (4, "start") if x(size) < WIDTH / 2 else (-4, "end")
        parts.append(_text(x(size) + side, HEIGHT - BOTTOM - 6, name, anchor=anchor, colour="#555"))
    parts.append(_line(LEFT, y(ceiling), WIDTH - RIGHT, y(ceiling), "#333", "6 4"))
    parts.append(_text(LEFT + 4, y(ceiling) - 5, f"no cache saves more: {ceiling:.1%}"))
    for number, curve in enumerate(curves):
        parts += _curve(curve, COLOURS[number % len(COLOURS)], x, y)
        parts.append(
            _text(LEFT + 200 * number, 42, curve.name, colour=COLOURS[number % len(COLOURS)])
        )
    return "\n".join([*parts, "</svg>", ""])


def _grid(
    x: Callable[[float], float],
    y: Callable[[float], float],
    top_share: float,
    sizes: Sequence[float],
    size_text: Callable[[float], str],
) -> list[str]:
    """Lines at every tenth or so, sizes at the axis, the axes' names."""
    step = 0.1 if top_share > 0.3 else 0.05
    parts = []
    for number in range(round(top_share / step) + 1):
        height = y(number * step)
        parts.append(_line(LEFT, height, WIDTH - RIGHT, height, "#e4e4e4"))
        parts.append(_text(LEFT - 8, height + 4, f"{number * step:.0%}", anchor="end"))
    low, high = math.log(min(sizes)), math.log(max(sizes))
    for number in range(6):
        size = math.exp(low + (high - low) * number / 5)
        parts.append(_text(x(size), HEIGHT - BOTTOM + 18, size_text(size), anchor="middle"))
    parts.append(_text(WIDTH / 2, HEIGHT - 12, "size of the cache", anchor="middle"))
    parts.append(
        f'<text x="16" y="{HEIGHT / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {HEIGHT / 2})">prefill saved</text>'
    )
    return parts


def _curve(
    curve: Curve, colour: str, x: Callable[[float], float], y: Callable[[float], float]
) -> list[str]:
    places = [(x(size), y(share)) for size, share in curve.points]
    line = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
    dots = [f'<circle cx="{a:.1f}" cy="{d:.1f}" r="3" fill="{colour}"/>' for a, d in places]
    return [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>', *dots]


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
