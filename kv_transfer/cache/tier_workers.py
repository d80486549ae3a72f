"""The threads that do a lower tier's work: some that read, one that asks, and one that writes and
removes.

They touch no state of the server: a job goes in by a queue, its result comes out by another one,
and a descriptor wakes the server. Buffers are the arena's slots, which the server keeps for the job
until its result is taken up.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import Empty, Queue
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from splitserve.kv_transfer.cache.chunk_coding import try_codec
from splitserve.kv_transfer.cache.chunk_format import BadChunkError
from splitserve.kv_transfer.cache.codecs.names import RAW
from splitserve.kv_transfer.cache.header_room import HeaderRoom
from splitserve.kv_transfer.cache.tiers.base import (
    ChunkBuffers,
    ReadOutcome,
    TierError,
    WriteOutcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from splitserve.kv_transfer.cache.chunk import Chunk
    from splitserve.kv_transfer.cache.chunk_codec import ChunkCodec
    from splitserve.kv_transfer.cache.chunk_coding import Trial
    from splitserve.kv_transfer.cache.codecs.names import CodecName
    from splitserve.kv_transfer.cache.tiers.base import Tier

logger = logging.getLogger(__name__)

READ_BATCH_LIMIT = 16
REMOVE_BATCH_LIMIT = 256
STOP_DEADLINE_S = 5.0
STOP_MARGIN_S = 1.0
"""For the job that runs at the deadline."""
PROBE_KEY = bytes(32)


class Asked(NamedTuple):
    """A tier has this many of the keys, from the first one on."""

    ask_id: int
    present: int
    elapsed_s: float
    found: tuple[bool, ...] | None = ()
    """Which of them; None when the tier could not be asked."""


class WasRead(NamedTuple):
    """A chunk has been brought into its slot; None: it has not."""

    key: bytes
    chunk: Chunk | None
    elapsed_s: float
    was_broken: bool = False
    has_failed: bool = False
    """The tier could not be used: it may have the chunk."""
    size_bytes: int = 0
    """Of its body, as it is stored."""


class WasWritten(NamedTuple):
    """A write has ended."""

    key: bytes
    outcome: str
    size_bytes: int = 0
    """What it takes in the tier."""
    trials: tuple[Trial, ...] = ()


class Failed(NamedTuple):
    """The tier could not be used."""

    reason: str


class Probed(NamedTuple):
    """The tier answers."""

    elapsed_s: float


class Cleared(NamedTuple):
    """So many chunks were removed."""

    clear_id: int
    chunks: int
    is_complete: bool
    """Whether these were all."""


class ReadJob(NamedTuple):
    """Read a chunk into a slot's memory."""

    key: bytes
    offset: int
    body: memoryview


class WriteJob(NamedTuple):
    """Write what lies in a slot."""

    key: bytes
    parent: bytes
    chunk: Chunk
    body: memoryview
    codec: CodecName = RAW
    """How a chunk that is not coded yet is to be stored."""
    trials: tuple[CodecName, ...] = ()
    """Codecs to measure on it."""


Result = Asked | WasRead | WasWritten | Failed | Probed | Cleared


class TierWorkers:
    """One tier's threads."""

    def __init__(
        self, number: int, tier: Tier, codec: ChunkCodec, *, readers: int, wake: Callable[[], None]
    ) -> None:
        self.number = number
        self._tier = tier
        self._codec = codec
        self._wake = wake
        self._reads: Queue[ReadJob | None] = Queue()
        self._asks: Queue[Callable[[], None] | None] = Queue()
        self._writes: Queue[Callable[[], None] | None] = Queue()
        self._results: deque[Result] = deque()
        self._failure: BaseException | None = None
        self.is_stopping = False
        """Nothing is begun any more."""
        self._write_until = float("inf")
        self._room = HeaderRoom(readers * READ_BATCH_LIMIT)
        tier.use_memory(self._room.shared)
        names: list[tuple[str, Callable[[], None]]] = [
            ("read", partial(self._read_loop, self._room.headers[number::readers]))
            for number in range(readers)
        ]
        names += [("ask", self._ask_loop), ("write", self._write_loop)]
        self._threads = [
            threading.Thread(
                target=self._run, args=(loop,), name=f"tier-{number}-{name}", daemon=True
            )
            for name, loop in names
        ]
        for thread in self._threads:
            thread.start()

    # -- the server's thread -------------------------------------------------------------------

    def take_results(self) -> list[Result]:
        """What has ended since the last call. Raises when a thread has died."""
        if self._failure is not None:
            raise RuntimeError(f"a thread of tier {self.number} has died") from self._failure
        taken = []
        while self._results:
            taken.append(self._results.popleft())
        return taken

    def ask(self, ask_id: int, keys: Sequence[bytes]) -> None:
        """See ``AskTier``."""
        self._asks.put(lambda: self._do_ask(ask_id, keys))

    def probe(self) -> None:
        """See ``ProbeTier``."""
        self._asks.put(self._do_probe)

    def read(self, job: ReadJob) -> None:
        """See ``ReadChunk``."""
        self._reads.put(job)

    def write(self, job: WriteJob) -> None:
        """See ``WriteChunk``."""
        self._writes.put(lambda: self._do_write(job))

    def remove(self, keys: Sequence[bytes], clear_id: int = 0) -> None:
        """See ``RemoveChunks``."""
        if clear_id:
            self._writes.put(lambda: self._do_clear(clear_id, keys))
        else:
            self._writes.put(lambda: self._do_remove(keys))

    def clear(self, clear_id: int, prefix: bytes) -> None:
        """See ``ListTier``."""
        self._writes.put(lambda: self._do_clear(clear_id, self._tier.listed(prefix)))

    def stop(self) -> None:
        """No more reads; what waits to be written has ``STOP_DEADLINE_S``. ``join`` follows."""
        self.is_stopping = True
        self._write_until = monotonic() + STOP_DEADLINE_S
        for queue in (self._reads, self._asks):
            with suppress(Empty):
                while True:
                    queue.get_nowait()
        ends: dict[str, Callable[[None], None]] = {
            "read": self._reads.put, "ask": self._asks.put, "write": self._writes.put,
        }  # fmt: skip
        for thread in self._threads:
            ends[thread.name.rpartition("-")[2]](None)

    def join(self) -> bool:
        """The threads have ended; False: one has died, or hangs in a call that has a timeout of its
        own.
        """
        until = self._write_until + STOP_MARGIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))
        if self._failure is not None or any(thread.is_alive() for thread in self._threads):
            return False
        self._tier.close()
        self._room.close()
        return True

    # -- the tier's threads --------------------------------------------------------------------

    def _run(self, loop: Callable[[], None]) -> None:
        """A fault ends the server, which is started again, instead of one thread in silence."""
        try:
            loop()
        except BaseException as error:
            logger.exception("a thread of tier %d died", self.number)
            self._failure = error
            self._wake()

    def _read_loop(self, headers: Sequence[memoryview]) -> None:
        while (job := self._reads.get()) is not None:
            batch = [job]
            while len(batch) < READ_BATCH_LIMIT:
                try:
                    other = self._reads.get_nowait()
                except Empty:
                    break
                if other is None:
                    self._reads.put(None)  # The end is for the loop.
                    break
                batch.append(other)
            self._do_read(batch, headers)

    def _ask_loop(self) -> None:
        """Questions have a thread of their own: behind reads their answers would be late."""
        while (job := self._asks.get()) is not None:
            job()

    def _write_loop(self) -> None:
        while (job := self._writes.get()) is not None:
            if monotonic() < self._write_until:
                job()

    def _done(self, *results: Result) -> None:
        self._results.extend(results)
        self._wake()

    def _do_ask(self, ask_id: int, keys: Sequence[bytes]) -> None:
        began = monotonic()
        try:
            found = self._tier.contains(keys)
        except TierError as error:
            self._done(Failed(str(error)), Asked(ask_id, 0, monotonic() - began, None))
            return
        present = found.index(False) if False in found else len(found)
        self._done(Asked(ask_id, present, monotonic() - began, tuple(found)))

    def _do_probe(self) -> None:
        began = monotonic()
        try:
            self._tier.contains([PROBE_KEY])
        except TierError as error:
            self._done(Failed(str(error)))
            return
        self._done(Probed(monotonic() - began))

    def _do_read(self, batch: list[ReadJob], headers: Sequence[memoryview]) -> None:
        buffers = [
            ChunkBuffers(job.key, header, job.body, may_be_shorter=True)
            for job, header in zip(batch, headers, strict=False)
        ]
        left = set(range(len(batch)))
        last = monotonic()
        try:
            for number, outcome in self._tier.read(buffers):
                now = monotonic()
                left.discard(number)
                self._done(self._was_read(batch[number], buffers[number], outcome, now - last))
                last = monotonic()
        except TierError as error:
            self._done(Failed(str(error)))
        for number in left:
            self._done(WasRead(batch[number].key, None, 0.0, has_failed=True))

    def _was_read(
        self, job: ReadJob, buffers: ChunkBuffers, outcome: ReadOutcome, elapsed_s: float
    ) -> WasRead:
        if outcome is not ReadOutcome.HIT:
            return WasRead(job.key, None, elapsed_s, outcome is ReadOutcome.BROKEN)
        try:
            chunk = self._codec.opened(
                job.key, job.offset, buffers.header, buffers.found_body, len(job.body)
            )
        except BadChunkError as error:
            logger.warning("%s", error)
            with suppress(TierError):  # It is a miss now, and will be found broken again.
                self._tier.remove([job.key])
            return WasRead(job.key, None, elapsed_s, True)
        return WasRead(job.key, chunk, elapsed_s, size_bytes=buffers.body_bytes)

    def _do_write(self, job: WriteJob) -> None:
        try:
            header, body = self._codec.sealed(job.key, job.parent, job.chunk, job.body, job.codec)
            outcome = self._tier.write([ChunkBuffers(job.key, header, body)])[0]
        except TierError as error:
            self._done(Failed(str(error)), WasWritten(job.key, "failed"))
            return
        except BadChunkError as error:
            logger.warning("not written: %s", error)
            self._done(WasWritten(job.key, "refused"))
            return
        found = [try_codec(name, job.chunk, job.body) for name in job.trials]
        self._done(
            WasWritten(
                job.key,
                "full" if outcome is WriteOutcome.FULL else "written",
                len(header) + len(body),
                tuple(trial for trial in found if trial is not None),
            )
        )

    def _do_remove(self, keys: Sequence[bytes]) -> None:
        try:
            self._tier.remove(keys)
        except TierError as error:
            self._done(Failed(str(error)))

    def _do_clear(self, clear_id: int, keys: Iterable[bytes]) -> None:
        removed = 0
        left = iter(keys)
        try:
            while not self.is_stopping and (batch := list(islice(left, REMOVE_BATCH_LIMIT))):
                removed += self._tier.remove(batch)
        except TierError as error:
            self._done(Failed(str(error)), Cleared(clear_id, removed, False))
            return
        self._done(Cleared(clear_id, removed, not self.is_stopping))


def waker() -> tuple[int, Callable[[], None]]:
    """A descriptor that becomes readable when the function beside it is called, from any thread."""
    descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake() -> None:
        with suppress(BlockingIOError):  # Its counter is full: it is readable.
            os.eventfd_write(descriptor, 1)

    return descriptor, wake
