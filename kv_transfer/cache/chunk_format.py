"""A chunk outside the arena: a header of 16 KiB that says what it is, then the bytes of its slot.

The header::

    0      8 bytes   magic
    8      uint32    version (``FORMAT_VERSION``), little-endian like all numbers here
    12     uint32    length of the content
    16     content   msgpack of ``Header``, then zeros
    16376  uint64    xxh3-64 of everything before it

The body is ``[layers, blocks, heads, slice_bytes]``; each layer has one checksum per *piece*. Piece
``p`` of a layer is heads ``[p * heads / pieces, (p + 1) * heads / pieces)`` of every block, in the
order of blocks, hashed as one stream: what one tensor-parallel rank of the writer has written.

The body of a coded chunk is one frame per layer (``codecs/base.py``), one after the other, then
zeros up to a whole number of pages; each frame has one checksum.

A header that does not fit together, or a body that does not fit its header, is ``BadChunkError``,
whatever bytes it is made of: to the cache it is a miss.
"""

from __future__ import annotations

import itertools
import struct

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from splitserve.kv_transfer.cache.codecs.names import CodecName
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.keys import FORMAT_VERSION, KEY_BYTES
from splitserve.kv_transfer.cache.tiers.base import HEADER_BYTES

MAGIC = b"SPLITKV\n"
CHECKSUM_BYTES = 8
LENGTH_BYTES = 4
PAGE_BYTES = 4096
"""Coded bodies are a whole number of these, so that disks take them past the page cache."""
_FRONT = struct.Struct("<8sII")
_END = HEADER_BYTES - CHECKSUM_BYTES
CONTENT_LIMIT_BYTES = _END - _FRONT.size


class BadChunkError(Exception):
    """These bytes are not the chunk that was asked for; says what is wrong with them."""


class Seal(msgspec.Struct, frozen=True):
    """How a chunk is encrypted (``sealing.py``)."""

    secret: bytes
    """Names the tenant's key without telling it."""
    nonce: bytes
    tag: bytes


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a chunk says of itself."""

    key: bytes
    model: bytes
    """``model_digest`` of its writer."""
    geometry: ChunkGeometry
    pieces: int
    """Equal runs of heads, each with its own checksums; divides the heads."""
    checksums: bytes
    """xxh3-64 ``[layers, pieces]``, eight bytes each, little-endian; encrypted in a sealed
    chunk.
    """
    parent: bytes = b""
    """Key of the chunk before it; empty at a prompt's beginning."""
    codec: CodecName = "raw"
    """How the body is coded; ``raw``: as the writer's pages are."""
    frames: bytes = b""
    """Of a coded body: the length of each layer's frame, uint32, little-endian."""
    tenant: str = ""
    """Tag of the tenant whose bytes these are."""
    seal: Seal | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for what cannot be."""
        if len(self.key) != KEY_BYTES or len(self.model) != KEY_BYTES:
            raise ValueError(f"a key and a model have {KEY_BYTES} bytes")
        if len(self.parent) not in (0, KEY_BYTES):
            raise ValueError(f"a parent has no or {KEY_BYTES} bytes")
        if self.pieces < 1 or self.geometry.heads % self.pieces:
            raise ValueError("pieces divide the heads")
        if len(self.checksums) != self.geometry.layers * self.pieces * CHECKSUM_BYTES:
            raise ValueError("each piece of each layer has a checksum")
        if self.codec == "raw":
            if self.frames:
                raise ValueError("a chunk that is not coded has no frames")
        elif self.pieces != 1 or len(self.frames) != self.geometry.layers * LENGTH_BYTES:
            raise ValueError("a coded chunk is one piece, with a frame for each layer")
        elif self.body_bytes > self.geometry.chunk_bytes:
            raise ValueError("a coded chunk is no larger than what it was made of")

    @property
    def body_bytes(self) -> int:
        """What follows the header."""
        return self.geometry.chunk_bytes if self.codec == "raw" else framed_bytes(self.frames)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode_content(header: Header) -> bytes:
    """What of a header depends on its fields."""
    return _encoder.encode(header)


def encode_header(header: Header) -> bytes:
    """The ``HEADER_BYTES`` before the body.

    Raises ``ValueError`` when the model has too many layers and pieces for that.
    """
    content = encode_content(header)
    if len(content) > CONTENT_LIMIT_BYTES:
        raise ValueError(
            f"{header.geometry.layers} layers in {header.pieces} pieces need a header of "
            f"{len(content)} bytes; {CONTENT_LIMIT_BYTES} is the most"
        )
    front = _FRONT.pack(MAGIC, FORMAT_VERSION, len(content)) + content
    front += bytes(_END - len(front))
    return front + _number(xxh3_64_intdigest(front))


def decode_header(data: memoryview, key: bytes, model: bytes | None) -> Header:
    """The header in ``data``, of this chunk and model; None takes any model.

    Raises ``BadChunkError``.
    """
    if len(data) != HEADER_BYTES:
        raise BadChunkError(f"torn: {len(data)} bytes of a header")
    magic, version, length = _FRONT.unpack_from(data)
    if magic != MAGIC:
        raise BadChunkError("foreign: no chunk of splitserve begins so")
    if version != FORMAT_VERSION:
        raise BadChunkError(f"format {version}; this is format {FORMAT_VERSION}")
    if _number(xxh3_64_intdigest(data[:_END])) != data[_END:] or length > CONTENT_LIMIT_BYTES:
        raise BadChunkError("torn: the header does not fit its checksum")
    try:
        header = _decoder.decode(data[_FRONT.size : _FRONT.size + length])
    except msgspec.DecodeError as error:
        raise BadChunkError(f"foreign: {error}") from error
    if header.key != key:
        raise BadChunkError(f"another chunk: {header.key.hex()}")
    if model is not None and header.model != model:
        raise BadChunkError(f"of another model: {header.model.hex()}")
    return header


def body_checksums(body: memoryview, geometry: ChunkGeometry, pieces: int) -> bytes:
    """``Header.checksums`` of these bytes, which are ``geometry.chunk_bytes`` long."""
    size = geometry.layer_bytes
    layers = [body[start : start + size] for start in range(0, geometry.chunk_bytes, size)]
    if pieces == 1:
        return b"".join(_number(xxh3_64_intdigest(layer)) for layer in layers)
    return b"".join(
        _number(_piece_checksum(layer, geometry, pieces, piece))
        for layer in layers
        for piece in range(pieces)
    )


def verify_body(header: Header, body: memoryview) -> None:
    """Every layer is what its writer has written, or ``BadChunkError``.

    A sealed chunk is unsealed first, which proves the same.
    """
    if header.seal is not None:
        raise ValueError("the checksums of a sealed chunk are encrypted")
    if len(body) != header.body_bytes:
        raise BadChunkError(f"torn: {len(body)} bytes instead of {header.body_bytes}")
    if header.codec == "raw":
        found = body_checksums(body, header.geometry, header.pieces)
    else:
        found = b"".join(checksum_of(body[s:e]) for s, e in frame_places(header.frames))
    if found != header.checksums:
        of_layer = header.pieces * CHECKSUM_BYTES
        wrong = next(i for i in range(len(found)) if found[i] != header.checksums[i]) // of_layer
        raise BadChunkError(f"layer {wrong} does not fit its checksum")


def frame_places(frames: bytes) -> list[tuple[int, int]]:
    """Where each frame begins and ends."""
    lengths = struct.unpack(f"<{len(frames) // LENGTH_BYTES}I", frames)
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))


def framed_bytes(frames: bytes) -> int:
    """What a coded body with these frames takes."""
    places = frame_places(frames)
    used = places[-1][1] if places else 0
    return -(-used // PAGE_BYTES) * PAGE_BYTES


def checksum_of(data: memoryview | bytes) -> bytes:
    """xxh3-64, eight bytes, little-endian."""
    return _number(xxh3_64_intdigest(data))


def _piece_checksum(layer: memoryview, geometry: ChunkGeometry, pieces: int, piece: int) -> int:
    block_bytes = geometry.heads * geometry.slice_bytes
    piece_bytes = block_bytes // pieces
    checksum = xxh3_64()
    for start in range(piece * piece_bytes, geometry.layer_bytes, block_bytes):
        checksum.update(layer[start : start + piece_bytes])
    return checksum.intdigest()


def _number(value: int) -> bytes:
    return value.to_bytes(CHECKSUM_BYTES, "little")
