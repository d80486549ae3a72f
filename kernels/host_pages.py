"""Between a chunk's layer and an engine's pages in host memory, converted on the way.

``memory`` is one layer of an engine's whole KV memory, ``[blocks, heads, slice_bytes]``; the chunk
takes the pages of ``block_ids`` in that order. Both are as in ``convert_pages.py``, and so is what
makes it fast; ``triton_pages.py`` is the same for GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from splitserve.kernels.convert_pages import (
    can_pair,
    check_pages,
    convert_pages,
    copy_numbers,
    paired_numbers,
)
from splitserve.kernels.page_formats import PageFormat, require_same_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from splitserve.kernels.convert_pages import Bytes, Numbers


def gather_pages(
    memory: Bytes,
    block_ids: Sequence[int],
    page_format: PageFormat,
    chunk_format: PageFormat,
    out: Bytes | None = None,
) -> Bytes:
    """The chunk's layer that these pages hold; written to ``out`` when it is given.

    ``ValueError`` for block ids outside the memory, and for what ``convert_pages`` refuses.
    """
    blocks = _check(memory, block_ids, page_format, chunk_format)
    heads = memory.shape[1]
    if out is None:
        out = np.empty((blocks, heads, chunk_format.slice_bytes), np.uint8)
    _check_chunk(out, chunk_format, blocks, heads)
    if page_format == chunk_format:
        for first, block, count in _runs(block_ids):
            np.copyto(out[first : first + count], memory[block : block + count])
    elif can_pair(page_format, chunk_format):
        for into, numbers, at_once in paired_numbers(out, chunk_format, memory, page_format):
            for part, page in _page_by_page(into, numbers, block_ids):
                copy_numbers(part, page, at_once)
    else:
        pages = gather_pages(memory, block_ids, page_format, page_format)
        convert_pages(pages, page_format, chunk_format, out)
    return out


def scatter_pages(
    chunk: Bytes,
    chunk_format: PageFormat,
    memory: Bytes,
    block_ids: Sequence[int],
    page_format: PageFormat,
) -> None:
    """The pages hold the chunk's layer; no other byte of ``memory`` has changed.

    No block id may come twice. ``ValueError`` as in ``gather_pages``.
    """
    blocks = _check(memory, block_ids, page_format, chunk_format)
    _check_chunk(chunk, chunk_format, blocks, memory.shape[1])
    if page_format == chunk_format:
        for first, block, count in _runs(block_ids):
            np.copyto(memory[block : block + count], chunk[first : first + count])
    elif can_pair(page_format, chunk_format):
        for into, numbers, at_once in paired_numbers(memory, page_format, chunk, chunk_format):
            for part, page in _page_by_page(numbers, into, block_ids):
                copy_numbers(page, part, at_once)
    else:
        pages = convert_pages(chunk, chunk_format, page_format)
        scatter_pages(pages, page_format, memory, block_ids, page_format)


def _check(
    memory: Bytes, block_ids: Sequence[int], page_format: PageFormat, chunk_format: PageFormat
) -> int:
    """Blocks of the chunk."""
    require_same_numbers(page_format, chunk_format)
    check_pages(memory, page_format, "memory")
    wrong = [block for block in block_ids if not 0 <= block < memory.shape[0]]
    if wrong:
        raise ValueError(f"no blocks {wrong[:5]} in a memory of {memory.shape[0]}")
    tokens = len(block_ids) * page_format.block_tokens
    if tokens % chunk_format.block_tokens:
        raise ValueError(
            f"{len(block_ids)} pages of {page_format.block_tokens} tokens are no whole number of "
            f"blocks of {chunk_format.block_tokens}"
        )
    return tokens // chunk_format.block_tokens


def _check_chunk(chunk: Bytes, chunk_format: PageFormat, blocks: int, heads: int) -> None:
    check_pages(chunk, chunk_format, "chunk")
    if chunk.shape[:2] != (blocks, heads):
        raise ValueError(
            f"the chunk has {chunk.shape[0]} blocks of {chunk.shape[1]} heads, "
            f"the pages are {blocks} of {heads}"
        )


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(index of the first, its block id, how many) of every run of consecutive block ids."""
    first = 0
    for index in range(1, len(block_ids) + 1):
        if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:
            yield first, block_ids[first], index - first
            first = index


def _page_by_page(
    chunk: Numbers, memory: Numbers, block_ids: Sequence[int]
) -> Iterator[tuple[Numbers, Numbers]]:
    """(part of the chunk, page) of every block id, with equal axes."""
    in_block, in_page = chunk.shape[1], memory.shape[1]
    for index, block in enumerate(block_ids):
        if in_page == 1:
            yield chunk[index // in_block, index % in_block], memory[block, 0]
        else:
            yield chunk[index * in_page : (index + 1) * in_page, 0], memory[block]
