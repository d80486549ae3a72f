"""The KV blocks of a simulated node: who holds them, and what they keep of prompts that ended.

As in vLLM, a block of a known prompt is shared by all that hold it, and stays until its room is
needed: what was let go longest ago goes first, the end of a prompt before its beginning. Prompts
are known by the chained block numbers of a trace, whose blocks are usually larger than the node's.

``Marks`` says of a prompt what a router would hash of it, as if each token had a fixed number of
bytes: as many as text has, but no more than put one mark into each of the trace's blocks where
marks are densest. More would say nothing new, as a block is there as a whole or not at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from typing import TYPE_CHECKING

from splitserve.kv_transfer.prefix_marks import (
    MARK_BYTES,
    MARK_OFFSETS,
    MARKS_LIMIT,
    SPACING_BYTES,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_BYTES_PER_TOKEN = 4
"""What text has."""
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
        self.shared = hits
        """How many of them others hold too, or may."""


class BlockPool:
    """The blocks of a node. With ``trace_block_tokens`` 0 nothing is shared or kept."""

    def __init__(self, total_blocks: int, block_tokens: int, trace_block_tokens: int) -> None:
        self.total_blocks = total_blocks
        self.used_blocks = 0
        """Held by requests; read only."""
        self._block_tokens = block_tokens
        self._trace_block_tokens = trace_block_tokens
        self._size = max(1, trace_block_tokens // block_tokens)
        """Node blocks of a trace block."""
        self._holders: dict[int, int] = {}
        """By trace block: how many requests hold it."""
        self._kept: OrderedDict[int, int] = OrderedDict()
        """Trace blocks that nobody holds, with their place in their prompt; the one let go longest
        ago first.
        """
        self._told: set[int] = set()
        """Trace blocks that were in ``added`` and not in ``evicted`` after that."""
        self.added: list[tuple[int, int]] = []
        """(trace block, place) of which ``tell`` was the first to speak since somebody last emptied
        this list.
        """
        self.evicted: list[tuple[int, int]] = []
        """The same of those that are gone."""

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
        prompt, size, first = holding.prompt, self._size, holding.shared
        holders, kept = self._holders, self._kept
        end = min(len(prompt), first + holding.own // size)
        for place in range(first, end):
            block = prompt[place]
            if block in holders or block in kept:
                end = place  # Somebody computed the same meanwhile: what follows stays our own
                break
            holders[block] = 1
        holding.own -= size * (end - first)
        holding.shared = end

    def tell(self, holding: Holding) -> None:
        """The engine is done with the request: it says what it has of its prompt."""
        prompt, told = holding.prompt, self._told
        for place in range(holding.shared):
            block = prompt[place]
            if block not in told:
                told.add(block)
                self.added.append((block, place))

    def release(self, holding: Holding) -> None:
        """The request lets go of all that it holds. Not to be called twice."""
        self.used_blocks -= holding.own
        holders, size = self._holders, self._size
        prompt, kept = holding.prompt, self._kept
        for place in range(holding.shared - 1, -1, -1):
            block = prompt[place]
            left = holders[block] - 1
            if left:
                holders[block] = left
            else:
                del holders[block]
                kept[block] = place
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
        kept = self._kept
        most = (self.total_blocks - self.used_blocks) // self._size
        while len(kept) > most:
            block, place = kept.popitem(last=False)
            if block in self._told:
                self._told.remove(block)
                self.evicted.append((block, place))


class Marks:
    """What a router would hash of prompts that are known by the blocks of a trace."""

    def __init__(self, trace_block_tokens: int) -> None:
        self._block_tokens = trace_block_tokens
        self.bytes_per_token = MOST_BYTES_PER_TOKEN
        self._places: list[int] = []
        """For each mark the place of the block in which it ends, in its prompt."""
        self._of_place: list[list[tuple[int, int]]] = []
        """(number of the mark, tokens before it), by place of the block."""
        if trace_block_tokens:
            dense = SPACING_BYTES // trace_block_tokens
            self.bytes_per_token = min(MOST_BYTES_PER_TOKEN, max(1, dense))
            places = -(-MARK_OFFSETS[-1] // (self.bytes_per_token * trace_block_tokens))
            self._of_place = [[] for _ in range(places)]
            for number, offset in enumerate(MARK_OFFSETS):
                tokens = offset // self.bytes_per_token
                place = (tokens - 1) // trace_block_tokens
                self._places.append(place)
                self._of_place[place].append((number, tokens))

    def of_prompt(self, blocks: Sequence[int], prompt_tokens: int) -> tuple[bytes, ...]:
        """The marks in the whole blocks of a prompt, from the first."""
        if not self._block_tokens:
            return ()
        places = self._places
        count = bisect_left(places, min(prompt_tokens // self._block_tokens, len(blocks)))
        found = enumerate(places[:count])
        return tuple([_digest(blocks[place], number) for number, place in found])

    def news(self, pool: BlockPool) -> tuple[tuple[tuple[bytes, int], ...], tuple[bytes, ...]]:
        """What has come, (mark, tokens before it), and what has gone since the last call."""
        of_place, reach = self._of_place, len(self._of_place)
        added: list[tuple[bytes, int]] = []
        removed: list[bytes] = []
        for block, place in pool.evicted:
            numbers = of_place[place] if place < reach else None
            if numbers and not pool.has(block):
                removed += [_digest(block, number) for number, _ in numbers]
        for block, place in pool.added:
            numbers = of_place[place] if place < reach else None
            if numbers and pool.has(block):
                added += [(_digest(block, number), tokens) for number, tokens in numbers]
        pool.added.clear()
        pool.evicted.clear()
        return tuple(added), tuple(removed)


def _digest(block: int, mark: int) -> bytes:
    """A block's number stands for all that is before it, too."""
    return ((block * MARKS_LIMIT + mark) % _DIGESTS).to_bytes(MARK_BYTES)
