"""Packets between the cache server and its clients on one host: Unix ``SOCK_SEQPACKET`` sockets.

A packet is one msgpack-encoded message, at most ``MESSAGE_LIMIT_BYTES`` long. The socket lies in a
folder that only its owner may enter, and both ends check that the other one runs under the same
user. A socket that is closed tells the other end that nobody of that process touches the arena any
more: clients close theirs only when their copies have ended, and the kernel does so for the dead.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from splitserve.kv_transfer.cache.messages import MESSAGE_LIMIT_BYTES
from splitserve.kv_transfer.cache.socket_path import short_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BACKLOG = 128
BUFFER_BYTES = 4 * MESSAGE_LIMIT_BYTES
_CREDENTIALS = struct.Struct("3i")

Message = TypeVar("Message")
encode = msgspec.msgpack.Encoder().encode


class PeerGoneError(ConnectionError):
    """The other end has closed or cannot be reached."""


class BadPacketError(ValueError):
    """The other end says what cannot be read. It may well be alive."""


def listen(path: str) -> socket.socket:
    """A listening socket at ``path``, which replaces one that nobody listens on any more."""
    place = Path(path)
    with suppress(FileNotFoundError):
        place.unlink()
    listener = _socket()
    with short_address(place) as address:
        listener.bind(address)
    place.chmod(0o600)
    listener.listen(BACKLOG)
    return listener


def connect(path: str) -> socket.socket:
    """A non-blocking connection to the server at ``path``. Raises ``PeerGoneError``."""
    connection = _socket()
    try:
        with short_address(path) as address:
            connection.connect(address)
        check_user(connection)
    except OSError as error:
        connection.close()
        raise PeerGoneError(f"no cache server answers at {path}: {error}") from error
    return connection


def wait(descriptors: Iterable[int], limit_s: float) -> None:
    """One of them can be read, or the time (rounded up to milliseconds) is over."""
    poller = select.poll()  # Unlike ``select`` it takes any descriptor, also in large processes.
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    poller.poll(max(0.0, limit_s) * 1e3)


def check_user(connection: socket.socket) -> None:
    """Raises ``PermissionError`` when the other end runs under another user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise PermissionError(f"the other end of the cache's socket belongs to user {user}")


def send(connection: socket.socket, message: object, descriptor: int | None = None) -> bool:
    """Send one message; False when the other end does not read and its buffer is full.

    Raises ``PeerGoneError`` when it has closed.
    """
    packet = encode(message)
    assert len(packet) <= MESSAGE_LIMIT_BYTES, f"a packet of {len(packet)} bytes"
    try:
        if descriptor is None:
            connection.send(packet)
        else:
            socket.send_fds(connection, [packet], [descriptor])
    except BlockingIOError:
        return False
    except OSError as error:
        raise PeerGoneError(f"the cache's socket has closed: {error}") from error
    return True


class Receiver(Generic[Message]):
    """Reads packets of one connection as messages of one union."""

    def __init__(
        self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[Message]
    ) -> None:
        self._connection = connection
        self._decode = decoder.decode
        self._buffer = bytearray(MESSAGE_LIMIT_BYTES)
        self._view = memoryview(self._buffer)

    def messages(self, limit: int) -> Iterator[Message]:
        """The messages that are there, at most ``limit``. Raises ``PeerGoneError`` when the other
        end has closed, ``BadPacketError`` when it says what cannot be read.
        """
        for _ in range(limit):
            try:
                size = self._connection.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerGoneError(f"the cache's socket has closed: {error}") from error
            if not size:
                raise PeerGoneError("the other end of the cache's socket has closed")
            try:
                yield self._decode(self._view[:size])
            except msgspec.DecodeError as error:
                raise BadPacketError(f"a packet cannot be read: {error}") from error


def receive_with_descriptor(connection: socket.socket) -> tuple[bytes, int | None] | None:
    """One packet and the descriptor that came with it; None: there is none yet. Raises
    ``PeerGoneError``.
    """
    try:
        packet, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_LIMIT_BYTES, 1)
    except BlockingIOError:
        return None
    except OSError as error:
        raise PeerGoneError(f"the cache's socket has closed: {error}") from error
    if not packet:
        raise PeerGoneError("the other end of the cache's socket has closed")
    return packet, descriptors[0] if descriptors else None


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        made.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    made.setblocking(False)
    return made
