"""`splitserve up --detach`, seen by the one who waits: progress, the end, and Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from splitserve.orchestrator.cli import background
from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.cli.running import SERVING_LINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONFIG = """
name: test
engine: mock
model: {path: m}
router: {port: 0}
prefill: &pool {kv_cache_bytes: 1 MiB, transfer: {transport: tcp}}
decode: *pool
"""
UP = """
import os, sys, time
from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord

def note(phase):
    ClusterFiles("test").write_record(ClusterRecord(
        name="test", run="r", pid=os.getpid(), source="", url="http://127.0.0.1:1", nodes=(),
        phase=phase, started=0.0, log_dir=""))

def say(text):
    print(text, flush=True)
"""
"""What the stand-ins for `up` begin with."""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Result]]:
    """Runs `up --detach` with that program in place of the `up` in the background."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(background, "_POLL_S", 0.01)
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIG)
    processes: list[subprocess.Popen[bytes]] = []

    def started(program: str) -> Result:
        popen = subprocess.Popen

        def stand_in(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            assert command[-2:] == ["up", str(path)]
            processes.append(popen([sys.executable, "-c", UP + program], **options))
            return processes[-1]

        monkeypatch.setattr(background.subprocess, "Popen", stand_in)
        return CliRunner().invoke(main, ["up", str(path), "--detach"])

    yield started
    for process in processes:
        process.kill()
        process.wait()


def interrupt_after(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when the log of `up` has that word."""
    log = Path(os.environ["XDG_STATE_HOME"]) / "splitserve/test/logs/up.log"

    def sleep(seconds: float) -> None:
        if word in log.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(background, "time", SimpleNamespace(sleep=sleep))


def test_progress_is_shown(started: Callable[[str], Result]) -> None:
    """Whole lines as they come, all of those before it served, and none that speaks of Ctrl-C."""
    result = started(
        f"""
say("decode-0: loading")
sys.stdout.write("decode-0: "); sys.stdout.flush(); note("starting")
say("ready"); note("serving"); say({SERVING_LINE!r}); time.sleep(60)
"""
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "decode-0: loading",
        "decode-0: ready",
        "test serves on http://127.0.0.1:1/v1; `splitserve down test` stops it",
    ]


def test_one_that_does_not_start_is_explained(started: Callable[[str], Result]) -> None:
    """Status 1, with the log's path and its last lines."""
    result = started('say("error: no room"); sys.exit(1)')
    assert result.exit_code == 1
    assert "it did not start; its log is " in result.stderr
    assert "  | error: no room" in result.stderr


def test_interrupted_while_it_starts_it_goes_on(
    started: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 130; the message says so, and how to stop it."""
    interrupt_after("router", monkeypatch)
    result = started('note("starting"); say("router: starting"); time.sleep(60)')
    assert result.exit_code == 130
    assert "test goes on in the background" in result.stderr
    assert "`splitserve down test` stops it" in result.stderr
    assert "Aborted" not in result.output


def test_interrupted_before_anything_started_nothing_is_left(
    started: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`down` would not find it yet, so it is ended."""
    interrupt_after("pid", monkeypatch)
    result = started('say(f"pid {os.getpid()}"); time.sleep(60)')
    assert result.exit_code == 130
    assert result.stderr.strip() == "test has not been started"
    log = Path(os.environ["XDG_STATE_HOME"]) / "splitserve/test/logs/up.log"
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text().split()[1]), 0)
