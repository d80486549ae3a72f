"""Where a cluster writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from splitserve.orchestrator.config import parse
from splitserve.orchestrator.launch.checks import folders as subject
from splitserve.orchestrator.launch.checks.subject import Subject
from splitserve.orchestrator.launch.finding import Severity

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.orchestrator.launch.finding import Problem

CLUSTER = "engine: mock\nmodel: {path: m}\nobservability: {log_dir: LOGS}\n"


def problems_of(logs: Path, environ: dict[str, str] | None = None) -> tuple[Problem, ...]:
    """Of a cluster that logs there."""
    config = parse(CLUSTER.replace("LOGS", str(logs)))
    return subject.folders(Subject(config, environ or {})).problems


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_folders_that_are_not_there_yet(tmp_path: Path) -> None:
    """They will be made."""
    assert problems_of(tmp_path / "not" / "there") == ()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    """It is named, also when it is further up."""
    (tmp_path / "file").write_text("x")
    for logs in (tmp_path / "file", tmp_path / "file" / "logs"):
        (problem,) = problems_of(logs)
        assert problem.severity is Severity.FAIL
        assert f"{tmp_path}/file is a file" in problem.what


@pytest.mark.parametrize(("free", "severity"), [(0, Severity.FAIL), (1 << 20, Severity.WARN)])
def test_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, severity: Severity
) -> None:
    """None at all, or less than logs may take."""
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(subject.shutil, "disk_usage", lambda path: usage)
    assert {problem.severity for problem in problems_of(tmp_path)} == {severity}


def test_the_temporary_folder(tmp_path: Path) -> None:
    """One that is not there, and one whose sockets would have too long a name."""
    (problem,) = problems_of(tmp_path, {"TMPDIR": str(tmp_path / "none")})
    assert problem.severity is Severity.WARN
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    (problem,) = problems_of(tmp_path, {"TMPDIR": str(deep)})
    assert problem.keys == ("TMPDIR",)
    assert problem.severity is Severity.FAIL
