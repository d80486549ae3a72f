"""Numbers of KV pages as small integers with scales, and back, in host memory.

A *group* of numbers shares a scale, the largest magnitude in it over the largest integer; an axis
says along which one groups run. Scales are stored as the upper half of a float32 (bfloat16's bits,
rounded up, so that no number of the group is cut off). This is the plain reference;
``compiled_quantise.py`` is the same for host memory in one pass, ``triton_quantise.py`` and
``triton_dequantise.py`` for GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]
    Small = npt.NDArray[np.int8]
    Scales = npt.NDArray[np.uint16]

NUMBERS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""What a page may hold, and its bytes; other kinds have no codec."""
LARGEST = {"float32": 3.4028234e38, "bfloat16": 3.3895314e38, "float16": 65504.0}
_UPPER_HALF = 16
_MAGNITUDE = np.uint32(0x7FFFFFFF)
"""All bits but the sign's: the peak of zeros may be negative zero."""
_LIMIT_SHARE = 0.99
"""Of the largest number: what is larger could round up to no number at all."""
_SMALLEST_SCALE = np.float32(1.0 / LARGEST["float32"])
SMALLEST_SCALE_BITS = int(_SMALLEST_SCALE.view(np.uint32))
"""Only scales above have an inverse; groups with others become zeros."""


def read_numbers(raw: npt.NDArray[np.uint8], number: str) -> Floats:
    """The numbers that these bytes are (last axis: bytes, contiguous), exactly. They may be a view
    of the bytes.
    """
    if number == "float32":
        return raw.view(np.float32)
    if number == "float16":
        return raw.view(np.float16).astype(np.float32)
    return widened(raw.view(np.uint16))


def write_numbers(values: Floats, number: str, out: npt.NDArray[np.uint8]) -> None:
    """``out`` (last axis: bytes) holds the nearest numbers of that kind, ties to even. ``values``
    may be used up.
    """
    if number == "float32":
        np.copyto(out.view(np.float32), values)
    elif number == "float16":
        np.copyto(out.view(np.float16), values, casting="same_kind")
    else:
        bits = values.view(np.uint32)
        odd = (bits >> _UPPER_HALF) & 1
        bits += odd
        bits += 0x7FFF
        np.right_shift(bits, _UPPER_HALF, out=out.view(np.uint16), casting="unsafe")


def widened(upper: npt.NDArray[np.uint16]) -> Floats:
    """The float32 numbers whose upper halves these are."""
    return (upper.astype(np.uint32) << _UPPER_HALF).view(np.float32)


def can_quantise(values: Floats, number: str) -> bool:
    """Whether all are finite and not so near to the largest number that rounding makes them
    infinite.
    """
    low, high = float(values.min(initial=0.0)), float(values.max(initial=0.0))
    limit = largest_quantised(number)
    return -limit <= low and high <= limit  # False for NaN too.


def largest_quantised(number: str) -> float:
    """The largest magnitude of that kind that ``can_quantise`` takes, a float32."""
    limit = LARGEST[number] * _LIMIT_SHARE
    nearest = np.float32(limit)
    return float(nearest if nearest <= limit else np.nextafter(nearest, np.float32(0)))


def scales_of(values: Floats, axis: int, levels: int) -> Scales:
    """The scale of each group along ``axis`` for integers from ``-levels`` to ``levels``; the axis
    stays, of length 1. 0 for a group of zeros, or one too small to be told from it.
    """
    peak = np.maximum(
        values.max(axis=axis, keepdims=True), -values.min(axis=axis, keepdims=True)
    ) * np.float32(1 / levels)
    bits = peak.astype(np.float32, copy=False).view(np.uint32) & _MAGNITUDE
    upper: Scales = ((bits + 0xFFFF) >> _UPPER_HALF).astype(np.uint16)
    return upper


def quantise(values: Floats, scales: Scales, levels: int) -> Small:
    """The integer nearest to each number over its group's scale."""
    wide = widened(scales)
    inverse = np.divide(1.0, wide, out=np.zeros_like(wide), where=wide > _SMALLEST_SCALE)
    scaled = values * inverse
    np.rint(scaled, out=scaled)
    np.clip(scaled, -levels, levels, out=scaled)
    small: Small = scaled.astype(np.int8)
    return small


def halved(values: Floats) -> Scales:
    """The upper halves nearest to these numbers, which are finite."""
    out = np.empty((*values.shape[:-1], 2 * values.shape[-1]), np.uint8)
    write_numbers(np.array(values, np.float32), "bfloat16", out)
    return out.view(np.uint16)


class QuantisedRows(NamedTuple):
    """Keys and values of some tokens in one layer. Scales and means are upper halves."""

    keys: Small  # [heads, tokens, key_items]
    key_scales: Scales  # [heads, 1, key_items]
    key_means: Scales | None  # [heads, 1, key_items]; None: nothing was subtracted
    values: Small  # [heads, tokens, value_items]
    value_scales: Scales  # [heads, tokens, 1]


def quantise_rows(rows: Floats, key_items: int, levels: int, *, centred: bool) -> QuantisedRows:
    """``rows`` are ``[heads, tokens, key_items + value_items]``, at least one token.

    Keys share a scale per channel, for some of their channels are many times larger than others in
    all tokens; values share one per token. ``centred``: each key channel's mean goes first, which
    is most of its energy.
    """
    keys, values = rows[..., :key_items], rows[..., key_items:]
    means = None
    if centred:
        means = halved(keys.mean(axis=1, keepdims=True))
        keys = keys - widened(means)
    key_scales = scales_of(keys, 1, levels)
    if values.shape[2]:
        value_scales = scales_of(values, 2, levels)
    else:
        value_scales = np.zeros((*values.shape[:2], 1), np.uint16)
    return QuantisedRows(
        quantise(keys, key_scales, levels),
        key_scales,
        means,
        quantise(values, value_scales, levels),
        value_scales,
    )


def dequantise_rows(quantised: QuantisedRows, number: str, out: npt.NDArray[np.uint8]) -> None:
    """``out`` (``[heads, tokens, bytes]``) holds the rows, as numbers of that kind."""
    keys, key_scales, means, values, value_scales = quantised
    key_items = keys.shape[2]
    rows = np.empty((*keys.shape[:2], key_items + values.shape[2]), np.float32)
    np.multiply(keys, widened(key_scales), out=rows[..., :key_items], dtype=np.float32)
    if means is not None:
        rows[..., :key_items] += widened(means)
    np.multiply(values, widened(value_scales), out=rows[..., key_items:], dtype=np.float32)
    write_numbers(rows, number, out)
