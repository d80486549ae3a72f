"""Holds the direction of imports between packages, and the purity of the modules that decide."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]

MAY_IMPORT = {
    "kernels": {"kernels"},
    "kv_transfer": {"kernels", "kv_transfer"},
    "prefill_node": {"kernels", "kv_transfer", "prefill_node"},
    "decode_node": {"kernels", "kv_transfer", "decode_node"},
    "orchestrator": {
        "kernels",
        "kv_transfer",
        "prefill_node",
        "decode_node",
        "orchestrator",
        "configs",
    },
    "configs": {"configs"},
}
KNOWN_IN = {
    "vllm": "orchestrator/engines/vllm/",
    "transformers": "orchestrator/engines/transformers/",
    "tokenizers": "orchestrator/engines/transformers/",
}
"""The one folder that may import an engine's library."""

PURE = (
    "kv_transfer/session*.py",
    "kv_transfer/*_book.py",
    "kv_transfer/transfer_lifecycle.py",
    "kv_transfer/transfer_story.py",
    "kv_transfer/layout.py",
    "kv_transfer/holdings.py",
    "kv_transfer/cache/*_book.py",
    "kv_transfer/cache/advice.py",
    "kv_transfer/cache/codec_choice.py",
    "kv_transfer/cache/codecs/names.py",
    "kv_transfer/cache/costs.py",
    "kv_transfer/cache/entry.py",
    "kv_transfer/cache/eviction.py",
    "kv_transfer/cache/geometry.py",
    "kv_transfer/cache/index.py",
    "kv_transfer/cache/keys.py",
    "kv_transfer/cache/tier_health.py",
    "kv_transfer/cache/truncation.py",
    "kv_transfer/held_prefixes.py",
    "kv_transfer/prefix_marks.py",
    "orchestrator/core/**/*.py",
)
IMPURE_MODULES = {"asyncio", "socket", "time", "random", "torch"}

FORBIDDEN_NAMES = {"utils", "common", "helpers", "util", "misc"}


def modules() -> list[Path]:
    return sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, full module name) of each import statement in one of the repository's files."""
    package = ("splitserve", *path.relative_to(ROOT).parent.parts)
    return imported_modules(path.read_text(encoding="utf-8"), package)


def imported_modules(source: str, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, full module name) of each import statement in ``source``, relative ones made absolute.

    ``from a import b`` counts as both ``a`` and ``a.b``: whether ``b`` is a module is not known
    here.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def own_package(module: str) -> str | None:
    """The top-level package of this repository that a module belongs to, None for all others."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] or None if first == "splitserve" else None


def test_there_are_modules_to_check() -> None:
    """The parser finds the packages, so that the tests below cannot pass on nothing."""
    assert len(modules()) > 20


def test_packages_import_in_one_direction() -> None:
    """kernels <- kv_transfer <- prefill_node, decode_node <- orchestrator, and never the other
    way.
    """
    wrong = []
    for path in modules():
        importer = path.relative_to(ROOT).parts[0]
        for line, module in imports_of(path):
            imported = own_package(module)
            if imported is not None and imported not in MAY_IMPORT[importer]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert wrong == []


def test_folders_are_imported_under_splitserve() -> None:
    """No module says ``import kernels``: that would be another distribution's package."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in modules()
        for line, module in imports_of(path)
        if module.partition(".")[0] in MAY_IMPORT
    ]
    assert wrong == []


def test_only_an_engines_adapter_imports_its_library() -> None:
    """vLLM is known in one folder, and so is transformers."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules()
        for line, module in imports_of(path)
        if (folder := KNOWN_IN.get(module.partition(".")[0])) is not None
        and not path.relative_to(ROOT).as_posix().startswith(folder)
    ]
    assert wrong == []


def test_pure_modules_take_time_and_chance_as_arguments() -> None:
    """Modules that decide import no clock, no randomness, no I/O and no tensors, themselves or
    through each other.
    """
    pure = {path for pattern in PURE for path in ROOT.glob(pattern)}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sorted(pure)
        for line, module in imports_of(path)
        if module.partition(".")[0] in IMPURE_MODULES
    ]
    assert wrong == []


def test_modules_are_named_after_what_they_know() -> None:
    """No utils, no common, no helpers."""
    assert [str(path) for path in modules() if path.stem in FORBIDDEN_NAMES] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import splitserve.kernels.pages", {"splitserve.kernels.pages"}),
        ("from splitserve import kernels", {"splitserve", "splitserve.kernels"}),
        (
            "def f():\n    from . import session",
            {"splitserve.kv_transfer", "splitserve.kv_transfer.session"},
        ),
        ("from ..kernels import pages", {"splitserve.kernels", "splitserve.kernels.pages"}),
    ],
)
def test_every_form_of_import_is_seen(source: str, expected: set[str]) -> None:
    """Absolute, relative and local imports all give the full module name."""
    seen = {module for _, module in imported_modules(source, ("splitserve", "kv_transfer"))}
    assert seen == expected
