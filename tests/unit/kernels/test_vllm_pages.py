"""The formats are those in which vLLM's CPU attention keeps its pages: its own op writes them."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from splitserve.kernels import reference
from splitserve.kernels.page_formats import PageFormat

ORDER_OF_ISA = {"vec": "vec", "vec16": "vec", "amx": "amx"}
SHAPES = [(32, 64), (128, 64), (64, 128), (32, 96), (16, 64), (32, 80), (48, 112)]
HEADS, BLOCKS = 3, 2


def written_by_vllm(
    keys: torch.Tensor, values: torch.Tensor, block_tokens: int, isa: str
) -> torch.Tensor:
    """Bytes ``[blocks, heads, slice_bytes]`` of pages that hold ``[tokens, heads, items]``."""
    tokens, heads, items = keys.shape
    cache = torch.zeros(tokens // block_tokens, heads, block_tokens * 2, items, dtype=keys.dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    slots = torch.arange(tokens)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
    return cache.view(torch.uint8).reshape(tokens // block_tokens, heads, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("block_tokens", "head_size"), SHAPES)
def test_formats_are_vllms(block_tokens: int, head_size: int, dtype: torch.dtype) -> None:
    """What vLLM writes with the instruction set that it chooses on this machine, and with the one
    that it has everywhere, is what the reference says of that order.
    """
    everywhere = "vec" if block_tokens % 32 == 0 and head_size % 32 == 0 else "vec16"
    keys = torch.randn(BLOCKS * block_tokens, HEADS, head_size).to(dtype)
    values = torch.randn(BLOCKS * block_tokens, HEADS, head_size).to(dtype)
    for isa in {everywhere, _get_attn_isa(dtype, block_tokens, head_size)}:
        order = ORDER_OF_ISA[isa]
        page_format = PageFormat(block_tokens, head_size, head_size, dtype.itemsize, order)
        pages = written_by_vllm(keys, values, block_tokens, isa)
        read_keys, read_values = reference.read_tokens(pages, page_format)
        assert torch.equal(read_keys.view(dtype), keys), isa
        assert torch.equal(read_values.view(dtype), values), isa


def test_the_last_tokens_place_does_not_depend_on_those_before() -> None:
    """A block that is half full is converted whole: the tokens that are there are right."""
    keys, values = torch.randn(2, 37, HEADS, 64)
    cache = torch.zeros(1, HEADS, 128, 64)
    key_cache, value_cache = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, torch.arange(37), "vec")
    pages = cache.view(torch.uint8).reshape(1, HEADS, -1)
    read_keys, read_values = reference.read_tokens(pages, PageFormat(64, 64, 64, 4, "vec"))
    assert torch.equal(read_keys[:37].view(torch.float32), keys)
    assert torch.equal(read_values[:37].view(torch.float32), values)
