"""Chunks as values of a Redis or Valkey server, one each.

The client is this package's own (``resp.py``), for values go straight between the socket and the
arena: plain ``redis-py`` was measured to take about four times as long for values of megabytes.
Calls take a connection each and leave it for the next; a connection on which something went wrong
is closed, and the next call makes a new one.

Several hosts may share a server: what one of them wrote or removed, or the server evicted, another
learns when it asks. A cluster of servers (``MOVED``) is not followed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import ssl
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec

from splitserve.kv_transfer.cache.tiers.address import (
    Count,
    Seconds,
    expand,
    read_options,
    split_url,
)
from splitserve.kv_transfer.cache.tiers.base import (
    CONNECT_TIMEOUT_S,
    HEADER_BYTES,
    OPERATION_TIMEOUT_S,
    ChunkBuffers,
    ReadOutcome,
    SharedMemory,
    StoredChunk,
    TierCapabilities,
    TierConfigError,
    TierError,
    TierUnavailableError,
    WriteOutcome,
)
from splitserve.kv_transfer.cache.tiers.resp import (
    Connection,
    ProtocolError,
    RespError,
    command,
    command_with_value,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from splitserve.kv_transfer.cache.settings import TierSettings

DEFAULT_PORT = 6379
READ_AHEAD_BYTES = 4 << 20
"""Asked for before it is received: hides the way to the server for small chunks; with more, the
server keeps that much in answer buffers, which was measured to be slower for large ones.
"""
WHOLE_BYTES = 8 << 20
"""Larger values are got in pieces of ``PIECE_BYTES``: the server was measured to give answers of
12 MB at half the speed of smaller ones.
"""
PIECE_BYTES = 4 << 20
KEYS_PER_COMMAND = 512
_KEY = re.compile(r"[0-9a-f]{64}")
_CREDENTIALS = frozenset({"NOAUTH", "WRONGPASS", "NOPERM"})
_MISCONFIGURED = frozenset({"READONLY", "MOVED", "CROSSSLOT", "OOM"})


class RedisOptions(msgspec.Struct, frozen=True):
    """Options of the tier."""

    username: str = ""
    password: str = ""
    prefix: str = "splitserve:"
    ca_file: str = ""
    """Certificates that sign the server's, for ``rediss://``; empty: those of the system."""
    connections: Count = 8
    connect_timeout_s: Seconds = CONNECT_TIMEOUT_S
    timeout_s: Seconds = OPERATION_TIMEOUT_S


class RedisTier:
    """Owns its connections, at most ``connections``."""

    capabilities = TierCapabilities(name="redis", is_exclusive=False, is_remote=True)

    def __init__(self, settings: TierSettings) -> None:
        url = split_url(settings, ("redis", "rediss"))
        self._options = options = read_options(settings, RedisOptions)
        where = "url of the redis tier"
        self._host = expand(url.hostname or "", where)
        self._port = url.port or DEFAULT_PORT
        self._database = url.path.strip("/") or "0"
        if not self._host or not self._database.isdigit():
            raise TierConfigError(f"{where}: it has to be {url.scheme}://host:port/number")
        self._username = options.username or expand(unquote(url.username or ""), where)
        self._password = options.password or expand(unquote(url.password or ""), where)
        self._tls = _tls_context(options.ca_file) if url.scheme == "rediss" else None
        self._shown = f"{url.scheme}://{self._host}:{self._port}/{self._database}"
        self._prefix = options.prefix.encode()
        self._expiry: tuple[bytes, ...] = ()
        if settings.ttl_s is not None:
            self._expiry = (b"PX", b"%d" % max(1, round(settings.ttl_s * 1000)))
        self._capacity_bytes = settings.capacity_bytes
        self._only_reads = settings.admission == "never"
        self._places = threading.BoundedSemaphore(options.connections)
        self._idle: list[Connection] = []

    def use_memory(self, memory: SharedMemory) -> None:
        """Any memory is as good."""

    def check(self) -> None:
        """The server answers, takes a value, and has the memory."""
        with self._connection() as connection:
            if not self._only_reads:
                probe = self._prefix + b"check-" + os.urandom(8).hex().encode()
                self._ask(connection, command(b"SET", probe, b"1", b"PX", b"1000"))
            else:
                self._ask(connection, command(b"EXISTS", self._prefix))
            # Large values need it, and a user of the server may not have the right
            self._ask(connection, command(b"WATCH", self._prefix))
            self._ask(connection, command(b"UNWATCH"))
        memory = self._memory()
        if self._capacity_bytes and memory and 0 < memory[0] < self._capacity_bytes:
            raise TierConfigError(
                f"the redis tier at {self._shown} is to hold {self._capacity_bytes} bytes, but the "
                f"server's maxmemory is {memory[0]}; set a smaller capacity_bytes or raise it"
            )

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """One EXISTS each, many on their way at once."""
        found: list[bool] = []
        with self._connection() as connection:
            for part in _parts(keys):
                asked = b"".join(command(b"EXISTS", self._name(key)) for key in part)
                deadline = self._deadline()
                connection.send([asked], deadline)
                found += [connection.answer(deadline) == 1 for _ in part]
        return found

    def read(self, chunks: Sequence[ChunkBuffers]) -> Iterator[tuple[int, ReadOutcome]]:
        """Small ones first, in the order given, then large ones, then those that are broken."""
        if not chunks:
            return
        large = [index for index, chunk in enumerate(chunks) if _size(chunk) > WHOLE_BYTES]
        small = sorted(set(range(len(chunks))) - set(large))
        broken: list[int] = []
        with self._connection() as connection:
            for index, outcome in itertools.chain(
                self._read_whole(connection, chunks, small),
                self._read_in_pieces(connection, chunks, large),
            ):
                if outcome is ReadOutcome.BROKEN:
                    broken.append(index)
                else:
                    yield index, outcome
            self._unlink(connection, [chunks[index].key for index in broken])
        for index in broken:
            yield index, ReadOutcome.BROKEN

    def write(self, chunks: Sequence[ChunkBuffers]) -> list[WriteOutcome]:
        """All are sent before the first answer is read: answers are a few bytes each."""
        with self._connection() as connection:
            for chunk in chunks:
                words = (b"SET", self._name(chunk.key))
                before, after = command_with_value(words, _size(chunk), self._expiry)
                connection.send([before, chunk.header, chunk.body, after], self._deadline())
            return [self._written(connection) for _ in chunks]

    def remove(self, keys: Sequence[bytes]) -> int:
        """The server frees their memory in the background."""
        with self._connection() as connection:
            return self._unlink(connection, keys)

    def stored(self) -> Iterator[StoredChunk]:
        """Nothing: other hosts come and go there."""
        return iter(())

    def listed(self, prefix: bytes) -> Iterator[bytes]:
        """By ``SCAN``, whose cursor needs no connection of its own. Other values are left out."""
        begin = _escaped(self._prefix) + prefix.hex().encode()
        words = (b"MATCH", begin + b"*", b"COUNT", b"%d" % KEYS_PER_COMMAND)
        cursor = b"0"
        while True:
            with self._connection() as connection:
                deadline = self._deadline()
                connection.send([command(b"SCAN", cursor, *words)], deadline)
                cursor, names = connection.cursor_and_names(deadline)
            for name in names:
                found = name[len(self._prefix) :].decode("ascii", "replace")
                if _KEY.fullmatch(found):
                    yield bytes.fromhex(found)
            if cursor == b"0":
                return

    def free_bytes(self) -> int | None:
        """Up to ``maxmemory``; None when there is no limit, or it may not be asked."""
        memory = self._memory()
        return max(0, memory[0] - memory[1]) if memory and memory[0] else None

    def clock_unix_s(self) -> float | None:
        """By ``TIME``; None for a user that may not ask."""
        try:
            with self._connection() as connection:
                deadline = self._deadline()
                connection.send([command(b"TIME")], deadline)
                seconds, microseconds = connection.words(deadline, 2)
        except TierError as error:
            if isinstance(error.__cause__, RespError):
                return None
            raise
        return int(seconds) + int(microseconds) / 1e6

    def close(self) -> None:
        """Every connection is closed."""
        while self._idle:
            self._idle.pop().close()

    def _read_whole(
        self, connection: Connection, chunks: Sequence[ChunkBuffers], indices: Sequence[int]
    ) -> Iterator[tuple[int, ReadOutcome]]:
        ahead = max(1, READ_AHEAD_BYTES // max((_size(chunks[i]) for i in indices), default=1))
        sent = 0
        for number, index in enumerate(indices):
            if sent < (until := min(len(indices), number + ahead)):
                names = (self._name(chunks[other].key) for other in indices[sent:until])
                asked = b"".join(command(b"GET", name) for name in names)
                connection.send([asked], self._deadline())
                sent = until
            yield index, self._receive(connection, chunks[index])

    def _read_in_pieces(
        self, connection: Connection, chunks: Sequence[ChunkBuffers], indices: Sequence[int]
    ) -> Iterator[tuple[int, ReadOutcome]]:
        names = [self._name(chunks[index].key) for index in indices]
        asked = b"".join(command(b"EXISTS", name) + command(b"STRLEN", name) for name in names)
        connection.send([asked], self._deadline())
        found = [self._found(connection, chunks[index]) for index in indices]
        for index, name, outcome in zip(indices, names, found, strict=True):
            if outcome is ReadOutcome.HIT:
                yield index, self._receive_pieces(connection, name, chunks[index])
            else:
                yield index, outcome

    def _found(self, connection: Connection, chunk: ChunkBuffers) -> ReadOutcome:
        """What the answers to EXISTS and STRLEN say of a value that should be that chunk."""
        deadline = self._deadline()
        if connection.answer(deadline) == 0:
            connection.answer(deadline)
            return ReadOutcome.ABSENT
        try:
            length = connection.answer(deadline)
            fits = isinstance(length, int) and chunk.hold(length)
        except RespError as error:
            if error.code != "WRONGTYPE":
                raise
            fits = False
        return ReadOutcome.HIT if fits else ReadOutcome.BROKEN

    def _receive_pieces(
        self, connection: Connection, name: bytes, chunk: ChunkBuffers
    ) -> ReadOutcome:
        """The next piece is asked for before one is received. Pieces are of one value: the server
        watches it, and the empty transaction at the end fails when it has changed.
        """
        pieces = [(0, chunk.header)]
        body = chunk.found_body
        for start in range(0, len(body), PIECE_BYTES):
            pieces.append((len(chunk.header) + start, body[start : start + PIECE_BYTES]))
        asked = [
            command(b"GETRANGE", name, b"%d" % start, b"%d" % (start + len(piece) - 1))
            for start, piece in pieces
        ]
        asked.append(command(b"MULTI") + command(b"EXEC"))
        connection.send([command(b"WATCH", name), asked[0]], self._deadline())
        connection.answer(self._deadline())
        is_whole = True
        for (_, piece), following in zip(pieces, asked[1:], strict=True):
            connection.send([following], self._deadline())
            is_whole &= connection.value_into([piece], self._deadline()) == len(piece)
        connection.answer(self._deadline())
        is_same = connection.answer(self._deadline()) is not None
        return ReadOutcome.HIT if is_whole and is_same else ReadOutcome.ABSENT

    def _receive(self, connection: Connection, chunk: ChunkBuffers) -> ReadOutcome:
        try:
            least = HEADER_BYTES + 1 if chunk.may_be_shorter else None
            parts = [chunk.header, chunk.body]
            length = connection.value_into(parts, self._deadline(), least)
        except RespError as error:
            if error.code == "WRONGTYPE":  # somebody else's value under this name
                return ReadOutcome.BROKEN
            raise
        if length is None:
            return ReadOutcome.ABSENT
        return ReadOutcome.HIT if chunk.hold(length) else ReadOutcome.BROKEN

    def _written(self, connection: Connection) -> WriteOutcome:
        try:
            connection.answer(self._deadline())
        except RespError as error:
            if error.code == "OOM":
                return WriteOutcome.FULL
            raise
        return WriteOutcome.WRITTEN

    def _unlink(self, connection: Connection, keys: Sequence[bytes]) -> int:
        removed = 0
        for part in _parts(keys):
            count = self._ask(connection, command(b"UNLINK", *map(self._name, part)))
            removed += count if isinstance(count, int) else 0
        return removed

    def _memory(self) -> tuple[int, int] | None:
        """(maxmemory, used) in bytes; None when the server does not say."""
        try:
            with self._connection() as connection:
                text = self._ask(connection, command(b"INFO", b"memory"))
        except TierError as error:
            if isinstance(error.__cause__, RespError):
                return None
            raise
        assert isinstance(text, bytes)
        fields = dict(line.split(b":", 1) for line in text.split(b"\r\n") if b":" in line)
        return int(fields.get(b"maxmemory", 0)), int(fields.get(b"used_memory", 0))

    def _ask(self, connection: Connection, words: bytes) -> bytes | int | None:
        deadline = self._deadline()
        connection.send([words], deadline)
        return connection.answer(deadline)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        """A connection for one call; faults become ``TierError``."""
        if not self._places.acquire(timeout=self._options.timeout_s):
            raise TierUnavailableError(
                f"the redis tier's {self._options.connections} connections to {self._shown} were "
                f"busy for {self._options.timeout_s} s; raise its option connections"
            )
        connection = None
        try:
            connection = self._take_idle() or self._connect()
            yield connection
            self._idle.append(connection)
            connection = None
        except (RespError, ProtocolError, OSError) as error:
            raise self._explained(error) from error
        finally:
            if connection is not None:
                connection.close()
            self._places.release()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if connection.is_idle:
                return connection
            connection.close()
        return None

    def _connect(self) -> Connection:
        """A new connection, signed in. RESP2 is what servers begin with."""
        connection = Connection(self._host, self._port, self._options.connect_timeout_s, self._tls)
        try:
            if self._password:
                user = [self._username.encode()] if self._username else []
                self._ask(connection, command(b"AUTH", *user, self._password.encode()))
            if self._database != "0":
                self._ask(connection, command(b"SELECT", self._database.encode()))
        except BaseException:
            connection.close()
            raise
        return connection

    def _explained(self, error: Exception) -> TierError:
        place = f"the redis tier at {self._shown}"
        if isinstance(error, RespError):
            if error.code in _CREDENTIALS or "AUTH" in str(error):
                return TierConfigError(
                    f"{place} refuses the credentials: {error}; correct username and password"
                )
            if error.code in _MISCONFIGURED or "DB index" in str(error):
                return TierConfigError(
                    f"{place} cannot hold the cache: {error}; change the server's settings, or "
                    "name another one in the url"
                )
            return TierUnavailableError(f"{place} answers with an error: {error}")
        if isinstance(error, ssl.SSLCertVerificationError):
            return TierConfigError(
                f"{place} shows a certificate that cannot be trusted: {error.verify_message}; "
                "name those who signed it with the option ca_file"
            )
        if isinstance(error, ProtocolError):
            return TierConfigError(f"{place} is no Redis: it sends {error}; correct the url")
        return TierUnavailableError(
            f"{place} cannot be reached: {error}; is it running? Start it, or correct the url"
        )

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _deadline(self) -> float:
        return time.monotonic() + self._options.timeout_s


def _tls_context(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise TierConfigError(
            f"the redis tier's ca_file {ca_file!r} cannot be used: {error}"
        ) from error


def _escaped(text: bytes) -> bytes:
    """As a pattern that only this text fits."""
    return re.sub(rb"([\\*?\[\]^])", rb"\\\1", text)


def _size(chunk: ChunkBuffers) -> int:
    return len(chunk.header) + len(chunk.body)


def _parts(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(keys), KEYS_PER_COMMAND):
        yield keys[start : start + KEYS_PER_COMMAND]
