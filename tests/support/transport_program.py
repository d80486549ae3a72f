"""A process that owns one transport and some pages, and does what its standard input says.

Each line in is a JSON object ``{"do": name, ...arguments}``, each line out its result. Between
commands the program polls its transport as a transfer thread does: woken by the transport's
descriptors, and by the clock while something is open.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import select
import sys
import time
from dataclasses import asdict
from typing import Any

import numpy as np

from splitserve.kv_transfer.transports.base import (
    PagePairing,
    PeerLost,
    Region,
    Transport,
    TransportError,
    TransportEvent,
    WriteDone,
)
from splitserve.kv_transfer.transports.registry import create
from splitserve.kv_transfer.transports.settings import TransportSettings

_OPEN_POLL_MS = 1
_IDLE_POLL_MS = 100


class TransportProgram:
    """Pages, their transport, and what happened to it."""

    def __init__(self) -> None:
        self.transport: Transport | None = None
        self.memory = np.empty(0, dtype=np.uint8)
        self.pages = 0
        self.stride = 0
        self.seed = 0
        self.events: list[TransportEvent] = []
        self.open_writes: set[int] = set()
        self.expecting = False
        self.slowest_poll_s = 0.0
        self.flood: dict[str, Any] | None = None
        self.flood_failed_writes = 0

    def poll(self) -> None:
        """One turn of the transport; every write must end once, and only once."""
        if self.transport is None:
            return
        started = time.monotonic()
        events = self.transport.poll()
        self.slowest_poll_s = max(self.slowest_poll_s, time.monotonic() - started)
        for event in events:
            if not isinstance(event, PeerLost):
                self.open_writes.remove(event.write_id)
        self.events += events
        if self.flood is not None:
            self._flood_on(self.flood, events)

    def _flood_on(self, flood: dict[str, Any], events: list[TransportEvent]) -> None:
        assert self.transport is not None
        if any(isinstance(event, PeerLost) for event in events):
            self.flood = None
            return
        while len(self.open_writes) < flood["open_limit"]:
            self.do_write(flood["peer"], flood["tag"], flood["local"], flood["remote"])

    def do_setup(
        self, transport: str, settings: dict[str, Any], pages: int, stride: int, seed: int
    ) -> dict[str, Any]:
        length = pages * stride
        self.memory = np.frombuffer(mmap.mmap(-1, length), dtype=np.uint8)
        self.pages, self.stride, self.seed = pages, stride, seed
        self.memory[:] = self._original()
        self.transport = create(transport, TransportSettings(**settings))
        base = self.memory.ctypes.data
        self.transport.register([Region(base, length)])
        self.events, self.open_writes, self.expecting = [], set(), False
        self.slowest_poll_s = 0.0
        return {
            "base": base,
            "capabilities": asdict(self.transport.capabilities),
            "description": self.transport.describe().hex(),
        }

    def do_connect(
        self, peer: str, description: str, local: list[int], remote: list[int], page_bytes: int
    ) -> None:
        """Tables are given as ``[address of the first page, stride, pages]``."""
        assert self.transport is not None
        mine, theirs = (
            start + np.arange(count, dtype=np.int64) * stride
            for start, stride, count in (local, remote)
        )
        pairing = PagePairing(mine, theirs, page_bytes)
        self.transport.connect(peer, bytes.fromhex(description), pairing)

    def do_write(self, peer: str, tag: int, local: list[int], remote: list[int]) -> int:
        assert self.transport is not None
        mine, theirs = (np.array(indices, dtype=np.int64) for indices in (local, remote))
        write_id = self.transport.write(peer, tag, mine, theirs)
        assert write_id not in self.open_writes
        self.open_writes.add(write_id)
        return write_id

    def do_flood(self, **flood: Any) -> None:
        """Keep ``open_limit`` writes open until a peer is lost."""
        self.flood = flood

    def do_take_events(self) -> list[dict[str, Any]]:
        taken, self.events = self.events, []
        return [{"kind": type(event).__name__, **asdict(event)} for event in taken]

    def do_counts(self) -> dict[str, int]:
        return {
            "done": sum(isinstance(event, WriteDone) for event in self.events),
            "open": len(self.open_writes),
        }

    def do_expect(self, tag: int, pages: list[int]) -> None:
        assert self.transport is not None
        self.expecting = True
        self.transport.expect(tag, np.array(pages, dtype=np.int64))

    def do_revoke(self, tag: int) -> bool:
        assert self.transport is not None
        return self.transport.revoke(tag)

    def do_disconnect(self, peer: str) -> None:
        assert self.transport is not None
        self.transport.disconnect(peer)

    def do_close(self) -> None:
        if self.transport is not None:
            self.transport.close()
        self.transport = None
        self.flood = None
        self.expecting = False

    def do_digests(self, pages: list[int], offset: int, length: int) -> list[str]:
        """A digest of each page's bytes from ``offset``."""
        rows = self.memory.reshape(self.pages, self.stride)[:, offset : offset + length]
        return [hashlib.blake2b(rows[page].tobytes()).hexdigest() for page in pages]

    def do_untouched_except(self, pages: list[int], offset: int, length: int) -> bool:
        """Whether every byte outside those parts of those pages is what it was at setup."""
        expected = self._original().reshape(self.pages, self.stride)
        rows = self.memory.reshape(self.pages, self.stride)
        expected[pages, offset : offset + length] = rows[pages, offset : offset + length]
        return bool((expected == rows).all())

    def do_take_slowest_poll_s(self) -> float:
        slowest, self.slowest_poll_s = self.slowest_poll_s, 0.0
        return slowest

    def do_forbid_tracing(self) -> None:
        """Nobody without the capability may write into this process, and this one has none."""
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
        if os.geteuid() == 0:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)

    def _original(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        generator = np.random.default_rng(self.seed)
        return np.frombuffer(generator.bytes(self.pages * self.stride), dtype=np.uint8).copy()


def main() -> None:
    """Serve commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    program = TransportProgram()
    commands = sys.stdin.fileno()
    pending = b""
    while True:
        watch = select.poll()
        watch.register(commands, select.POLLIN)
        busy = bool(program.open_writes) or program.expecting or program.flood is not None
        for descriptor in program.transport.filenos() if program.transport else ():
            watch.register(descriptor, select.POLLIN)
        ready = [
            descriptor for descriptor, _ in watch.poll(_OPEN_POLL_MS if busy else _IDLE_POLL_MS)
        ]
        program.poll()
        if commands not in ready:
            continue
        piece = os.read(commands, 1 << 20)
        if not piece:
            program.do_close()
            return
        pending += piece
        *lines, pending = pending.split(b"\n")
        for line in lines:
            order = json.loads(line)
            try:
                result = {"result": getattr(program, "do_" + order.pop("do"))(**order)}
            except TransportError as error:
                result = {"transport_error": str(error)}
            answers.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
