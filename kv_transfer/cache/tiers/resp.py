"""One connection to a Redis or Valkey server, speaking RESP2 with large values in mind.

Values are received straight into the caller's buffers and sent from them, header and body as they
lie. Every wait ends with its deadline, even when the server accepts and never answers or answers a
byte at a time: over TCP the kernel keeps it (SO_RCVTIMEO with MSG_WAITALL, so that a value of
megabytes is a few calls), with TLS Python does.

After anything but a whole answer the connection is useless; its owner closes it.
Protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import io
import select
import socket
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer

SMALL_BYTES = 512
"""Read ahead; what is longer is read exactly, into its place."""
LINE_LIMIT_BYTES = 64 * 1024
SCRATCH_BYTES = 64 * 1024
VALUE_LIMIT_BYTES = 512 << 20
"""Of a value, and so of what is read to be thrown away: the server's own limit."""
SCAN_LIMIT_NAMES = 1 << 20
"""Of one answer; servers find about as many as they are asked for."""
_TIMEVAL = struct.Struct("ll")


class RespError(Exception):
    """The server answered with an error; ``code`` is its first word."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


class ProtocolError(Exception):
    """What the other side sends is not RESP2."""


class Connection:
    """A connected socket and what was read ahead from it."""

    def __init__(self, host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None) -> None:
        """Connected within ``timeout_s`` per address of the host, TLS included; how long the name
        takes is up to the system's resolver. Raises ``OSError``.
        """
        plain = socket.create_connection((host, port), timeout_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = tls.wrap_socket(plain, server_hostname=host) if tls else plain
        except BaseException:
            plain.close()
            raise
        self._raw = _TlsReader(self._socket) if tls else _TcpReader(self._socket)
        self._reader = io.BufferedReader(self._raw, SMALL_BYTES)

    def send(self, parts: Sequence[ReadableBuffer], deadline: float) -> None:
        """Every byte is on its way. Raises ``OSError`` (``TimeoutError`` at the deadline)."""
        self._raw.send([memoryview(part) for part in parts], deadline)

    def answer(self, deadline: float) -> bytes | int | None:
        """The next answer, when it is short: a status, a number, a value, zero for an empty array,
        None for no value or no array.

        Raises ``RespError``, ``ProtocolError``, ``OSError``.
        """
        kind, rest = self._line(deadline)
        if kind == b"$":
            length = _integer(rest)
            if length < 0:
                return None
            if length > LINE_LIMIT_BYTES:
                raise ProtocolError(f"a value of {length} bytes where a short one was expected")
            value = bytearray(length)
            self._fill(memoryview(value))
            self._end_of_value()
            return bytes(value)
        if kind == b"*" and _integer(rest) <= 0:  # an empty array, or none
            return None if rest == b"-1" else 0
        if kind == b"+":
            return rest
        if kind == b":":
            return _integer(rest)
        raise ProtocolError(f"an answer of type {kind!r}")

    def value_into(
        self, parts: Sequence[memoryview], deadline: float, least: int | None = None
    ) -> int | None:
        """The next answer, a value: its length, None for no value.

        It is in ``parts`` when it is as long as they are together, or shorter but at least
        ``least`` bytes long; else it is thrown away. Raises as ``answer``.
        """
        kind, rest = self._line(deadline)
        if kind != b"$":
            raise ProtocolError(f"an answer of type {kind!r} instead of a value")
        length = _integer(rest)
        if length < 0:
            return None
        room = sum(len(part) for part in parts)
        if (room if least is None else least) <= length <= room:
            left = length
            for part in parts:
                self._fill(part[:left])
                left -= min(left, len(part))
        else:
            self._throw_away(length)
        self._end_of_value()
        return length

    def cursor_and_names(self, deadline: float) -> tuple[bytes, list[bytes]]:
        """The next answer, that of a SCAN: where it goes on (``0``: it has ended), and what it has
        found. Raises as ``answer``.
        """
        self._count(deadline, 2)
        cursor = self.answer(deadline)
        names = [self.answer(deadline) for _ in range(self._count(deadline, SCAN_LIMIT_NAMES))]
        if not isinstance(cursor, bytes):
            raise ProtocolError(f"a cursor {cursor!r}")
        return cursor, [name for name in names if isinstance(name, bytes)]

    def words(self, deadline: float, count: int) -> list[bytes]:
        """The next answer, a list of so many short values. Raises as ``answer``."""
        if self._count(deadline, count) != count:
            raise ProtocolError(f"another list than one of {count} values")
        found = [self.answer(deadline) for _ in range(count)]
        words = [word for word in found if isinstance(word, bytes)]
        if len(words) != count:
            raise ProtocolError("a list that does not hold values only")
        return words

    @property
    def is_idle(self) -> bool:
        """Open, and nothing has come that nobody asked for."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Closed, whatever was under way."""
        self._reader.close()
        self._socket.close()

    def _line(self, deadline: float) -> tuple[bytes, bytes]:
        """(type, rest) of the next answer's first line; errors are raised."""
        self._raw.deadline = deadline
        line = self._reader.readline(LINE_LIMIT_BYTES)
        if not line:
            raise ConnectionResetError("the server closed the connection")
        if not line.endswith(b"\r\n"):
            raise ProtocolError(f"a line that begins with {line[:20]!r} and has no end")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise RespError(rest.decode("utf-8", "replace"))
        return kind, rest

    def _count(self, deadline: float, limit: int) -> int:
        """How many answers belong to the next one."""
        kind, rest = self._line(deadline)
        count = _integer(rest)
        if kind != b"*" or not 0 <= count <= limit:
            raise ProtocolError(f"an answer {kind + rest[:20]!r} instead of a list")
        return count

    def _fill(self, part: memoryview) -> None:
        if self._reader.readinto(part) != len(part):
            raise ConnectionResetError("the server closed the connection inside a value")

    def _throw_away(self, length: int) -> None:
        if length > VALUE_LIMIT_BYTES:
            raise ProtocolError(f"a value of {length} bytes")
        scratch = memoryview(bytearray(SCRATCH_BYTES))
        while length:
            part = scratch[: min(length, SCRATCH_BYTES)]
            self._fill(part)
            length -= len(part)

    def _end_of_value(self) -> None:
        if self._reader.read(2) != b"\r\n":
            raise ProtocolError("a value longer than it says")


def command(*words: bytes) -> bytes:
    """A command as an array of bulk strings."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


def command_with_value(words: Sequence[bytes], length: int, after: Sequence[bytes]) -> list[bytes]:
    """What goes before and behind a value of ``length`` bytes that stands between words."""
    before = b"*%d\r\n" % (len(words) + 1 + len(after))
    before += b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words) + b"$%d\r\n" % length
    return [before, b"\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in after)]


def _integer(digits: bytes) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ProtocolError(f"{digits[:20]!r} instead of a number") from None


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


class _TcpReader(io.RawIOBase):
    """Blocking calls that the kernel ends at the deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.settimeout(None)
        self.deadline = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer)
        self._limit(socket.SO_RCVTIMEO, self.deadline)
        # The reader above asks for more than it reads ahead only when it wants exactly that
        flags = socket.MSG_WAITALL if len(view) > SMALL_BYTES else 0
        try:
            return self._socket.recv_into(view, 0, flags)
        except BlockingIOError:
            raise TimeoutError("no answer in time") from None

    def send(self, parts: list[memoryview], deadline: float) -> None:
        while parts:
            self._limit(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._socket.sendmsg(parts)
            except BlockingIOError:
                raise TimeoutError("the server takes nothing") from None
            while parts and sent >= len(parts[0]):
                sent -= len(parts[0])
                parts = parts[1:]
            if sent:
                parts[0] = parts[0][sent:]

    def _limit(self, option: int, deadline: float) -> None:
        microseconds = int(_left(deadline) * 1e6) + 1  # zero would be for ever
        value = _TIMEVAL.pack(*divmod(microseconds, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, option, value)


class _TlsReader(io.RawIOBase):
    """Calls of an encrypted socket; OpenSSL decrypts into the caller's buffer."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.deadline = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        self._socket.settimeout(_left(self.deadline))
        return self._socket.recv_into(memoryview(buffer))

    def send(self, parts: list[memoryview], deadline: float) -> None:
        for part in parts:
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(part)
