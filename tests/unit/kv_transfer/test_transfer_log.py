"""The log of finished transfers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from splitserve.kv_transfer.transfer_log import LOG_ENV, TransferLog

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the environment variable nothing is kept."""
    monkeypatch.delenv(LOG_ENV, raising=False)
    log = TransferLog()
    log.record("send", pages=1)
    assert not log.is_on
    log.close()


def test_one_line_per_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several writers may share the file."""
    path = tmp_path / "new" / "log"
    monkeypatch.setenv(LOG_ENV, str(path))
    logs = [TransferLog(), TransferLog(str(path))]
    for number, log in enumerate(logs):
        log.record("send", pages=number)
        log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"side": "send", "pages": 0}, {"side": "send", "pages": 1}]


def test_a_full_disk_turns_the_log_off(caplog: pytest.LogCaptureFixture) -> None:
    """A log that cannot be written costs a warning, not the transfers."""
    log = TransferLog("/dev/full")
    log.record("send", pages=1)
    assert not log.is_on
    assert "not logged any more" in caplog.text
