"""One side of a transport on trial, as a process of its own: pages that are nobody's KV are written
to a peer, and timed.

Reads JSON commands from standard input, one a line, and answers each on standard output. Between
commands it polls its transport as an engine's transfer thread does while bytes move. The first half
of its memory is what it writes from, the second what the peer writes to, so both sides can write at
a time. What libraries print goes to standard error.
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
from typing import TYPE_CHECKING, Any

import numpy as np

from splitserve.kv_transfer.transports.base import (
    PagePairing,
    Region,
    Transport,
    TransportError,
    WriteDone,
)
from splitserve.kv_transfer.transports.registry import create
from splitserve.kv_transfer.transports.settings import TransportSettings

if TYPE_CHECKING:
    from collections.abc import Callable

NAP_S = 50e-6
TAG = 1
WRITE_DEADLINE_S = 10.0
WRITE_BYTES = 4 << 20
"""Of one write, as engines group layers."""
OPEN_BYTES = 32 << 20
"""Written at a time."""


class Side:
    """A transport and the memory of this side."""

    def __init__(self) -> None:
        self.transport: Transport | None = None
        self._memory = np.empty(0, dtype=np.uint8)
        self._page_bytes = 1
        self._pages = 0
        self._order = np.empty(0, dtype=np.int64)

    def do_setup(
        self, transport: str, settings: dict[str, Any], page_bytes: int, pages: int, seed: int
    ) -> dict[str, Any]:
        """The transport is there and the memory registered."""
        self._page_bytes, self._pages = page_bytes, pages
        half = pages * page_bytes
        self._memory = np.frombuffer(mmap.mmap(-1, 2 * half), dtype=np.uint8)
        draw = np.random.default_rng(seed)
        self._memory[:half] = np.frombuffer(draw.bytes(half), dtype=np.uint8)
        self._memory[half:] = 0
        self._order = draw.permutation(pages).astype(np.int64)
        started = time.perf_counter()
        self.transport = create(transport, TransportSettings(**settings))
        base = self._memory.ctypes.data
        self.transport.register([Region(base, 2 * half)])
        seconds = time.perf_counter() - started
        self.transport.expect(TAG, np.arange(pages, dtype=np.int64))
        return {"base": base, "description": self.transport.describe().hex(), "seconds": seconds}

    def do_connect(self, peer: str, description: str, base: int) -> float:
        """Ready to write to the peer; returns the seconds that it took."""
        assert self.transport is not None
        offsets = np.arange(self._pages, dtype=np.int64) * self._page_bytes
        landing = base + self._pages * self._page_bytes
        pairing = PagePairing(
            self._memory.ctypes.data + offsets, landing + offsets, self._page_bytes
        )
        started = time.perf_counter()
        self.transport.connect(peer, bytes.fromhex(description), pairing)
        return time.perf_counter() - started

    def do_write_one(self, peer: str, count: int) -> list[float]:
        """Seconds of ``count`` writes of one page, each begun when the one before has landed."""
        took = []
        for index in range(count):
            page = self._order[index % self._pages :][:1]
            started = time.perf_counter()
            self._finish(peer, [page])
            took.append(time.perf_counter() - started)
        return took

    def do_write_all(self, peer: str, budget_s: float) -> float:
        """Bytes per second of the quickest of the passes over all pages that fit into the budget:
        what else computes here counts least.
        """
        each = max(1, WRITE_BYTES // self._page_bytes)
        writes = [self._order[at : at + each] for at in range(0, self._pages, each)]
        passes = _repeated(lambda: self._finish(peer, writes), budget_s)
        return self._pages * self._page_bytes / min(passes)

    def do_copy(self, budget_s: float) -> float:
        """Bytes per second of a plain copy of the same pages inside this process, the quickest."""
        base, half = self._memory.ctypes.data, self._pages * self._page_bytes
        target = np.frombuffer(mmap.mmap(-1, half), dtype=np.uint8)
        target[:] = 0
        pairs = [
            (target.ctypes.data + index * self._page_bytes, base + page * self._page_bytes)
            for index, page in enumerate(self._order.tolist())
        ]

        def copy() -> None:
            for to, source in pairs:
                ctypes.memmove(to, source, self._page_bytes)

        return half / min(_repeated(copy, budget_s))

    def do_digests(self) -> tuple[str, str]:
        """Of what this side writes, and of what the peer has written."""
        half = self._pages * self._page_bytes
        return _digest(self._memory[:half]), _digest(self._memory[half:])

    def poll(self) -> None:
        """The transport goes on."""
        if self.transport is not None:
            self.transport.poll()

    def close(self) -> None:
        """The transport is gone."""
        if self.transport is not None:
            self.transport.close()

    @property
    def must_help(self) -> bool:
        """Whether the peer's writes move only while this side polls."""
        return self.transport is not None and self.transport.capabilities.target_must_progress

    @property
    def descriptors(self) -> list[int]:
        """Readable when ``poll`` has work."""
        return self.transport.filenos() if self.transport is not None else []

    def _finish(self, peer: str, writes: list[Any]) -> None:
        """Every write has landed; as many are open at a time as engines have."""
        assert self.transport is not None
        deadline = time.monotonic() + WRITE_DEADLINE_S
        at_once = max(1, OPEN_BYTES // WRITE_BYTES)
        waiting, opened = list(writes), set[int]()
        while waiting or opened:
            while waiting and len(opened) < at_once:
                pages = waiting.pop()
                opened.add(self.transport.write(peer, TAG, pages, pages))
            events = self.transport.poll()
            for event in events:
                if not isinstance(event, WriteDone):
                    raise TransportError(event.reason)
                opened.discard(event.write_id)
            if time.monotonic() > deadline:
                raise TransportError(f"writes did not end in {WRITE_DEADLINE_S:g} s")
            if not events:
                time.sleep(NAP_S)


def _repeated(action: Callable[[], None], budget_s: float) -> list[float]:
    """Seconds of each repetition until the budget is used up; at least three."""
    took: list[float] = []
    end = time.monotonic() + budget_s
    while len(took) < 3 or time.monotonic() < end:
        started = time.perf_counter()
        action()
        took.append(time.perf_counter() - started)
    return took


def _digest(part: Any) -> str:
    return hashlib.blake2b(part.tobytes(), digest_size=16).hexdigest()


def main(cpus: str) -> None:
    """Serve commands on these CPUs (``0,1``; empty: any) until standard input ends."""
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    side, commands = Side(), sys.stdin.buffer
    while True:
        side.poll()
        watched = [commands.fileno(), *side.descriptors]
        wait_s = NAP_S if side.must_help else 1.0
        if commands.fileno() not in select.select(watched, [], [], wait_s)[0]:
            continue
        line = commands.readline()
        if not line:
            side.close()
            return
        order = json.loads(line)
        try:
            answer = {"result": getattr(side, "do_" + order.pop("do"))(**order)}
        except (TransportError, OSError, MemoryError) as error:
            answer = {"error": str(error) or type(error).__name__}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
