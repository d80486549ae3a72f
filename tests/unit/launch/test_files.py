"""The traces of running clusters: private, and honest about what runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from splitserve.orchestrator.launch.files import (
    ClusterFiles,
    ClusterRecord,
    RunningClusterError,
    known_clusters,
)

if TYPE_CHECKING:
    from pathlib import Path

RECORD = ClusterRecord(
    name="a",
    run="r",
    pid=1,
    source="a.yaml",
    url="http://127.0.0.1:8000",
    nodes=("prefill-0",),
    phase="serving",
    started=0.0,
    log_dir="/logs",
)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "splitserve"


def test_the_lock_says_what_runs(state: Path) -> None:
    """While it is held the cluster runs and a second `up` is refused; afterwards neither."""
    files = ClusterFiles("a")
    assert not files.is_running()
    with files.lock():
        assert files.is_running()
        with pytest.raises(RunningClusterError, match="splitserve down a"):
            files.lock()
    assert not files.is_running()


def test_records_are_private_and_listed(state: Path) -> None:
    """Mode 0600 in folders of mode 0700; what is removed is not listed."""
    files = ClusterFiles("a")
    files.lock().close()
    files.write_record(RECORD)
    assert files.record() == RECORD
    assert known_clusters() == [files]
    assert files.record_path.stat().st_mode & 0o777 == 0o600
    assert state.stat().st_mode & 0o777 == 0o700
    files.remove_record()
    assert files.record() is None
    assert known_clusters() == []


def test_a_new_run_forgets_the_old_one(state: Path) -> None:
    """Statuses, incarnations and wishes of the last run are gone; the configuration and the token
    are private.
    """
    files = ClusterFiles("a")
    files.begin_run("{}", "old")
    files.wish_for("prefill-0")
    (files.run_dir / "prefill-0.status.json").write_text("old")
    (files.run_dir / "prefill-0.incarnation").write_text("old")
    files.begin_run("{}", "new")
    names = sorted(path.name for path in files.run_dir.iterdir())
    assert names == ["logs", "operator.token", "resolved.json"]
    assert files.config_path.stat().st_mode & 0o777 == 0o600
    assert files.token_path.stat().st_mode & 0o777 == 0o600
    assert files.token_path.read_text() == "new"
    files.remove_record()
    assert not files.token_path.exists()


def test_a_wish_is_taken_once(state: Path) -> None:
    """A node is started again when somebody asked for it, and once for each time."""
    files = ClusterFiles("a")
    files.begin_run("{}", "token")
    assert not files.is_wished("prefill-0")
    files.wish_for("prefill-0")
    assert files.is_wished("prefill-0")
    assert not files.is_wished("prefill-1")
    files.take_wish("prefill-0")
    assert not files.is_wished("prefill-0")


def test_a_damaged_record_is_no_record(state: Path) -> None:
    """Half a file does not break `status`."""
    files = ClusterFiles("a")
    files.lock().close()
    files.record_path.write_text("{")
    assert files.record() is None
