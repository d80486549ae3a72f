"""No entry of the bug bank is without a test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from end_to_end.bug_bank.index import ENTRIES, HERE

TESTS = Path(__file__).parents[2]
COVERED = [f"A{n:02}" for n in (*range(1, 27), *range(29, 44), 45, 46, 47)]


def _tests_in(path: Path) -> set[str]:
    """The names of a file's test functions."""
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


def test_the_list_is_whole() -> None:
    """Every entry that is to be covered stands in the index, and no other."""
    assert sorted(ENTRIES) == COVERED


@pytest.mark.parametrize("number", COVERED)
def test_every_entry_has_tests_that_exist(number: str) -> None:
    """Each test that the index names is a test function of that file."""
    entry = ENTRIES[number]
    assert entry.tests
    for test in entry.tests:
        file, name = test.split("::")
        assert name.startswith("test_")
        assert name in _tests_in(TESTS / file), test


def test_tests_and_index_name_each_other() -> None:
    """A docstring here that begins with an entry's number belongs to a test of that entry."""
    for path in sorted((TESTS / HERE).glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                number = (ast.get_docstring(node) or "").split(" ")[0].split(":")[0].rstrip(",")
                if number in ENTRIES:
                    assert f"{HERE}{path.name}::{node.name}" in ENTRIES[number].tests
