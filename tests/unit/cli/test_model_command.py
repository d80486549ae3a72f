"""``splitserve model``: what it prints and how it fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from splitserve.orchestrator.cli import model as model_command
from splitserve.orchestrator.models.errors import PrepareError

if TYPE_CHECKING:
    from splitserve.orchestrator.models.prepare import Progress


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(model_command.model, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_prepare_prints_the_folder_and_each_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output is the folder alone; without a terminal a step is two lines on stderr."""

    def fake_prepare(name: str, progress: Progress) -> Path:
        for done in (1, 5, 10, 10):
            progress("download", done, 10)
        return Path("/models") / name

    monkeypatch.setattr(model_command, "prepare", fake_prepare)
    code, out, err = run("prepare", "smollm2-135m")
    assert (code, out) == (0, "/models/smollm2-135m\n")
    assert err == "download ...\ndownload: done\n"


def test_a_failure_is_one_message_and_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """What prepare raises is shown without a traceback."""

    def fake_prepare(name: str, progress: Progress) -> Path:
        raise PrepareError("the disk is full")

    monkeypatch.setattr(model_command, "prepare", fake_prepare)
    code, out, err = run("prepare", "smollm2-135m")
    assert (code, out) == (1, "")
    assert err == "Error: the disk is full\n"


def test_list_says_what_is_prepared() -> None:
    """Every model of the catalogue with its state, its size and its licence."""
    code, out, _ = run("list")
    assert code == 0
    assert "smollm2-135m  (not prepared, 93 MB to download)" in out
    assert "Apache-2.0" in out


def test_path_prints_where_a_model_is(tiny_model: Path) -> None:
    """A folder is printed, a model that is not prepared leads to the command that does it."""
    assert run("path", str(tiny_model)) == (0, f"{tiny_model}\n", "")
    code, _, err = run("path", "smollm2-135m")
    assert code == 1
    assert "splitserve model prepare smollm2-135m" in err
