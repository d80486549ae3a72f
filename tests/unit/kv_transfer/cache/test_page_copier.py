"""Copies between slots and pages, of equal and of other layouts."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from splitserve.kernels.convert_pages import convert_pages
from splitserve.kernels.page_formats import PageFormat
from splitserve.kv_transfer.cache.arena import Mapping
from splitserve.kv_transfer.cache.chunk_format import body_checksums
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.messages import ReadyChunk
from splitserve.kv_transfer.cache.page_copier import COPY_LIMIT_BYTES, Copied, PageCopier
from splitserve.kv_transfer.layout import PageLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

OFFSET = 8192
ROWS = ChunkGeometry(
    layers=2, chunk_tokens=64, block_tokens=16, heads=4, key_bytes=64, value_bytes=32, item_bytes=2,
    order="rows",
)  # fmt: skip
IDS = [7, 3, 4, 9]


@pytest.fixture
def arena() -> Iterator[Mapping]:
    """Room for one chunk at ``OFFSET``."""
    size = OFFSET + ROWS.chunk_bytes + 4096
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, size)
    mapping = Mapping(descriptor, size)
    os.close(descriptor)
    yield mapping
    mapping.close()


@dataclass
class Rank:
    """One rank's memory, with a gap behind each page, and its copier."""

    memory: npt.NDArray[np.uint8]  # [layers, blocks, bytes]
    copier: PageCopier


def rank_of(geometry: ChunkGeometry, rank: int = 0, ranks: int = 1, seed: int = 1) -> Rank:
    heads, blocks, gap = geometry.heads // ranks, 24, 128
    page = heads * geometry.slice_bytes
    memory = np.random.default_rng(seed).integers(
        0, 256, (geometry.layers, blocks, page + gap), np.uint8
    )
    layout = PageLayout(
        layer_bases=tuple(int(layer.ctypes.data) for layer in memory), block_stride=page + gap,
        page_bytes=page, num_blocks=blocks, block_tokens=geometry.block_tokens, heads=heads,
        first_head=rank * heads, total_heads=geometry.heads,
    )  # fmt: skip
    return Rank(memory, PageCopier(layout, geometry))


def view(rank: Rank, geometry: ChunkGeometry) -> npt.NDArray[np.uint8]:
    """The pages as they are now: ``[layers, blocks, heads, slice_bytes]``."""
    layers, blocks, stride = rank.memory.shape
    heads = stride // geometry.slice_bytes
    pages = rank.memory[:, :, : heads * geometry.slice_bytes]
    return pages.reshape(layers, blocks, heads, geometry.slice_bytes)


def ready(arena: Mapping, geometry: ChunkGeometry, pieces: int = 1) -> ReadyChunk:
    """What lies in the slot, with the right checksums."""
    body = arena.view[OFFSET : OFFSET + geometry.chunk_bytes]
    sums = body_checksums(body, geometry, pieces)
    return ReadyChunk(index=0, offset=OFFSET, geometry=geometry, pieces=pieces, checksums=sums)


def fill(arena: Mapping, geometry: ChunkGeometry, seed: int = 5) -> npt.NDArray[np.uint8]:
    """Random content: ``[layers, blocks, heads, slice_bytes]``."""
    shape = (geometry.layers, geometry.blocks, geometry.heads, geometry.slice_bytes)
    content = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    arena.view[OFFSET : OFFSET + geometry.chunk_bytes] = content.tobytes()
    return content


def format_of(geometry: ChunkGeometry) -> PageFormat:
    item = geometry.item_bytes
    return PageFormat(
        geometry.block_tokens, geometry.key_bytes // item, geometry.value_bytes // item, item,
        geometry.order,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("ids", [IDS, [2, 3, 4, 5], [9, 8, 7, 6]], ids=str)
def test_what_all_ranks_save_is_the_chunk(arena: Mapping, ranks: int, ids: list[int]) -> None:
    """Their heads lie where they belong, and the checksums are those of the chunk's pieces."""
    parts = [rank_of(ROWS, rank, ranks, seed=rank) for rank in range(ranks)]
    sums = [
        b"".join(part.copier.save_layer(arena, OFFSET, layer, ids) for part in parts)
        for layer in range(ROWS.layers)
    ]
    expected = np.concatenate([view(part, ROWS)[:, ids] for part in parts], axis=2)
    assert bytes(arena.view[OFFSET : OFFSET + ROWS.chunk_bytes]) == expected.tobytes()
    assert b"".join(sums) == ready(arena, ROWS, ranks).checksums
    assert not any(arena.view[:OFFSET])
    assert not any(arena.view[OFFSET + ROWS.chunk_bytes :])


@pytest.mark.parametrize(("pieces", "ranks"), [*itertools.product([1, 2, 4], repeat=2)])
@pytest.mark.parametrize("first_block", [0, 3])
def test_every_rank_loads_its_heads(
    arena: Mapping, pieces: int, ranks: int, first_block: int
) -> None:
    """And touches no other page; one flipped byte in a piece that it reads is found."""
    content = fill(arena, ROWS)
    chunk = ready(arena, ROWS, pieces)
    ids = IDS[first_block:]
    for rank in range(ranks):
        reader = rank_of(ROWS, rank, ranks)
        before = view(reader, ROWS).copy()
        assert reader.copier.load(arena, chunk, first_block, ids) is Copied.WHOLE
        heads = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        assert (view(reader, ROWS)[:, ids] == content[:, first_block:, heads]).all()
        others = [block for block in range(24) if block not in ids]
        assert (view(reader, ROWS)[:, others] == before[:, others]).all()
        at = OFFSET + ROWS.layer_bytes + (heads.start * ROWS.slice_bytes) + 3
        arena.view[at] ^= 1
        assert reader.copier.load(arena, chunk, first_block, ids) is Copied.BROKEN
        arena.view[at] ^= 1


@pytest.mark.parametrize("order", ["rows", "vec", "amx"])
@pytest.mark.parametrize("block_tokens", [16, 32, 64])
@pytest.mark.parametrize(("pieces", "ranks"), [(1, 2), (4, 2), (2, 1)])
def test_other_layouts_are_converted(
    arena: Mapping, order: str, block_tokens: int, pieces: int, ranks: int
) -> None:
    """The pages hold the chunk's numbers in their own order, from any block on; a flipped byte is
    found before anything is converted.
    """
    own = ROWS
    other = replace(ROWS, order=order, block_tokens=block_tokens)
    content = fill(arena, other)
    chunk = ready(arena, other, pieces)
    expected = np.stack(
        [convert_pages(layer, format_of(other), format_of(own)) for layer in content]
    )
    for rank, first_block in itertools.product(range(ranks), (0, 1, 3)):
        reader = rank_of(own, rank, ranks)
        ids = IDS[first_block:]
        assert reader.copier.load(arena, chunk, first_block, ids) is Copied.WHOLE
        heads = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        assert (view(reader, own)[:, ids] == expected[:, first_block:, heads]).all()
        at = OFFSET + heads.start * other.slice_bytes
        arena.view[at] ^= 1
        assert reader.copier.load(arena, chunk, first_block, ids) is Copied.BROKEN
        arena.view[at] ^= 1


@pytest.mark.parametrize(
    "other",
    [
        replace(ROWS, order="tiles"),
        replace(ROWS, key_bytes=32, value_bytes=64),
        replace(ROWS, order="amx", block_tokens=8),
    ],
    ids=["order", "numbers", "impossible"],
)
def test_what_cannot_be_converted_is_foreign(arena: Mapping, other: ChunkGeometry) -> None:
    """No page is touched."""
    fill(arena, other)
    reader = rank_of(ROWS)
    before = view(reader, ROWS).copy()
    assert reader.copier.load(arena, ready(arena, other), 0, IDS) is Copied.FOREIGN
    assert (view(reader, ROWS) == before).all()


def test_an_unknown_order_is_copied_to_an_equal_one(arena: Mapping) -> None:
    """Engines of the same kind need not know what their order means; fp8 pages, say."""
    opaque = replace(ROWS, order="tiles")
    content = fill(arena, opaque)
    reader = rank_of(opaque)
    assert reader.copier.load(arena, ready(arena, opaque), 0, IDS) is Copied.WHOLE
    assert (view(reader, opaque)[:, IDS] == content).all()


def test_steps_fit_the_processors_cache(arena: Mapping) -> None:
    """Long runs are cut; none is empty."""
    big = replace(ROWS, chunk_tokens=512, block_tokens=256, key_bytes=512)
    steps = rank_of(big).copier._steps_to_load(1, 0, [1, 2])
    assert max(step.size_bytes for step in steps) <= COPY_LIMIT_BYTES
    assert min(step.size_bytes for step in steps) > 0
    assert sum(step.size_bytes for step in steps) == big.layer_bytes
