"""The flags of the installed vLLM, their choices and its models, read from its source: importing it
takes many seconds.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE_FILE = "config/cache.py"
CACHE_TYPES = "CacheDType"
MODELS_FILE = "model_executor/models/registry.py"
FILES = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
"""Below vLLM's package: the classes whose fields become flags, and what is added by hand."""


@cache
def known_flags() -> frozenset[str]:
    """Every flag without its dashes, with underscores; empty where they cannot be read."""
    flags: set[str] = set()
    for name in FILES:
        tree = _source(name)
        if tree is None:
            return frozenset()
        flags |= set(_flags_in(tree))
    return frozenset(flag.lstrip("-").replace("-", "_") for flag in flags)


@cache
def known_kv_cache_types() -> frozenset[str]:
    """What ``kv_cache_dtype`` may be; empty where it cannot be read."""
    tree = _source(CACHE_FILE)
    for node in tree.body if tree is not None else ():
        names = [t.id for t in getattr(node, "targets", ()) if isinstance(t, ast.Name)]
        if names == [CACHE_TYPES]:
            return frozenset(_texts_in(node))
    return frozenset()


@cache
def known_architectures() -> frozenset[str]:
    """Classes of models that vLLM has an implementation of; others may run by that of
    transformers. Empty where they cannot be read.
    """
    tree = _source(MODELS_FILE)
    keys: set[str] = set()
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Dict):
            keys |= {text for key in node.keys if key is not None for text in _texts_in(key)}
    return frozenset(keys)


def _source(name: str) -> ast.Module | None:
    """A module of the installed vLLM, not imported; None where there is none."""
    found = find_spec("vllm")
    places = found.submodule_search_locations if found is not None else None
    if not places:
        return None
    try:
        return ast.parse((Path(places[0]) / name).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _texts_in(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


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
