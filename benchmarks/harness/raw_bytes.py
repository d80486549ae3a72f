"""What moving the bytes of a prompt's KV costs without a cache: a copy in memory, reads of files,
GETs.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import time
from ctypes import addressof, c_char, memmove
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import redis

START_DEADLINE_S = 10.0
STOP_DEADLINE_S = 10.0
PAGE_BYTES = mmap.PAGESIZE


class RawBytes:
    """Two touched buffers of ``size_bytes``; every method answers in seconds."""

    def __init__(self, size_bytes: int) -> None:
        self._size = size_bytes
        self._buffers = [mmap.mmap(-1, size_bytes) for _ in range(2)]
        for buffer in self._buffers:
            for start in range(0, size_bytes, PAGE_BYTES):
                buffer[start] = 1

    def copy(self) -> float:
        """One copy of all bytes from one buffer into the other."""
        source, target = (addressof(c_char.from_buffer(buffer)) for buffer in self._buffers)
        begun = time.perf_counter()
        memmove(target, source, self._size)
        return time.perf_counter() - begun

    def read(self, files: Sequence[Path]) -> float:
        """All bytes of the files, past the page cache, one file after the other."""
        view = memoryview(self._buffers[0])
        begun = time.perf_counter()
        for path in files:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                size, at = os.fstat(file).st_size, 0
                while at < size:
                    at += os.preadv(file, [view[at : min(size, self._size)]], at)
            finally:
                os.close(file)
        return time.perf_counter() - begun

    @staticmethod
    def get(client: redis.Redis, names: Sequence[str]) -> float:
        """One GET after the other with plain redis-py. Raises ``KeyError`` for a value that is not
        there.
        """
        begun = time.perf_counter()
        for name in names:
            if client.get(name) is None:
                raise KeyError(name)
        return time.perf_counter() - begun


class RedisServer(contextlib.AbstractContextManager["RedisServer"]):
    """``redis-server`` on loopback, keeping nothing on disk; leaving the block stops it."""

    def __init__(self, port: int, folder: Path) -> None:
        self.port = port
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
        with (folder / "redis.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--dir", str(folder)], stdout=log, stderr=log
            )

    def __enter__(self) -> RedisServer:
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise OSError("redis-server does not start")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(STOP_DEADLINE_S)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
