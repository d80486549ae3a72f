"""An engine's KV memory: blocks with owners, pages with contents, and who may write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.world import World

LAYERS = 2
BLOCK_TOKENS = 4

Content = tuple[int, tuple[int, ...]]
"""(layer, the tokens that the page's KV depends on)."""


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def page_of(layer: int, prompt: tuple[int, ...], block: int, computed: int) -> Content:
    """What the page of a prompt's ``block`` holds when ``computed`` tokens are computed."""
    return layer, prompt[: min((block + 1) * BLOCK_TOKENS, computed)]


class Memory:
    """Blocks 1 to ``total``; block 0 is the null block. The audit is here: every change checks."""

    def __init__(self, world: World, name: str, total: int) -> None:
        self.world = world
        self.name = name
        self.total = total
        self.pages: dict[tuple[int, int], Content] = {}
        self._free = list(range(total, 0, -1))
        self._owner: dict[int, str] = {}
        self._granted: dict[int, tuple[str, frozenset[int]]] = {}
        """Per tag: the request whose blocks may be written, and the blocks."""

    @property
    def free_blocks(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    def take(self, owner: str, count: int) -> list[int]:
        """``count`` blocks for a request."""
        assert count <= self.free_blocks
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            if block in self._owner:
                self.world.fail(f"{self.name}: block {block} of {self._owner[block]} is given away")
            self._owner[block] = owner
        return taken

    def give_back(self, owner: str, blocks: list[int]) -> None:
        """The request's blocks are free; the latest to be freed is the first to be used again."""
        for block in blocks:
            if self._owner.pop(block, None) != owner:
                self.world.fail(f"{self.name}: {owner} gives back block {block}, not its own")
            self._free.append(block)

    def grant(self, tag: int, owner: str, blocks: tuple[int, ...]) -> None:
        """A peer may write these from now on."""
        for block in blocks:
            if self._owner.get(block) != owner:
                self.world.fail(f"{self.name}: block {block} is granted, not owned by {owner}")
        self._granted[tag] = (owner, frozenset(blocks))

    def write_from_peer(self, tag: int, layer: int, block: int, content: Content) -> None:
        """A byte of a peer lands."""
        owner, blocks = self._granted[tag]
        if block not in blocks:
            self.world.fail(f"{self.name}: block {block} is written, but was not granted")
        if self._owner.get(block) != owner:
            self.world.fail(
                f"{self.name}: block {block} is written for {owner} and belongs to "
                f"{self._owner.get(block, 'nobody')}"
            )
        self.pages[layer, block] = content

    def read_for_peer(self, owner: str, layer: int, block: int) -> Content:
        """A byte is read for a peer."""
        if self._owner.get(block) != owner:
            self.world.fail(
                f"{self.name}: block {block} is read for {owner} and belongs to "
                f"{self._owner.get(block, 'nobody')}"
            )
        return self.pages[layer, block]

    def check(self) -> None:
        """Every block is either free or owned."""
        if sorted([*self._free, *self._owner]) != list(range(1, self.total + 1)):
            self.world.fail(f"{self.name}: blocks are {self._free} and {self._owner}")

    def owners(self) -> dict[int, str]:
        """Every block that is not free."""
        return dict(self._owner)
