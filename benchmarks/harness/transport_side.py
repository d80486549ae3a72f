"""One side of a transport under measurement, in its own process on its own core.

Reads JSON commands from standard input, answers on standard output. The receiver polls as the
product's transfer thread does while bytes move: every 50 microseconds. The writer measures.
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
from typing import Any

import numpy as np

from splitserve.kv_transfer.transports.base import PagePairing, Region, TransportEvent, WriteDone
from splitserve.kv_transfer.transports.registry import create
from splitserve.kv_transfer.transports.settings import TransportSettings

NAP_S = 50e-6
TAG = 1
WRITE_DEADLINE_S = 30.0


class Side:
    """A transport, and touched memory that each measurement cuts into pages of its own size."""

    def __init__(self, transport: str, incarnation: str, memory_bytes: int) -> None:
        self.memory = np.frombuffer(mmap.mmap(-1, memory_bytes), dtype=np.uint8)
        self.memory[:] = np.random.default_rng(len(incarnation)).integers(
            0, 255, memory_bytes, dtype=np.uint8
        )
        self.base = self.memory.ctypes.data
        self.transport = create(transport, TransportSettings(incarnation))
        self.transport.register([Region(self.base, memory_bytes)])
        self.connected: set[int] = set()

    def do_describe(self) -> dict[str, Any]:
        return {"base": self.base, "description": self.transport.describe().hex()}

    def do_expect(self, pages: int) -> None:
        """All pages of the smallest size, hence of every size."""
        self.transport.expect(TAG, np.arange(pages))

    def do_digest(self, page_bytes: int, pages: list[int]) -> str:
        """Of those pages in that order."""
        found = hashlib.blake2b()
        for page in pages:
            found.update(self.memory[page * page_bytes : (page + 1) * page_bytes].tobytes())
        return found.hexdigest()

    def do_connect(self, description: str, base: int, page_bytes: int) -> None:
        """The peer's memory cut into pages of ``page_bytes`` is the peer named by that number."""
        offsets = np.arange(self.memory.size // page_bytes, dtype=np.int64) * page_bytes
        pairing = PagePairing(self.base + offsets, base + offsets, page_bytes)
        self.transport.connect(str(page_bytes), bytes.fromhex(description), pairing)

    def do_send(self, page_bytes: int, local: list[int], remote: list[int], batch: int) -> float:
        """Seconds until all pages have landed, written ``batch`` pages at a time, all at once."""
        mine, theirs = np.array(local, dtype=np.int64), np.array(remote, dtype=np.int64)
        started = time.perf_counter()
        opened = {
            self.transport.write(
                str(page_bytes), TAG, mine[at : at + batch], theirs[at : at + batch]
            )
            for at in range(0, mine.size, batch)
        }
        self._wait(opened)
        return time.perf_counter() - started

    def do_send_one_by_one(
        self, page_bytes: int, local: list[int], remote: list[int], batch: int
    ) -> list[float]:
        """Seconds of each write, begun after the one before has landed."""
        mine, theirs = np.array(local, dtype=np.int64), np.array(remote, dtype=np.int64)
        took = []
        for at in range(0, mine.size - batch + 1, batch):
            chosen = mine[at : at + batch], theirs[at : at + batch]
            started = time.perf_counter()
            self._wait({self.transport.write(str(page_bytes), TAG, *chosen)})
            took.append(time.perf_counter() - started)
        return took

    def do_copy(self, page_bytes: int, local: list[int], remote: list[int]) -> float:
        """Seconds of a plain copy of pages inside this process, one ``memmove`` per page."""
        half = self.base + self.memory.size // 2
        pairs = [
            (half + theirs * page_bytes, self.base + mine * page_bytes)
            for mine, theirs in zip(local, remote, strict=True)
        ]
        move = ctypes.memmove
        started = time.perf_counter()
        for target, source in pairs:
            move(target, source, page_bytes)
        return time.perf_counter() - started

    def do_copy_contiguous(self, size: int) -> float:
        """Seconds of one ``memmove`` of ``size`` bytes inside this process."""
        half = self.base + self.memory.size // 2
        started = time.perf_counter()
        ctypes.memmove(half, self.base, size)
        return time.perf_counter() - started

    def _wait(self, opened: set[int]) -> None:
        until = time.monotonic() + WRITE_DEADLINE_S
        while opened:
            events: list[TransportEvent] = self.transport.poll()
            for event in events:
                if not isinstance(event, WriteDone):
                    raise RuntimeError(f"{event}")
                opened.discard(event.write_id)
            if time.monotonic() > until:
                raise TimeoutError(f"{len(opened)} writes did not end in {WRITE_DEADLINE_S} s")
            if opened and not events:
                time.sleep(NAP_S)


def main() -> None:
    """``transport_side.py ROLE TRANSPORT CORE MEMORY_BYTES``: serve until standard input ends."""
    role, transport, core, memory_bytes = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    side = Side(transport, role, int(memory_bytes))
    polls = role == "receiver" and side.transport.capabilities.target_must_progress
    commands = sys.stdin.fileno()
    while True:
        side.transport.poll()
        waiting_for = [commands, *side.transport.filenos()]
        if commands not in select.select(waiting_for, [], [], NAP_S if polls else 1.0)[0]:
            continue
        line = sys.stdin.buffer.readline()
        if not line:
            side.transport.close()
            return
        order = json.loads(line)
        answers.write(json.dumps(getattr(side, "do_" + order.pop("do"))(**order)) + "\n")


if __name__ == "__main__":
    main()
