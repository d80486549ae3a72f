"""Mooncake's client from outside: the process of ``mooncake_process.py``, and lanes to it.

Bytes in memory that the process maps too are moved in place, others by way of a lane's own memory.

The client's own calls may wait for a minute, and a store that stands still cannot be told to leave
the memory alone. So it has a process of its own: one that does not answer in time is killed, and
when it is gone nobody writes to the arena any more. A new one takes about a tenth of a second.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from splitserve.kv_transfer.cache.tiers.base import TierConfigError, TierUnavailableError
from splitserve.kv_transfer.cache.tiers.mooncake_process import (
    MESSAGE_LIMIT_BYTES,
    OK,
    Answer,
    Done,
    Fault,
    Get,
    Open,
    Piece,
    Put,
    Question,
    Share,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from splitserve.kv_transfer.cache.tiers.base import ChunkBuffers, SharedMemory

START_LIMIT_S = 20.0
"""For a process to start and to load the library, on a loaded machine."""
KILL_LIMIT_S = 10.0
GRACE_S = 1.0
"""Beyond what the client's own timeouts should take."""
STAGING_STEP_BYTES = 1 << 20
_PROGRAM = "splitserve.kv_transfer.cache.tiers.mooncake_process"
_OURS = "SPLITSERVE_"
"""Such variables may hold the cluster's and the cache's secret."""


class ClientProcess:
    """A running client, until it is found ``is_lost``; ``close`` it then."""

    def __init__(
        self,
        where: Open,
        *,
        lanes: int,
        timeout_s: float,
        connect_timeout_s: float,
    ) -> None:
        """It is connected. Raises ``TierConfigError`` without the library, and
        ``TierUnavailableError``.
        """
        pairs = [_lane_sockets() for _ in range(lanes)]
        theirs = [other.fileno() for _, other in pairs]
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, *map(str, theirs)],
            stdin=subprocess.DEVNULL,
            env=_environment(timeout_s, connect_timeout_s),
            pass_fds=theirs,
        )
        for _, other in pairs:
            other.close()
        # It waits for the master, then for the owner of a segment
        limit_s = timeout_s + math.ceil(timeout_s) + GRACE_S
        self.is_lost = False
        self._lock = threading.Lock()
        self._idle = [Lane(self, ours, limit_s, number) for number, (ours, _) in enumerate(pairs)]
        self._first_region = lanes
        """Of memory that is shared; lower numbers are those of the lanes' own."""
        self._shared: list[SharedMemory] = []
        try:
            self._idle[0].ask(where, limit_s=START_LIMIT_S)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """For those who look at it from outside."""
        return self._process.pid

    def use(self, memories: Sequence[SharedMemory]) -> None:
        """It has these mapped, which begin with those that it had; one caller at a time, while a
        lane is free. Raises ``TierError``.
        """
        for memory in memories[len(self._shared) :]:
            lane = self.take()
            try:
                region = self._first_region + len(self._shared)
                lane.share(region, memory.descriptor, memory.size_bytes)
            finally:
                self.give_back(lane)
            self._shared.append(memory)

    def place(self, view: memoryview) -> tuple[int, int] | None:
        """Region and offset where the process finds these bytes; None: it does not."""
        if view.readonly or not view:
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        for region, memory in enumerate(self._shared, self._first_region):
            if 0 <= address - memory.address <= memory.size_bytes - len(view):
                return region, address - memory.address
        return None

    def take(self) -> Lane:
        """A lane that nobody else uses. There is one: no more are taken than there are."""
        with self._lock:
            if not self._idle:
                raise TierUnavailableError(self.ended())
            return self._idle.pop()

    def give_back(self, lane: Lane) -> None:
        """Somebody else may use it."""
        with self._lock:
            if self.is_lost:
                lane.close()
            else:
                self._idle.append(lane)

    def close(self) -> None:
        """The process is gone: nobody writes to memory that it was given. May be repeated, and
        whoever waits for an answer gets none. Raises ``TimeoutExpired`` when it cannot be ended.
        """
        self.is_lost = True
        self._process.kill()
        self._process.wait(KILL_LIMIT_S)
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def ended(self) -> str:
        """How, for messages."""
        return f"its client has ended (exit status {self._process.wait(KILL_LIMIT_S)})"


class Lane:
    """One question at a time, with memory for what lies in none that is shared."""

    def __init__(
        self, process: ClientProcess, connection: socket.socket, limit_s: float, region: int
    ) -> None:
        self._process = process
        self._connection = connection
        self._limit_s = limit_s
        self._region = region
        self._decoder = msgspec.msgpack.Decoder(Answer)
        self._staging: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def get(self, names: Sequence[str], chunks: Sequence[ChunkBuffers]) -> list[int]:
        """The store's codes (``Get``); chunks that their buffers ``hold`` are in them."""
        pieces = self._pieces(chunks)
        codes = self.ask(Get(list(names), pieces, [chunk.may_be_shorter for chunk in chunks]))
        for chunk, places, code in zip(chunks, pieces, codes, strict=True):
            if code > 0 and chunk.hold(code):
                views = (chunk.header, chunk.found_body)
                for view, (region, start, _) in zip(views, places, strict=True):
                    if region == self._region:
                        np.copyto(_array(view), self._staging[start : start + len(view)])
        return codes

    def put(
        self, names: Sequence[str], chunks: Sequence[ChunkBuffers], replicas: int, forced: list[str]
    ) -> list[int]:
        """The store's codes (``Put``)."""
        pieces = self._pieces(chunks)
        for chunk, places in zip(chunks, pieces, strict=True):
            for view, (region, start, size) in zip((chunk.header, chunk.body), places, strict=True):
                if region == self._region:
                    np.copyto(self._staging[start : start + size], _array(view))
        return self.ask(Put(list(names), pieces, replicas, forced))

    def ask(
        self, question: Question, descriptor: int | None = None, limit_s: float | None = None
    ) -> list[int]:
        """The codes that answer it. Raises ``TierError``: for one that did not come in time the
        process has been ended.
        """
        packet = msgspec.msgpack.encode(question)
        assert len(packet) <= MESSAGE_LIMIT_BYTES, f"a question of {len(packet)} bytes"
        limit_s = self._limit_s if limit_s is None else limit_s
        try:
            socket.send_fds(self._connection, [packet], [] if descriptor is None else [descriptor])
            came = _wait(self._connection, limit_s)
            packet = self._connection.recv(MESSAGE_LIMIT_BYTES) if came else b""
        except OSError:
            came, packet = True, b""
        if not came:
            self._process.close()
            raise TierUnavailableError(f"no answer in {limit_s:.1f} s")
        if not packet:
            self._process.is_lost = True
            raise TierUnavailableError(self._process.ended())
        match self._decoder.decode(packet):
            case Done(codes):
                return codes
            case Fault(reason, is_lasting):
                raise (TierConfigError if is_lasting else TierUnavailableError)(reason)

    def share(self, region: int, descriptor: int, size_bytes: int) -> None:
        """The client may use that memory, under this number. Raises ``TierError``."""
        code = self.ask(Share(region, size_bytes), descriptor, START_LIMIT_S)[0]
        if code != OK:
            raise TierUnavailableError(
                f"its client cannot register {size_bytes} bytes of memory (code {code})"
            )

    def close(self) -> None:
        """Nobody waits for an answer."""
        self._connection.close()

    def _pieces(self, chunks: Sequence[ChunkBuffers]) -> list[list[Piece]]:
        """Where header and body of each lie: in shared memory, or in this lane's own."""
        end = 0
        found: list[list[Piece]] = []
        for chunk in chunks:
            pieces: list[Piece] = []
            for view in (chunk.header, chunk.body):
                region, offset = self._process.place(view) or (self._region, end)
                pieces.append((region, offset, len(view)))
                end += len(view) if region == self._region else 0
            found.append(pieces)
        self._make_room(end)
        return found

    def _make_room(self, size_bytes: int) -> None:
        """The lane's memory is at least so large; it never shrinks."""
        if size_bytes <= len(self._staging):
            return
        size_bytes = -(-size_bytes // STAGING_STEP_BYTES) * STAGING_STEP_BYTES
        descriptor = os.memfd_create("splitserve-mooncake", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size_bytes)
            self.share(self._region, descriptor, size_bytes)
            self._staging = np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)
        finally:
            os.close(descriptor)


def _lane_sockets() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_LIMIT_BYTES)
    return pair


def _environment(timeout_s: float, connect_timeout_s: float) -> dict[str, str]:
    """Mooncake has most of its settings there. What the user has set stays, but for timeouts, which
    are the tier's, and secrets, which the library does not need.
    """
    quiet = {"MC_LOG_LEVEL": "ERROR"}
    theirs = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    whole_s = str(math.ceil(timeout_s))
    ours = {
        "MC_RPC_TIMEOUT_MS": str(max(1, round(timeout_s * 1000))),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(max(1, round(connect_timeout_s * 1000))),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": whole_s,
        "MC_TCP_STATUS_TIMEOUT_SEC": whole_s,
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    }
    return quiet | theirs | ours


def _wait(connection: socket.socket, limit_s: float) -> bool:
    """Whether something can be read, in time."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(limit_s * 1e3))


def _array(view: memoryview) -> npt.NDArray[np.uint8]:
    """The same bytes; copies of megabytes then do not hold up other threads."""
    return np.frombuffer(view, np.uint8)
