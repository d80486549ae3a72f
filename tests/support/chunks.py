"""Chunks with random bytes, as the cache would store them."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass

from splitserve.kv_transfer.cache.chunk_format import (
    Header,
    body_checksums,
    decode_header,
    encode_header,
    verify_body,
)
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.tiers.base import ChunkBuffers, new_header

MODEL = bytes(range(32))
PAGES = ChunkGeometry(
    layers=3,
    chunk_tokens=32,
    block_tokens=16,
    heads=4,
    key_bytes=128,
    value_bytes=128,
    item_bytes=2,
    order="rows",
)
"""Whole pages."""
ODD = ChunkGeometry(
    layers=5,
    chunk_tokens=21,
    block_tokens=7,
    heads=3,
    key_bytes=18,
    value_bytes=10,
    item_bytes=2,
    order="rows",
)
"""No whole number of anything."""


@dataclass(frozen=True)
class Chunk:
    """A chunk in memory."""

    header: Header
    buffers: ChunkBuffers

    @property
    def key(self) -> bytes:
        return self.header.key

    @property
    def content(self) -> bytes:
        """As it lies in a store."""
        return bytes(self.buffers.header) + bytes(self.buffers.body)


def make_chunk(
    seed: int, geometry: ChunkGeometry = PAGES, *, content: int = 0, pieces: int = 1
) -> Chunk:
    """The chunk with that seed's key; other ``content`` gives it other bytes."""
    chance = random.Random(seed)
    key = chance.randbytes(32)
    body = new_body(geometry.chunk_bytes)
    body[:] = random.Random(seed * 1000 + content).randbytes(len(body))
    checksums = body_checksums(body, geometry, pieces)
    header = Header(key=key, model=MODEL, geometry=geometry, pieces=pieces, checksums=checksums)
    front = new_header()
    front[:] = encode_header(header)
    return Chunk(header, ChunkBuffers(key, front, body))


def empty_like(chunk: Chunk) -> ChunkBuffers:
    """Buffers to read it into."""
    return ChunkBuffers(chunk.key, new_header(), new_body(len(chunk.buffers.body)))


def unaligned_like(chunk: Chunk) -> ChunkBuffers:
    """Buffers that begin in the middle of a page."""
    size = len(chunk.buffers.body)
    header, body = new_body(len(chunk.buffers.header) + 1), new_body(size + 1)
    return ChunkBuffers(chunk.key, header[1:], body[1:])


def new_body(size: int) -> memoryview:
    """Page-aligned."""
    return memoryview(mmap.mmap(-1, size))


def verify(buffers: ChunkBuffers) -> Header:
    """What a reader does with a hit; raises ``BadChunkError``."""
    header = decode_header(buffers.header, buffers.key, MODEL)
    verify_body(header, buffers.body)
    return header
