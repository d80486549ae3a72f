"""``splitserve record``: its file, and what it refuses. A recording of a running cluster is made in
``end_to_end/test_mock_record.py``.
"""

from __future__ import annotations

import resource
import signal
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from splitserve.orchestrator.cli.errors import EXIT_NOT_RUNNING, RefusedError
from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.cli.record import TraceFile

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_on_a_full_disk_holds_whole_lines(tmp_path: Path) -> None:
    """What did not fit is not there in part, and later lines come behind the others."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as file:
        file.append(b"one\n")
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                file.append(b"two\nthree\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        assert path.read_bytes() == b"one\n"
        file.append(b"four\n")
    assert path.read_bytes() == b"one\nfour\n"


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    """The one that is there stays as it is."""
    path = tmp_path / "trace.jsonl"
    path.write_text("mine")
    with pytest.raises(RefusedError, match="there is such a file"):
        TraceFile(path)
    assert path.read_text() == "mine"


def test_without_a_cluster_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status says that none is running; a bad option is refused before."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "trace.jsonl"
    for arguments in ([], ["no-such"]):
        result = CliRunner().invoke(main, ["record", *arguments, "--out", str(path)])
        assert result.exit_code == EXIT_NOT_RUNNING
        assert "is running" in result.stderr
    assert not path.exists()
    for wrong in (["--minutes", "0"], ["--block-tokens", "0"]):
        assert CliRunner().invoke(main, ["record", "--out", str(path), *wrong]).exit_code == 2
    assert CliRunner().invoke(main, ["record"]).exit_code == 2
