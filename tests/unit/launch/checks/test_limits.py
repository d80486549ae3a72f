"""What the shell allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from splitserve.orchestrator.config import parse
from splitserve.orchestrator.launch.checks import limits as subject
from splitserve.orchestrator.launch.checks.subject import Subject
from splitserve.orchestrator.launch.finding import Severity

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.orchestrator.launch.finding import Finding

CLUSTER = """
engine: mock
model: {path: m}
prefill: &pool {transfer: {transport: nixl}}
decode: *pool
"""
INFINITY = subject.resource.RLIM_INFINITY


def finding_of(
    monkeypatch: pytest.MonkeyPatch,
    files: int = INFINITY,
    processes: int = INFINITY,
    locked: int = INFINITY,
    addresses: int = INFINITY,
) -> Finding:
    """With these soft limits, for a user that is not root."""
    resource = subject.resource
    values = {
        resource.RLIMIT_NOFILE: files,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_MEMLOCK: locked,
        resource.RLIMIT_AS: addresses,
    }
    monkeypatch.setattr(subject.resource, "getrlimit", lambda kind: (values[kind], 4096))
    monkeypatch.setattr(subject.os, "geteuid", lambda: 1000)
    return subject.limits(Subject(parse(CLUSTER), {}))


def test_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to say."""
    finding = finding_of(monkeypatch)
    assert finding.problems == ()
    assert finding.detail.startswith("open files unlimited")


@pytest.mark.parametrize(("files", "severity"), [(100, Severity.FAIL), (1024, Severity.WARN)])
def test_few_open_files(monkeypatch: pytest.MonkeyPatch, files: int, severity: Severity) -> None:
    """Too few to start, or too few for all requests that may wait; what to say in the shell."""
    (problem,) = finding_of(monkeypatch, files=files).problems
    assert problem.severity is severity
    assert problem.fix.startswith("ulimit -n 1088")


def test_few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this user runs already counts."""
    monkeypatch.setattr(subject, "_own_threads", lambda: 900)
    (problem,) = finding_of(monkeypatch, processes=1000).problems
    assert "1000 processes and threads, of which 100 are left" in problem.what


def test_a_containers_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its limit and what it has."""
    paths = (tmp_path / "max", tmp_path / "current")
    for path, text in zip(paths, ("300\n", "200\n"), strict=True):
        path.write_text(text)
    monkeypatch.setattr(subject, "_PIDS", paths)
    (problem,) = finding_of(monkeypatch).problems
    assert problem.keys == ("pids.max",)
    paths[0].write_text("max\n")
    assert finding_of(monkeypatch).problems == ()


def test_locked_memory_matters_with_rdma(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without such a device nothing is locked."""
    monkeypatch.setattr(subject, "_INFINIBAND", tmp_path)
    assert finding_of(monkeypatch, locked=1 << 20).problems == ()
    (tmp_path / "mlx5_0").mkdir()
    (problem,) = finding_of(monkeypatch, locked=1 << 20).problems
    assert problem.keys == ("ulimit -l",)


def test_few_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than the KV of one node."""
    (problem,) = finding_of(monkeypatch, addresses=10**8).problems
    assert problem.keys == ("ulimit -v",)
