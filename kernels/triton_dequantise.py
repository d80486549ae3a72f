"""``quantise.dequantise_rows`` straight into an engine's pages in GPU memory.

What crosses to the GPU are the small integers and their scales; each program turns a tile of tokens
of one head into numbers and writes them where ``page_formats.Placement`` says, as
``triton_pages.py`` does. Numbers are the reference's to the bit: products and sums are rounded one
by one, and halves are rounded by hand. The other way is ``triton_quantise.py``.

With ``TRITON_INTERPRET=1`` before the first import of Triton it runs on CPU tensors, for tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from splitserve.kernels.triton_pages import _offsets, tile_constants

if TYPE_CHECKING:
    from splitserve.kernels.page_formats import PageFormat

NUMBER_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


class QuantisedTensors(NamedTuple):
    """``quantise.QuantisedRows`` on a device; scales and means are float32."""

    keys: torch.Tensor  # int8 [heads, tokens, key_items]
    key_scales: torch.Tensor  # [heads, key_items]
    key_means: torch.Tensor  # [heads, key_items]; zeros where nothing was subtracted
    values: torch.Tensor  # int8 [heads, tokens, value_items]
    value_scales: torch.Tensor  # [heads, tokens]
    sinks: torch.Tensor | None = None
    """``[heads, sinks, items]``: the tokens before those, as the pages have them; None: none."""


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
    heads, coded_tokens, key_items = quantised.keys.shape
    require_memory(memory, page_format, heads)
    sinks = quantised.sinks
    if sinks is not None and (sinks.dtype, sinks.shape[2]) != (memory.dtype, memory.shape[3]):
        raise ValueError(f"the sinks are {sinks.dtype} {list(sinks.shape)}, unlike the pages")
    sink_tokens = 0 if sinks is None else sinks.shape[1]
    tokens = sink_tokens + coded_tokens
    if tokens != block_ids.numel() * page_format.block_tokens:
        raise ValueError(
            f"{tokens} tokens do not fill {block_ids.numel()} pages of {page_format.block_tokens}"
        )
    sizes = (key_items, quantised.values.shape[2])
    if sizes != (page_format.key_items, page_format.value_items):
        raise ValueError(f"rows of {sizes[0]}+{sizes[1]} numbers do not fit the pages")
    constants = page_constants(memory, page_format)
    raw = as_loaded(memory)
    dequantise_tiles[(tokens // constants["TILE_TOKENS"], heads)](
        *(tensor.contiguous() for tensor in quantised[:5]),
        raw if sinks is None else as_loaded(sinks.contiguous()),
        raw,
        block_ids.contiguous(),
        memory.stride(0),
        memory.stride(1),
        coded_tokens,
        SINKS=sink_tokens,
        enable_fp_fusion=False,
        **constants,
    )


def require_memory(memory: torch.Tensor, page_format: PageFormat, heads: int) -> None:
    """``ValueError`` unless this is a layer of such pages, of numbers that have a codec."""
    expected = (heads, page_format.block_tokens, page_format.token_items)
    if tuple(memory.shape[1:]) != expected or memory.dtype not in NUMBER_NAMES:
        raise ValueError(
            f"the memory is {memory.dtype} {list(memory.shape)}, not [blocks, {expected[0]}, "
            f"{expected[1]}, {expected[2]}] of {', '.join(NUMBER_NAMES.values())}"
        )


def page_constants(memory: torch.Tensor, page_format: PageFormat) -> dict[str, Any]:
    """What a kernel on these pages knows when it is compiled."""
    token_step = memory.stride(2) if page_format.order == "rows" else None
    constants = tile_constants(page_format, page_format, token_step)
    for name in ("CHUNK_TOKENS", "CHUNK_KEYS", "CHUNK_VALUES"):
        del constants[name]
    return constants | {"IS_HALF": memory.dtype == torch.bfloat16}


def as_loaded(numbers: torch.Tensor) -> torch.Tensor:
    """The same memory as kernels take it: bfloat16 as integers, whose rounding is their own."""
    return numbers.view(torch.int16) if numbers.dtype == torch.bfloat16 else numbers


@triton.jit
def dequantise_tiles(
    keys,
    key_scales,
    key_means,
    values,
    value_scales,
    sinks,
    memory,
    block_ids,
    memory_block_step,
    memory_head_step,
    coded_tokens,
    SINKS: tl.constexpr,
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
    tokens = first_token + in_tile
    page_tokens = first_token % PAGE_TOKENS + in_tile
    rows = head * coded_tokens + tokens - SINKS
    is_coded = (tokens >= SINKS)[:, None]
    sink_rows = sinks + (head * SINKS + tokens)[:, None] * (KEY_ITEMS + VALUE_ITEMS)
    for first in tl.static_range(0, KEY_ITEMS, TILE_CHANNELS):
        channels = first + tl.arange(0, TILE_CHANNELS)
        is_there = (channels < KEY_ITEMS)[None, :]
        mask = is_there & is_coded
        at = rows[:, None] * KEY_ITEMS + channels[None, :]
        of_channel = head * KEY_ITEMS + channels[None, :]
        scale = tl.load(key_scales + of_channel, mask=is_there)
        mean = tl.load(key_means + of_channel, mask=is_there)
        found = tl.load(keys + at, mask=mask).to(tl.float32) * scale + mean
        place = page + _offsets(page_tokens, channels, PAGE_KEYS)
        _store(place, found, mask, IS_HALF)
        if SINKS > 0:
            mask = is_there & (tokens < SINKS)[:, None]
            tl.store(place, tl.load(sink_rows + channels[None, :], mask=mask), mask=mask)
    for first in tl.static_range(0, VALUE_ITEMS, TILE_CHANNELS):
        channels = first + tl.arange(0, TILE_CHANNELS)
        is_there = (channels < VALUE_ITEMS)[None, :]
        mask = is_there & is_coded
        at = rows[:, None] * VALUE_ITEMS + channels[None, :]
        scale = tl.load(value_scales + rows, mask=tokens >= SINKS)[:, None]
        found = tl.load(values + at, mask=mask).to(tl.float32) * scale
        place = page + _offsets(page_tokens, channels, PAGE_VALUES)
        _store(place, found, mask, IS_HALF)
        if SINKS > 0:
            mask = is_there & (tokens < SINKS)[:, None]
            kept = tl.load(sink_rows + KEY_ITEMS + channels[None, :], mask=mask)
            tl.store(place, kept, mask=mask)


@triton.jit
def _store(place, numbers, mask, IS_HALF: tl.constexpr):
    """The numbers in the memory's type; bfloat16 memory is taken for integers."""
    if IS_HALF:
        bits = numbers.to(tl.uint32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(place, upper.to(tl.int16), mask=mask)
    else:
        tl.store(place, numbers.to(place.dtype.element_ty), mask=mask)
