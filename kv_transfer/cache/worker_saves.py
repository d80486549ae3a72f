"""A worker's saves: layer by layer into slots that the server has reserved. Owned by its cache
thread.

Blocks are held for a save from its order to its end, so a save that cannot go on is given up at
once: no room, no server, or an answer that does not come.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.chunk_format import CHECKSUM_BYTES
from splitserve.kv_transfer.cache.keys import KEY_BYTES
from splitserve.kv_transfer.cache.messages import (
    CHUNKS_LIMIT_BYTES,
    Commit,
    Reserve,
    Reserved,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.kv_transfer.cache.arena import Mapping
    from splitserve.kv_transfer.cache.orders import SaveOrder
    from splitserve.kv_transfer.cache.page_copier import PageCopier

INDEX_BYTES = 8
"""At most, of a chunk in a commit, besides its checksums."""
ANSWER_LIMIT_S = 1.0
"""How long blocks are held for a server that does not answer."""


@dataclass(eq=False)
class Save:
    """Chunks of one request."""

    order: SaveOrder
    until: float
    final: set[int] = field(default_factory=set)
    """Layers that may be copied and have not been."""
    offsets: dict[int, int] | None = None
    """Chunk to its slot; None before the server has answered."""
    sums: dict[int, list[bytes]] = field(default_factory=dict)
    """Per chunk, by layer."""
    copied: set[int] = field(default_factory=set)
    """Layers that are in the slots."""


class WorkerSaves:
    """All saves of one rank."""

    def __init__(self, copier: PageCopier) -> None:
        self._copier = copier
        self._layers = copier.geometry.layers
        of_chunk = self._layers * CHECKSUM_BYTES + INDEX_BYTES
        self._commit_chunks = max(1, CHUNKS_LIMIT_BYTES // of_chunk)
        self._open: dict[int, Save] = {}
        self._step: list[Save] = []
        """Saves whose blocks the running step computes."""
        self._ended: list[int] = []
        self.counters: defaultdict[str, float] = defaultdict(float)

    def begin(self, order: SaveOrder, now: float, *, is_there: bool) -> Reserve | None:
        """Chunks are to be saved. The question to the server, None when there is none."""
        if not is_there:
            self._ended.append(order.save_id)
            self.counters["saves_shed"] += 1
            return None
        save = Save(order, now + ANSWER_LIMIT_S)
        self._open[order.save_id] = save
        if order.is_final:
            save.final.update(range(self._layers))
        else:
            self._step.append(save)
        return Reserve(
            save_id=order.save_id, parent=order.parent, keys=order.keys, marks=order.marks
        )

    def layer_final(self, layer: int) -> None:
        """The running step has left ``layer``."""
        for save in self._step:
            if layer not in save.copied:
                save.final.add(layer)

    def all_final(self) -> None:
        """The step is over: layers whose hook did not fire are final too."""
        for save in self._step:
            save.final.update(set(range(self._layers)) - save.copied)
        self._step.clear()

    def reserved(self, message: Reserved) -> Commit | None:
        """The server has given slots, or none."""
        offsets = {i: offset for i, offset in enumerate(message.offsets) if offset >= 0}
        save = self._open.get(message.save_id)
        if save is None:
            if not offsets:
                return None
            return Commit(save_id=message.save_id, written=(), abandoned=tuple(offsets))
        save.offsets = offsets
        save.sums = {index: [b""] * self._layers for index in offsets}
        self.counters["chunks_present"] += message.offsets.count(-1)
        self.counters["chunks_without_room"] += message.offsets.count(-2)
        if not offsets:
            self._end(save)
        return None

    def copy_due(self, arena: Mapping) -> Iterator[Commit]:
        """Copy every layer that is final; whole saves are committed."""
        for save in list(self._open.values()):
            if save.offsets is None:
                continue
            for layer in sorted(save.final):
                self._copy_layer(save, layer, arena)
            save.final.clear()
            if len(save.copied) == self._layers:
                self._end(save)
                self.counters["saved_chunks"] += len(save.offsets)
                self.counters["saved_bytes"] += len(save.offsets) * self._copier.rank_bytes
                written = [(i, b"".join(sums)) for i, sums in save.sums.items()]
                for start in range(0, len(written), self._commit_chunks):
                    part = tuple(written[start : start + self._commit_chunks])
                    yield Commit(save_id=save.order.save_id, written=part)

    def expire(self, now: float) -> None:
        """Blocks are not held any longer for a server that does not answer."""
        for save in list(self._open.values()):
            if save.offsets is None and now >= save.until:
                self.counters["saves_shed"] += 1
                self._end(save)

    def lost(self) -> None:
        """The server is gone."""
        for save in list(self._open.values()):
            self.counters["saves_shed"] += 1
            self._end(save)

    def next_deadline(self) -> float:
        """When ``expire`` has something to do."""
        waiting = (save.until for save in self._open.values() if save.offsets is None)
        return min(waiting, default=float("inf"))

    def take_ended(self) -> list[int]:
        """Saves whose blocks are not read any more."""
        ended, self._ended = self._ended, []
        return ended

    def _copy_layer(self, save: Save, layer: int, arena: Mapping) -> None:
        assert save.offsets is not None
        blocks = self._copier.geometry.blocks
        for index, offset in save.offsets.items():
            ids = save.order.block_ids[index * blocks : (index + 1) * blocks]
            save.sums[index][layer] = self._copier.save_layer(arena, offset, layer, ids)
        save.copied.add(layer)

    def _end(self, save: Save) -> None:
        self._open.pop(save.order.save_id, None)
        if save in self._step:
            self._step.remove(save)
        self._ended.append(save.order.save_id)
        self.counters["saves"] += len(save.order.keys) // KEY_BYTES
