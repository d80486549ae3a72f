"""Linux process control for the processes that start others: who dies with whom, and how a whole
tree is ended for sure.

Two facts of Linux carry the promise "nothing is left behind":

- a *subreaper* (``PR_SET_CHILD_SUBREAPER``) inherits every orphan below it, also those that called
  ``setsid``; so when ``waitpid`` says ``ECHILD`` there is no descendant left, and that is a proof,
  not a guess;
- ``PR_SET_PDEATHSIG`` sends a signal to a child when its parent dies, also by SIGKILL.

A marker variable in the environment finds what escaped both (the starter and its starter killed at
the same moment).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Collection

RUN_MARKER_ENV = "SPLITSERVE_RUN"
"""Names the ``up`` that a process belongs to; inherited by everything it starts."""
NODE_MARKER_ENV = "SPLITSERVE_NODE"
"""Names the node that a process belongs to."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02


def become_subreaper() -> None:
    """From now on orphaned descendants become children of this process. Raises ``OSError`` where
    the kernel refuses.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """This process gets the signal when ``parent`` dies, at once when it is dead already.

    Call it in the process that shall die, from its main thread; it survives ``exec``.
    """
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


def descendants(of: int | None = None) -> list[psutil.Process]:
    """All living processes below ``of`` (default: this process), zombies excepted."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(of).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def kill_descendants(deadline_s: float) -> bool:
    """SIGKILL everything below this process, until nothing is left. False when something still
    lives at the deadline.

    Needs ``become_subreaper``. Orphans that were adopted are reaped, so that none remains as a
    zombie.
    """
    end = time.monotonic() + deadline_s
    while True:
        left = descendants()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        reap_children()
        if not left:
            return True
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)


def reap_children(keep: Collection[int] = ()) -> dict[int, int]:
    """Collect children that have ended, except those in ``keep``: pid to wait status."""
    ended = {}
    for child in psutil.Process().children():
        if child.pid in keep:
            continue
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                ended[pid] = status
    return ended


def marked(run: str, node: str | None = None) -> list[psutil.Process]:
    """Living processes of this user that carry the marker of ``run`` (and of ``node``), this
    process excepted.
    """
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            environ = process.environ()
            if environ.get(RUN_MARKER_ENV) != run or process.status() == psutil.STATUS_ZOMBIE:
                continue
        except psutil.Error:
            continue
        if node is None or environ.get(NODE_MARKER_ENV) == node:
            found.append(process)
    return found


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
