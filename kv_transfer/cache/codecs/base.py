"""A codec turns one layer of a chunk into a *frame* and back.

A layer comes as rows: ``[heads, tokens, row_bytes]``, each token its key and then its value, the
numbers as the engine's pages have them. A frame is a front of four bytes, then content::

    0   uint8   kind: 0, the rows as they are; 1, coded
    1   uint8   tokens at the beginning that are as they are (``SINKS`` of a prompt's first chunk)
    2   2 bytes zero

What a codec cannot hold (a number that is not finite) or what would not become smaller is a frame
of kind 0, so every layer has one. A frame that is cut or does not fit its shape is a
``FrameError``, whatever bytes it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from splitserve.kernels.quantise import NUMBERS

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

FRONT_BYTES = 4
SINKS = 4
"""Tokens at a prompt's beginning to which all others attend, whatever they say: an error there is
an error everywhere.
"""
_PLAIN, _CODED = 0, 1


class FrameError(Exception):
    """These bytes are no frame of this codec and shape; says what is wrong with them."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer of a chunk. Counts numbers, not bytes."""

    heads: int
    tokens: int
    key_items: int
    value_items: int
    number: str
    """One of ``NUMBERS``: what the pages hold."""

    @property
    def row_bytes(self) -> int:
        """One token in one head."""
        return (self.key_items + self.value_items) * NUMBERS[self.number]

    @property
    def layer_bytes(self) -> int:
        """The layer as it is."""
        return self.heads * self.tokens * self.row_bytes


class Codec(Protocol):
    """Stateless; used by several threads at once."""

    @property
    def name(self) -> str:
        """Part of what it codes, in headers and keys: a codec that changes gets another name."""

    @property
    def keeps_sinks(self) -> bool:
        """Whether a prompt's first tokens stay as they are."""

    def encode(self, rows: Bytes, shape: LayerShape) -> list[bytes] | None:
        """The content of a frame, in parts; None when these numbers have none."""

    def decode(self, content: memoryview, shape: LayerShape, heads: slice, out: Bytes) -> None:
        """``out`` holds the rows of these heads. Raises ``FrameError``."""


def encode_layer(codec: Codec, rows: Bytes, shape: LayerShape, *, begins_prompt: bool) -> bytes:
    """The frame of a layer; at most ``FRONT_BYTES`` longer than the layer."""
    sinks = min(SINKS, shape.tokens) if begins_prompt and codec.keeps_sinks else 0
    kept = rows[:, :sinks].tobytes()
    rest = LayerShape(
        shape.heads, shape.tokens - sinks, shape.key_items, shape.value_items, shape.number
    )
    content = codec.encode(rows[:, sinks:], rest) if rest.tokens else None
    if content is not None and len(kept) + sum(map(len, content)) < shape.layer_bytes:
        return b"".join([bytes([_CODED, sinks, 0, 0]), kept, *content])
    return bytes([_PLAIN, 0, 0, 0]) + rows.tobytes()


def decode_layer(
    codec: Codec, frame: memoryview, shape: LayerShape, heads: slice, out: Bytes
) -> None:
    """``out``, ``[heads, tokens, row_bytes]``, holds the rows of these heads.

    Raises ``FrameError``: then ``out`` holds anything.
    """
    kind, sinks = _front(frame, shape)
    content = frame[FRONT_BYTES:]
    kept_bytes = shape.heads * sinks * shape.row_bytes
    if kind == _PLAIN:
        np.copyto(out, _rows(content, shape.heads, shape.tokens, shape)[heads])
        return
    if len(content) < kept_bytes:
        raise FrameError(f"cut: {len(content)} bytes of content, {kept_bytes} are kept alone")
    if sinks:
        out[:, :sinks] = _rows(content[:kept_bytes], shape.heads, sinks, shape)[heads]
    rest = LayerShape(
        shape.heads, shape.tokens - sinks, shape.key_items, shape.value_items, shape.number
    )
    codec.decode(content[kept_bytes:], rest, heads, out[:, sinks:])


def _front(frame: memoryview, shape: LayerShape) -> tuple[int, int]:
    """(kind, sinks)."""
    if len(frame) < FRONT_BYTES:
        raise FrameError(f"cut: a frame of {len(frame)} bytes")
    kind, sinks = frame[0], frame[1]
    if kind not in (_PLAIN, _CODED) or sinks >= shape.tokens or frame[2] or frame[3]:
        raise FrameError(f"no frame begins with {bytes(frame[:FRONT_BYTES]).hex()}")
    if kind == _PLAIN and (sinks or len(frame) - FRONT_BYTES != shape.layer_bytes):
        raise FrameError(
            f"{len(frame) - FRONT_BYTES} bytes of a layer that has {shape.layer_bytes}"
        )
    return kind, sinks


def _rows(content: memoryview, heads: int, tokens: int, shape: LayerShape) -> Bytes:
    flat = np.frombuffer(content, np.uint8)
    return flat.reshape(heads, tokens, shape.row_bytes)
