"""Tokens in and out of KV pages as torch tensors, whatever order the pages are in.

``page_formats.py`` says where a number lies as steps over its token and its channel in groups; a
strided view of a layer's memory with these groups as its axes lets torch write and read single
tokens in place. So an engine that computes with plain tensors can keep its KV in the pages of
another engine, without a second copy and without a conversion when pages move.

A layer's memory is ``[blocks, heads, slice_items]`` in the model's type, on any device, and
contiguous but for the step between blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from splitserve.kernels.page_formats import PageFormat, Placement


@dataclass(frozen=True)
class LayerPages:
    """One layer's keys and values, seen token by token."""

    keys: torch.Tensor  # [blocks, token groups, token in group, heads, channel groups, in group]
    values: torch.Tensor  # the same

    def write(
        self,
        block_ids: torch.Tensor,  # [tokens], of each token's block
        offsets: torch.Tensor,  # [tokens], its place in that block
        keys: torch.Tensor,  # [tokens, heads, key_items]
        values: torch.Tensor,  # [tokens, heads, value_items]
    ) -> None:
        """These tokens' KV is in the pages. No place may come twice."""
        for view, numbers in ((self.keys, keys), (self.values, values)):
            group = view.shape[2]
            view[block_ids, offsets // group, offsets % group] = numbers.reshape(
                numbers.shape[0], *view.shape[3:]
            )

    def read(
        self, block_ids: torch.Tensor, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [tokens, heads, key_items], [.., value_items]
        """Copies of the first ``tokens`` tokens of these blocks, in order."""
        found = []
        for view in (self.keys, self.values):
            blocks = view[block_ids]
            flat = blocks.reshape(-1, view.shape[3], view.shape[4] * view.shape[5])
            found.append(flat[:tokens])
        return found[0], found[1]


def layer_pages(layer: torch.Tensor, page_format: PageFormat) -> LayerPages:
    """Views of ``layer``, ``[blocks, heads, slice_items]``. Raises ``ValueError`` for memory that
    does not hold slices of this format.
    """
    if (
        layer.ndim != 3
        or layer.shape[2] != page_format.slice_items
        or layer.element_size() != page_format.item_bytes
        or layer.stride()[1:] != (page_format.slice_items, 1)
    ):
        raise ValueError(
            f"a layer of shape {tuple(layer.shape)}, strides {layer.stride()} and "
            f"{layer.element_size()} bytes a number does not hold slices of {page_format}"
        )
    return LayerPages(
        _view(layer, page_format.block_tokens, page_format.keys),
        _view(layer, page_format.block_tokens, page_format.values),
    )


def _view(layer: torch.Tensor, block_tokens: int, place: Placement) -> torch.Tensor:
    blocks, heads, slice_items = layer.shape
    return layer.as_strided(
        (
            blocks,
            block_tokens // place.token_group,
            place.token_group,
            heads,
            place.items // place.channel_group,
            place.channel_group,
        ),
        (
            layer.stride(0),
            place.token_group_step,
            place.token_step,
            slice_items,
            place.channel_group_step,
            place.channel_step,
        ),
        layer.storage_offset() + place.first,
    )
