"""Loads coded chunks into an engine's pages: each layer is decoded into a buffer that stays in the
processor's cache, and goes from there to its pages, in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from splitserve.kernels.compiled_quantise import warm_up
from splitserve.kv_transfer.cache.chunk_coding import layer_shape, rows_format
from splitserve.kv_transfer.cache.chunk_format import CHECKSUM_BYTES, checksum_of, frame_places
from splitserve.kv_transfer.cache.codecs.base import FrameError, decode_layer
from splitserve.kv_transfer.cache.codecs.registry import codec_named
from splitserve.kv_transfer.cache.geometry import same_content

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.kv_transfer.cache.arena import Mapping
    from splitserve.kv_transfer.cache.geometry import ChunkGeometry
    from splitserve.kv_transfer.cache.messages import ReadyChunk
    from splitserve.kv_transfer.cache.page_converter import PageConverter
    from splitserve.kv_transfer.layout import PageLayout


class CodedLoader:
    """One rank's pages. Used by one thread."""

    def __init__(
        self, layout: PageLayout, geometry: ChunkGeometry, converter: PageConverter
    ) -> None:
        self._converter = converter
        self._geometry = geometry
        self._shape = layer_shape(geometry)
        self._heads = slice(layout.first_head, layout.first_head + layout.heads)
        self._layers = layout.layers
        self._buffer = np.empty(0, np.uint8)

    def warm_up(self) -> None:
        """Whatever takes long the first time is done."""
        if self._shape is not None:
            warm_up(self._shape.number)

    def can_load(self, other: ChunkGeometry) -> bool:
        """Whether coded chunks of that geometry can be turned into these pages."""
        return self._shape is not None and same_content(self._geometry, other)

    def load(
        self, arena: Mapping, chunk: ReadyChunk, first_block: int, block_ids: Sequence[int]
    ) -> bool:
        """As ``PageCopier.load``, for a chunk that ``can_load``: False when its checksums or its
        frames do not fit.
        """
        assert self._shape is not None
        codec, shape = codec_named(chunk.codec), self._shape
        heads = self._heads.stop - self._heads.start
        if not self._buffer.size:
            self._buffer = np.empty(heads * shape.tokens * shape.row_bytes, np.uint8)
        rows = self._buffer.reshape(heads, shape.tokens, shape.row_bytes)
        source = rows_format(self._geometry)
        for layer, (start, end) in enumerate(frame_places(chunk.frames)):
            frame = arena.view[chunk.offset + start : chunk.offset + end]
            at = layer * CHECKSUM_BYTES
            if checksum_of(frame) != chunk.checksums[at : at + CHECKSUM_BYTES]:
                return False
            try:
                decode_layer(codec, frame, shape, self._heads, rows)
            except FrameError:
                return False
            self._converter.scatter(
                rows.reshape(1, heads, -1), source, layer, first_block, block_ids
            )
        return True
