"""Loads chunks whose bytes are ordered otherwise than an engine's pages: another block size, or
another order inside a head's slice.

Layer by layer: its checksums first, for what does not fit them must not become numbers, then the
conversion straight into the pages.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided
from xxhash import xxh3_64

from splitserve.kernels.convert_pages import convert_pages
from splitserve.kernels.host_pages import scatter_pages
from splitserve.kernels.page_formats import PageFormat
from splitserve.kv_transfer.cache.chunk_format import CHECKSUM_BYTES
from splitserve.kv_transfer.cache.geometry import ChunkGeometry, same_content

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.kernels.convert_pages import Bytes
    from splitserve.kv_transfer.cache.arena import Mapping
    from splitserve.kv_transfer.cache.messages import ReadyChunk
    from splitserve.kv_transfer.layout import PageLayout


class PageConverter:
    """One rank's pages, whose blocks and slices are those of ``geometry``."""

    def __init__(self, layout: PageLayout, geometry: ChunkGeometry) -> None:
        self._layout = layout
        self._geometry = geometry
        self._heads = slice(layout.first_head, layout.first_head + layout.heads)

    def can_load(self, other: ChunkGeometry) -> bool:
        """Whether chunks of that geometry can be turned into these pages."""
        formats = page_format(self._geometry), page_format(other)
        return same_content(self._geometry, other) and None not in formats

    def load(
        self, arena: Mapping, chunk: ReadyChunk, first_block: int, block_ids: Sequence[int]
    ) -> bool:
        """As ``PageCopier.load``, for a chunk that ``can_load``: False when its checksums do not
        fit.
        """
        source = page_format(chunk.geometry)
        assert source is not None
        for layer in range(self._layout.layers):
            pages = _chunk_layer(arena, chunk, layer)
            if not self._is_whole(pages, chunk, layer):
                return False
            self.scatter(pages[:, self._heads], source, layer, first_block, block_ids)
        return True

    def scatter(
        self,
        own: Bytes,
        source: PageFormat,
        layer: int,
        first_block: int,
        block_ids: Sequence[int],
    ) -> None:
        """The pages of a layer hold this rank's heads of a chunk, from ``first_block`` on."""
        target, memory = page_format(self._geometry), self._memory(layer)
        assert target is not None
        if first_block:
            # The engine may have the beginning of what is one block in the chunk.
            own = convert_pages(own, source, target)[first_block:]
            scatter_pages(own, target, memory, block_ids, target)
        else:
            scatter_pages(own, source, memory, block_ids, target)

    def _is_whole(self, pages: Bytes, chunk: ReadyChunk, layer: int) -> bool:
        """Whether the pieces that this rank's heads are in fit their checksums."""
        of_piece = chunk.geometry.heads // chunk.pieces
        for piece in range(chunk.pieces):
            start, end = piece * of_piece, (piece + 1) * of_piece
            if end <= self._heads.start or start >= self._heads.stop:
                continue
            found = xxh3_64()
            for block in pages:
                found.update(block[start:end])
            at = (layer * chunk.pieces + piece) * CHECKSUM_BYTES
            if (
                found.intdigest().to_bytes(CHECKSUM_BYTES, "little")
                != (chunk.checksums[at : at + CHECKSUM_BYTES])
            ):
                return False
        return True

    def _memory(self, layer: int) -> Bytes:
        """One layer of the engine's memory: ``[blocks, heads, slice_bytes]``."""
        layout = self._layout
        size = (layout.num_blocks - 1) * layout.block_stride + layout.page_bytes
        area = (ctypes.c_uint8 * size).from_address(layout.layer_bases[layer])
        shape = (layout.num_blocks, layout.heads, layout.head_bytes)
        return as_strided(
            np.ctypeslib.as_array(area), shape, (layout.block_stride, layout.head_bytes, 1)
        )


@lru_cache(maxsize=256)
def page_format(geometry: ChunkGeometry) -> PageFormat | None:
    """What the conversion needs to know; None for an order that it does not know."""
    item = geometry.item_bytes
    try:
        return PageFormat(
            geometry.block_tokens,
            geometry.key_bytes // item,
            geometry.value_bytes // item,
            item,
            geometry.order,
        )
    except ValueError:
        return None


def _chunk_layer(arena: Mapping, chunk: ReadyChunk, layer: int) -> Bytes:
    """``[blocks, heads, slice_bytes]`` of the slot."""
    geometry = chunk.geometry
    start = chunk.offset + layer * geometry.layer_bytes
    flat = np.frombuffer(arena.view, np.uint8, geometry.layer_bytes, start)
    return flat.reshape(geometry.blocks, geometry.heads, geometry.slice_bytes)
