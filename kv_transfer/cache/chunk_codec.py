"""From a chunk in the arena to what a lower tier keeps, and back: the header, and the seal where
the cluster wants one.
"""

from __future__ import annotations

import logging
import mmap
from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.chunk import Chunk
from splitserve.kv_transfer.cache.chunk_format import (
    BadChunkError,
    Header,
    decode_header,
    encode_header,
)
from splitserve.kv_transfer.cache.keys import tenant_of
from splitserve.kv_transfer.cache.tiers.base import new_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.kv_transfer.cache.sealing import Sealer
    from splitserve.kv_transfer.cache.tiers.base import Tier

logger = logging.getLogger(__name__)


class ChunkCodec:
    """Stateless but for the tenants' keys; used by all threads of all tiers."""

    def __init__(self, sealer: Sealer | None) -> None:
        self._sealer = sealer

    def sealed(
        self, key: bytes, parent: bytes, chunk: Chunk, body: memoryview
    ) -> tuple[memoryview, memoryview]:
        """Header and body as they are stored. Raises ``BadChunkError`` when the header has no room
        for the model's checksums.
        """
        header = Header(
            key=key,
            model=chunk.model,
            geometry=chunk.geometry,
            pieces=chunk.pieces,
            checksums=chunk.checksums,
            parent=parent,
            tenant=tenant_of(key).hex(),
        )
        if self._sealer is not None:
            hidden = memoryview(mmap.mmap(-1, len(body)))
            header = self._sealer.seal(header, body, hidden)
            body = hidden
        buffer = new_header()
        try:
            buffer[:] = encode_header(header)
        except ValueError as error:
            raise BadChunkError(f"chunk {key.hex()} cannot be stored: {error}") from error
        return buffer, body

    def opened(self, key: bytes, offset: int, header: memoryview, body: memoryview) -> Chunk:
        """The chunk that was read into the slot at ``offset``. Raises ``BadChunkError``.

        Whoever loads it compares its bytes with its checksums; a sealed one is proven here.
        """
        found = decode_header(header, key, None)
        if found.geometry.chunk_bytes != len(body):
            raise BadChunkError(
                f"chunk {key.hex()} has {found.geometry.chunk_bytes} bytes, the arena's {len(body)}"
            )
        if found.seal is not None and self._sealer is None:
            raise BadChunkError(f"chunk {key.hex()} is sealed, and cache.encrypt is off")
        if self._sealer is not None:
            found = self._sealer.unseal(found, body)
        return Chunk(offset, found.geometry, found.pieces, found.checksums, (), found.model)

    def stored(self, tier: Tier) -> Iterator[tuple[bytes, bytes, int]]:
        """(key, parent, size) of what an exclusive tier has from an earlier life. What is no chunk
        is removed.
        """
        for found in tier.stored():
            try:
                header = decode_header(memoryview(found.header), found.key, None)
            except BadChunkError as error:
                logger.warning("removed from the %s tier: %s", tier.capabilities.name, error)
                tier.remove([found.key])
                continue
            yield found.key, header.parent, found.size_bytes
