"""``quantise.quantise_rows`` straight out of an engine's pages in GPU memory.

Two kernels. The first finds mean and scale of each key channel: its programs have some channels of
one head each, and add token by token, in the reference's order. The second turns tiles of tokens
into integers, with a scale per token for the values, and copies the sinks. Integers, scales and
means are the reference's to the bit: sums and quotients are rounded one by one, halves by hand.

With ``TRITON_INTERPRET=1`` before the first import of Triton it runs on CPU tensors, for tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from splitserve.kernels.quantise import SMALLEST_SCALE_BITS, largest_quantised
from splitserve.kernels.triton_dequantise import (
    NUMBER_NAMES,
    QuantisedTensors,
    as_loaded,
    page_constants,
    require_memory,
)
from splitserve.kernels.triton_pages import _offsets

if TYPE_CHECKING:
    from splitserve.kernels.page_formats import PageFormat

_SUM_TOKENS_LIMIT = 16
_SUM_CHANNELS_LIMIT = 32
"""Of one program of the first kernel: few, as there is one for each head and so many channels."""


def quantise_pages(
    memory: torch.Tensor,
    block_ids: torch.Tensor,
    page_format: PageFormat,
    levels: int,
    *,
    centred: bool,
    sinks: int = 0,
) -> tuple[QuantisedTensors, torch.Tensor]:
    """The rows that these pages hold, as ``quantise_rows`` makes them, but for the first ``sinks``
    tokens, which stay as they are; and whether they can be quantised at all.

    The latter is one int32 on the device: 0 means that ``can_quantise`` refuses a number of these
    rows (sinks are not asked), and that what was made is to be thrown away.

    ``memory`` and ``block_ids`` are as for ``triton_pages.gather_pages``, ``levels`` is at most
    127. The work is queued on the current stream. ``ValueError`` for shapes and types that do not
    fit one another.
    """
    heads = memory.shape[1]
    require_memory(memory, page_format, heads)
    tokens = block_ids.numel() * page_format.block_tokens
    if not 0 <= sinks < tokens or not 0 < levels <= 127:
        raise ValueError(f"{sinks} sinks of {tokens} tokens, {levels} levels: too few or too many")
    made, can_be = _empty(memory, tokens - sinks, page_format, sinks)
    constants = page_constants(memory, page_format)
    constants |= {
        "TOKENS": tokens,
        "SINKS": sinks,
        "LIMIT": largest_quantised(NUMBER_NAMES[memory.dtype]),
        "LEVELS": levels,
    }
    raw, ids = as_loaded(memory), block_ids.contiguous()
    steps = (memory.stride(0), memory.stride(1))
    _measure_channels(made, raw, ids, steps, constants, centred=centred)
    quantise_tiles[(tokens // constants["TILE_TOKENS"], heads)](
        *made[:5],
        raw if made.sinks is None else as_loaded(made.sinks),
        can_be,
        raw,
        ids,
        *steps,
        SMALLEST_SCALE_BITS=SMALLEST_SCALE_BITS,
        enable_fp_fusion=False,
        **constants,
    )
    return made, can_be


def _empty(
    memory: torch.Tensor, tokens: int, page_format: PageFormat, sinks: int
) -> tuple[QuantisedTensors, torch.Tensor]:
    """Room for ``tokens`` rows beside the sinks, means of zero, and an answer that says yes."""
    heads, device = memory.shape[1], memory.device
    key_items, value_items = page_format.key_items, page_format.value_items
    made = QuantisedTensors(
        torch.empty((heads, tokens, key_items), dtype=torch.int8, device=device),
        torch.empty((heads, key_items), device=device),
        torch.zeros((heads, key_items), device=device),
        torch.empty((heads, tokens, value_items), dtype=torch.int8, device=device),
        torch.empty((heads, tokens), device=device),
        memory.new_empty((heads, sinks, key_items + value_items)) if sinks else None,
    )
    return made, torch.ones(1, dtype=torch.int32, device=device)


def _measure_channels(
    made: QuantisedTensors,
    raw: torch.Tensor,
    ids: torch.Tensor,
    steps: tuple[int, int],
    constants: dict[str, object],
    *,
    centred: bool,
) -> None:
    """The first kernel is queued."""
    heads, key_items = made.key_scales.shape
    own = {k: v for k, v in constants.items() if k not in ("PAGE_VALUES", "VALUE_ITEMS")}
    own["TILE_TOKENS"] = min(int(str(constants["TILE_TOKENS"])), _SUM_TOKENS_LIMIT)
    channels = min(triton.next_power_of_2(key_items), _SUM_CHANNELS_LIMIT)
    own["TILE_CHANNELS"] = channels
    measure_channels[(heads, triton.cdiv(key_items, channels))](
        made.key_scales,
        made.key_means,
        raw,
        ids,
        *steps,
        CENTRED=centred,
        enable_fp_fusion=False,
        num_warps=1,
        **own,
    )


@triton.jit
def measure_channels(
    key_scales,
    key_means,
    memory,
    block_ids,
    memory_block_step,
    memory_head_step,
    CENTRED: tl.constexpr,
    TOKENS: tl.constexpr,
    SINKS: tl.constexpr,
    LIMIT: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_HALF: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_KEYS: tl.constexpr,
    KEY_ITEMS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    """Means and scales of ``TILE_CHANNELS`` key channels of one head over all tokens but the sinks;
    means stay what they were unless ``CENTRED``.
    """
    head = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    is_there = (channels < KEY_ITEMS)[None, :]
    slices = memory + head * memory_head_step
    mean = tl.zeros([1, TILE_CHANNELS], tl.float32)
    if CENTRED:
        total = tl.zeros([1, TILE_CHANNELS], tl.float32)
        for first in range(0, TOKENS, TILE_TOKENS):
            block = tl.load(block_ids + first // PAGE_TOKENS).to(tl.int64)
            page = slices + block * memory_block_step
            for step in tl.static_range(0, TILE_TOKENS):
                page_token = first % PAGE_TOKENS + step + tl.arange(0, 1)
                mask = is_there & (first + step >= SINKS)
                place = page + _offsets(page_token, channels, PAGE_KEYS)
                found, _ = _numbers(tl.load(place, mask=mask, other=0), LIMIT, IS_HALF)
                total = total + found
        mean = _rounded(tl.div_rn(total, tl.full([1, TILE_CHANNELS], TOKENS - SINKS, tl.float32)))
        tl.store(key_means + head * KEY_ITEMS + channels[None, :], mean, mask=is_there)
    peak = tl.zeros([TILE_CHANNELS], tl.float32)
    for first in range(0, TOKENS, TILE_TOKENS):
        block = tl.load(block_ids + first // PAGE_TOKENS).to(tl.int64)
        page = slices + block * memory_block_step
        in_tile = tl.arange(0, TILE_TOKENS)
        mask = is_there & (first + in_tile >= SINKS)[:, None]
        place = page + _offsets(first % PAGE_TOKENS + in_tile, channels, PAGE_KEYS)
        found, _ = _numbers(tl.load(place, mask=mask, other=0), LIMIT, IS_HALF)
        peak = tl.maximum(peak, tl.max(tl.where(mask, tl.abs(found - mean), 0.0), axis=0))
    scale = _scale(peak, LEVELS)
    tl.store(key_scales + head * KEY_ITEMS + channels, scale, mask=channels < KEY_ITEMS)


@triton.jit
def quantise_tiles(
    keys,
    key_scales,
    key_means,
    values,
    value_scales,
    sinks,
    can_be_quantised,
    memory,
    block_ids,
    memory_block_step,
    memory_head_step,
    SMALLEST_SCALE_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    SINKS: tl.constexpr,
    LIMIT: tl.constexpr,
    LEVELS: tl.constexpr,
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
    rows = head * (TOKENS - SINKS) + tokens - SINKS
    is_coded = (tokens >= SINKS)[:, None]
    sink_rows = sinks + (head * SINKS + tokens)[:, None] * (KEY_ITEMS + VALUE_ITEMS)
    refused = tl.zeros([TILE_TOKENS], tl.int32)
    for first in tl.static_range(0, KEY_ITEMS, TILE_CHANNELS):
        channels = first + tl.arange(0, TILE_CHANNELS)
        is_there = (channels < KEY_ITEMS)[None, :]
        place = page + _offsets(page_tokens, channels, PAGE_KEYS)
        raw = tl.load(place, mask=is_there, other=0)
        found, bad = _numbers(raw, LIMIT, IS_HALF)
        refused = tl.maximum(refused, tl.max(tl.where(is_coded, bad, 0), axis=1))
        of_channel = head * KEY_ITEMS + channels[None, :]
        scale = tl.load(key_scales + of_channel, mask=is_there, other=0.0)
        mean = tl.load(key_means + of_channel, mask=is_there, other=0.0)
        small = _small(found - mean, scale, LEVELS, SMALLEST_SCALE_BITS)
        at = rows[:, None] * KEY_ITEMS + channels[None, :]
        tl.store(keys + at, small, mask=is_there & is_coded)
        if SINKS > 0:
            tl.store(sink_rows + channels[None, :], raw, mask=is_there & (tokens < SINKS)[:, None])
    peak = tl.zeros([TILE_TOKENS], tl.float32)
    for first in tl.static_range(0, VALUE_ITEMS, TILE_CHANNELS):
        channels = first + tl.arange(0, TILE_CHANNELS)
        is_there = (channels < VALUE_ITEMS)[None, :]
        place = page + _offsets(page_tokens, channels, PAGE_VALUES)
        raw = tl.load(place, mask=is_there, other=0)
        found, bad = _numbers(raw, LIMIT, IS_HALF)
        refused = tl.maximum(refused, tl.max(tl.where(is_coded, bad, 0), axis=1))
        peak = tl.maximum(peak, tl.max(tl.abs(found), axis=1))
        if SINKS > 0:
            mask = is_there & (tokens < SINKS)[:, None]
            tl.store(sink_rows + KEY_ITEMS + channels[None, :], raw, mask=mask)
    scale = _scale(peak, LEVELS)
    tl.store(value_scales + rows, scale, mask=tokens >= SINKS)
    for first in tl.static_range(0, VALUE_ITEMS, TILE_CHANNELS):
        channels = first + tl.arange(0, TILE_CHANNELS)
        is_there = (channels < VALUE_ITEMS)[None, :]
        place = page + _offsets(page_tokens, channels, PAGE_VALUES)
        found, _ = _numbers(tl.load(place, mask=is_there, other=0), LIMIT, IS_HALF)
        small = _small(found, scale[:, None], LEVELS, SMALLEST_SCALE_BITS)
        at = rows[:, None] * VALUE_ITEMS + channels[None, :]
        tl.store(values + at, small, mask=is_there & is_coded)
    tl.store(can_be_quantised, 0, mask=tl.max(refused, axis=0) > 0)


@triton.jit
def _numbers(raw, LIMIT: tl.constexpr, IS_HALF: tl.constexpr):
    """(float32 numbers, 1 where there is one that cannot be quantised, which counts as 0)."""
    wide = raw.to(tl.float32)
    if IS_HALF:
        wide = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    is_right = tl.abs(wide) <= LIMIT
    return tl.where(is_right, wide, 0.0), tl.where(is_right, 0, 1)


@triton.jit
def _scale(peak, LEVELS: tl.constexpr):
    """As ``quantise.scales_of``: rounded up to an upper half."""
    bits = (peak * (1 / LEVELS)).to(tl.uint32, bitcast=True)
    return ((bits + 0xFFFF) >> 16 << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(numbers):
    """The nearest upper halves, ties to even."""
    bits = numbers.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).to(tl.float32, bitcast=True)


@triton.jit
def _small(numbers, scale, LEVELS: tl.constexpr, SMALLEST_SCALE_BITS: tl.constexpr):
    """As ``quantise.quantise``. Adding 1.5 * 2**23 leaves no room for a fraction, which rounds to
    the nearest, ties to even.
    """
    is_scale = scale.to(tl.uint32, bitcast=True) > SMALLEST_SCALE_BITS
    one = tl.full(scale.shape, 1.0, tl.float32)
    inverse = tl.where(is_scale, tl.div_rn(one, tl.where(is_scale, scale, one)), 0.0)
    nearest = (numbers * inverse + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(nearest, -LEVELS), LEVELS).to(tl.int8)
