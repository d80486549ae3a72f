"""The wheel: built from what a Docker build sees, complete, and usable where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "kv_transfer", "prefill_node", "decode_node", "orchestrator", "configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy of the files that ``.dockerignore`` lets through."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in (line[1:] for line in lines if line.startswith("!")):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(out), str(source)], check=True)
    (built,) = out.glob("*.whl")
    return built


def test_it_holds_every_file_of_the_packages(wheel: Path) -> None:
    """Modules, built-in configurations, alert rules, the dashboard's page and `py.typed`."""
    wanted = {
        f"splitserve/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == wanted


def test_it_runs_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which borrows only what splitserve depends on: the command is
    there, and finds its own files.
    """
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "env")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True)
    (packages,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    installed = sysconfig.get_path("purelib")
    others = [path for path in sys.path if path.endswith("site-packages") and path != installed]
    (packages / "dependencies.pth").write_text("\n".join([installed, *others]) + "\n")
    script = tmp_path / "env" / "bin" / "splitserve"
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    for arguments, told in ((["version"], "splitserve 0."), (["config", "list"], "quickstart")):
        result = subprocess.run(
            [str(script), *arguments], env=environ, capture_output=True, text=True, check=True
        )
        assert told in result.stdout
    where = "import splitserve.orchestrator.cli.main as m; print(m.__file__)"
    python = tmp_path / "env" / "bin" / "python"
    result = subprocess.run(
        [str(python), "-c", where], env=environ, capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith(str(packages))
