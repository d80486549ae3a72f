"""`docs/doctor.md` names every check."""

from __future__ import annotations

import re
from pathlib import Path

from splitserve.orchestrator.launch.checks.table import CHECKS

DOCS = Path(__file__).resolve().parents[3] / "docs" / "doctor.md"


def test_every_check_is_in_the_docs() -> None:
    """The table there has the names of the table in the code, and `running`, in that order."""
    section = DOCS.read_text().partition("## Checks")[2].partition("## What")[0]
    named = re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)
    assert named[0] == "running"
    assert sorted(named[1:]) == sorted(check.name for check in CHECKS)
