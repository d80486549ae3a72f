"""Coded chunks on their way: from the arena to a tier, back, to another tier, and into pages."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.kv_numbers import GEOMETRY, body_like_kv, chunk_of, numbers_in

from splitserve.kv_transfer.cache.arena import Mapping
from splitserve.kv_transfer.cache.chunk_codec import ChunkCodec
from splitserve.kv_transfer.cache.chunk_coding import encode_chunk, try_codec
from splitserve.kv_transfer.cache.chunk_format import (
    BadChunkError,
    decode_header,
    frame_places,
    verify_body,
)
from splitserve.kv_transfer.cache.codecs.names import CODED, LOSSLESS
from splitserve.kv_transfer.cache.messages import ReadyChunk
from splitserve.kv_transfer.cache.page_copier import Copied, PageCopier
from splitserve.kv_transfer.cache.sealing import Sealer
from splitserve.kv_transfer.layout import PageLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.kv_transfer.cache.chunk import Chunk
    from splitserve.kv_transfer.cache.geometry import ChunkGeometry

KEY, PARENT = bytes(8) + bytes([7]) * 24, bytes(8) + bytes([6]) * 24
OFFSET = 8192
IDS = [7, 3, 4, 9]
PLAIN = ChunkCodec(None)
STEP = {"int8": 1 / 127, "int5z": 1 / 15}


@pytest.fixture
def arena() -> Iterator[Mapping]:
    size = OFFSET + GEOMETRY.chunk_bytes
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, size)
    mapping = Mapping(descriptor, size)
    os.close(descriptor)
    yield mapping
    mapping.close()


class Rank:
    """One rank's pages of a model's engine."""

    def __init__(self, geometry: ChunkGeometry, rank: int = 0, ranks: int = 1) -> None:
        heads, blocks = geometry.heads // ranks, 24
        page = heads * geometry.slice_bytes
        self.heads = slice(rank * heads, (rank + 1) * heads)
        self.memory = np.full((geometry.layers, blocks, page), 0xAA, np.uint8)
        self.geometry = geometry
        layout = PageLayout(
            layer_bases=tuple(int(layer.ctypes.data) for layer in self.memory), block_stride=page,
            page_bytes=page, num_blocks=blocks, block_tokens=geometry.block_tokens, heads=heads,
            first_head=rank * heads, total_heads=geometry.heads,
        )  # fmt: skip
        self.copier = PageCopier(layout, geometry)

    def pages(self, ids: list[int]) -> Any:
        """``[layers, blocks, heads, slice_bytes]``."""
        shape = (self.geometry.layers, len(ids), -1, self.geometry.slice_bytes)
        return self.memory[:, ids].reshape(shape)


def stored(
    name: Any, body: memoryview, chunk: Chunk, codec: ChunkCodec = PLAIN, parent: bytes = PARENT
) -> tuple[memoryview, memoryview]:
    return codec.sealed(KEY, parent, chunk, body, name)


def brought(arena: Mapping, header: memoryview, body: memoryview, codec: Any = PLAIN) -> Chunk:
    """What a tier has stored is read into the arena's slot."""
    arena.view[OFFSET : OFFSET + len(body)] = body
    place = arena.view[OFFSET : OFFSET + len(body)]
    found: Chunk = codec.opened(KEY, OFFSET, header, place, GEOMETRY.chunk_bytes)
    return found


def ready(chunk: Chunk) -> ReadyChunk:
    return ReadyChunk(
        index=0, offset=chunk.offset, geometry=chunk.geometry, pieces=chunk.pieces,
        checksums=chunk.checksums, codec=chunk.codec, frames=chunk.frames,
    )  # fmt: skip


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("sealer", [None, Sealer(b"secret" * 4)], ids=["plain", "sealed"])
def test_a_coded_chunk_is_smaller_and_keeps_its_bytes_on_every_way(
    arena: Mapping, name: Any, sealer: Any
) -> None:
    """Read into the arena it is what was stored; written from there to any other tier it is stored
    as it is, whatever codec that one has: nothing is coded twice.
    """
    codec = ChunkCodec(sealer)
    body = body_like_kv()
    header, coded = stored(name, body, chunk_of(body), codec)
    assert len(coded) < len(body) * (0.9 if name in LOSSLESS else 0.6)
    assert len(coded) % 4096 == 0
    chunk = brought(arena, header, coded, codec)
    assert chunk.codec == name
    assert (chunk.geometry, chunk.pieces) == (GEOMETRY, 1)
    slot = arena.view[OFFSET : OFFSET + GEOMETRY.chunk_bytes]
    first = bytes(slot[: len(coded)])
    for other in ("raw", *CODED):
        again_header, again = codec.sealed(KEY, PARENT, chunk, slot, other)
        found = brought(arena, again_header, again, codec)
        assert found == chunk
        assert bytes(slot[: len(again)]) == first


@pytest.mark.parametrize("name", CODED)
def test_a_header_verifies_coded_bodies(name: Any) -> None:
    """Frame by frame, and says which one is wrong."""
    body = body_like_kv()
    header_bytes, coded = stored(name, body, chunk_of(body))
    header = decode_header(header_bytes, KEY, None)
    verify_body(header, coded)
    start, _ = frame_places(header.frames)[1]
    coded[start + 9] ^= 1
    with pytest.raises(BadChunkError, match="layer 1"):
        verify_body(header, coded)


@pytest.mark.parametrize("name", CODED)
def test_what_is_cut_is_found_when_it_is_read(arena: Mapping, name: Any) -> None:
    """One page is missing, or there is one too many."""
    body = body_like_kv()
    header, coded = stored(name, body, chunk_of(body))
    for size in (len(coded) - 4096, len(coded) + 4096):
        with pytest.raises(BadChunkError, match="torn"):
            PLAIN.opened(KEY, 0, header, memoryview(bytes(size)), GEOMETRY.chunk_bytes)
    with pytest.raises(BadChunkError, match="the arena's"):
        PLAIN.opened(KEY, 0, header, coded, GEOMETRY.chunk_bytes * 2)


def test_what_is_broken_is_not_made_to_look_right() -> None:
    """A chunk whose bytes have changed in the arena is not coded."""
    body = body_like_kv()
    chunk = chunk_of(body)
    body[5000] ^= 1
    with pytest.raises(BadChunkError, match="checksums"):
        stored("int8", body, chunk)


@pytest.mark.parametrize(
    "change", [{"order": "tiles"}, {"number": ""}, {"number": "float32"}], ids=str
)
def test_pages_that_nobody_can_read_stay_as_they_are(change: Any) -> None:
    """Unknown orders and numbers: stored raw, and no codec is tried on them."""
    body = body_like_kv()
    geometry = replace(GEOMETRY, **change)
    chunk = chunk_of(body, geometry)
    header, kept = stored("int8", body, chunk)
    assert bytes(kept) == bytes(body)
    assert decode_header(header, KEY, None).codec == "raw"
    assert try_codec("int8", chunk, body) is None


def test_noise_stays_as_it_is() -> None:
    """What does not become smaller is not coded."""
    body = memoryview(bytearray(np.random.default_rng(1).bytes(GEOMETRY.chunk_bytes)))
    assert encode_chunk("bf16z", chunk_of(body), body, begins_prompt=True) is None


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("order", ["rows", "vec", "amx"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_pages_hold_what_was_coded(arena: Mapping, name: Any, order: str, ranks: int) -> None:
    """In the engine's own order and block size, its rank's heads, from any block on, and in no
    other page; to the bit or within a step of the codec.
    """
    written = replace(GEOMETRY, block_tokens=32)
    body = body_like_kv(written)
    header, coded = stored(name, body, chunk_of(body, written, pieces=2))
    chunk = brought(arena, header, coded)
    own = replace(GEOMETRY, order=order)
    exact = body_like_kv(own)
    expected = numbers_in(exact, own).reshape(own.layers, own.blocks, own.heads, -1)
    for rank, first_block in itertools.product(range(ranks), (0, 1, 3)):
        reader = Rank(own, rank, ranks)
        ids = IDS[first_block:]
        assert reader.copier.load(arena, ready(chunk), first_block, ids) is Copied.WHOLE
        found = numbers_in(reader.pages(ids).tobytes(), own)
        wanted = expected[:, first_block:, reader.heads]
        off = np.abs(found.reshape(wanted.shape) - wanted).max()
        assert off == 0 if name in LOSSLESS else 0 < off < np.abs(wanted).max() * STEP[name]
        others = [block for block in range(24) if block not in ids]
        assert (reader.memory[:, others] == 0xAA).all()


@pytest.mark.parametrize("name", CODED)
def test_a_flipped_byte_is_found_before_it_becomes_numbers(arena: Mapping, name: Any) -> None:
    """In any frame; layers before it may be in the pages already."""
    body = body_like_kv()
    chunk = brought(arena, *stored(name, body, chunk_of(body)))
    for start, end in frame_places(chunk.frames):
        reader = Rank(GEOMETRY)
        at = OFFSET + (start + end) // 2
        arena.view[at] ^= 1
        assert reader.copier.load(arena, ready(chunk), 0, IDS) is Copied.BROKEN
        arena.view[at] ^= 1
    frames = bytearray(chunk.frames)
    frames[0] -= 1
    cut = ready(chunk)
    cut = replace(cut, frames=bytes(frames))
    assert Rank(GEOMETRY).copier.load(arena, cut, 0, IDS) is Copied.BROKEN


def test_engines_that_cannot_read_it_say_so(arena: Mapping) -> None:
    """Numbers of another kind, or an order that they do not know."""
    body = body_like_kv()
    chunk = brought(arena, *stored("int8", body, chunk_of(body)))
    for change in ({"number": ""}, {"order": "tiles"}, {"key_bytes": 32, "value_bytes": 96}):
        reader = Rank(replace(GEOMETRY, **change))  # type: ignore[arg-type]
        assert reader.copier.load(arena, ready(chunk), 0, IDS) is Copied.FOREIGN


def test_first_tokens_of_a_prompt_are_kept() -> None:
    """By ``int5z``, in a prompt's first chunk and in no other one."""
    body = body_like_kv()
    sizes = {}
    for parent in (b"", PARENT):
        _, coded = stored("int5z", body, chunk_of(body), parent=parent)
        made = encode_chunk("int5z", chunk_of(body), body, begins_prompt=not parent)
        assert made is not None
        assert bytes(made.body) == bytes(coded)
        sizes[parent] = frame_places(made.frames)[-1][1]
    assert sizes[b""] > sizes[PARENT]


@pytest.mark.parametrize("name", CODED)
def test_a_trial_measures(name: Any) -> None:
    """Ratio and speeds, with a real chunk."""
    body = body_like_kv()
    trial = try_codec(name, chunk_of(body), body)
    assert trial is not None
    assert trial.codec == name
    assert trial.ratio > 1.1
    assert trial.encode_bytes_per_s > 0
    assert trial.decode_bytes_per_s > 0
