"""A worker's loads: which chunks have come, and what to tell the server. Owned by its cache
thread.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.keys import KEY_BYTES
from splitserve.kv_transfer.cache.messages import CloseChunks, OpenChunks, Ready
from splitserve.kv_transfer.cache.orders import Loaded, LoadOrder
from splitserve.kv_transfer.cache.page_copier import Copied

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.arena import Mapping
    from splitserve.kv_transfer.cache.messages import ReadyChunk
    from splitserve.kv_transfer.cache.page_copier import PageCopier

GRACE_S = 1.0
"""How much longer than the server's time for a load its worker waits."""


@dataclass(eq=False)
class Load:
    """Chunks for one request."""

    order: LoadOrder
    chunks: int
    began: float
    until: float
    copied: set[int] = field(default_factory=set)
    end: int = 0
    """Chunks from this index on will not come."""
    foreign: int = -1
    """A chunk that this engine cannot read."""

    @property
    def is_over(self) -> bool:
        """Whether every chunk has come or will not."""
        return all(index in self.copied for index in range(self.end))


class WorkerLoads:
    """All loads of one rank."""

    def __init__(self, copier: PageCopier) -> None:
        self._copier = copier
        self._open: dict[int, Load] = {}
        self._ended: list[Loaded] = []
        self.counters: defaultdict[str, float] = defaultdict(float)

    def expect_coded(self) -> None:
        """Chunks may come coded: the first one does not wait for a compiler."""
        self._copier.coded.warm_up()

    def begin(self, order: LoadOrder, now: float, *, is_there: bool) -> OpenChunks | None:
        """A request waits for chunks. The question to the server, None when there is none."""
        chunks = len(order.keys) // KEY_BYTES
        load = Load(order, chunks, now, now + order.limit_s + GRACE_S, end=chunks)
        if not is_there:
            load.end = 0
            self._end(load, now)
            return None
        self._open[order.load_id] = load
        return OpenChunks(load_id=order.load_id, keys=order.keys, limit_s=order.limit_s)

    def ready(self, message: Ready, arena: Mapping, now: float) -> list[CloseChunks]:
        """Chunks are in the arena, or will not come."""
        load = self._open.get(message.load_id)
        if load is None:
            return []
        answers: list[CloseChunks] = []
        for chunk in message.chunks:
            if chunk.index >= load.end:
                answers.append(CloseChunks(load_id=message.load_id, indices=(chunk.index,)))
                continue
            copied = self._copy(load, chunk, arena)
            if copied is not Copied.WHOLE:
                load.end = min(load.end, chunk.index)
                load.foreign = chunk.index if copied is Copied.FOREIGN else load.foreign
            broken = (chunk.index,) if copied is Copied.BROKEN else ()
            answers.append(
                CloseChunks(load_id=message.load_id, indices=(chunk.index,), broken=broken)
            )
        if message.missing:
            load.end = min(load.end, *message.missing)
        if load.is_over:
            del self._open[message.load_id]
            self._end(load, monotonic())
            answers.append(CloseChunks(load_id=message.load_id))
        return answers

    def expire(self, now: float) -> list[CloseChunks]:
        """Loads whose time is over have failed."""
        answers = []
        for load_id, load in list(self._open.items()):
            if now >= load.until:
                del self._open[load_id]
                self.counters["loads_late"] += 1
                self._give_up(load, now)
                answers.append(CloseChunks(load_id=load_id))
        return answers

    def lost(self, now: float) -> None:
        """The server is gone."""
        for load in self._open.values():
            self._give_up(load, now)
        self._open.clear()

    def next_deadline(self) -> float:
        """When ``expire`` has something to do."""
        return min((load.until for load in self._open.values()), default=float("inf"))

    def take_ended(self) -> list[Loaded]:
        """Loads that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _copy(self, load: Load, chunk: ReadyChunk, arena: Mapping) -> Copied:
        order, blocks = load.order, self._copier.geometry.blocks
        first = order.first_block if chunk.index == 0 else 0
        start = chunk.index * blocks - (order.first_block if chunk.index else 0)
        ids = order.block_ids[start : start + blocks - first]
        copied = self._copier.load(arena, chunk, first, ids)
        if copied is Copied.WHOLE:
            load.copied.add(chunk.index)
        else:
            self.counters[f"{copied.value}_chunks"] += 1
        return copied

    def _give_up(self, load: Load, now: float) -> None:
        load.end = next(i for i in range(load.chunks + 1) if i not in load.copied)
        self._end(load, now)

    def _end(self, load: Load, now: float) -> None:
        size = self._copier.rank_bytes * load.end
        self.counters["loaded_chunks"] += load.end
        self.counters["loaded_bytes"] += size
        self.counters["loads"] += 1
        self.counters["loads_failed"] += load.end < load.chunks
        elapsed_s = now - load.began
        self.counters["load_seconds"] += elapsed_s
        order = load.order
        is_foreign = load.foreign == load.end
        self._ended.append(
            Loaded(
                order.request_id, order.load_id, load.chunks, load.end, size, elapsed_s, is_foreign
            )
        )
