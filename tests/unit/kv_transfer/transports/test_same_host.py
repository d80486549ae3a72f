"""The trial copy between two processes that were started side by side."""

from __future__ import annotations

import sys

import pytest

from splitserve.kv_transfer.transports import same_host


def test_this_machine_allows_it() -> None:
    """What the transport contract needs holds here, so there is no obstacle."""
    assert same_host.obstacle() == ""


def test_a_process_that_has_ended_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The reader says which process it could not read, and ends well: that is its answer."""
    same_host._read(2**22 - 1, 4096)
    assert "process 4194303 has ended" in capsys.readouterr().out


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "import time; time.sleep(60)"])
def test_a_trial_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Not an obstacle and not a pass: it could not be tried."""
    monkeypatch.setattr(same_host, "DEADLINE_S", 0.5)
    script = f"import sys\nif sys.argv[-1] == 'hold': print(1, flush=True)\n{program}\n"
    monkeypatch.setattr(same_host, "command", lambda *words: [sys.executable, "-c", script, *words])
    with pytest.raises(OSError, match=r"trial|did not end"):
        same_host.obstacle()
