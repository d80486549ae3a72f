"""The hit-rate curve as an SVG picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from splitserve.orchestrator.cli import charts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def svg(
    title: str,
    curves: Sequence[charts.Curve],
    ceiling: float,
    marks: Sequence[tuple[str, float]],
    size_text: Callable[[float], str],
) -> str:
    """Share of prefill saved (0 to 1) against the cache's size, which has a logarithmic axis.

    ``ceiling`` is what no cache exceeds, ``marks`` are sizes with a name.
    """
    sizes = [size for curve in curves for size, _ in curve.points] + [size for _, size in marks]
    chart = charts.Chart(
        title,
        charts.log_axis("size of the cache", sizes, size_text),
        _share_axis(ceiling),
        tuple(curves),
        tuple(marks),
        ((f"no cache saves more: {ceiling:.1%}", ceiling),),
    )
    return charts.svg([chart])


def _share_axis(ceiling: float) -> charts.Axis:
    """Lines at every tenth or so."""
    top = max(math.ceil(ceiling * 10) / 10, 0.1)
    step = 0.1 if top > 0.3 else 0.05
    shares = [number * step for number in range(round(top / step) + 1)]
    ticks = tuple((share, f"{share:.0%}") for share in shares)
    return charts.Axis("prefill saved", 0.0, top, ticks)
