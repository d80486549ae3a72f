"""Processes that stand still.

SIGSTOP ends nothing at once: one thread has to take it before the others hear of it, and on a
machine with more to do than processors they run on until then.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

DEADLINE_S = 20.0
POLL_S = 0.001
STATE = 2
"""Place of a thread's state in its ``stat``, counted from the end of its name."""


def stand_still(pid: int) -> None:
    """The process does nothing from now on, until SIGCONT."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + DEADLINE_S
    while not all(_state(task) in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < end, f"process {pid} does not stop"
        time.sleep(POLL_S)


def tell(pid: int, number: signal.Signals) -> None:
    """The process has the signal; of SIGSTOP, it stands still."""
    if number == signal.SIGSTOP:
        stand_still(pid)
    else:
        os.kill(pid, number)


def _state(task: Path) -> str:
    try:
        text = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return text[text.rindex(")") + STATE]
