"""How a chunk's bytes lie: layer-major, and inside a layer as the engine that wrote it keeps its
pages.

A layer of a chunk is its blocks one after the other, each block its heads one after the other
(vLLM's ``LBHNC`` pages without gaps), all heads of the model: every tensor-parallel rank writes and
reads its own heads' slices, so a chunk does not know how many ranks its writer had. What is inside
a head's slice (*the order of tokens and channels*) is the writer's; a reader whose own differs
converts, and one whose own is equal copies.
"""

from __future__ import annotations

import msgspec


class ChunkGeometry(msgspec.Struct, frozen=True):
    """The shape of a chunk and of the slices in it."""

    layers: int
    chunk_tokens: int
    block_tokens: int
    """Tokens of one block; divides ``chunk_tokens``."""
    heads: int
    """KV heads of the whole model."""
    key_bytes: int
    """One token's key in one head."""
    value_bytes: int
    """One token's value in one head."""
    item_bytes: int
    """One number."""
    order: str
    """Inside a head's slice: ``rows``: token by token, key then value; ``vec``: all keys with
    channels outermost, then all values token by token; ``amx``: packed for its tiles
    (``kernels/page_formats.py``); other names are opaque.
    """
    number: str = ""
    """What one number is (``kernels/quantise.NUMBERS``); others, and empty, have no codec."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for what cannot be: a geometry may come from a file."""
        if min(self.layers, self.chunk_tokens, self.block_tokens, self.heads, self.item_bytes) < 1:
            raise ValueError("a chunk has at least one layer, token and head")
        if self.key_bytes < 0 or self.value_bytes < 0 or self.token_bytes < 1:
            raise ValueError("a token has at least one byte in each head")
        if self.chunk_tokens % self.block_tokens:
            raise ValueError("a chunk is a whole number of blocks")

    @property
    def blocks(self) -> int:
        """Blocks of a chunk."""
        return self.chunk_tokens // self.block_tokens

    @property
    def token_bytes(self) -> int:
        """One token in one head of one layer."""
        return self.key_bytes + self.value_bytes

    @property
    def slice_bytes(self) -> int:
        """One head of one block in one layer."""
        return self.block_tokens * self.token_bytes

    @property
    def layer_bytes(self) -> int:
        """One layer of a chunk, all heads."""
        return self.blocks * self.heads * self.slice_bytes

    @property
    def chunk_bytes(self) -> int:
        """A whole chunk."""
        return self.layers * self.layer_bytes


def same_content(one: ChunkGeometry, other: ChunkGeometry) -> bool:
    """Whether chunks of the two differ only in how their bytes are ordered."""
    return (
        one.layers == other.layers
        and one.chunk_tokens == other.chunk_tokens
        and one.heads == other.heads
        and one.key_bytes == other.key_bytes
        and one.value_bytes == other.value_bytes
        and one.item_bytes == other.item_bytes
    )
