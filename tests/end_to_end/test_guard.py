"""The guard of an engine: it pins, it stops, it kills, and its end is the proof that nothing is
left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from support.up_process import kill, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FAMILY = """
import os, signal, subprocess, sys, time
{before}
orphan = "import time; time.sleep(600)"
middle = (
    "import subprocess, sys\\n"
    f"print(subprocess.Popen([sys.executable, '-c', {{orphan!r}}], start_new_session=True, "
    "stdout=subprocess.DEVNULL).pid)"
)
found = subprocess.run([sys.executable, "-c", middle], stdout=subprocess.PIPE, text=True)
print(os.getpid(), found.stdout.strip(), flush=True)
{after}
"""


class GuardProcess:
    """A guard around a Python program that leaves an orphan in a session of its own."""

    def __init__(self, after: str, before: str = "", cpus: str = "") -> None:
        program = FAMILY.format(before=before, after=after)
        guard = [sys.executable, "-m", "splitserve.orchestrator.agent.guard"]
        self.process = subprocess.Popen(
            [*guard, *(["--cpus", cpus] if cpus else []), "--", sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self.process.stdout is not None
        engine, orphan = map(int, self.process.stdout.readline().split())
        self.tree = []
        for pid in (engine, orphan):
            with contextlib.suppress(psutil.NoSuchProcess):  # The engine may have ended already
                self.tree.append(psutil.Process(pid))

    def order(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")

    def ended(self, limit_s: float = 20) -> int:
        """The guard's exit status; nothing of the tree lives."""
        status = self.process.wait(limit_s)
        assert not [process for process in self.tree if process.is_running()]
        return status


@pytest.fixture
def guards() -> Iterator[list[GuardProcess]]:
    """Guards to kill when a test fails."""
    started: list[GuardProcess] = []
    yield started
    for guard in started:
        kill([guard.process.pid, *(process.pid for process in guard.tree)])
        guard.process.wait(10)
        assert guard.process.stdin is not None
        assert guard.process.stdout is not None
        guard.process.stdin.close()
        guard.process.stdout.close()


def test_the_engines_end_takes_its_orphans_along(guards: list[GuardProcess]) -> None:
    """The engine ends with status 7: its orphan is killed, and the guard ends with 7."""
    guards.append(GuardProcess("sys.exit(7)"))
    assert guards[0].ended() == 7


def test_an_engine_that_a_signal_ended(guards: list[GuardProcess]) -> None:
    """A killed engine is reported as 128 + 9."""
    guards.append(GuardProcess("time.sleep(600)"))
    engine = next(process for process in guards[0].tree if process.ppid() == guards[0].process.pid)
    kill([engine.pid])
    assert guards[0].ended() == 137


def test_stop_lets_the_engine_end_by_itself(guards: list[GuardProcess]) -> None:
    """`stop` sends SIGTERM; an engine that takes it ends with its own status."""
    before = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
    guards.append(GuardProcess("time.sleep(600)", before))
    guards[0].order("stop 30")
    assert guards[0].ended() == 5


def test_stop_kills_an_engine_that_does_not_listen(guards: list[GuardProcess]) -> None:
    """After its seconds everything is killed."""
    before = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    guards.append(GuardProcess("time.sleep(600)", before))
    guards[0].order("stop 0.2")
    assert guards[0].ended() == 137


def test_the_end_of_the_agent_kills_everything(guards: list[GuardProcess]) -> None:
    """Standard input ends: whoever held it is gone."""
    guards.append(GuardProcess("time.sleep(600)"))
    assert guards[0].process.stdin is not None
    guards[0].process.stdin.close()
    assert guards[0].ended() == 137


def test_a_stopped_engine_is_killed_too(guards: list[GuardProcess]) -> None:
    """SIGSTOP does not protect from the guard."""
    guards.append(GuardProcess("time.sleep(600)"))
    for process in guards[0].tree:
        os.kill(process.pid, signal.SIGSTOP)
    guards[0].order("kill")
    assert guards[0].ended() == 137


def test_the_whole_tree_is_pinned(guards: list[GuardProcess]) -> None:
    """Engine and orphan may run on the given CPU only."""
    cpu = max(os.sched_getaffinity(0))
    guards.append(GuardProcess("time.sleep(600)", cpus=str(cpu)))
    assert [process.cpu_affinity() for process in guards[0].tree] == [[cpu], [cpu]]


def test_a_tethered_process_dies_with_its_parent(tmp_path: Path) -> None:
    """After SIGKILL of the parent the child is gone, without anybody's help."""
    child = tmp_path / "child"
    program = (
        "import subprocess, sys, time\n"
        "from splitserve.orchestrator.launch.tether import tethered\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(tethered(sleep))\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_for(lambda: child.exists() and child.read_text(), 20, "the child")
        pid = int(child.read_text())
        wait_for(lambda: "tether" not in " ".join(psutil.Process(pid).cmdline()), 20, "its exec")
    finally:
        kill([parent.pid])
        parent.wait(10)
    wait_for(lambda: not psutil.pid_exists(pid), 30, "the child's end")
