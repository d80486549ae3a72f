"""The documentation names every metric."""

from __future__ import annotations

import re
from pathlib import Path

from support.metric_table import table

DOCS = Path(__file__).parents[3] / "docs"


def test_the_table_of_metrics_is_complete() -> None:
    """As `python -m support.metric_table` in `tests/` prints it."""
    assert table() in (DOCS / "observability.md").read_text()


def test_pages_name_metrics_that_exist() -> None:
    """Whatever page mentions one."""
    known = {row.split("`")[1] for row in table().splitlines()[2:]}
    bases = {name.removesuffix("_total") for name in known} | known
    for page in DOCS.glob("*.md"):
        for name in re.findall(r"`(splitserve_[a-z_]+)[`{]", page.read_text()):
            assert name in bases, f"{page.name}: {name}"
