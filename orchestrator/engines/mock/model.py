"""What the mock engine computes instead of a model: KV that can be checked, and answers that depend
on every byte of it.

* The KV of (layer, head, position) follows from the tokens up to that position, so that two engines
  which hold the same prompt hold the same bytes, and pages of another prompt, block, layer or head
  differ.
* The next token is a hash over the KV of all tokens so far, *read from memory* through the
  request's block table, in layer, head and position order. One page that is missing, stale, swapped
  or belongs to another layer changes the answer.

The KV memory is laid out as vLLM's ``LBHNC``: ``[layers, blocks, heads, tokens, bytes]``, one array
per tensor-parallel rank with that rank's heads. The hash goes over heads in their global order, so
the answer does not depend on the number of ranks.

What it does not know: requests. Time passes only where the engine waits.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.layout import PageLayout
from splitserve.kv_transfer.transports.base import Region
from splitserve.orchestrator.engines.mock.tokenizer import END, PRINTABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

WORD_BYTES = 8
END_ONE_IN = 256
"""An answer ends by itself after this many tokens on average."""

_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15

States = npt.NDArray[np.uint64]
"""One number per token, which stands for all tokens up to it."""


@dataclass(frozen=True)
class KvShape:
    """What the KV of one token looks like, equal in all engines that may be paired."""

    layers: int = 4
    heads: int = 2
    """KV heads of the whole model."""
    block_tokens: int = 32
    head_bytes: int = 32
    """Bytes of one head of one token in one layer."""

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers and heads."""
        return self.layers * self.heads * self.head_bytes

    def page_bytes(self, heads: int) -> int:
        """One layer of one block with so many heads."""
        return heads * self.block_tokens * self.head_bytes


class KvMemory:
    """One rank's KV. Block 0 is the null block: never written."""

    def __init__(self, shape: KvShape, *, rank: int, tensor_parallel: int, blocks: int) -> None:
        assert shape.heads % tensor_parallel == 0
        self.shape = shape
        self.heads = shape.heads // tensor_parallel
        self.first_head = rank * self.heads
        self.blocks = blocks
        page = shape.page_bytes(self.heads)
        size_bytes = shape.layers * blocks * page
        self._map = mmap.mmap(-1, size_bytes)
        dimensions = (shape.layers, blocks, self.heads, shape.block_tokens)
        self.bytes = np.frombuffer(self._map, np.uint8).reshape(*dimensions, shape.head_bytes)
        self.words = self.bytes.view(np.uint64)
        address = self.bytes.ctypes.data
        self.region = Region(address, size_bytes)
        self.layout = PageLayout(
            layer_bases=tuple(address + layer * blocks * page for layer in range(shape.layers)),
            block_stride=page,
            page_bytes=page,
            num_blocks=blocks,
            block_tokens=shape.block_tokens,
            heads=self.heads,
            first_head=self.first_head,
            total_heads=shape.heads,
        )

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers and in the heads of all ranks."""
        return self.shape.token_bytes

    def geometry(self, chunk_tokens: int) -> ChunkGeometry:
        """The chunks that the engine writes."""
        return chunk_geometry(chunk_tokens, self.shape)

    def computed_so_far(self) -> None:
        """What was written is there."""
        return


class MockModel:
    """The arithmetic. ``seed`` stands for the weights."""

    def __init__(self, shape: KvShape, seed: int = 0) -> None:
        self.shape = shape
        self._start = (seed * _MIX + 1) & _MASK
        words = shape.head_bytes // WORD_BYTES
        layers, heads = np.arange(shape.layers), np.arange(shape.heads)
        place = (layers[:, None, None] * shape.heads + heads[:, None]) * words + np.arange(words)
        self._places = _mixed(place.astype(np.uint64) + np.uint64(1))  # [layers, heads, words]

    def states(self, tokens: Sequence[int], known: States | None = None) -> States:
        """The state of each token; ``known`` are those of the first tokens."""
        count = 0 if known is None else len(known)
        state = int(known[-1]) if known is not None and count else self._start
        found = np.empty(len(tokens), np.uint64)
        if known is not None:
            found[:count] = known
        for position in range(count, len(tokens)):
            state = ((state ^ (tokens[position] + 1)) * _MIX + 1) & _MASK
            state ^= state >> 29
            found[position] = state
        return found

    def write(
        self, memory: KvMemory, layer: int, states: States, first: int, block_ids: Sequence[int]
    ) -> None:
        """The KV of the tokens from position ``first`` on, whose states are given, is in
        ``memory``.
        """
        positions = np.arange(first, first + len(states))
        blocks = np.asarray(block_ids)[positions // self.shape.block_tokens]
        heads = slice(memory.first_head, memory.first_head + memory.heads)
        values = _mixed(
            states[:, None, None] ^ self._places[layer, heads]
        )  # [tokens, heads, words]
        memory.words[layer, blocks, :, positions % self.shape.block_tokens] = values

    def next_token(
        self, memories: Sequence[KvMemory], block_ids: Sequence[int], tokens: int
    ) -> int:
        """The token that follows ``tokens`` tokens, from their KV as the ranks hold it."""
        blocks = np.asarray(block_ids[: -(-tokens // self.shape.block_tokens)])
        digest = blake2b(digest_size=8)
        for memory in memories:
            for head in range(memory.heads):
                pages = memory.bytes[:, blocks, head]  # [layers, blocks, tokens, bytes]
                rows = pages.reshape(self.shape.layers, -1)
                digest.update(rows[:, : tokens * self.shape.head_bytes].tobytes())
        value = int.from_bytes(digest.digest(), "little")
        if value % END_ONE_IN == 0:
            return END
        return PRINTABLE[(value >> 8) % len(PRINTABLE)]


def reference_answer(model: MockModel, prompt: Sequence[int], tokens: int) -> list[int]:
    """The first ``tokens`` tokens of the answer to ``prompt``, from fresh memory and without an
    engine.
    """
    shape = model.shape
    blocks = -(-(len(prompt) + tokens) // shape.block_tokens)
    memory = KvMemory(shape, rank=0, tensor_parallel=1, blocks=blocks + 1)
    table = range(1, blocks + 1)
    text, states = list(prompt), model.states([])
    while len(text) < len(prompt) + tokens:
        known = len(states)
        states = model.states(text, states)
        for layer in range(shape.layers):
            model.write(memory, layer, states[known:], known, table)
        text.append(model.next_token([memory], table, len(text)))
    return text[len(prompt) :]


def chunk_geometry(chunk_tokens: int, shape: KvShape) -> ChunkGeometry:
    """The chunks that the mock engine writes: it has keys only."""
    return ChunkGeometry(
        layers=shape.layers,
        chunk_tokens=chunk_tokens,
        block_tokens=shape.block_tokens,
        heads=shape.heads,
        key_bytes=shape.head_bytes,
        value_bytes=0,
        item_bytes=1,
        order="rows",
    )


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser: every bit of the input changes about half of the output's."""
    values = values * np.uint64(_MIX)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
