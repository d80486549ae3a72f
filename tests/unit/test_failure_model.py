"""docs/failure-model.md names the test that proves each row: the tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "failure-model.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
COLUMNS = 5


def test_every_named_test_exists() -> None:
    """By path and name; a test that is renamed takes the page along."""
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 20
    missing = [f"{path}::{name}" for path, name in named if name not in _tests_of(ROOT / path)]
    assert not missing


def test_every_row_names_a_test() -> None:
    """No fault is only claimed."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    facts = [row for row in rows if not row.startswith("| fault |")]
    assert len(facts) > 20
    assert [row for row in facts if row.count(" |") != COLUMNS or not NAMED.search(row)] == []


def _tests_of(path: Path) -> set[str]:
    """Names of the test functions of a file, {} when there is none."""
    if not path.exists():
        return set()
    nodes = ast.walk(ast.parse(path.read_text()))
    return {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
