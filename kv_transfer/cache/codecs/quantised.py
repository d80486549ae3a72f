"""``int8`` and ``int5z``: small integers with scales.

Content of both: means of the key channels (``int5z``), scales of the key channels, scales of the
tokens' values, each an upper half of a float32, little-endian; then the integers of the keys and
those of the values, one byte each, token by token in each head. ``int5z`` compresses these with
zstd, whose entropy coding brings numbers of five bits down to about four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from splitserve.kernels.compiled_quantise import dequantise_quickly
from splitserve.kernels.quantise import (
    QuantisedRows,
    can_quantise,
    quantise_rows,
    read_numbers,
)
from splitserve.kv_transfer.cache.codecs.base import FrameError
from splitserve.kv_transfer.cache.codecs.entropy import compress, decompress

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.codecs.base import Bytes, LayerShape

HALF_BYTES = 2


@dataclass(frozen=True)
class QuantisedCodec:
    """Integers from ``-levels`` to ``levels``."""

    name: str
    levels: int
    is_centred: bool
    """Whether each key channel's mean is subtracted first."""
    is_packed: bool
    """Whether the integers are compressed."""
    keeps_sinks: bool

    def encode(self, rows: Bytes, shape: LayerShape) -> list[bytes] | None:
        numbers = read_numbers(np.ascontiguousarray(rows), shape.number)
        if not can_quantise(numbers, shape.number):
            return None
        made = quantise_rows(numbers, shape.key_items, self.levels, centred=self.is_centred)
        means = [] if made.key_means is None else [made.key_means.tobytes()]
        integers = [made.keys.tobytes(), made.values.tobytes()]
        if self.is_packed:
            integers = [compress(b"".join(integers))]
        return [*means, made.key_scales.tobytes(), made.value_scales.tobytes(), *integers]

    def decode(self, content: memoryview, shape: LayerShape, heads: slice, out: Bytes) -> None:
        heads_tokens = shape.heads * shape.tokens
        sizes = [shape.heads * shape.key_items * HALF_BYTES] * (2 if self.is_centred else 1)
        sizes.append(heads_tokens * HALF_BYTES)
        scales_bytes = sum(sizes)
        integers_bytes = heads_tokens * (shape.key_items + shape.value_items)
        if len(content) < scales_bytes:
            raise FrameError(f"cut: {len(content)} bytes, the scales alone have {scales_bytes}")
        parts, at = [], 0
        for size in sizes:
            parts.append(np.frombuffer(content[at : at + size], np.uint16))
            at += size
        packed = content[at:]
        integers = decompress(packed, integers_bytes) if self.is_packed else packed
        if len(integers) != integers_bytes:
            raise FrameError(f"{len(integers)} bytes of integers instead of {integers_bytes}")
        found = np.frombuffer(integers, np.int8)
        split = heads_tokens * shape.key_items
        by_channel = (shape.heads, 1, shape.key_items)
        by_token = (shape.heads, shape.tokens, 1)
        quantised = QuantisedRows(
            keys=found[:split].reshape(shape.heads, shape.tokens, shape.key_items)[heads],
            key_scales=parts[-2].reshape(by_channel)[heads],
            key_means=parts[0].reshape(by_channel)[heads] if self.is_centred else None,
            values=found[split:].reshape(shape.heads, shape.tokens, shape.value_items)[heads],
            value_scales=parts[-1].reshape(by_token)[heads],
        )
        dequantise_quickly(quantised, shape.number, out)


INT8 = QuantisedCodec("int8", 127, is_centred=False, is_packed=False, keeps_sinks=False)
INT5Z = QuantisedCodec("int5z", 15, is_centred=True, is_packed=True, keeps_sinks=True)
