"""Between a chunk's layer and an engine's pages in GPU memory, converted on the way.

``host_pages.py`` for CUDA: a worker gathers a layer's pages into one contiguous piece, which a
single copy then takes to the host, and the other way round. Each program moves a tile of tokens of
one head, and as a tile lies inside one page and one block of the chunk, its two places are one
block id and the steps of ``page_formats.Placement``: known when the kernel is compiled, so the
compiler sees along which side reads, and along which writes, are contiguous.

With ``TRITON_INTERPRET=1`` before the first import of Triton it runs on CPU tensors, for tests.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl

from splitserve.kernels.page_formats import PageFormat, Placement, require_same_numbers

_ITEM_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_TILE_TOKENS_LIMIT = 64
_TILE_CHANNELS_LIMIT = 128


def gather_pages(
    memory: torch.Tensor,
    block_ids: torch.Tensor,
    page_format: PageFormat,
    chunk_format: PageFormat,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The chunk's layer that these pages hold: bytes ``[blocks, heads, slice_bytes]``.

    ``memory`` is one layer as an engine registers it, ``[blocks, heads, tokens, items]`` of its own
    type; the order ``rows`` allows any steps from block to block, head to head and token to token
    (layouts with tokens outside heads), the other orders only from block to block and head to head.
    ``block_ids`` are integers on the same device, in the order of the chunk; they are not checked.
    Written to ``out`` when it is given. The work is queued on the current stream.

    ``ValueError`` for shapes and formats that do not fit one another.
    """
    shape = _chunk_shape(memory, block_ids, page_format, chunk_format)
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8, device=memory.device)
    _move(memory, block_ids, page_format, out, shape, chunk_format, into_chunk=True)
    return out


def scatter_pages(
    chunk: torch.Tensor,
    chunk_format: PageFormat,
    memory: torch.Tensor,
    block_ids: torch.Tensor,
    page_format: PageFormat,
) -> None:
    """The pages hold the chunk's layer once the current stream has come so far.

    No other byte of ``memory`` changes. No block id may come twice. Else as ``gather_pages``.
    """
    shape = _chunk_shape(memory, block_ids, page_format, chunk_format)
    _move(memory, block_ids, page_format, chunk, shape, chunk_format, into_chunk=False)


def _chunk_shape(
    memory: torch.Tensor,
    block_ids: torch.Tensor,
    page_format: PageFormat,
    chunk_format: PageFormat,
) -> tuple[int, int, int]:
    """``[blocks, heads, slice_bytes]`` of the chunk; the memory and the formats are checked."""
    require_same_numbers(page_format, chunk_format)
    expected = (page_format.block_tokens, page_format.token_items)
    if tuple(memory.shape[2:]) != expected or memory.element_size() != page_format.item_bytes:
        raise ValueError(
            f"the memory is {memory.dtype} {list(memory.shape)}, not [blocks, heads, "
            f"{expected[0]}, {expected[1]}] of {page_format.item_bytes} bytes"
        )
    if memory.stride(3) != 1:
        raise ValueError("the numbers of a token are not contiguous in the memory")
    if page_format.order != "rows" and memory.stride(2) != page_format.token_items:
        raise ValueError("the tokens of a head are not contiguous in the memory")
    tokens = block_ids.numel() * page_format.block_tokens
    if tokens % chunk_format.block_tokens:
        raise ValueError(
            f"{block_ids.numel()} pages of {page_format.block_tokens} tokens are no whole number "
            f"of blocks of {chunk_format.block_tokens}"
        )
    return tokens // chunk_format.block_tokens, memory.shape[1], chunk_format.slice_bytes


def _move(
    memory: torch.Tensor,
    block_ids: torch.Tensor,
    page_format: PageFormat,
    chunk: torch.Tensor,
    shape: tuple[int, int, int],
    chunk_format: PageFormat,
    *,
    into_chunk: bool,
) -> None:
    if chunk.dtype != torch.uint8 or chunk.shape != shape or chunk.stride(2) != 1:
        raise ValueError(
            f"the chunk is {chunk.dtype} {list(chunk.shape)}, not contiguous bytes {list(shape)}"
        )
    item_type = _ITEM_TYPES[page_format.item_bytes]
    chunk, memory = chunk.view(item_type), memory.view(item_type)
    tile_tokens = tokens_of_a_tile(page_format, chunk_format)
    tokens = block_ids.numel() * page_format.block_tokens
    token_step = memory.stride(2) if page_format.order == "rows" else None
    move_tiles[(tokens // tile_tokens, memory.shape[1])](
        memory,
        block_ids.contiguous(),
        chunk,
        memory.stride(0),
        memory.stride(1),
        chunk.stride(0),
        chunk.stride(1),
        INTO_CHUNK=into_chunk,
        **tile_constants(page_format, chunk_format, token_step),
    )


def tokens_of_a_tile(page_format: PageFormat, chunk_format: PageFormat) -> int:
    """The largest power of two that divides both blocks, within a limit."""
    both = gcd(page_format.block_tokens, chunk_format.block_tokens)
    return min(both & -both, _TILE_TOKENS_LIMIT)


def tile_constants(
    page_format: PageFormat, chunk_format: PageFormat, token_step: int | None = None
) -> dict[str, object]:
    """What ``move_tiles`` knows when it is compiled, but for the direction.

    ``token_step`` is the memory's where its rows have gaps.
    """
    page_keys, page_values = page_format.keys, page_format.values
    widest = max(page_format.key_items, page_format.value_items)
    return {
        "PAGE_TOKENS": page_format.block_tokens,
        "CHUNK_TOKENS": chunk_format.block_tokens,
        "PAGE_KEYS": _constants(page_keys, token_step),
        "PAGE_VALUES": _constants(page_values, token_step),
        "CHUNK_KEYS": _constants(chunk_format.keys),
        "CHUNK_VALUES": _constants(chunk_format.values),
        "KEY_ITEMS": page_format.key_items,
        "VALUE_ITEMS": page_format.value_items,
        "TILE_TOKENS": tokens_of_a_tile(page_format, chunk_format),
        "TILE_CHANNELS": min(triton.next_power_of_2(widest), _TILE_CHANNELS_LIMIT),
    }


def _constants(places: Placement, token_step: int | None = None) -> tuple[int, ...]:
    """A placement as ``_offsets`` takes it apart."""
    return (
        places.first,
        places.token_group,
        places.token_group_step if token_step is None else token_step,
        places.token_step,
        places.channel_group,
        places.channel_group_step,
        places.channel_step,
    )


@triton.jit
def move_tiles(
    memory,
    block_ids,
    chunk,
    memory_block_step,
    memory_head_step,
    chunk_block_step,
    chunk_head_step,
    INTO_CHUNK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    PAGE_KEYS: tl.constexpr,
    PAGE_VALUES: tl.constexpr,
    CHUNK_KEYS: tl.constexpr,
    CHUNK_VALUES: tl.constexpr,
    KEY_ITEMS: tl.constexpr,
    VALUE_ITEMS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    """Keys and values of ``TILE_TOKENS`` tokens of one head; steps count in numbers."""
    first_token = tl.program_id(0) * TILE_TOKENS
    head = tl.program_id(1).to(tl.int64)
    block = tl.load(block_ids + first_token // PAGE_TOKENS).to(tl.int64)
    page_slice = memory + block * memory_block_step + head * memory_head_step
    chunk_block = (first_token // CHUNK_TOKENS).to(tl.int64)
    chunk_slice = chunk + chunk_block * chunk_block_step + head * chunk_head_step
    in_tile = tl.arange(0, TILE_TOKENS)
    page_tokens = first_token % PAGE_TOKENS + in_tile
    chunk_tokens = first_token % CHUNK_TOKENS + in_tile
    for first in tl.static_range(0, KEY_ITEMS, TILE_CHANNELS):
        channels = first + tl.arange(0, TILE_CHANNELS)
        page = page_slice + _offsets(page_tokens, channels, PAGE_KEYS)
        part = chunk_slice + _offsets(chunk_tokens, channels, CHUNK_KEYS)
        _copy(page, part, (channels < KEY_ITEMS)[None, :], INTO_CHUNK)
    for first in tl.static_range(0, VALUE_ITEMS, TILE_CHANNELS):
        channels = first + tl.arange(0, TILE_CHANNELS)
        page = page_slice + _offsets(page_tokens, channels, PAGE_VALUES)
        part = chunk_slice + _offsets(chunk_tokens, channels, CHUNK_VALUES)
        _copy(page, part, (channels < VALUE_ITEMS)[None, :], INTO_CHUNK)


@triton.jit
def _offsets(tokens, channels, PLACES: tl.constexpr):
    """``[tokens, channels]`` offsets in a slice, by ``Placement``'s formula."""
    by_token = tokens // PLACES[1] * PLACES[2] + tokens % PLACES[1] * PLACES[3]
    by_channel = channels // PLACES[4] * PLACES[5] + channels % PLACES[4] * PLACES[6]
    return PLACES[0] + by_token[:, None] + by_channel[None, :]


@triton.jit
def _copy(page, part, mask, INTO_CHUNK: tl.constexpr):
    """One of the two tiles has the other's numbers."""
    if INTO_CHUNK:
        tl.store(part, tl.load(page, mask=mask), mask=mask)
    else:
        tl.store(page, tl.load(part, mask=mask), mask=mask)
