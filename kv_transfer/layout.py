"""Where one rank's KV pages lie in memory, and how the pages of two ranks correspond.

A *page* is one layer's bytes of one block. Only layouts whose page is contiguous and whose heads
are outermost inside the page (vLLM's ``LBHNC``) are described: then the heads that two ranks share
are one contiguous slice of every page, and ranks of different tensor-parallel sizes can exchange
pages. The bytes inside a head's slice are opaque: on CPU they depend on the instruction set, so
they are only ever copied whole, between engines whose fingerprints are equal.

Pure: addresses are plain integers, nothing here touches memory.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from splitserve.kv_transfer.transports.base import PageIndices, PagePairing

PAGE_LIMIT = 1 << 28
"""Pages of one rank (layers times blocks): their addresses are kept in arrays."""


class LayoutMismatchError(ValueError):
    """Two ranks whose pages cannot be copied into each other; the message names both values."""


class PageLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's KV memory: every layer's pages at a constant stride."""

    layer_bases: tuple[int, ...]
    """Address of block 0 in each layer, in the model's layer order."""
    block_stride: int
    """Bytes from one block's page to the next block's page of the same layer."""
    page_bytes: int
    num_blocks: int
    block_tokens: int
    heads: int
    """KV heads that this rank holds."""
    first_head: int
    """Global number of this rank's first KV head."""
    total_heads: int

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for what cannot be memory: a layout may come from a peer."""
        counts = (self.num_blocks, self.block_tokens, self.heads, self.page_bytes)
        if min(counts) <= 0 or not self.layer_bases or self.layers * self.num_blocks > PAGE_LIMIT:
            raise ValueError("a layout has at least one page, and at most 2**28")
        if self.page_bytes % self.heads or self.block_stride < self.page_bytes:
            raise ValueError("a page holds whole heads and does not overlap the next one")
        if self.first_head < 0 or self.first_head + self.heads > self.total_heads:
            raise ValueError("a rank's heads are some of the model's")
        end = max(self.layer_bases) + self.num_blocks * self.block_stride
        if min(self.layer_bases) <= 0 or end >= 1 << 63:
            raise ValueError("a page lies at a positive 63-bit address")

    @property
    def layers(self) -> int:
        """Number of layers that have pages."""
        return len(self.layer_bases)

    @property
    def head_numbers(self) -> frozenset[int]:
        """Global numbers of this rank's KV heads."""
        return frozenset(range(self.first_head, self.first_head + self.heads))

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's slice of a page."""
        return self.page_bytes // self.heads

    def page_addresses(self) -> npt.NDArray[np.int64]:
        """Address of every page, by page index: int64 ``[layers * num_blocks]``."""
        bases = np.asarray(self.layer_bases, dtype=np.int64)[:, None]
        offsets = np.arange(self.num_blocks, dtype=np.int64)[None, :] * self.block_stride
        return (bases + offsets).reshape(-1)

    def page_indices(self, layers: npt.ArrayLike, blocks: npt.ArrayLike) -> PageIndices:
        """Page indices of ``blocks`` in ``layers``, layer by layer: int64 ``[len(layers) *
        len(blocks)]``.
        """
        rows = np.asarray(layers, dtype=np.int64)[:, None] * self.num_blocks
        return (rows + np.asarray(blocks, dtype=np.int64)[None, :]).reshape(-1)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens, the last one possibly in part."""
        return -(-tokens // self.block_tokens)


def shares_heads(one: PageLayout, other: PageLayout) -> bool:
    """Whether the two ranks hold a KV head in common."""
    return (
        one.first_head < other.first_head + other.heads
        and other.first_head < one.first_head + one.heads
    )


def ranks_sharing_heads(own: PageLayout, tensor_parallel: int, peer: PageLayout) -> int:
    """How many ranks of the engine that ``own`` belongs to hold a head that ``peer`` holds too."""
    return sum(
        shares_heads(msgspec.structs.replace(own, first_head=rank * own.heads), peer)
        for rank in range(tensor_parallel)
    )


def check_compatible(local: PageLayout, remote: PageLayout) -> None:
    """Raise ``LayoutMismatchError`` unless pages of the two ranks can be copied into each other."""
    for what, ours, theirs in (
        ("layers", local.layers, remote.layers),
        ("tokens per block", local.block_tokens, remote.block_tokens),
        ("KV heads of the model", local.total_heads, remote.total_heads),
        ("bytes of a head's slice of a page", local.head_bytes, remote.head_bytes),
    ):
        if ours != theirs:
            raise LayoutMismatchError(
                f"{what}: {ours} here, {theirs} at the peer; start both nodes with equal values"
            )


def pair(local: PageLayout, remote: PageLayout) -> PagePairing:
    """How pages of ``local`` are written into pages of ``remote``: the slice of the heads that both
    hold.

    Raises ``LayoutMismatchError`` when the pages differ or no head is shared.
    """
    check_compatible(local, remote)
    if not shares_heads(local, remote):
        raise LayoutMismatchError(
            f"no KV head in common: {local.first_head}..{local.first_head + local.heads - 1} here, "
            f"{remote.first_head}..{remote.first_head + remote.heads - 1} at the peer"
        )
    first = max(local.first_head, remote.first_head)
    last = min(local.first_head + local.heads, remote.first_head + remote.heads)
    return PagePairing(
        local_addresses=local.page_addresses() + (first - local.first_head) * local.head_bytes,
        remote_addresses=remote.page_addresses() + (first - remote.first_head) * remote.head_bytes,
        page_bytes=(last - first) * local.head_bytes,
    )
