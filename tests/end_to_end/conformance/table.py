"""The tables of rows as documentation: a section of ``docs/compatibility.md``.

``python -m end_to_end.conformance.table`` in ``tests/`` writes it anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from end_to_end.conformance.row import CHAT
from end_to_end.conformance.run import ROWS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from end_to_end.conformance.row import Row

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"
BEGIN, END = "<!-- rows: begin -->\n", "<!-- rows: end -->\n"
HEAD = "| about | split over both pools | by a decode node alone | refused |\n|---|---|---|---|\n"


def rendered() -> str:
    """One line for each area."""
    areas: dict[str, list[Row]] = {}
    for row in ROWS:
        areas.setdefault(row.area, []).append(row)
    lines = []
    for area, rows in areas.items():
        endpoints = {_endpoint(row) for row in rows}
        only = f" ({endpoints.pop()})" if len(endpoints) == 1 else ""
        served = (
            [row for row in rows if row.status == 200 and not row.alone],
            [row for row in rows if row.status == 200 and row.alone],
            [row for row in rows if row.status != 200],
        )
        cells = " | ".join(_names(found, of_each=not only) for found in served)
        lines.append(f"| {area}{only} | {cells} |\n")
    requests = sum(len(row.forms) for row in ROWS)
    total = f"{len(ROWS)} rows, {requests} requests to each side.\n\n"
    return total + HEAD + "".join(lines)


def _endpoint(row: Row) -> str:
    return "chat" if row.path == CHAT else "completions"


def _names(rows: Iterable[Row], *, of_each: bool) -> str:
    """The rows' names; ``of_each``: with the endpoint of those that only one has."""
    endpoints: dict[str, set[str]] = {}
    for row in rows:
        endpoints.setdefault(row.name, set()).add(_endpoint(row))
    names = [
        f"{name} ({next(iter(paths))})" if of_each and len(paths) == 1 else name
        for name, paths in endpoints.items()
    ]
    return "; ".join(names).replace("|", "\\|")


def section_of(page: str) -> str:
    """The section as it stands in the page."""
    return page.partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text.replace(BEGIN + section_of(text), BEGIN + rendered()))
