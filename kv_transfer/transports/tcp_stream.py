"""One non-blocking TCP connection that moves byte ranges: what goes out is a queue, what comes in
is a conversation.

A conversation is a generator: it yields the ranges that the next bytes belong into and is resumed
when they are full, so a protocol reads as straight lines though it is fed piece by piece. Both
directions hand the kernel the ranges themselves: a page is never copied on its way between KV
memory and the socket.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from splitserve.kv_transfer.transports.pages import ByteRanges, Int64Array

Conversation = Iterator[ByteRanges]

STEP_BYTES = 4 * 1024 * 1024
"""Most bytes that one step moves in one direction: bounds the time of ``poll``."""

SILENCE_LIMIT_S = 30
"""A connection whose other end acknowledges nothing, or has no room, for so long is over."""

_SCRATCH = np.zeros(256 * 1024, dtype=np.uint8)
"""Where bytes go that nobody may have; shared by all connections and never read."""

_libc = ctypes.CDLL(None, use_errno=True)


class _MessageHeader(ctypes.Structure):
    """The kernel's ``struct msghdr``."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("ranges", ctypes.c_void_p),
        ("range_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


for _function in (_libc.sendmsg, _libc.recvmsg):
    _function.argtypes = (ctypes.c_int, ctypes.POINTER(_MessageHeader), ctypes.c_int)
    _function.restype = ctypes.c_ssize_t


class StreamEndedError(Exception):
    """The connection is over; the message says why."""


class Stream:
    """A connected or connecting socket. The owner closes it after ``StreamEndedError``."""

    def __init__(self, connection: socket.socket, *, connected: bool) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _detect_silence(connection)
        self._socket = connection
        self._header = _MessageHeader()
        self._outgoing: deque[tuple[ByteRanges, object]] = deque()
        self._conversation: Conversation = iter(())
        self._incoming: ByteRanges | None = None
        self.connected = connected

    def fileno(self) -> int:
        return self._socket.fileno()

    def converse(self, conversation: Conversation) -> None:
        """Incoming bytes go to ``conversation`` from now on."""
        self._conversation = conversation
        self._next_target()

    @property
    def wants_to_send(self) -> bool:
        """Whether the socket should be watched for room (or for the end of connecting)."""
        return not self.connected or bool(self._outgoing)

    @property
    def queued(self) -> int:
        """Number of messages that are not fully sent."""
        return len(self._outgoing)

    def enqueue(self, ranges: ByteRanges, keep: object) -> None:
        """Send ``ranges`` after all before them; ``keep`` stays referenced until then."""
        self._outgoing.append((ranges, keep))

    def enqueue_bytes(self, message: bytes) -> None:
        """Send a copy of ``message``."""
        buffer = np.frombuffer(message, dtype=np.uint8)
        self.enqueue(whole_buffer(buffer), buffer)

    def discard_incoming(self) -> None:
        """What is left of the ranges being received goes nowhere."""
        if self._incoming is not None:
            self._incoming = nowhere(self._incoming.left)

    def step(self) -> None:
        """Move what the socket takes and gives, up to a bound. Raises ``StreamEndedError``."""
        if not self.connected:
            self._finish_connecting()
        if self.connected:
            self._receive()
            self.flush()

    def flush(self) -> None:
        """Send what the socket takes, up to a bound. Raises ``StreamEndedError``."""
        budget = STEP_BYTES
        while self.connected and self._outgoing and budget > 0:
            ranges, _ = self._outgoing[0]
            moved = self._call(_libc.sendmsg, ranges, budget)
            if moved is None:
                return
            budget -= moved
            ranges.advance(moved)
            if not ranges.left:
                self._outgoing.popleft()

    def close(self, *, abort: bool) -> None:
        """Close; with ``abort`` the kernel drops what it has not sent yet. Idempotent."""
        if abort and self._socket.fileno() >= 0:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._socket.close()
        self._outgoing.clear()
        self._incoming = None
        self._conversation = iter(())

    def _finish_connecting(self) -> None:
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise StreamEndedError(f"cannot connect: {os.strerror(error)}")
        try:
            self._socket.getpeername()
        except OSError:
            return
        self.connected = True

    def _receive(self) -> None:
        budget = STEP_BYTES
        while self._incoming is not None and budget > 0:
            moved = self._call(_libc.recvmsg, self._incoming, budget)
            if moved is None:
                return
            if moved == 0:
                raise StreamEndedError("the peer closed the connection")
            budget -= moved
            self._incoming.advance(moved)
            if not self._incoming.left:
                self._next_target()

    def _next_target(self) -> None:
        self._incoming = next(self._conversation, None)
        while self._incoming is not None and not self._incoming.left:
            self._incoming = next(self._conversation, None)

    def _call(
        self, function: ctypes._NamedFuncPointer, ranges: ByteRanges, limit_bytes: int
    ) -> int | None:
        """Bytes moved by ``function``; None when the socket is not ready."""
        self._header.range_count = ranges.window(limit_bytes)
        self._header.ranges = ranges.pointer()
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        moved: int = function(self._socket.fileno(), ctypes.byref(self._header), flags)
        if moved >= 0:
            return moved
        error = ctypes.get_errno()
        if error in (errno.EAGAIN, errno.EINTR):
            return None
        raise StreamEndedError(os.strerror(error))


def whole_buffer(buffer: npt.NDArray[Any]) -> ByteRanges:
    """The bytes of a contiguous array; the caller keeps the array."""
    address: Int64Array = np.array([buffer.ctypes.data], dtype=np.int64)
    return ByteRanges((address,), np.array([buffer.nbytes], dtype=np.int64))


def nowhere(length: int) -> ByteRanges:
    """``length`` bytes that overwrite each other in a scratch buffer."""
    pieces = -(-length // _SCRATCH.nbytes)
    lengths: Int64Array = np.full(pieces, _SCRATCH.nbytes, dtype=np.int64)
    lengths[-1:] -= pieces * _SCRATCH.nbytes - length
    return ByteRanges((np.full(pieces, _SCRATCH.ctypes.data, dtype=np.int64),), lengths)


def _detect_silence(connection: socket.socket) -> None:
    """A peer that vanished, or takes nothing that is sent, is lost after ``SILENCE_LIMIT_S``."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_LIMIT_S * 1000)
