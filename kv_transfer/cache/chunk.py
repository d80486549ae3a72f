"""A chunk that lies in the arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """xxh3-64 per layer and piece: ``[layers, pieces]``, eight bytes each, little-endian."""
    marks: tuple[Mark, ...] = ()
    model: bytes = b""
    """``model_digest`` of its writer."""
