"""The flags of the installed vLLM, read from its source: importing it takes many seconds."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
"""Below vLLM's package: the classes whose fields become flags, and what is added by hand."""


@cache
def known_flags() -> frozenset[str]:
    """Every flag without its dashes, with underscores; empty where they cannot be read."""
    found = find_spec("vllm")
    places = found.submodule_search_locations if found is not None else None
    if not places:
        return frozenset()
    flags: set[str] = set()
    for name in FILES:
        try:
            tree = ast.parse((Path(places[0]) / name).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            return frozenset()
        flags |= set(_flags_in(tree))
    return frozenset(flag.lstrip("-").replace("-", "_") for flag in flags)


def _flags_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("-")
            and " " not in node.value
        ):
            yield node.value
