"""What ``splitserve bench`` says and draws of its runs.

All figures in tables are the generator's own. Only the picture's time per output token is reckoned
here, as the generator does for its table: the time after the first token over the *tokens* behind
it, whatever the number of chunks in which they came. The generator's inter-token latency (ITL) is
the time between two *chunks* of an answer: where a chunk holds several tokens it is longer than the
time per token.
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from splitserve.orchestrator.cli import charts
from splitserve.orchestrator.cli.figures import printable, three_digits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

COMPARED = {
    "request_throughput": "Request throughput (req/s)",
    "request_goodput": "Request goodput (req/s)",
    "output_throughput": "Output throughput (tok/s)",
    **{
        f"{statistic}_{name}_ms": f"{word} {name.upper()} (ms)"
        for name in ("ttft", "tpot", "itl", "e2el")
        for statistic, word in (("mean", "Mean"), ("median", "Median"), ("p99", "P99"))
    },
}
"""Figures of the generator that a comparison shows."""
POINTS = 25
"""Of a curve."""
DOTS_LIMIT = 1000
LATEST_SHARE = 0.99
"""Charts end here: the few requests beyond would press all others to the left edge."""
ERRORS_SHOWN = 3


def failures(result: dict[str, Any]) -> str:
    """How many requests have failed, and of what; empty when none has."""
    failed = result.get("failed") or 0
    if not failed:
        return ""
    reasons = Counter(_reason(error) for error in result.get("errors", ()) if error)
    shown = [f"{reason} ({number}x)" for reason, number in reasons.most_common(ERRORS_SHOWN)]
    total = failed + (result.get("completed") or 0)
    return f"{failed} of {total} requests have failed: {', '.join(shown) or 'no reason given'}"


def slowest(result: dict[str, Any]) -> tuple[int, float] | None:
    """(number, milliseconds) of the request with the latest first token."""
    times = result.get("ttfts") or []
    if not any(times):
        return None
    number = max(range(len(times)), key=times.__getitem__)
    return number, times[number] * 1000


def stored(result: dict[str, Any]) -> dict[str, Any]:
    """The generator's result without what models have said."""
    return {name: value for name, value in result.items() if name != "generated_texts"}


def times_per_token(result: dict[str, Any]) -> list[float]:
    """TPOT of each answered request with more than one token, in milliseconds."""
    rows = zip(result["latencies"], result["ttfts"], result["output_lens"], strict=True)
    return [
        (latency - first) / (tokens - 1) * 1000
        for latency, first, tokens in rows
        if tokens > 1 and first > 0
    ]


def medians(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each figure over the runs of one server."""
    found = {}
    for name in COMPARED:
        values = [result[name] for result in results if result.get(name) is not None]
        if values:
            found[name] = float(statistics.median(values))
    return found


def ratios(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """Our figures over theirs, of those that both have and that are not 0."""
    return {name: ours[name] / theirs[name] for name in ours if theirs.get(name)}


def comparison(by_server: Mapping[str, Sequence[dict[str, Any]]]) -> Table:
    """Both servers' medians over the rounds, their spread, and the ratio."""
    ours, theirs = by_server
    found = {name: medians(results) for name, results in by_server.items()}
    shares = ratios(found[ours], found[theirs])
    rounds = len(by_server[ours])
    title = f"medians of {rounds} rounds (lowest to highest)" if rounds > 1 else "one round"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    for server in (ours, theirs):
        table.add_column(printable(server), justify="right", overflow="fold")
    table.add_column("ratio", justify="right")
    for name, words in COMPARED.items():
        if name in found[ours] and name in found[theirs]:
            cells = [
                f"{three_digits(found[server][name])}{_spread(by_server[server], name)}"
                for server in (ours, theirs)
            ]
            ratio = f"{shares[name]:.2f}" if name in shares else "-"
            table.add_row(words, *cells, ratio)
    return table


def picture(
    title: str, by_server: Mapping[str, Sequence[dict[str, Any]]], targets: Mapping[str, float]
) -> str:
    """Four charts as SVG: how many requests had their first token, their tokens and their chunks
    how soon, and first tokens over the run.
    """
    firsts = {
        server: [t * 1000 for result in results for t in result["ttfts"] if t > 0]
        for server, results in by_server.items()
    }
    tokens = {
        server: [t for result in results for t in times_per_token(result)]
        for server, results in by_server.items()
    }
    gaps = {
        server: [t * 1000 for result in results for gaps in result["itls"] for t in gaps]
        for server, results in by_server.items()
    }
    return charts.svg(
        [
            _shares(
                f"{title}: time to first token (TTFT)", "requests", firsts, targets.get("ttft")
            ),
            _shares("time per output token (TPOT)", "requests", tokens, targets.get("tpot")),
            _shares("time between chunks (ITL)", "chunks", gaps, None),
            _over_time("TTFT over the run", by_server, targets.get("ttft")),
        ],
        columns=2,
    )


def _reason(error: str) -> str:
    """The last line of what may be a whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[-1])[:200] if lines else "no reason given"


def _spread(results: Sequence[dict[str, Any]], name: str) -> str:
    values = [result[name] for result in results if result.get(name) is not None]
    if len(values) < 2:
        return ""
    return f" ({three_digits(min(values))} to {three_digits(max(values))})"


def _shares(
    title: str, what: str, values: Mapping[str, Sequence[float]], target: float | None
) -> charts.Chart:
    """Which share of the values is at most how large."""
    curves = []
    ends = [0.0]
    for server, found in values.items():
        ordered = sorted(found)
        points = tuple(_quantiles(ordered))
        if points:
            ends.append(points[-1][0])
            name = f"{server}: median {three_digits(ordered[len(ordered) // 2])} ms"
            curves.append(charts.Curve(name, points))
    marks = ((f"target {target:g} ms", target),) if target is not None else ()
    return charts.Chart(
        title,
        charts.even_axis("ms", [*ends, target or 0.0], "{:g}".format),
        charts.Axis(what, 0.0, 1.0, tuple((n / 4, f"{n * 25} %") for n in range(5))),
        tuple(curves),
        marks,
    )


def _quantiles(ordered: Sequence[float]) -> Iterator[tuple[float, float]]:
    for number in range(POINTS if ordered else 0):
        share = LATEST_SHARE * number / (POINTS - 1)
        yield ordered[min(int(share * len(ordered)), len(ordered) - 1)], share


def _over_time(
    title: str, by_server: Mapping[str, Sequence[dict[str, Any]]], target: float | None
) -> charts.Chart:
    curves = []
    for server, results in by_server.items():
        dots = [dot for result in results for dot in _dots(result)]
        step = -(-len(dots) // DOTS_LIMIT) or 1
        curves.append(charts.Curve(server, tuple(dots[::step]), is_joined=False))
    every = [dot for curve in curves for dot in curve.points]
    levels = ((f"target {target:g} ms", target),) if target is not None else ()
    return charts.Chart(
        title,
        charts.even_axis("seconds after the run's begin", [at for at, _ in every], "{:g}".format),
        charts.even_axis("TTFT, ms", [ms for _, ms in every] + [target or 0.0], "{:g}".format),
        tuple(curves),
        levels=levels,
    )


def _dots(result: dict[str, Any]) -> list[tuple[float, float]]:
    rows = [
        (at, first * 1000)
        for at, first in zip(result["start_times"], result["ttfts"], strict=True)
        if first > 0
    ]
    began = min((at for at, _ in rows), default=0.0)
    return sorted((at - began, ms) for at, ms in rows)
