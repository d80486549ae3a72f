"""May two processes that were started side by side copy into each other's memory?

``local`` cannot work without that right; UCX, and so ``nixl``, silently uses TCP between processes
of one host, which is many times slower. The right depends on the user, the container and
``ptrace_scope`` (with 1 a parent may reach into its child, which says nothing about siblings), so
it is tried between two children.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys

DEADLINE_S = 20.0
_BYTES = b"splitserve"


def obstacle() -> str:
    """What keeps engines of this host from copying into each other, with the cure; empty when
    nothing does. Takes about half a second. Raises ``OSError`` when it cannot be tried.
    """
    holder = subprocess.Popen(
        command("hold"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        address = holder.stdout.readline().strip()
        reader = subprocess.run(
            command("read", str(holder.pid), address),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"two processes that should copy did not end in {DEADLINE_S:g} s") from error
    finally:
        holder.kill()
        holder.communicate()
    if reader.returncode:
        raise OSError(f"the trial process failed: {reader.stderr.strip()[-300:]}")
    return reader.stdout.strip()


def command(*words: str) -> list[str]:
    """How this module is run as a process of its own."""
    return [sys.executable, "-m", "splitserve.kv_transfer.transports.same_host", *words]


def _hold() -> None:
    """Print where some bytes are and keep them until the input ends."""
    kept = ctypes.create_string_buffer(_BYTES)
    print(ctypes.addressof(kept), flush=True)
    sys.stdin.read()


def _read(pid: int, address: int) -> None:
    """Print what goes wrong when the bytes are read from that process, or nothing."""
    from splitserve.kv_transfer.transports.base import TransportError
    from splitserve.kv_transfer.transports.local import read_process

    try:
        found = read_process(pid, address, len(_BYTES))
    except TransportError as error:
        print(error)
    else:
        assert found == _BYTES, f"process {pid} holds other bytes at {address}"


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        _hold()
    else:
        _read(int(sys.argv[2]), int(sys.argv[3]))
