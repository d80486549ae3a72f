"""Numbers as models have them in their KV, and chunks made of them."""

from __future__ import annotations

import mmap

import numpy as np

from splitserve.kernels.convert_pages import convert_pages
from splitserve.kernels.quantise import NUMBERS, read_numbers, write_numbers
from splitserve.kv_transfer.cache.chunk import Chunk
from splitserve.kv_transfer.cache.chunk_coding import rows_format
from splitserve.kv_transfer.cache.chunk_format import body_checksums
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.page_converter import page_format

GEOMETRY = ChunkGeometry(
    layers=3, chunk_tokens=64, block_tokens=16, heads=4, key_bytes=64, value_bytes=64, item_bytes=2,
    order="rows", number="bfloat16",
)  # fmt: skip
MODEL = bytes(range(32))


def like_kv(
    heads: int, tokens: int, items: int, seed: int = 3
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """``[heads, tokens, items]``: channels of very different sizes and means."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((heads, tokens, items))
    size = np.exp(rng.standard_normal(items) * 1.5)
    return np.asarray(values * size + 3 * size * rng.standard_normal(items), np.float32)


def body_like_kv(geometry: ChunkGeometry = GEOMETRY, seed: int = 3) -> memoryview:
    """A chunk's bytes in the order of its pages."""
    body = memoryview(mmap.mmap(-1, geometry.chunk_bytes))
    target = page_format(geometry)
    assert target is not None
    for layer in range(geometry.layers):
        items = geometry.token_bytes // geometry.item_bytes
        values = like_kv(geometry.heads, geometry.chunk_tokens, items, seed + 1000 * layer)
        rows = np.empty((*values.shape[:2], items * NUMBERS[geometry.number]), np.uint8)
        write_numbers(values, geometry.number, rows)
        pages = convert_pages(rows.reshape(1, geometry.heads, -1), rows_format(geometry), target)
        start = layer * geometry.layer_bytes
        body[start : start + geometry.layer_bytes] = pages.tobytes()
    return body


def chunk_of(body: memoryview, geometry: ChunkGeometry = GEOMETRY, pieces: int = 1) -> Chunk:
    """What the arena's book says of these bytes."""
    return Chunk(0, geometry, pieces, body_checksums(body, geometry, pieces), (), MODEL)


def numbers_in(
    body: bytes | memoryview, geometry: ChunkGeometry = GEOMETRY
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """All numbers of a chunk in pages, in the order of its bytes."""
    return read_numbers(np.frombuffer(body, np.uint8), geometry.number)
