"""Layout conversion in host memory: one strided copy for keys and one for values.

Memory is numpy arrays of bytes ``[blocks, heads, slice_bytes]``: one layer of a chunk, or of an
engine's pages (a CPU tensor's ``.numpy()`` shares its memory). The two outer steps may be anything,
so a range of heads or blocks of something larger is as good; a slice's bytes are contiguous.

Every order is an affine placement (``page_formats.py``), so the numbers of both sides can be seen
as arrays of one shape that differ in their strides only, and numpy copies one into the other. That
uses one thread and holds no lock of Python's meanwhile. numpy walks in the order of the target's
strides, which is right but for two cases that ``_at_once`` takes apart; torch walks no better and
its threads cost more than a layer's copy on a pinned process. Nothing is compared or converted as a
number: NaNs keep their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from splitserve.kernels.page_formats import PageFormat, Placement, require_same_numbers

if TYPE_CHECKING:
    Bytes = npt.NDArray[np.uint8]
    Numbers = npt.NDArray[np.unsignedinteger[npt.NBitBase]]

_CACHE_BYTES = 32 << 10
"""The first-level cache. A transposed copy reads numbers that lie a step apart, then their
neighbours: by then the lines are gone when their span is larger, for with the usual powers of two
they share a few of the cache's sets.
"""
_LEAST_AT_ONCE = 16
_SHORT = 2
"""numpy pays as much to begin a run as to copy a dozen numbers: better two long ones than many of
two.
"""


def convert_pages(
    source: Bytes,
    source_format: PageFormat,
    target_format: PageFormat,
    out: Bytes | None = None,
) -> Bytes:
    """The tokens of ``source`` in the target's format: ``[blocks, heads, slice_bytes]``.

    Written to ``out`` when it is given, which must not overlap ``source``. ``ValueError`` for
    shapes and formats that do not fit one another.
    """
    require_same_numbers(source_format, target_format)
    check_pages(source, source_format, "source")
    tokens = source.shape[0] * source_format.block_tokens
    if tokens % target_format.block_tokens:
        raise ValueError(
            f"{tokens} tokens are no whole number of blocks of {target_format.block_tokens}"
        )
    blocks, heads = tokens // target_format.block_tokens, source.shape[1]
    if out is None:
        out = np.empty((blocks, heads, target_format.slice_bytes), np.uint8)
    check_pages(out, target_format, "target")
    if out.shape[:2] != (blocks, heads):
        raise ValueError(
            f"the target holds {out.shape[0]} blocks of {out.shape[1]} heads, "
            f"the source fills {blocks} of {heads}"
        )
    if source_format == target_format:
        np.copyto(out, source)
    elif can_pair(source_format, target_format):
        for into, numbers, at_once in paired_numbers(out, target_format, source, source_format):
            shape = max(into.shape, numbers.shape, key=lambda shape: shape[1])
            into, numbers = into.reshape(shape, copy=False), numbers.reshape(shape, copy=False)
            copy_numbers(into, numbers, at_once)
    else:
        between = _one_block(tokens, target_format)
        convert_pages(convert_pages(source, source_format, between), between, target_format, out)
    return out


def convert_heads(
    source: Bytes,
    first_head: int,
    end_head: int,
    source_format: PageFormat,
    target_format: PageFormat,
    out: Bytes | None = None,
) -> Bytes:
    """``convert_pages`` of the heads from ``first_head`` up to, not including, ``end_head``.

    The target has only these: what one tensor-parallel rank reads of a chunk. A rank that writes
    its heads into a chunk gives ``convert_pages`` that range of it as ``out``.
    """
    check_pages(source, source_format, "source")
    if not 0 <= first_head < end_head <= source.shape[1]:
        raise ValueError(f"heads {first_head} to {end_head} of {source.shape[1]}")
    return convert_pages(source[:, first_head:end_head], source_format, target_format, out)


def check_pages(pages: Bytes, page_format: PageFormat, name: str) -> None:
    """``ValueError`` unless ``pages`` can be pages of that format."""
    if pages.dtype != np.uint8 or pages.ndim != 3 or pages.shape[2] != page_format.slice_bytes:
        raise ValueError(
            f"the {name} is {pages.dtype} {list(pages.shape)}, not bytes "
            f"[blocks, heads, {page_format.slice_bytes}]"
        )
    if pages.strides[2] != 1:
        raise ValueError(f"the bytes of a slice are not contiguous in the {name}")


def can_pair(one: PageFormat, other: PageFormat) -> bool:
    """Whether ``paired_numbers`` takes the two.

    Every block of the one has to be whole blocks of the other, and no group of tokens may lie in
    two blocks.
    """
    small, large = sorted((one.block_tokens, other.block_tokens))
    return large % small == 0 and all(
        small % max(a.token_group, b.token_group) == 0
        for a, b in ((one.keys, other.keys), (one.values, other.values))
    )


def paired_numbers(
    target: Bytes, target_format: PageFormat, source: Bytes, source_format: PageFormat
) -> list[tuple[Numbers, Numbers, int]]:
    """Views of target and source, of their keys and of their values, for ``copy_numbers``.

    Axes: blocks, windows of a block, heads, and what a window of a head has. A window is as many
    tokens as the smaller block has, so the first two axes are a memory's own and the others equal
    for both. The integer goes to ``copy_numbers`` too. Only for formats that ``can_pair``.
    """
    return [
        (
            _numbers(target, region.target, region),
            _numbers(source, region.source, region),
            region.at_once,
        )
        for region in _regions(target_format, source_format)
    ]


def copy_numbers(target: Numbers, source: Numbers, at_once: int) -> None:
    """``target[...] = source``, that many indices of the last axis at a time."""
    size = target.shape[-1]
    for start in range(0, size, at_once):
        np.copyto(target[..., start : start + at_once], source[..., start : start + at_once])


@dataclass(frozen=True)
class _Side:
    """Where one memory has a region's numbers, in bytes from the beginning of a slice."""

    first: int
    windows: int
    window_step: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class _Region:
    """Keys or values of one window of one head: ``shape`` numbers, at other steps on each side."""

    dtype: np.dtype[np.unsignedinteger[npt.NBitBase]]
    shape: tuple[int, ...]
    target: _Side
    source: _Side
    at_once: int


@lru_cache(maxsize=64)
def _regions(target_format: PageFormat, source_format: PageFormat) -> list[_Region]:
    """Of two formats: one region for keys and values together where they lie alike."""
    pairs = [
        (target_format.keys, source_format.keys),
        (target_format.values, source_format.values),
    ]
    if target_format.order == source_format.order == "rows":
        pairs = [(Placement(0, target_format.token_items, target_format.token_items, 1),) * 2]
    window = min(target_format.block_tokens, source_format.block_tokens)
    regions = []
    for target, source in pairs:
        tokens = max(target.token_group, source.token_group)
        channels = max(target.channel_group, source.channel_group)
        into, out_of = target.grouped(tokens, channels), source.grouped(tokens, channels)
        sizes = (window // tokens, tokens, target.items // channels, channels)
        if target.items:
            item_bytes = target_format.item_bytes
            axes = zip(sizes, _steps(into, item_bytes), _steps(out_of, item_bytes), strict=True)
            item_bytes, shape, steps = _simplified(item_bytes, list(axes))
            regions.append(
                _Region(
                    np.dtype(f"u{item_bytes}"),
                    shape,
                    _side(target_format, into, window, steps[0]),
                    _side(source_format, out_of, window, steps[1]),
                    _at_once(shape[-1], steps[1][-1], item_bytes),
                )
            )
    return regions


def _steps(places: Placement, item_bytes: int) -> tuple[int, ...]:
    """Bytes from group to group of tokens, token to token, and the same for channels."""
    steps = (
        places.token_group_step,
        places.token_step,
        places.channel_group_step,
        places.channel_step,
    )
    return tuple(step * item_bytes for step in steps)


def _simplified(
    item_bytes: int, axes: list[tuple[int, int, int]]
) -> tuple[int, tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]:
    """Bytes of an item, shape, and steps of the target and of the source.

    ``axes`` are (size, step in the target, step in the source). Afterwards they come in the
    target's order, neighbours in both memories are one axis, and a few bytes that are neighbours in
    both are one item.
    """
    merged: list[tuple[int, int, int]] = []
    for size, into, out_of in sorted(axes, key=lambda axis: -axis[1]):
        if merged and merged[-1][1:] == (size * into, size * out_of):
            merged[-1] = (merged[-1][0] * size, into, out_of)
        elif size > 1:
            merged.append((size, into, out_of))
    if len(merged) > 1 and merged[-1][1:] == (item_bytes, item_bytes):
        wide = merged[-1][0] * item_bytes
        if wide in (2, 4, 8):
            item_bytes = wide
            merged.pop()
    merged = merged or [(1, item_bytes, item_bytes)]
    shape, into_steps, out_of_steps = zip(*merged, strict=True)
    return item_bytes, shape, (into_steps, out_of_steps)


def _side(page_format: PageFormat, places: Placement, window: int, steps: tuple[int, ...]) -> _Side:
    return _Side(
        places.first * page_format.item_bytes,
        page_format.block_tokens // window,
        window // places.token_group * places.token_group_step * page_format.item_bytes,
        steps,
    )


def _at_once(size: int, source_step: int, item_bytes: int) -> int:
    """How much of the last axis one copy takes."""
    if size <= _SHORT:
        return 1
    if source_step == item_bytes:
        return size
    return max(_LEAST_AT_ONCE, _CACHE_BYTES // source_step)


def _numbers(pages: Bytes, side: _Side, region: _Region) -> Numbers:
    blocks, heads, _ = pages.shape
    shape = (blocks, side.windows, heads, *region.shape)
    strides = (pages.strides[0], side.window_step, pages.strides[1], *side.steps)
    if pages.flags.c_contiguous:  # ten times faster, and numpy checks the bounds
        return np.ndarray(shape, region.dtype, pages, side.first, strides)
    numbers = pages[:, :, side.first : side.first + region.dtype.itemsize].view(region.dtype)
    return as_strided(numbers, shape, strides)


def _one_block(tokens: int, page_format: PageFormat) -> PageFormat:
    """Rows of all tokens, which every format that divides them pairs with."""
    return PageFormat(
        tokens, page_format.key_items, page_format.value_items, page_format.item_bytes, "rows"
    )
