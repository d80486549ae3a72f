"""Codecs with a fault that a measure of quality has to find: what comes back is of the right size
and nearly right. A text with which they look good says nothing about codecs either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from splitserve.kernels.quantise import read_numbers, write_numbers
from splitserve.orchestrator.engines.transformers.quality import codec_coder

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.codecs.base import Bytes, LayerShape
    from splitserve.orchestrator.engines.transformers.quality import Coder

BASE = "int8"
WRONG_SCALE = 1.25
WRONG_TOKENS = 16


def controls(rope_theta: float | None) -> dict[str, Coder]:
    """By name; the one with wrong positions only for models that turn their keys."""
    found = {f"{BASE}, wrong scale": wrong_scale(BASE)}
    if rope_theta is not None:
        found[f"{BASE}, wrong position"] = wrong_position(BASE, rope_theta, WRONG_TOKENS)
    return found


def wrong_scale(name: str) -> Coder:
    """Every number comes back a quarter too large, as with another group's scale."""
    right = codec_coder(name)

    def coder(rows: Bytes, shape: LayerShape, begins_prompt: bool) -> tuple[Bytes, int]:
        found, size = right(rows, shape, begins_prompt)
        values = read_numbers(found, shape.number) * np.float32(WRONG_SCALE)
        write_numbers(values, shape.number, found)
        return found, size

    return coder


def wrong_position(name: str, rope_theta: float, tokens: int) -> Coder:
    """Keys come back turned as if every token stood so much further behind. (That tokens have
    changed places would be no fault: where a token stands is in its key.)
    """
    right = codec_coder(name)

    def coder(rows: Bytes, shape: LayerShape, begins_prompt: bool) -> tuple[Bytes, int]:
        found, size = right(rows, shape, begins_prompt)
        values = np.array(read_numbers(found, shape.number))
        half = shape.key_items // 2
        angles = tokens * rope_theta ** (-np.arange(half, dtype=np.float32) / half)
        cosine, sine = np.cos(angles), np.sin(angles)
        first, second = values[..., :half].copy(), values[..., half : 2 * half].copy()
        values[..., :half] = first * cosine - second * sine
        values[..., half : 2 * half] = second * cosine + first * sine
        write_numbers(np.array(values, np.float32), shape.number, found)
        return found, size

    return coder
