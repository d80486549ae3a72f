"""Tokens written and read in place, against the layouts spelled out."""

from __future__ import annotations

import pytest
import torch

from splitserve.kernels import reference
from splitserve.kernels.page_formats import ORDERS, PageFormat
from splitserve.kernels.torch_pages import layer_pages

BLOCKS, HEADS, TOKENS, ITEMS = 5, 3, 32, 64


def page_format(order: str, dtype: torch.dtype) -> PageFormat:
    return PageFormat(TOKENS, ITEMS, ITEMS, dtype.itemsize, order)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_tokens_lie_where_the_reference_has_them(order: str, dtype: torch.dtype) -> None:
    """Written one by one, in any sequence of blocks, they are the pages of the same tokens; read
    back, they are the same tokens; and no other block has changed.
    """
    if order == "amx" and dtype != torch.bfloat16:
        with pytest.raises(ValueError, match="1 or 2 bytes"):
            page_format(order, dtype)
        return
    form = page_format(order, dtype)
    memory = torch.full((2, BLOCKS, HEADS, form.slice_items), -1.0, dtype=dtype)
    pages = layer_pages(memory[1], form)
    tokens, table = 2 * TOKENS, torch.tensor([3, 1])
    keys, values = torch.randn(2, tokens, HEADS, ITEMS).to(dtype)
    positions = torch.randperm(tokens)
    pages.write(table[positions // TOKENS], positions % TOKENS, keys[positions], values[positions])
    expected = reference.write_tokens(keys, values, form).view(dtype)
    assert torch.equal(memory[1, table].view(expected.shape), expected)
    read_keys, read_values = pages.read(table, tokens - 5)
    assert torch.equal(read_keys, keys[:-5])
    assert torch.equal(read_values, values[:-5])
    assert (memory[0] == -1).all()
    assert (memory[1, [0, 2, 4]] == -1).all()


def test_memory_of_another_shape_is_refused() -> None:
    """Its strides would lead into somebody else's pages."""
    form = page_format("rows", torch.float32)
    good = torch.zeros(BLOCKS, HEADS, form.slice_items)
    layer_pages(good, form)
    for bad in (good[:, :, :-1], good.to(torch.bfloat16), good[0]):
        with pytest.raises(ValueError, match="does not hold slices"):
            layer_pages(bad, form)
    with pytest.raises(ValueError, match="does not hold slices"):
        layer_pages(torch.zeros(HEADS, form.slice_items, BLOCKS).permute(2, 0, 1), form)
