"""A chunk's body and its frames: coding what engines wrote, measuring what that brings.

Done by the threads of tiers, never by engines: a chunk is coded once, when it is written to a tier
that wants it so, and is read back as it is. Engines decode while they copy (``coded_loader.py``).
"""

from __future__ import annotations

import mmap
import struct
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from splitserve.kernels.convert_pages import convert_pages
from splitserve.kernels.page_formats import PageFormat
from splitserve.kernels.quantise import NUMBERS
from splitserve.kv_transfer.cache.chunk_format import (
    PAGE_BYTES,
    BadChunkError,
    body_checksums,
    checksum_of,
)
from splitserve.kv_transfer.cache.codecs.base import LayerShape, decode_layer, encode_layer
from splitserve.kv_transfer.cache.codecs.registry import codec_named
from splitserve.kv_transfer.cache.page_converter import page_format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.kv_transfer.cache.chunk import Chunk
    from splitserve.kv_transfer.cache.codecs.base import Bytes, Codec
    from splitserve.kv_transfer.cache.codecs.names import CodecName
    from splitserve.kv_transfer.cache.geometry import ChunkGeometry

TRIAL_LAYERS = 4
"""Of a chunk that a codec is tried on."""


class CodedBody(NamedTuple):
    """A body as it is stored; see ``chunk_format.py``."""

    body: memoryview
    frames: bytes
    checksums: bytes


class Trial(NamedTuple):
    """What a codec was measured to do with a chunk of this model on this machine."""

    codec: CodecName
    ratio: float
    """Bytes before over bytes after."""
    encode_bytes_per_s: float
    """Of what there was before, one thread."""
    decode_bytes_per_s: float
    """Into pages."""


def layer_shape(geometry: ChunkGeometry) -> LayerShape | None:
    """One layer as codecs see it; None for pages whose order or numbers nobody here knows."""
    if page_format(geometry) is None or NUMBERS.get(geometry.number) != geometry.item_bytes:
        return None
    return LayerShape(
        geometry.heads,
        geometry.chunk_tokens,
        geometry.key_bytes // geometry.item_bytes,
        geometry.value_bytes // geometry.item_bytes,
        geometry.number,
    )


def rows_format(geometry: ChunkGeometry) -> PageFormat:
    """A layer whose tokens are one block of rows: what codecs work on."""
    item = geometry.item_bytes
    return PageFormat(
        geometry.chunk_tokens,
        geometry.key_bytes // item,
        geometry.value_bytes // item,
        item,
        "rows",
    )


def encode_chunk(
    name: CodecName, chunk: Chunk, body: memoryview, *, begins_prompt: bool
) -> CodedBody | None:
    """The coded body of a chunk that lies in the arena; None when it cannot be coded, or does not
    become smaller.

    Raises ``BadChunkError`` when it does not fit its checksums: coded, it would look right.
    """
    shape = layer_shape(chunk.geometry)
    if shape is None:
        return None
    if body_checksums(body, chunk.geometry, chunk.pieces) != chunk.checksums:
        raise BadChunkError("a chunk of the arena does not fit its checksums")
    codec = codec_named(name)
    frames = [
        encode_layer(
            codec, _rows_of(body, chunk.geometry, layer), shape, begins_prompt=begins_prompt
        )
        for layer in range(chunk.geometry.layers)
    ]
    size = -(-sum(map(len, frames)) // PAGE_BYTES) * PAGE_BYTES
    if size >= chunk.geometry.chunk_bytes:
        return None
    coded = memoryview(mmap.mmap(-1, size))
    at = 0
    for frame in frames:
        coded[at : at + len(frame)] = frame
        at += len(frame)
    return CodedBody(
        coded,
        struct.pack(f"<{len(frames)}I", *map(len, frames)),
        b"".join(map(checksum_of, frames)),
    )


def try_codec(name: CodecName, chunk: Chunk, body: memoryview) -> Trial | None:
    """Code some layers, decode them and bring them into the order of pages, as engines do; None
    where ``encode_chunk`` would be.
    """
    geometry = chunk.geometry
    shape = layer_shape(geometry)
    if shape is None:
        return None
    codec = codec_named(name)
    rows = [_rows_of(body, geometry, n) for n in range(min(TRIAL_LAYERS, geometry.layers))]
    _decode_into_pages(codec, [encode_layer(codec, rows[0], shape, begins_prompt=False)], geometry)
    # The first pass may compile, and brings tables and memory up; the second one counts.
    began = perf_counter()
    frames = [encode_layer(codec, layer, shape, begins_prompt=False) for layer in rows]
    coded = perf_counter()
    _decode_into_pages(codec, frames, geometry)
    ended = perf_counter()
    size = shape.layer_bytes * len(rows)
    return Trial(
        name,
        size / sum(map(len, frames)),
        size / max(coded - began, 1e-9),
        size / max(ended - coded, 1e-9),
    )


def _decode_into_pages(codec: Codec, frames: Sequence[bytes], geometry: ChunkGeometry) -> None:
    shape, target = layer_shape(geometry), page_format(geometry)
    assert shape is not None
    assert target is not None
    out = np.empty((shape.heads, shape.tokens, shape.row_bytes), np.uint8)
    pages = np.empty((geometry.blocks, geometry.heads, geometry.slice_bytes), np.uint8)
    for frame in frames:
        decode_layer(codec, memoryview(frame), shape, slice(0, shape.heads), out)
        convert_pages(out.reshape(1, shape.heads, -1), rows_format(geometry), target, pages)


def _rows_of(body: memoryview, geometry: ChunkGeometry, layer: int) -> Bytes:
    """``[heads, tokens, row_bytes]`` of one layer."""
    source = page_format(geometry)
    assert source is not None
    start = layer * geometry.layer_bytes
    flat = np.frombuffer(body, np.uint8, geometry.layer_bytes, start)
    pages = flat.reshape(geometry.blocks, geometry.heads, geometry.slice_bytes)
    rows = convert_pages(pages, source, rows_format(geometry))
    return rows.reshape(geometry.heads, geometry.chunk_tokens, -1)
