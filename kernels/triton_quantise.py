"""``quantise.dequantise_rows`` straight into an engine's pages in GPU memory.

What crosses to the GPU are the small integers and their scales; each program turns a tile of tokens
of one head into numbers and writes them where ``page_formats.Placement`` says, as
``triton_pages.py`` does. Numbers are the reference's to the bit: products and sums are rounded one
by one, and halves are rounded by hand.

With ``TRITON_INTERPRET=1`` before the first import of Triton it runs on CPU tensors, for tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from splitserve.kernels.triton_pages import _offsets, tile_constants

if TYPE_CHECKING:
    from splitserve.kernels.page_formats import PageFormat

_NUMBERS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


class QuantisedTensors(NamedTuple):
    """``quantise.QuantisedRows`` on a device; scales and means are float32."""

    keys: torch.Tensor  # int8 [heads, tokens, key_items]
    key_scales: torch.Tensor  # [heads, key_items]
    key_means: torch.Tensor  # [heads, key_items]; zeros where nothing was subtracted
    values: torch.Tensor  # int8 [heads, tokens, value_items]
    value_scales: torch.Tensor  # [heads, tokens]


def dequantise_into_pages(
    quantised: QuantisedTensors,
    memory: torch.Tensor,
    block_ids: torch.Tensor,
    page_format: PageFormat,
) -> None:
    """The pages hold the rows once the current stream has come so far; no other page changes.

    ``memory`` is one layer as an engine registers it, ``[blocks, heads, tokens, items]`` of its own
    type, with any steps that ``triton_pages.scatter_pages`` takes; ``block_ids`` are as many pages
    as the rows fill. ``ValueError`` for shapes and types that do not fit one another.
    """
    heads, tokens, _ = quantised.keys.shape
    expected = (heads, page_format.block_tokens, page_format.token_items)
    if tuple(memory.shape[1:]) != expected or memory.dtype not in _NUMBERS:
        raise ValueError(
            f"the memory is {memory.dtype} {list(memory.shape)}, not [blocks, {expected[0]}, "
            f"{expected[1]}, {expected[2]}] of {', '.join(_NUMBERS.values())}"
        )
    if tokens != block_ids.numel() * page_format.block_tokens:
        raise ValueError(
            f"{tokens} tokens do not fill {block_ids.numel()} pages of {page_format.block_tokens}"
        )
    sizes = (quantised.keys.shape[2], quantised.values.shape[2])
    if sizes != (page_format.key_items, page_format.value_items):
        raise ValueError(f"rows of {sizes[0]}+{sizes[1]} numbers do not fit the pages")
    is_half = memory.dtype == torch.bfloat16
    token_step = memory.stride(2) if page_format.order == "rows" else None
    constants = tile_constants(page_format, page_format, token_step)
    for name in ("CHUNK_TOKENS", "CHUNK_KEYS", "CHUNK_VALUES"):
        del constants[name]
    tile_tokens = constants["TILE_TOKENS"]
    assert isinstance(tile_tokens, int)
    dequantise_tiles[(tokens // tile_tokens, heads)](
        *(tensor.contiguous() for tensor in quantised),
        memory.view(torch.int16) if is_half else memory,
        block_ids.contiguous(),
        memory.stride(0),
        memory.stride(1),
        tokens,
        IS_HALF=is_half,
        enable_fp_fusion=False,
        **constants,
    )


@triton.jit
def dequantise_tiles(
    keys,
    key_scales,
    key_means,
    values,
    value_scales,
    memory,
    block_ids,
    memory_block_step,
    memory_head_step,
    tokens,
    IS_HALF: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_KEYS: tl.constexpr,
    PAGE_VALUES: tl.constexpr,
    KEY_ITEMS: tl.constexpr,
    VALUE_ITEMS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    """Keys and values of ``TILE_TOKENS`` tokens of one head; steps count in numbers."""
    first_token = tl.program_id(0) * TILE_TOKENS
    head = tl.program_id(1).to(tl.int64)
    block = tl.load(block_ids + first_token // PAGE_TOKENS).to(tl.int64)
    page = memory + block * memory_block_step + head * memory_head_step
    in_tile = tl.arange(0, TILE_TOKENS)
    page_tokens = first_token % PAGE_TOKENS + in_tile
    rows = head * tokens + first_token + in_tile
    for first in tl.static_range(0, KEY_ITEMS, TILE_CHANNELS):
        channels = first + tl.arange(0, TILE_CHANNELS)
        mask = (channels < KEY_ITEMS)[None, :]
        at = rows[:, None] * KEY_ITEMS + channels[None, :]
        of_channel = head * KEY_ITEMS + channels[None, :]
        scale = tl.load(key_scales + of_channel, mask=mask)
        mean = tl.load(key_means + of_channel, mask=mask)
        found = tl.load(keys + at, mask=mask).to(tl.float32) * scale + mean
        _store(page + _offsets(page_tokens, channels, PAGE_KEYS), found, mask, IS_HALF)
    for first in tl.static_range(0, VALUE_ITEMS, TILE_CHANNELS):
        channels = first + tl.arange(0, TILE_CHANNELS)
        mask = (channels < VALUE_ITEMS)[None, :]
        at = rows[:, None] * VALUE_ITEMS + channels[None, :]
        scale = tl.load(value_scales + rows)[:, None]
        found = tl.load(values + at, mask=mask).to(tl.float32) * scale
        _store(page + _offsets(page_tokens, channels, PAGE_VALUES), found, mask, IS_HALF)


@triton.jit
def _store(place, numbers, mask, IS_HALF: tl.constexpr):
    """The numbers in the memory's type; bfloat16 memory is taken for integers."""
    if IS_HALF:
        bits = numbers.to(tl.uint32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(place, upper.to(tl.int16), mask=mask)
    else:
        tl.store(place, numbers.to(place.dtype.element_ty), mask=mask)
