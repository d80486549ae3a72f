"""A folder for a disk tier that can be made full: a small file system of its own where one may be
mounted, else a limit on the size of the files that one process may write.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LEFT_BYTES = 20 * 1024
"""Of a full disk, and of each file where that is limited: the beginning of a chunk."""


class SmallDisk:
    """``folder`` lies on a disk of ``size_bytes``, or looks so."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        folder.mkdir()
        self.folder = folder
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
        self.is_mounted = (
            os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
        )

    @property
    def chunk_files(self) -> list[Path]:
        """The chunks of a tier in ``folder / tier``."""
        return sorted((self.folder / "tier" / "chunks").glob("*/" + "?" * 64))

    @contextlib.contextmanager
    def full(self, writer: int) -> Iterator[None]:
        """Inside, the process ``writer`` meets the disk's end in the middle of each chunk."""
        if not self.is_mounted:
            before = resource.prlimit(writer, resource.RLIMIT_FSIZE)
            resource.prlimit(writer, resource.RLIMIT_FSIZE, (LEFT_BYTES, before[1]))
            yield
            resource.prlimit(writer, resource.RLIMIT_FSIZE, before)
            return
        filler = self.folder / "filler"
        fill(filler)
        os.truncate(filler, filler.stat().st_size - LEFT_BYTES)
        yield
        filler.unlink()

    def close(self) -> None:
        """The file system is gone."""
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


def fill(path: Path) -> None:
    """The file takes all the room that its disk has."""
    with path.open("ab", 0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))


def spoil(path: Path, way: str, at: int = 0) -> None:
    """The file is ``halved``, ``emptied``, or has the byte ``at`` ``flipped``."""
    with path.open("r+b", 0) as file:
        if way == "flipped":
            for byte in os.pread(file.fileno(), 1, at):  # None in a file that is empty already.
                os.pwrite(file.fileno(), bytes([byte ^ 0x40]), at)
        else:
            file.truncate(path.stat().st_size // 2 if way == "halved" else 0)
