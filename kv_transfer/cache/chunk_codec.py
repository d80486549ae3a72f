"""From a chunk in the arena to what a lower tier keeps, and back: its codec, the header, and the
seal where the cluster wants one.

A chunk that is coded already keeps its bytes: what was decoded is never coded again.
"""

from __future__ import annotations

import logging
import mmap
from typing import TYPE_CHECKING

import msgspec

from splitserve.kv_transfer.cache.chunk import Chunk
from splitserve.kv_transfer.cache.chunk_coding import encode_chunk
from splitserve.kv_transfer.cache.chunk_format import (
    BadChunkError,
    Header,
    decode_header,
    encode_header,
)
from splitserve.kv_transfer.cache.codecs.names import RAW
from splitserve.kv_transfer.cache.keys import tenant_of
from splitserve.kv_transfer.cache.tiers.base import new_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.kv_transfer.cache.codecs.names import CodecName
    from splitserve.kv_transfer.cache.sealing import Sealer
    from splitserve.kv_transfer.cache.tiers.base import Tier

logger = logging.getLogger(__name__)


class ChunkCodec:
    """Stateless but for the tenants' keys; used by all threads of all tiers."""

    def __init__(self, sealer: Sealer | None) -> None:
        self._sealer = sealer

    def sealed(
        self, key: bytes, parent: bytes, chunk: Chunk, body: memoryview, codec: CodecName = RAW
    ) -> tuple[memoryview, memoryview]:
        """Header and body as they are stored: coded, when the chunk is so or can be. Raises
        ``BadChunkError`` when the header has no room for the model's checksums, and when a chunk
        that is to be coded does not fit its own.
        """
        header = Header(
            key=key,
            model=chunk.model,
            geometry=chunk.geometry,
            pieces=chunk.pieces,
            checksums=chunk.checksums,
            parent=parent,
            codec=chunk.codec,
            frames=chunk.frames,
            tenant=tenant_of(key).hex(),
        )
        body = body[: header.body_bytes]
        if codec != RAW and chunk.codec == RAW:
            coded = encode_chunk(codec, chunk, body, begins_prompt=not parent)
            if coded is not None:
                body = coded.body
                header = msgspec.structs.replace(
                    header, codec=codec, frames=coded.frames, checksums=coded.checksums, pieces=1
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

    def opened(
        self,
        key: bytes,
        offset: int,
        header: memoryview,
        body: memoryview,
        slot_bytes: int | None = None,
    ) -> Chunk:
        """The chunk whose ``body`` was read into the slot at ``offset``, which is for chunks of
        ``slot_bytes`` (None: as long as the body). Raises ``BadChunkError``.

        Whoever loads it compares its bytes with its checksums; a sealed one is proven here.
        """
        found = decode_header(header, key, None)
        whole = len(body) if slot_bytes is None else slot_bytes
        if found.geometry.chunk_bytes != whole:
            raise BadChunkError(
                f"chunk {key.hex()} has {found.geometry.chunk_bytes} bytes, the arena's {whole}"
            )
        if found.body_bytes != len(body):
            raise BadChunkError(f"torn: chunk {key.hex()} has {len(body)} of {found.body_bytes}")
        if found.seal is not None and self._sealer is None:
            raise BadChunkError(f"chunk {key.hex()} is sealed, and cache.encrypt is off")
        if self._sealer is not None:
            found = self._sealer.unseal(found, body)
        return Chunk(
            offset,
            found.geometry,
            found.pieces,
            found.checksums,
            (),
            found.model,
            found.codec,
            found.frames,
        )

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
