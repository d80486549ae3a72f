"""A chunk that lies in the arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.codecs.names import RAW, CodecName

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.geometry import ChunkGeometry
    from splitserve.kv_transfer.cache.messages import Mark


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where it lies, how its bytes are ordered, and what they have to sum up to."""

    offset: int
    geometry: ChunkGeometry
    pieces: int
    """Tensor-parallel ranks that wrote it: as many equal runs of heads."""
    checksums: bytes
    """xxh3-64 per layer and piece: ``[layers, pieces]``, eight bytes each, little-endian; of a
    coded chunk one per frame.
    """
    marks: tuple[Mark, ...] = ()
    model: bytes = b""
    """``model_digest`` of its writer."""
    codec: CodecName = RAW
    """How its bytes are coded: it keeps them wherever it goes."""
    frames: bytes = b""
    """Of a coded chunk: the length of each layer's frame, uint32, little-endian; they lie one after
    the other.
    """
