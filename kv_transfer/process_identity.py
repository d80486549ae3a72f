"""Naming a process so that its death can be watched from another process of the same host.

A pid alone is reused; together with the kernel's boot id and the start time it names one process
for ever. The watch is a pidfd: readable when the process is gone, whatever killed it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.kv_transfer.messages import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Callable


def boot_id() -> str:
    """Of the kernel: processes with the same one share a host, and its monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def own_identity() -> ProcessIdentity:
    """This process."""
    return identity_of(os.getpid())


def identity_of(pid: int) -> ProcessIdentity:
    """A process of this host and pid namespace. Raises ``ProcessLookupError`` when it is gone."""
    return ProcessIdentity(
        boot_id=boot_id(),
        pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
        pid=pid,
        start_ticks=_start_ticks(pid),
    )


def watch(peer: ProcessIdentity) -> int | None:
    """A pidfd of the peer, or None when it lives on another host or in another pid namespace.

    Raises ``ProcessLookupError`` when the process is already gone.
    """
    own = own_identity()
    if (own.boot_id, own.pid_namespace) != (peer.boot_id, peer.pid_namespace):
        return None
    try:
        pidfd = os.pidfd_open(peer.pid)
    except (OSError, OverflowError) as error:
        raise ProcessLookupError(f"process {peer.pid} is gone: {error}") from error
    try:
        if _start_ticks(peer.pid) != peer.start_ticks:
            raise ProcessLookupError(f"process {peer.pid} is another one by now")
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd


class DeathWatch:
    """Processes whose end matters, each under a key of the owner's choice."""

    def __init__(self) -> None:
        self._keys: dict[int, tuple[str, str]] = {}

    def add(self, key: tuple[str, str], process: ProcessIdentity) -> None:
        """``take`` tells the key once the process has ended; other hosts' processes never do.

        Raises ``ProcessLookupError`` when it has ended already.
        """
        if key not in self._keys.values():
            pidfd = watch(process)
            if pidfd is not None:
                self._keys[pidfd] = key

    @property
    def pidfds(self) -> list[int]:
        """Descriptors that become readable when a process has ended."""
        return list(self._keys)

    def take(self, pidfd: int) -> tuple[str, str] | None:
        """The key of a process that has ended, which is forgotten; None for another's pidfd."""
        key = self._keys.pop(pidfd, None)
        if key is not None:
            os.close(pidfd)
        return key

    def keep(self, is_wanted: Callable[[tuple[str, str]], bool]) -> None:
        """Forget the keys that are not wanted any more."""
        for pidfd, key in list(self._keys.items()):
            if not is_wanted(key):
                self.take(pidfd)


def _start_ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(f"process {pid} is gone") from error
    # The command, in parentheses, may hold spaces; the start time is field 22.
    return int(stat.rsplit(")", 1)[1].split()[19])
