"""The formats are those in which vLLM's CPU attention keeps its pages: its own op writes them."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from splitserve.kernels import reference
from splitserve.kernels.page_formats import PageFormat

ORDER_OF_ISA = {"vec": "vec", "vec16": "vec", "amx": "amx"}
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SHAPES = [(32, 64), (128, 64), (64, 128), (32, 96), (16, 64), (32, 80), (48, 112)]
HEADS, BLOCKS = 3, 2


def written_by_vllm(
    keys: torch.Tensor, values: torch.Tensor, block_tokens: int, isa: str, stored: str = "auto"
) -> torch.Tensor:
    """Bytes ``[blocks, heads, slice_bytes]`` of pages that hold ``[tokens, heads, items]``."""
    tokens, heads, items = keys.shape
    dtype = keys.dtype if stored == "auto" else torch.uint8
    cache = torch.zeros(tokens // block_tokens, heads, block_tokens * 2, items, dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    slots = torch.arange(tokens)
    ops.cpu_attn_reshape_and_cache(
        keys, values, key_cache, value_cache, slots, isa, kv_cache_dtype=stored
    )
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


def fp8_types() -> list[str]:
    """Those that vLLM stores on this machine."""
    try:
        _get_attn_isa(torch.bfloat16, 32, 64, "fp8_e4m3")
    except NotImplementedError:
        return []
    return list(FP8)


def test_fp8_pages_are_in_the_same_orders() -> None:
    """One byte takes each number's place, where vLLM stores FP8 at all."""
    for stored in fp8_types():
        numbers = torch.randint(0x20, 0x50, (2, BLOCKS * 64, HEADS, 64), dtype=torch.uint8)
        keys, values = numbers.view(FP8[stored]).to(torch.bfloat16)
        for isa in {"vec", _get_attn_isa(torch.bfloat16, 64, 64, stored)}:
            pages = written_by_vllm(keys, values, 64, isa, stored)
            page_format = PageFormat(64, 64, 64, 1, ORDER_OF_ISA[isa])
            read_keys, read_values = reference.read_tokens(pages, page_format)
            assert torch.equal(read_keys, numbers[0]), (stored, isa)
            assert torch.equal(read_values, numbers[1]), (stored, isa)


def test_a_block_that_is_not_full_holds_its_tokens_in_place() -> None:
    """Converted whole, its tokens are right, whatever lies in the places of the others."""
    keys, values = torch.randn(2, 37, HEADS, 64)
    cache = torch.zeros(1, HEADS, 128, 64)
    key_cache, value_cache = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, torch.arange(37), "vec")
    pages = cache.view(torch.uint8).reshape(1, HEADS, -1)
    read_keys, read_values = reference.read_tokens(pages, PageFormat(64, 64, 64, 4, "vec"))
    assert torch.equal(read_keys[:37].view(torch.float32), keys)
    assert torch.equal(read_values[:37].view(torch.float32), values)
