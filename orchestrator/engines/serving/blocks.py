"""An engine's KV blocks: who uses them, and which full blocks can serve another prompt that begins
alike.

As in vLLM: block 0 is the null block; a block nobody uses keeps its content, and its hash, until it
is taken for something else, longest unused first. A block is offered to others from the moment it
is *planned* to be full, which is before the step that fills it.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


class BlockPool:
    """All blocks of an engine. Changed by the scheduler only; ``free_blocks`` may be read by other
    threads.
    """

    def __init__(self, blocks: int) -> None:
        self.total_blocks = blocks
        self._users = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning of ``hashes``."""
        found: list[int] = []
        for value in hashes:
            block = self._block_of.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, shared: Sequence[int], fresh: int) -> list[int] | None:
        """``shared`` blocks with one more user each, and ``fresh`` new ones; None when there are
        too few.
        """
        revived = sum(not self._users[block] for block in shared)
        if fresh + revived > len(self._free):
            return None
        for block in shared:
            self._free.pop(block, None)
            self._users[block] += 1
        return [*shared, *(self._take_oldest() for _ in range(fresh))]

    def give_back(self, blocks: Sequence[int]) -> None:
        """One user less for each; the last blocks of a request are reused first."""
        for block in reversed(blocks):
            assert self._users[block] > 0, f"block {block} was given back twice"
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None

    def publish(self, block: int, value: bytes) -> None:
        """From now on ``block`` serves requests whose beginning hashes to ``value``."""
        if block not in self._hash_of and value not in self._block_of:
            self._hash_of[block] = value
            self._block_of[value] = block

    def forget(self) -> bool:
        """No block serves another prompt any more; False, and nothing changed, while some are in
        use.
        """
        if any(self._users):
            return False
        self._hash_of.clear()
        self._block_of.clear()
        return True

    def _take_oldest(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._users[block] = 1
        value = self._hash_of.pop(block, None)
        if value is not None:
            del self._block_of[value]
        return block


def block_hashes(tokens: Sequence[int], block_tokens: int, salt: str) -> list[bytes]:
    """One hash per full block, over everything up to its end and the salt."""
    parent = blake2b(salt.encode(), digest_size=16).digest()
    hashes = []
    data = np.asarray(tokens, "<u4").tobytes()
    size = 4 * block_tokens
    for start in range(0, len(tokens) // block_tokens * size, size):
        parent = blake2b(parent + data[start : start + size], digest_size=16).digest()
        hashes.append(parent)
    return hashes
