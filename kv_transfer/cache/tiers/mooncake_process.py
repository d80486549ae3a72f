"""The process in which Mooncake's client runs: ``python -m
splitserve.kv_transfer.cache.tiers.mooncake_process DESCRIPTOR...``.

Each descriptor is a lane, a socket on which the tier asks one question at a time; a thread answers
it. Memory comes along lanes too, as descriptors, and is registered with the client, which writes
to and reads from nothing else. The end of any lane ends the process, so what has asked it need not
trust a call to return: once the process is gone nobody writes to the memory.

The client listens on two ports of all interfaces, without any authentication, for those who read
from it what it holds. This one holds nothing, and maps the arena: it hears nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MESSAGE_LIMIT_BYTES = 128 * 1024
OK = 0
UNFINISHED, NOT_FOUND, EXISTS, LEASED = -703, -704, -705, -706
"""What the store says of a name."""
_SIZE_IN_DOUBT = frozenset({-600, -800})
"""Said of an object that has another size than its buffers, among others."""
_LISTENING = "0A"
_SO_ATTACH_FILTER = 26
_FILTER_DROPS_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0 bytes of the packet

Piece = tuple[int, int, int]
"""Region, offset and length of bytes in shared memory."""


class Open(msgspec.Struct, frozen=True, tag=True):
    """Connect to a store; the first message."""

    hostname: str
    metadata: str
    protocol: str
    devices: str
    master: str


class Share(msgspec.Struct, frozen=True, tag=True):
    """Map the memory whose descriptor comes along as this region, instead of what it was."""

    region: int
    size_bytes: int


class Get(msgspec.Struct, frozen=True, tag=True):
    """Read objects, each into its pieces; those that are ``flexible`` may end in the last one.
    Codes: sizes in bytes; one that does not fit is that of an object which was not read.
    """

    names: list[str]
    pieces: list[list[Piece]]
    flexible: list[bool]


class Put(msgspec.Struct, frozen=True, tag=True):
    """Write objects, each from its pieces, in place of what has the name; a reader's lease is
    broken for those that are ``forced`` only.
    """

    names: list[str]
    pieces: list[list[Piece]]
    replicas: int
    forced: list[str]


class Exist(msgspec.Struct, frozen=True, tag=True):
    """Codes: 1 for what is there, else 0."""

    names: list[str]


class Remove(msgspec.Struct, frozen=True, tag=True):
    """Remove objects; ``force`` breaks readers' leases."""

    names: list[str]
    force: bool


class Done(msgspec.Struct, frozen=True, tag=True):
    """The store's codes, one a name; negative ones are errors."""

    codes: list[int]


class Fault(msgspec.Struct, frozen=True, tag=True):
    """The client cannot be used."""

    reason: str
    is_lasting: bool
    """Another attempt will not help."""


Question = Open | Share | Get | Put | Exist | Remove
Answer = Done | Fault


class Client:
    """Mooncake's client and the memory that it may use; its calls may overlap."""

    def __init__(self) -> None:
        self._store: Any = None
        self._regions: dict[int, tuple[mmap.mmap, int]] = {}
        """Number to memory and address."""

    def answer(self, question: Question, descriptor: int | None) -> Answer:
        """Whatever was asked has been done, or cannot be."""
        match question:
            case Open():
                return self._open(question)
            case Share(region, size_bytes):
                assert descriptor is not None
                return Done([self._share(region, size_bytes, descriptor)])
            case Get():
                return Done(self._get(question))
            case Put():
                return Done(self._put(question))
            case Exist(names):
                return Done(list(self._store.batch_is_exist(names)))
            case Remove(names, force):
                return Done(list(self._store.batch_remove(names, force)))

    def _open(self, asked: Open) -> Answer:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            return Fault(str(error), is_lasting=True)
        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            asked.hostname, asked.metadata, 0, 0, asked.protocol, asked.devices, asked.master
        )
        if code != OK:
            return Fault(f"its client cannot be set up (code {code})", is_lasting=False)
        hear_nobody()
        return Done([])

    def _share(self, region: int, size_bytes: int, descriptor: int) -> int:
        memory = mmap.mmap(descriptor, size_bytes)
        os.close(descriptor)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if region in self._regions:
            self._store.unregister_buffer(self._regions.pop(region)[1])
        self._regions[region] = memory, address
        code: int = self._store.register_buffer(address, size_bytes)
        return code

    def _get(self, asked: Get) -> list[int]:
        """The library reads into buffers of the object's very size only, so that of those which may
        be shorter is asked for.
        """
        addresses, sizes = self._placed(asked.pieces)
        codes = self._fit(asked, sizes)
        ready = [index for index in range(len(asked.names)) if index not in codes]
        read = self._store.batch_get_into_multi_buffers(
            [asked.names[i] for i in ready],
            [addresses[i] for i in ready],
            [sizes[i] for i in ready],
        )
        for index, code in zip(ready, read, strict=True):
            codes[index] = code
            if code in _SIZE_IN_DOUBT:
                size = self._store.get_size(asked.names[index])
                if size >= 0 and size != sum(sizes[index]):
                    # One whose size was right a moment ago has been replaced: it is there next time
                    codes[index] = NOT_FOUND if asked.flexible[index] else size
        return [codes[index] for index in range(len(asked.names))]

    def _fit(self, asked: Get, sizes: list[list[int]]) -> dict[int, int]:
        """Sizes of flexible objects' pieces are those of the objects; returns the codes of those
        that do not fit.
        """
        flexible = [index for index, is_so in enumerate(asked.flexible) if is_so]
        codes: dict[int, int] = {}
        if not flexible:
            return codes
        found = self._store.batch_get_replica_desc([asked.names[i] for i in flexible])
        for index in flexible:
            size = _size_of(found.get(asked.names[index], ()))
            first, last = sum(sizes[index][:-1]), sizes[index][-1]
            if size is None:
                size = self._store.get_size(asked.names[index])
            if first < size <= first + last:
                sizes[index][-1] = size - first
            else:
                codes[index] = size
        return codes

    def _put(self, asked: Put) -> list[int]:
        """By a session: unlike a plain put it tells of objects that are there already."""
        addresses, sizes = self._placed(asked.pieces)
        begun = self._begin(asked, [sum(each) for each in sizes])
        codes = [begun[name] for name in asked.names]
        ready = [index for index, code in enumerate(codes) if code == OK]
        if not ready:
            return codes
        moved = self._store.batch_put_from_multi_buffer_ranges(
            [asked.names[i] for i in ready],
            [addresses[i] for i in ready],
            [sizes[i] for i in ready],
            [offsets(sizes[i]) for i in ready],
        )
        lost = [i for i, code in zip(ready, moved, strict=True) if code < 0]
        whole = [i for i in ready if i not in lost]
        for index, code in zip(ready, moved, strict=True):
            codes[index] = min(code, OK)
        if lost:
            self._store.batch_put_session_revoke([asked.names[i] for i in lost])
        if whole:
            ended = self._store.batch_put_session_end([asked.names[i] for i in whole])
            for index, code in zip(whole, ended, strict=True):
                codes[index] = code
        return codes

    def _begin(self, asked: Put, sizes: list[int]) -> dict[str, int]:
        """Codes of sessions' starts; what was there has been removed, unless it is leased."""
        size_of = dict(zip(asked.names, sizes, strict=True))
        codes = self._start(size_of, asked.replicas)
        there = {name for name, code in codes.items() if code == EXISTS}
        free = []
        for force in (False, True):
            names = [name for name in there if (name in asked.forced) is force]
            if names:
                removed = self._store.batch_remove(names, force)
                codes |= dict(zip(names, removed, strict=True))
                free += [name for name in names if codes[name] in (OK, NOT_FOUND)]
        if free:
            codes |= self._start({name: size_of[name] for name in free}, asked.replicas)
        return codes

    def _start(self, size_of: dict[str, int], replicas: int) -> dict[str, int]:
        from mooncake.store import ReplicateConfig

        config = ReplicateConfig()
        config.replica_num = replicas
        names = list(size_of)
        started = self._store.batch_put_session_start(names, list(size_of.values()), config)
        return dict(zip(names, started, strict=True))

    def _placed(self, pieces: Sequence[Sequence[Piece]]) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes. Regions are those that were shared, and large enough."""
        addresses = [[self._regions[r][1] + offset for r, offset, _ in each] for each in pieces]
        return addresses, [[length for _, _, length in each] for each in pieces]


def offsets(sizes: Iterable[int]) -> list[int]:
    """Where pieces of these sizes begin, one behind the other."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += size
    return starts


def _size_of(replicas: Iterable[Any]) -> int | None:
    """Bytes of an object with these descriptors; None when none of them is in memory."""
    for replica in replicas:
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
    return None


def hear_nobody() -> None:
    """Sockets of this process that listen are left open, but the kernel drops what comes in."""
    program = ctypes.create_string_buffer(_FILTER_DROPS_ALL)
    setting = struct.pack("HL", 1, ctypes.addressof(program))
    for descriptor in _listening():
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, setting)


def _listening() -> Iterator[int]:
    """Descriptors of this process's TCP sockets that listen."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                inodes.add(f"socket:[{fields[9]}]")
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            if os.readlink(f"/proc/self/fd/{name}") in inodes:
                yield int(name)


def serve(client: Client, lane: socket.socket) -> None:
    """Answer until the other end closes; then the process ends, whatever else it does. So it does
    after a fault, which is logged.
    """
    decoder = msgspec.msgpack.Decoder(Question)
    try:
        while True:
            packet, descriptors, _, _ = socket.recv_fds(lane, MESSAGE_LIMIT_BYTES, 1)
            if not packet:
                os._exit(0)
            descriptor = descriptors[0] if descriptors else None
            lane.send(msgspec.msgpack.encode(client.answer(decoder.decode(packet), descriptor)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    """Serve every lane; ends with the first of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that has started it
    client = Client()
    lanes = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    threads = [threading.Thread(target=serve, args=(client, lane)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
