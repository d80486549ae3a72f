"""Naming a process so that its death can be watched from another process of the same host.

A pid alone is reused; together with the kernel's boot id and the start time it names one process for ever. The watch is
a pidfd: readable when the process is gone, whatever killed it.
"""

from __future__ import annotations

import os
from pathlib import Path

from splitserve.kv_transfer.messages import ProcessIdentity


def own_identity() -> ProcessIdentity:
    """This process."""
    return ProcessIdentity(
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
        pid=os.getpid(),
        start_ticks=_start_ticks(os.getpid()),
    )


def watch(peer: ProcessIdentity) -> int | None:
    """A pidfd of the peer, or None when it lives on another host or in another pid namespace.

    Raises ``ProcessLookupError`` when the process is already gone.
    """
    own = own_identity()
    if (own.boot_id, own.pid_namespace) != (peer.boot_id, peer.pid_namespace):
        return None
    pidfd = os.pidfd_open(peer.pid)
    try:
        if _start_ticks(peer.pid) != peer.start_ticks:
            raise ProcessLookupError(f"process {peer.pid} is another one by now")
    except OSError:
        os.close(pidfd)
        raise
    return pidfd


def _start_ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError as error:
        raise ProcessLookupError(f"process {pid} is gone") from error
    # The command, in parentheses, may hold spaces; the start time is field 22.
    return int(stat.rsplit(")", 1)[1].split()[19])
