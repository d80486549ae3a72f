"""The KV blocks of a simulated node: who holds them, and what is left in them of prompts that ended.

As in vLLM, a block of a known prompt is shared by all that hold it, and stays until its room is
needed: what was let go longest ago goes first, the end of a prompt before its beginning. Prompts
are known by the chained block numbers of a trace, whose blocks are usually larger than the node's.

``Marks`` says of a prompt what a router would hash of it: a trace's blocks stand for the bytes of
the prompt, ``BYTES_PER_TOKEN`` for each token.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from splitserve.kv_transfer.prefix_marks import MARK_BYTES, MARK_OFFSETS, MARKS_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

BYTES_PER_TOKEN = 4
"""Of the prompts that a router hashes."""

_DIGESTS = 1 << 8 * MARK_BYTES

NO_BLOCKS: tuple[int, ...] = ()


class Holding:
    """The blocks of one request on one node."""

    __slots__ = ("hits", "own", "prompt", "shared")

    def __init__(self, prompt: Sequence[int], hits: int, own: int) -> None:
        self.prompt = prompt
        """Numbers of the prompt's whole trace blocks."""
        self.hits = hits
        """How many of those were there."""
        self.own = own
        """Node blocks that nobody shares."""
        self.shared: list[int] = list(prompt[:hits])
        """Trace blocks that are held together with others, or may be."""


class BlockPool:
    """The blocks of a node. With ``trace_block_tokens`` 0 nothing is shared or kept."""

    def __init__(self, total_blocks: int, block_tokens: int, trace_block_tokens: int) -> None:
        self.total_blocks = total_blocks
        self.used_blocks = 0
        """Held by requests; read only."""
        self._block_tokens = block_tokens
        self._trace_block_tokens = trace_block_tokens
        self._size = -(-trace_block_tokens // block_tokens)
        """Node blocks of a trace block."""
        self._holders: dict[int, int] = {}
        """By trace block: how many requests hold it."""
        self._kept: dict[int, None] = {}
        """Trace blocks that nobody holds, the one let go longest ago first."""
        self.added: list[int] = []
        """Trace blocks that came since somebody last emptied this list."""
        self.evicted: list[int] = []

    @property
    def free_blocks(self) -> int:
        """Held by no request."""
        return self.total_blocks - self.used_blocks

    def blocks_for(self, tokens: int) -> int:
        """Node blocks that so many tokens take."""
        return -(-tokens // self._block_tokens)

    def has(self, block: int) -> bool:
        """Whether that trace block is there."""
        return block in self._holders or block in self._kept

    def take(self, blocks: Sequence[int], prompt_tokens: int, tokens: int) -> Holding | None:
        """Blocks for ``tokens``, of which the prompt ``blocks`` is the beginning; None when there
        is no room. At least one prompt token is left to compute.
        """
        prompt, hits, kept_hits = NO_BLOCKS, 0, 0
        if self._trace_block_tokens and blocks:
            prompt = tuple(blocks[: prompt_tokens // self._trace_block_tokens])
            most = (prompt_tokens - 1) // self._trace_block_tokens
            for block in prompt[:most]:
                if block in self._kept:
                    kept_hits += 1
                elif block not in self._holders:
                    break
                hits += 1
        own = self.blocks_for(tokens) - hits * self._size
        own = max(own, 0)
        if self.used_blocks + own + kept_hits * self._size > self.total_blocks:
            return None
        for block in prompt[:hits]:
            self._hold(block)
        self.used_blocks += own
        self._evict()
        return Holding(prompt, hits, own)

    def cached_tokens(self, holding: Holding) -> int:
        """Prompt tokens that were there when the holding was taken."""
        return holding.hits * self._trace_block_tokens

    def register(self, holding: Holding) -> None:
        """The prompt's blocks have been computed or have come: others may share them."""
        prompt, size = holding.prompt, self._size
        for block in prompt[len(holding.shared) :]:
            if block in self._holders or block in self._kept or holding.own < size:
                continue  # somebody computed the same meanwhile: ours stays our own
            self._holders[block] = 1
            holding.own -= size
            holding.shared.append(block)
            self.added.append(block)

    def release(self, holding: Holding) -> None:
        """The request lets go of all that it holds. Not to be called twice."""
        self.used_blocks -= holding.own
        holders, size = self._holders, self._size
        for block in reversed(holding.shared):
            left = holders[block] - 1
            if left:
                holders[block] = left
            else:
                del holders[block]
                self._kept[block] = None
                self.used_blocks -= size

    def _hold(self, block: int) -> None:
        if block in self._kept:
            del self._kept[block]
            self._holders[block] = 1
            self.used_blocks += self._size
        else:
            self._holders[block] += 1

    def _evict(self) -> None:
        """Nothing is kept where there is no room for it."""
        kept, size = self._kept, self._size
        if not size:
            return
        most = (self.total_blocks - self.used_blocks) // size
        while len(kept) > most:
            block = next(iter(kept))
            del kept[block]
            self.evicted.append(block)


class Marks:
    """The marks that end in each block of a trace; a block's number stands for all before it."""

    def __init__(self, trace_block_tokens: int) -> None:
        self._of_place: list[list[tuple[int, int]]] = []
        """By place of the block in its prompt."""
        if trace_block_tokens:
            last = MARK_OFFSETS[-1] // BYTES_PER_TOKEN
            edges = range(0, last + 2 * trace_block_tokens, trace_block_tokens)
            table = [(n, offset // BYTES_PER_TOKEN) for n, offset in enumerate(MARK_OFFSETS)]
            at = 0
            for _, end in pairwise(edges):
                first = at
                while at < len(table) and table[at][1] <= end:
                    at += 1
                self._of_place.append(table[first:at])
        self._of_block: dict[int, tuple[tuple[bytes, int], ...]] = {}
        self._trace_block_tokens = trace_block_tokens

    def of_block(self, block: int) -> tuple[tuple[bytes, int], ...]:
        """(mark, tokens before it) of those that end in a block of a prompt that was asked for."""
        return self._of_block.get(block, ())

    def of_prompt(self, blocks: Sequence[int], prompt_tokens: int) -> tuple[bytes, ...]:
        """The marks in the whole blocks of a prompt, from the first."""
        if not self._trace_block_tokens:
            return ()
        known, found = self._of_block, []
        for place in range(min(prompt_tokens // self._trace_block_tokens, len(blocks))):
            block = blocks[place]
            marks = known.get(block)
            if marks is None:
                marks = known[block] = tuple(
                    (((block * MARKS_LIMIT + mark) % _DIGESTS).to_bytes(MARK_BYTES), tokens)
                    for mark, tokens in self._marks_at(place)
                )
            found += [mark for mark, _ in marks]
        return tuple(found)

    def _marks_at(self, place: int) -> list[tuple[int, int]]:
        return self._of_place[place] if place < len(self._of_place) else []
