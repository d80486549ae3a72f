"""The engine's KV memory: one tensor of pages as vLLM lays them out (``LBHNC``), so that pages move
between the two engines as they are.

Block 0 is the null block: no request has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from splitserve.kernels.page_formats import PageFormat
from splitserve.kernels.torch_pages import layer_pages
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.layout import PageLayout
from splitserve.kv_transfer.transports.base import Region

if TYPE_CHECKING:
    from splitserve.kv_transfer.transfer_thread import WhenReady


@dataclass(frozen=True)
class KvShape:
    """The KV of a model, and how it lies in a page."""

    layers: int
    heads: int
    head_items: int
    """Numbers of one key, and of one value, in one head."""
    block_tokens: int
    order: str
    """Inside a head's slice (``kernels/page_formats.py``)."""
    dtype: torch.dtype

    @property
    def page_format(self) -> PageFormat:
        """Of one head's slice. Raises ``ValueError`` for an order that these sizes do not fit."""
        items = self.head_items
        return PageFormat(self.block_tokens, items, items, self.dtype.itemsize, self.order)

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers."""
        return 2 * self.layers * self.heads * self.head_items * int(self.dtype.itemsize)

    @property
    def block_bytes(self) -> int:
        """One block in all layers."""
        return self.token_bytes * self.block_tokens


class TorchMemory:
    """All pages of an engine, for as long as it runs; see ``serving.memory.RankMemory``."""

    def __init__(self, shape: KvShape, blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        page_format = shape.page_format
        size = (shape.layers, blocks, shape.heads, page_format.slice_items)
        self._pages = torch.zeros(size, dtype=shape.dtype, device=device)
        self.layers = [layer_pages(layer, page_format) for layer in self._pages]
        address, page_bytes = self._pages.data_ptr(), shape.heads * page_format.slice_bytes
        self.region = Region(address, self._pages.nbytes, device.index)
        self.layout = PageLayout(
            layer_bases=tuple(address + n * blocks * page_bytes for n in range(shape.layers)),
            block_stride=page_bytes,
            page_bytes=page_bytes,
            num_blocks=blocks,
            block_tokens=shape.block_tokens,
            heads=shape.heads,
            first_head=0,
            total_heads=shape.heads,
        )

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers and heads."""
        return self.shape.token_bytes

    def geometry(self, chunk_tokens: int) -> ChunkGeometry:
        """The chunks that the engine writes: vLLM's."""
        shape = self.shape
        item = shape.dtype.itemsize
        return ChunkGeometry(
            layers=shape.layers,
            chunk_tokens=chunk_tokens,
            block_tokens=shape.block_tokens,
            heads=shape.heads,
            key_bytes=shape.head_items * item,
            value_bytes=shape.head_items * item,
            item_bytes=item,
            order=shape.order,
            number=str(shape.dtype).removeprefix("torch."),
        )

    def computed_so_far(self) -> WhenReady | None:
        """A wait for the kernels given to the device so far; None on CPU, where they are done."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        wait: WhenReady = event.synchronize
        return wait
