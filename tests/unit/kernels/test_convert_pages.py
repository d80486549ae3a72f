"""Layout conversion in host memory gives the bytes of the plain reference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitserve.kernels import reference
from splitserve.kernels.convert_pages import convert_heads, convert_pages
from splitserve.kernels.host_pages import gather_pages, scatter_pages
from splitserve.kernels.page_formats import ORDERS, PageFormat

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

ROWS = PageFormat(32, 64, 64, 4, "rows")
VEC = replace(ROWS, order="vec")


def noise(blocks: int, heads: int, page_format: PageFormat, seed: int = 0) -> Bytes:
    """Random pages: as numbers, NaNs and everything else."""
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (blocks, heads, page_format.slice_bytes), np.uint8)


def by_reference(pages: Bytes, source: PageFormat, target: PageFormat) -> Bytes:
    """What the fast path has to give."""
    converted = reference.convert_pages(torch.from_numpy(pages), source, target).numpy()
    assert isinstance(converted, np.ndarray)
    return converted


@st.composite
def format_pairs(draw: st.DrawFn) -> tuple[PageFormat, PageFormat, int]:
    """Two formats of the same tokens, and how many tokens: a whole number of both's blocks."""
    item_bytes = draw(st.sampled_from([1, 2, 4]))
    orders = [order for order in ORDERS if order != "amx" or item_bytes < 4]
    first, second = draw(st.sampled_from(orders)), draw(st.sampled_from(orders))
    if "amx" in (first, second):
        key_items = draw(st.sampled_from([2, 32, 64, 96]))
        value_items = draw(st.sampled_from([0, 16, 64, 96]))
    else:
        key_items = draw(st.integers(1, 8) | st.sampled_from([32, 64, 96, 128]))
        value_items = draw(st.integers(0, 8) | st.sampled_from([64, 128]))
    blocks = {
        order: st.sampled_from([16, 32, 48, 128] if order == "amx" else [1, 2, 3, 16, 32, 40, 128])
        for order in ORDERS
    }
    one = PageFormat(draw(blocks[first]), key_items, value_items, item_bytes, first)
    other = replace(one, block_tokens=draw(blocks[second]), order=second)
    tokens = int(np.lcm(one.block_tokens, other.block_tokens)) * draw(st.integers(1, 2))
    return one, other, tokens


@given(format_pairs(), st.sampled_from([1, 3, 8]), st.integers(0, 2**32))
def test_every_conversion_equals_the_reference(
    pair: tuple[PageFormat, PageFormat, int], heads: int, seed: int
) -> None:
    """To the bit, and the way back gives the source again."""
    source, target, tokens = pair
    pages = noise(tokens // source.block_tokens, heads, source, seed)
    converted = convert_pages(pages, source, target)
    assert np.array_equal(converted, by_reference(pages, source, target))
    assert np.array_equal(convert_pages(converted, target, source), pages)


@given(format_pairs(), st.randoms(use_true_random=False))
def test_pages_of_any_block_ids_are_gathered_and_scattered(
    pair: tuple[PageFormat, PageFormat, int], random: np.random.Generator
) -> None:
    """A chunk gathered from scattered pages is what these pages hold in their order, and scattered
    into other pages it leaves all others as they were.
    """
    page_format, chunk_format, tokens = pair
    count = tokens // page_format.block_tokens
    memory = noise(2 * count + 3, 2, page_format)
    ids = list(range(len(memory)))
    random.shuffle(ids)
    chunk = gather_pages(memory, ids[:count], page_format, chunk_format)
    assert np.array_equal(chunk, by_reference(memory[ids[:count]], page_format, chunk_format))

    expected = memory.copy()
    expected[ids[count : 2 * count]] = memory[ids[:count]]
    scatter_pages(chunk, chunk_format, memory, ids[count : 2 * count], page_format)
    assert np.array_equal(memory, expected)


@pytest.mark.parametrize("chunk_format", [ROWS, VEC, replace(VEC, block_tokens=128)])
def test_consecutive_pages_are_gathered_and_scattered(chunk_format: PageFormat) -> None:
    """Runs of block ids, with a gap and a step back between them."""
    memory = noise(16, 3, ROWS)
    ids = [4, 5, 6, 9, 10, 2, 3, 1]
    chunk = gather_pages(memory, ids, ROWS, chunk_format)
    assert np.array_equal(chunk, by_reference(memory[ids], ROWS, chunk_format))
    other = noise(16, 3, ROWS, seed=1)
    expected = other.copy()
    expected[ids] = memory[ids]
    scatter_pages(chunk, chunk_format, other, ids, ROWS)
    assert np.array_equal(other, expected)


def test_ranks_read_and_write_their_own_heads() -> None:
    """Two ranks' pages of two heads each make the chunk of four heads, and come out of it again."""
    chunk_format = replace(VEC, block_tokens=128)
    ranks = [noise(8, 2, ROWS, seed) for seed in (1, 2)]
    chunk = np.zeros((2, 4, chunk_format.slice_bytes), np.uint8)
    for rank, pages in enumerate(ranks):
        convert_pages(pages, ROWS, chunk_format, out=chunk[:, 2 * rank : 2 * rank + 2])
    both = np.concatenate(ranks, axis=1)
    assert np.array_equal(chunk, by_reference(both, ROWS, chunk_format))
    for rank, pages in enumerate(ranks):
        read = convert_heads(chunk, 2 * rank, 2 * rank + 2, chunk_format, ROWS)
        assert np.array_equal(read, pages)
    with pytest.raises(ValueError, match="heads 3 to 5 of 4"):
        convert_heads(chunk, 3, 5, chunk_format, ROWS)


def test_only_the_target_is_written() -> None:
    """Blocks beside the range that is the target keep their bytes."""
    memory = noise(10, 3, VEC)
    before = memory.copy()
    source = noise(4, 3, ROWS, seed=1)
    convert_pages(source, ROWS, VEC, out=memory[3:7])
    before[3:7] = by_reference(source, ROWS, VEC)
    assert np.array_equal(memory, before)


def test_a_source_that_may_not_be_written_is_read() -> None:
    """A reader's mapping of an arena is read-only."""
    pages = noise(2, 3, ROWS)
    expected = by_reference(pages, ROWS, VEC)
    pages.flags.writeable = False
    assert np.array_equal(convert_pages(pages, ROWS, VEC), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": "hnd"}, "unknown order 'hnd' of KV pages; known: rows, vec, amx"),
        ({"item_bytes": 8}, "numbers of 8 bytes"),
        ({"block_tokens": 0}, "at least one token"),
        ({"key_items": 0, "value_items": 0}, "at least one number"),
        ({"value_items": -1}, "no negative size"),
        ({"order": "amx"}, "numbers of 1 or 2 bytes, not 4"),
        ({"order": "amx", "item_bytes": 2, "block_tokens": 24}, "multiple of 16 tokens"),
    ],
)
def test_impossible_formats_are_refused(change: dict[str, int | str], message: str) -> None:
    """With a sentence that says what is wrong."""
    with pytest.raises(ValueError, match=message):
        replace(ROWS, **change)


def test_memory_that_does_not_fit_the_format_is_refused() -> None:
    """Nothing is read or written beyond it."""
    pages = noise(3, 2, ROWS)
    long = replace(VEC, block_tokens=64)
    cases = [
        ("not what a token holds", lambda: convert_pages(pages, ROWS, replace(VEC, key_items=32))),
        ("96 tokens are no whole number", lambda: convert_pages(pages, ROWS, long)),
        ("source is uint8", lambda: convert_pages(pages[:, :, 1:], ROWS, VEC)),
        ("source is float32", lambda: convert_pages(pages.view(np.float32), ROWS, VEC)),
        ("not contiguous", lambda: convert_pages(np.repeat(pages, 2, 2)[..., ::2], ROWS, VEC)),
        ("fills 3 of 2", lambda: convert_pages(pages, ROWS, VEC, out=noise(2, 2, VEC))),
        ("fills 3 of 2", lambda: convert_pages(pages, ROWS, VEC, out=noise(3, 1, VEC))),
        (r"no blocks \[3, -1\]", lambda: gather_pages(pages, [0, 3, -1], ROWS, VEC)),
        ("3 pages of 32 tokens", lambda: gather_pages(pages, [0, 1, 2], ROWS, long)),
        ("pages are 2 of 2", lambda: scatter_pages(noise(3, 2, VEC), VEC, pages, [0, 1], ROWS)),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
