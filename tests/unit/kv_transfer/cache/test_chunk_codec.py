"""What a lower tier keeps of a chunk, with a seal and without."""

from __future__ import annotations

import mmap

import pytest

from splitserve.kv_transfer.cache.chunk import Chunk
from splitserve.kv_transfer.cache.chunk_codec import ChunkCodec
from splitserve.kv_transfer.cache.chunk_format import BadChunkError, body_checksums
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.keys import NO_TENANT, chunk_keys, root_key
from splitserve.kv_transfer.cache.sealing import Sealer

GEOMETRY = ChunkGeometry(2, 8, 4, 2, 8, 8, 2, "rows")
MODEL = bytes(range(32))
(KEY,) = chunk_keys(root_key(MODEL, NO_TENANT, "", ""), list(range(8)), 8)
PLAIN, SEALING = ChunkCodec(None), ChunkCodec(Sealer(b"secret" * 4))


def body() -> memoryview:
    """A chunk's bytes, writable."""
    made = memoryview(mmap.mmap(-1, GEOMETRY.chunk_bytes))
    made[:] = bytes(number % 251 for number in range(GEOMETRY.chunk_bytes))
    return made


CHUNK = Chunk(0, GEOMETRY, 1, body_checksums(body(), GEOMETRY, 1), (), MODEL)


def stored(codec: ChunkCodec) -> tuple[memoryview, memoryview]:
    """Header and body as a tier gives them back."""
    header, kept = codec.sealed(KEY, b"", CHUNK, body())
    copy = memoryview(mmap.mmap(-1, GEOMETRY.chunk_bytes))
    copy[:] = kept
    return header, copy


@pytest.mark.parametrize("codec", [PLAIN, SEALING], ids=["plain", "sealed"])
def test_a_chunk_comes_back_as_it_was(codec: ChunkCodec) -> None:
    """In the slot that it was read into."""
    header, kept = stored(codec)
    found = codec.opened(KEY, 4096, header, kept)
    assert (found.offset, found.geometry, found.checksums) == (4096, GEOMETRY, CHUNK.checksums)
    assert kept == body()


def test_a_sealed_chunk_shows_nothing() -> None:
    """Neither its bytes nor the checksums that would confirm a guess of them."""
    header, kept = stored(SEALING)
    assert kept != body()
    assert CHUNK.checksums not in bytes(header)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [(SEALING, PLAIN), (PLAIN, SEALING), (SEALING, ChunkCodec(Sealer(b"other!" * 4)))],
    ids=["sealed for a server without a secret", "not sealed", "another secret"],
)
def test_what_is_sealed_otherwise_is_a_miss(writer: ChunkCodec, reader: ChunkCodec) -> None:
    """It is neither read as it lies there nor taken for the tenant's."""
    header, kept = stored(writer)
    with pytest.raises(BadChunkError):
        reader.opened(KEY, 0, header, kept)


def test_a_flipped_byte_breaks_the_seal() -> None:
    """Whoever changes the store cannot change the KV."""
    header, kept = stored(SEALING)
    kept[7] ^= 1
    with pytest.raises(BadChunkError):
        SEALING.opened(KEY, 0, header, kept)
