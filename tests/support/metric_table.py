"""The table of all metrics in ``docs/observability.md``: ``python -m support.metric_table`` in
``tests/`` prints it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.config import parse
from splitserve.orchestrator.core.router_core import RouterCore
from splitserve.orchestrator.observe.sent_counts import SentCounts
from splitserve.orchestrator.router.app import limits_of
from splitserve.orchestrator.router.metrics import RouterMetrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

HEAD = "| metric | type | labels | what |\n|---|---|---|---|\n"


class _NoSpans:
    counts = SentCounts()


def families() -> Iterator[Metric]:
    """All that a router can show, with everything on."""
    config = parse("engine: mock\nmodel: {path: m}\n")
    metrics = RouterMetrics(RouterCore(limits_of(config)))
    metrics.show_cache()
    metrics.count_traces(_NoSpans())  # type: ignore[arg-type]
    for family in metrics._registry.collect():
        if family.name.startswith("splitserve_"):
            yield family


def table() -> str:
    """One row for each, in the order of a scrape."""
    rows = []
    for family in families():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in family._labelnames)  # type: ignore[attr-defined]
        rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    print(table(), end="")
