"""Chunks as objects of a Mooncake Store: memory of many hosts behind one master.

Mooncake's own client moves them, in a process of its own (``mooncake_client.py``) that maps the
cache's memory and registers it, several chunks to a call, each from or into two buffers. It is a
client only: what stores is the memory of others, such as Mooncake's ``mooncake_client``.

The store forgets: it evicts, loses what the owner of a segment held when that one ends, and
everything when the master does. All of this is absence. What the store does not do while somebody
reads: it neither removes a chunk (see ``mooncake_removals.py``) nor replaces it, so that a write of
a chunk that others read leaves it as it is, which the same key makes as good.

The master's second port, for its metrics, is the only one that lists names.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import threading
import time
from email.utils import parsedate_to_datetime
from http.client import OK as OK_STATUS
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Annotated, Literal

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
    OPERATION_TIMEOUT_S,
    ChunkBuffers,
    ReadOutcome,
    TierCapabilities,
    TierConfigError,
    TierError,
    TierUnavailableError,
    WriteOutcome,
    new_header,
)
from splitserve.kv_transfer.cache.tiers.mooncake_client import ClientProcess, Lane
from splitserve.kv_transfer.cache.tiers.mooncake_process import (
    EXISTS,
    LEASED,
    NOT_FOUND,
    OK,
    UNFINISHED,
    Exist,
    Open,
    Remove,
)
from splitserve.kv_transfer.cache.tiers.mooncake_removals import Removals

if importlib.util.find_spec("mooncake") is None:
    raise TierConfigError(
        "the mooncake tier needs Mooncake's client; install it with "
        "`pip install 'splitserve[mooncake]'`"
    )

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from splitserve.kv_transfer.cache.settings import TierSettings
    from splitserve.kv_transfer.cache.tiers.base import SharedMemory, StoredChunk

DEFAULT_PORT = 50051
GROUP_BYTES = 8 << 20
"""Chunks up to so much together are one call, for small ones are several times as fast then. More
would keep those that have come waiting for those that follow.
"""
GROUP_CHUNKS = 64
KEYS_PER_QUESTION = 512
PREFIX_LIMIT = 128
"""So many names fit into one message."""
_NOT_TAKEN = frozenset({-200, EXISTS, UNFINISHED})
"""No segment has room for it; somebody else writes it, or has begun to and is given up soon."""
_UNREACHABLE = frozenset({-900, -901})
_KEY = re.compile(rb"[0-9a-f]{64}")
_ALL_BYTES, _USED_BYTES = "master_total_capacity_bytes", "master_allocated_bytes"


class MooncakeOptions(msgspec.Struct, frozen=True):
    """Options of the tier."""

    admin_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 9003
    """The master's ``metrics_port``."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    """Of RDMA, separated by commas; empty: all."""
    metadata: str = "P2PHANDSHAKE"
    """Of the transfer engine: without a server, or ``http://``, ``etcd://``, ``redis://``."""
    hostname: str = ""
    """This host's address; empty: the one from which the master is reached."""
    prefix: Annotated[str, msgspec.Meta(max_length=PREFIX_LIMIT)] = "splitserve:"
    replicas: Count = 1
    concurrency: Count = 4
    """Calls at once."""
    connect_timeout_s: Seconds = CONNECT_TIMEOUT_S
    timeout_s: Seconds = OPERATION_TIMEOUT_S


class MooncakeTier:
    """Owns the client's process, which is started with the first call, and again when it or the
    master has ended.
    """

    capabilities = TierCapabilities(name="mooncake", is_exclusive=False, is_remote=True)

    def __init__(self, settings: TierSettings) -> None:
        url = split_url(settings, ("mooncake",))
        self._options = options = read_options(settings, MooncakeOptions)
        self._host = expand(url.hostname or "", "url of the mooncake tier")
        self._port = url.port or DEFAULT_PORT
        if not self._host or url.username or url.path.strip("/"):
            raise TierConfigError("url of the mooncake tier: it has to be mooncake://host:port")
        self._master = f"[{self._host}]" if ":" in self._host else self._host
        self._master += f":{self._port}"
        self._shown = f"mooncake://{self._master}"
        self._prefix = options.prefix.encode()
        self._capacity_bytes = settings.capacity_bytes
        self._only_reads = settings.admission == "never"
        self._memories: list[SharedMemory] = []
        self._places = threading.BoundedSemaphore(options.concurrency)
        self._lock = threading.Lock()
        """Held while a process is started or given up."""
        self._process: ClientProcess | None = None
        self._watch: socket.socket | None = None
        """A connection to the master that says when it has ended."""
        self._removals = Removals(self._remove_now)

    def use_memory(self, memory: SharedMemory) -> None:
        """It is mapped and registered by the client's process with the next call."""
        self._memories.append(memory)

    def check(self) -> None:
        """The master answers on both ports, and the store takes an object."""
        room = self._room()
        if room is None:
            raise TierUnavailableError(
                f"the master of {self._shown} cannot be reached at its metrics port "
                f"{self._options.admin_port}; start it with --metrics_port, or correct the option "
                "admin_port"
            )
        total, _ = room
        if total == 0:
            raise TierUnavailableError(
                f"{self._shown} has no memory; start a client that gives it some "
                "(mooncake_client --global_segment_size=...)"
            )
        if total < (self._capacity_bytes or 0):
            raise TierUnavailableError(
                f"the mooncake tier at {self._shown} is to hold {self._capacity_bytes} bytes, but "
                f"the store has {total}; set a smaller capacity_bytes, or give it more memory"
            )
        probe = ChunkBuffers(os.urandom(32), new_header(), memoryview(bytearray(1)))
        if self._only_reads:
            self.contains([probe.key])
            return
        self.write([probe])
        self._remove_now([probe.key], True)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """One question for many. It leases what is there to this host for some seconds."""
        found: list[bool] = []
        for start in range(0, len(keys), KEYS_PER_QUESTION):
            part = keys[start : start + KEYS_PER_QUESTION]
            codes = self._exist(part)
            found += [
                code > 0 and key not in self._removals
                for key, code in zip(part, codes, strict=True)
            ]
        return found

    def read(self, chunks: Sequence[ChunkBuffers]) -> Iterator[tuple[int, ReadOutcome]]:
        """In the order given. What an owner that is gone had is absent; one that keeps everybody
        waiting is an error.
        """
        for start, end in _groups(chunks):
            group = chunks[start:end]
            began = time.monotonic()
            codes = self._got(group)
            took_s = time.monotonic() - began
            broken = []
            for index, (chunk, code) in enumerate(zip(group, codes, strict=True), start):
                if chunk.key in self._removals or code < 0:
                    yield index, ReadOutcome.ABSENT
                elif chunk.hold(code):
                    yield index, ReadOutcome.HIT
                else:
                    broken.append(index)
            self._remove_now([chunks[index].key for index in broken], True)
            for index in broken:
                yield index, ReadOutcome.BROKEN
            if min(codes) < 0 and took_s > self._options.timeout_s:
                raise self._unreachable(f"the owner of a segment took {took_s:.1f} s")

    def write(self, chunks: Sequence[ChunkBuffers]) -> list[WriteOutcome]:
        """One that was to be removed is replaced at once; one that is being read stays."""
        outcomes = []
        for start, end in _groups(chunks):
            outcomes += [self._written(code) for code in self._put(chunks[start:end])]
        return outcomes

    def remove(self, keys: Sequence[bytes]) -> int:
        """At once, or for others when the last reader's lease has ended."""
        removed = 0
        for start in range(0, len(keys), KEYS_PER_QUESTION):
            part = [k for k in keys[start : start + KEYS_PER_QUESTION] if k not in self._removals]
            codes = self._ask_to_remove(part, False)
            removed += sum(code != NOT_FOUND for code in codes)
            leased = [k for k, code in zip(part, codes, strict=True) if code not in (OK, NOT_FOUND)]
            self._remove_now(self._removals.wait_for(leased), True)
        return removed

    def stored(self) -> Iterator[StoredChunk]:
        """Nothing: other hosts come and go there."""
        return iter(())

    def listed(self, prefix: bytes) -> Iterator[bytes]:
        """Out of all names of the store, as they were when the master was asked."""
        begin = self._prefix + prefix.hex().encode()
        with self._admin("/get_all_keys") as answer:
            for line in answer:
                name = line.rstrip(b"\n")
                hexadecimal = name[len(self._prefix) :]
                if name.startswith(begin) and _KEY.fullmatch(hexadecimal):
                    key = bytes.fromhex(hexadecimal.decode())
                    if key not in self._removals:
                        yield key

    def free_bytes(self) -> int | None:
        """In all segments; None when the master does not say."""
        room = self._room()
        return max(0, room[0] - room[1]) if room else None

    def clock_unix_s(self) -> float | None:
        """By the date of an answer of the master's."""
        try:
            with self._admin("/health") as answer:
                date = answer.getheader("Date")
        except TierError:
            return None
        return parsedate_to_datetime(date).timestamp() if date else None

    def client_pid(self) -> int:
        """Of the process with Mooncake's client, which runs."""
        with self._lock:
            return self._running().pid

    def close(self) -> None:
        """The process is gone."""
        self._removals.close()
        with self._lock:
            self._give_up()

    def _call(self, ask: Callable[[Lane], list[int]]) -> list[int]:
        """What the store says, by a client that is connected; faults name the store."""
        if not self._places.acquire(timeout=self._options.timeout_s):
            raise TierUnavailableError(
                f"the mooncake tier's {self._options.concurrency} calls to {self._shown} were busy "
                f"for {self._options.timeout_s} s; raise its option concurrency"
            )
        try:
            with self._lock:
                process = self._running()
                process.use(self._memories)
            lane = process.take()
            try:
                codes = ask(lane)
            finally:
                process.give_back(lane)
        except TierConfigError as error:
            raise TierConfigError(
                f"the mooncake tier's client cannot be loaded: {error}; Debian has what it needs "
                "beside it in the packages libibverbs1 and libnuma1"
            ) from error
        except (TierUnavailableError, OSError) as error:
            raise self._unreachable(str(error)) from error
        finally:
            self._places.release()
        for code in _UNREACHABLE.intersection(codes):
            raise self._unreachable(f"the master does not answer (code {code})")
        return codes

    def _running(self) -> ClientProcess:
        """The process. It is a new one after the master's end: the old one would try for seconds to
        use connections that are gone.
        """
        if self._process is not None and not self._process.is_lost and self._is_master_there():
            return self._process
        self._give_up()
        options = self._options
        self._watch = socket.create_connection((self._host, self._port), options.connect_timeout_s)
        self._watch.setblocking(False)
        self._process = ClientProcess(
            Open(
                options.hostname or self._watch.getsockname()[0],
                options.metadata,
                options.protocol,
                options.devices,
                self._master,
            ),
            lanes=options.concurrency,
            timeout_s=options.timeout_s,
            connect_timeout_s=options.connect_timeout_s,
        )
        return self._process

    def _is_master_there(self) -> bool:
        assert self._watch is not None
        try:
            return bool(self._watch.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _give_up(self) -> None:
        process, watch = self._process, self._watch
        self._process = self._watch = None
        if process is not None:
            process.close()
        if watch is not None:
            watch.close()

    def _remove_now(self, keys: Sequence[bytes], force: bool) -> Collection[bytes]:
        """Those that are still there."""
        codes = self._ask_to_remove(keys, force)
        return [key for key, code in zip(keys, codes, strict=True) if code not in (OK, NOT_FOUND)]

    def _ask_to_remove(self, keys: Sequence[bytes], force: bool) -> list[int]:
        names = self._names(keys)
        return self._call(lambda lane: lane.ask(Remove(names, force))) if names else []

    def _exist(self, keys: Sequence[bytes]) -> list[int]:
        names = self._names(keys)
        return self._call(lambda lane: lane.ask(Exist(names)))

    def _got(self, group: Sequence[ChunkBuffers]) -> list[int]:
        names = self._names([chunk.key for chunk in group])
        return self._call(lambda lane: lane.get(names, group))

    def _put(self, group: Sequence[ChunkBuffers]) -> list[int]:
        keys = [chunk.key for chunk in group]
        names, forced = self._names(keys), self._names(self._removals.claim(keys))
        return self._call(lambda lane: lane.put(names, group, self._options.replicas, forced))

    def _written(self, code: int) -> WriteOutcome:
        if code in (OK, LEASED):
            return WriteOutcome.WRITTEN
        if code in _NOT_TAKEN:
            return WriteOutcome.FULL
        raise self._unreachable(f"a chunk was not taken (code {code})")

    def _room(self) -> tuple[int, int] | None:
        """(all, used) bytes of the store's memory; None when the master does not say."""
        found: dict[str, int] = {}
        with contextlib.suppress(TierError), self._admin("/metrics") as answer:
            for line in answer:
                name, _, value = line.decode().partition(" ")
                if name in (_ALL_BYTES, _USED_BYTES):
                    found[name] = int(float(value))
        return (found[_ALL_BYTES], found[_USED_BYTES]) if len(found) > 1 else None

    @contextlib.contextmanager
    def _admin(self, path: str) -> Iterator[HTTPResponse]:
        """The master's answer at its metrics port. Raises ``TierUnavailableError``."""
        port = self._options.admin_port
        connection = HTTPConnection(self._host, port, timeout=self._options.timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != OK_STATUS:
                raise HTTPException(f"status {answer.status}")
            yield answer
        except (OSError, HTTPException) as error:
            raise self._unreachable(f"its metrics port {port} says: {error}") from error
        finally:
            connection.close()

    def _unreachable(self, reason: str) -> TierUnavailableError:
        return TierUnavailableError(
            f"the mooncake tier at {self._shown} cannot be reached: {reason}; is the master "
            "running? Start it, or correct the url"
        )

    def _names(self, keys: Collection[bytes]) -> list[str]:
        return [self._options.prefix + key.hex() for key in keys]


def _groups(chunks: Sequence[ChunkBuffers]) -> Iterator[tuple[int, int]]:
    """Begin and end of those that make up one call."""
    begin, size = 0, 0
    for index, chunk in enumerate(chunks):
        size += len(chunk.header) + len(chunk.body)
        if index > begin and (size > GROUP_BYTES or index - begin == GROUP_CHUNKS):
            yield begin, index
            begin, size = index, len(chunk.header) + len(chunk.body)
    if begin < len(chunks):
        yield begin, len(chunks)
