"""Copies between the arena and an engine's KV pages in host memory, layer by layer, with checksums.

A page is copied in pieces that fit into the processor's cache and summed up right after, so the sum
costs a fraction of the copy. Copies release the interpreter: the engine's thread computes on.
"""

from __future__ import annotations

import enum
import itertools
from ctypes import memmove
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64

from splitserve.kv_transfer.cache.codecs.names import RAW
from splitserve.kv_transfer.cache.coded_loader import CodedLoader
from splitserve.kv_transfer.cache.page_converter import PageConverter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.kv_transfer.cache.arena import Mapping
    from splitserve.kv_transfer.cache.geometry import ChunkGeometry
    from splitserve.kv_transfer.cache.messages import ReadyChunk
    from splitserve.kv_transfer.layout import PageLayout

COPY_LIMIT_BYTES = 256 * 1024
WORD_BYTES = 8
STEPS_KEPT = 64
"""Of chunks that are being saved: all their layers take the same ones."""
NOT_COPIED = -1
NOT_SUMMED = -1


class Copied(enum.Enum):
    """What became of a chunk that was to be loaded."""

    WHOLE = "whole"
    BROKEN = "broken"
    """Its checksums or frames do not fit: the pages hold anything."""
    FOREIGN = "foreign"
    """Nobody here knows how its bytes are ordered."""


class Step(NamedTuple):
    """Part of a layer: bytes of a chunk, where they are in the engine's layer, and which sum they
    are part of.
    """

    in_chunk: int
    in_pages: int
    """``NOT_COPIED`` where the engine has them already."""
    size_bytes: int
    piece: int
    """``NOT_SUMMED`` for those that another step sums up."""


class PageCopier:
    """One rank's pages. Used by one thread."""

    def __init__(self, layout: PageLayout, geometry: ChunkGeometry) -> None:
        assert geometry.layers == layout.layers
        assert layout.head_bytes == geometry.slice_bytes, (layout, geometry)
        self._layout = layout
        self._converter = PageConverter(layout, geometry)
        self.coded = CodedLoader(layout, geometry, self._converter)
        self.geometry = geometry
        self._steps_to_save = lru_cache(maxsize=STEPS_KEPT)(self._find_steps_to_save)

    @property
    def rank_bytes(self) -> int:
        """This rank's part of a chunk."""
        return self._layout.layers * self.geometry.blocks * self._layout.page_bytes

    def load(
        self, arena: Mapping, chunk: ReadyChunk, first_block: int, block_ids: Sequence[int]
    ) -> Copied:
        """The chunk's blocks (of this engine's size) from ``first_block`` on are in the pages
        ``block_ids``, unless something is wrong with it.
        """
        if chunk.codec != RAW:
            if not self.coded.can_load(chunk.geometry):
                return Copied.FOREIGN
            is_whole = self.coded.load(arena, chunk, first_block, block_ids)
        elif chunk.geometry == self.geometry:
            is_whole = self._load(arena, chunk, first_block, block_ids)
        elif self._converter.can_load(chunk.geometry):
            is_whole = self._converter.load(arena, chunk, first_block, block_ids)
        else:
            return Copied.FOREIGN
        return Copied.WHOLE if is_whole else Copied.BROKEN

    def _load(
        self, arena: Mapping, chunk: ReadyChunk, first_block: int, block_ids: Sequence[int]
    ) -> bool:
        steps = self._steps_to_load(chunk.pieces, first_block, block_ids)
        expected = memoryview(chunk.checksums)
        layer_bytes = chunk.geometry.layer_bytes
        sums = chunk.pieces * WORD_BYTES
        for layer, base in enumerate(self._layout.layer_bases):
            found = self._run(arena, chunk.offset + layer * layer_bytes, base, steps, loads=True)
            for piece, digest in found.items():
                at = layer * sums + piece * WORD_BYTES
                if expected[at : at + WORD_BYTES] != digest:
                    return False
        return True

    def save_layer(
        self, arena: Mapping, offset: int, layer: int, block_ids: Sequence[int]
    ) -> bytes:
        """This rank's heads of one layer of a chunk are in the slot at ``offset``; the answer is
        their checksum.
        """
        steps = self._steps_to_save(tuple(block_ids))
        start = offset + layer * self.geometry.layer_bytes
        base = self._layout.layer_bases[layer]
        return self._run(arena, start, base, steps, loads=False)[0]

    def _run(
        self, arena: Mapping, start: int, base: int, steps: Sequence[Step], *, loads: bool
    ) -> dict[int, bytes]:
        view, address = arena.view, arena.address
        sums: dict[int, xxh3_64] = {}
        for in_chunk, in_pages, size, piece in steps:
            at = start + in_chunk
            if in_pages != NOT_COPIED:
                if loads:
                    memmove(base + in_pages, address + at, size)
                else:
                    memmove(address + at, base + in_pages, size)
            if piece != NOT_SUMMED:
                summed = sums.get(piece)
                if summed is None:
                    summed = sums[piece] = xxh3_64()
                summed.update(view[at : at + size])
        return {piece: s.intdigest().to_bytes(WORD_BYTES, "little") for piece, s in sums.items()}

    def _find_steps_to_save(self, block_ids: tuple[int, ...]) -> list[Step]:
        return self._steps(0, block_ids, [(self._layout.first_head, self._layout.heads, 0)])

    def _steps_to_load(self, pieces: int, first_block: int, block_ids: Sequence[int]) -> list[Step]:
        """Whole pieces are summed up, also those heads of them that this rank does not have."""
        runs = _head_runs(self._layout.first_head, self._layout.heads, self.geometry.heads, pieces)
        return self._steps(first_block, tuple(block_ids), runs)

    def _steps(
        self, first_block: int, block_ids: tuple[int, ...], runs: Sequence[tuple[int, int, int]]
    ) -> list[Step]:
        layout, geometry = self._layout, self.geometry
        slice_bytes = geometry.slice_bytes
        block_bytes = geometry.heads * slice_bytes
        own = range(layout.first_head, layout.first_head + layout.heads)
        steps: list[Step] = []
        for block in range(geometry.blocks):
            for head, heads, piece in runs:
                page = NOT_COPIED
                if block >= first_block and head in own:
                    page = block_ids[block - first_block] * layout.block_stride
                    page += (head - layout.first_head) * slice_bytes
                size = heads * slice_bytes
                _add(steps, Step(block * block_bytes + head * slice_bytes, page, size, piece))
        return [part for step in steps for part in _cut(step)]


@lru_cache(maxsize=64)
def _head_runs(
    first_head: int, heads: int, total: int, pieces: int
) -> tuple[tuple[int, int, int], ...]:
    """(first head, heads, piece) of every run of heads that is copied, or only summed up."""
    per_piece = total // pieces
    runs: list[tuple[int, int, int]] = []
    for piece in range(pieces):
        start, end = piece * per_piece, (piece + 1) * per_piece
        low, high = max(start, first_head), min(end, first_head + heads)
        if low >= high:
            continue
        cuts = sorted({start, low, high, end})
        runs += [(a, b - a, piece) for a, b in itertools.pairwise(cuts)]
    return tuple(runs)


def _add(steps: list[Step], step: Step) -> None:
    """Append, or lengthen the last step when both sides go on where it ends."""
    if steps:
        last = steps[-1]
        joins_chunk = last.in_chunk + last.size_bytes == step.in_chunk
        copied = last.in_pages != NOT_COPIED and step.in_pages != NOT_COPIED
        joins_pages = (
            last.in_pages + last.size_bytes == step.in_pages
            if copied
            else last.in_pages == step.in_pages
        )
        if joins_chunk and joins_pages and last.piece == step.piece:
            steps[-1] = last._replace(size_bytes=last.size_bytes + step.size_bytes)
            return
    steps.append(step)


def _cut(step: Step) -> list[Step]:
    parts = []
    for at in range(0, step.size_bytes, COPY_LIMIT_BYTES):
        size = min(COPY_LIMIT_BYTES, step.size_bytes - at)
        page = step.in_pages if step.in_pages == NOT_COPIED else step.in_pages + at
        parts.append(Step(step.in_chunk + at, page, size, step.piece))
    return parts
