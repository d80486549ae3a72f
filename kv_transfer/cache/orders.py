"""What an engine's scheduler half tells the cache thread of each worker, once per step, and what
comes back.
"""

from __future__ import annotations

import msgspec

from splitserve.kv_transfer.cache.messages import Mark


class LoadOrder(msgspec.Struct, frozen=True):
    """Chunks that a parked request waits for."""

    load_id: int
    request_id: str
    keys: bytes
    first_block: int
    """Blocks of the first chunk that the engine has already."""
    block_ids: tuple[int, ...]
    """Where the others go: all blocks of all chunks but those."""
    limit_s: float


class SaveOrder(msgspec.Struct, frozen=True):
    """Whole chunks of a request whose blocks are held until the save is reported."""

    save_id: int
    parent: bytes
    keys: bytes
    block_ids: tuple[int, ...]
    """All blocks of all chunks."""
    is_final: bool
    """The blocks are computed; else each layer is final when this step has left it."""
    marks: tuple[tuple[int, Mark], ...] = ()


class CacheOrders(msgspec.Struct, frozen=True):
    """All orders of one step."""

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    step: int = 0
    """Number of a step whose duration says how fast the engine computes prompts; else 0."""

    @property
    def is_empty(self) -> bool:
        """Nothing to do in this step."""
        return not (self.loads or self.saves)


class Loaded(msgspec.Struct, frozen=True):
    """A load has ended on this rank."""

    request_id: str
    load_id: int
    wanted: int
    """Chunks that were asked for."""
    chunks: int
    """Chunks that are in place, from the first one on."""
    size_bytes: int
    elapsed_s: float
    is_foreign: bool = False
    """The next chunk is there, in an order that this engine cannot read."""

    @property
    def is_whole(self) -> bool:
        """Whether everything came."""
        return self.chunks == self.wanted


class CacheNews(msgspec.Struct, frozen=True):
    """What has ended on one rank since the last step."""

    loaded: tuple[Loaded, ...] = ()
    saved: tuple[int, ...] = ()
    """Save ids whose blocks are not read any more."""
    step: int = 0
    """Of the orders with which the step began."""

    @property
    def is_empty(self) -> bool:
        """Nothing is to be told."""
        return not (self.loaded or self.saved or self.step)

    def followed_by(self, later: CacheNews) -> CacheNews:
        """Both, as one."""
        return CacheNews(
            self.loaded + later.loaded, self.saved + later.saved, later.step or self.step
        )
