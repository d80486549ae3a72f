"""Layout conversion spelled out: every order to plain keys and values, and back.

Slow and easy to believe. The fast paths (``convert_pages.py``, ``host_pages.py``,
``triton_pages.py``) have to give the same bytes.
"""

from __future__ import annotations

import torch

from splitserve.kernels.page_formats import PageFormat, require_same_numbers

_ITEM_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def read_tokens(pages: torch.Tensor, page_format: PageFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[tokens, heads, key_items]`` and values ``[tokens, heads, value_items]``.

    ``pages`` are bytes, ``[blocks, heads, slice_bytes]``. Numbers come as integers of their size.
    """
    blocks, heads, _ = pages.shape
    tokens = page_format.block_tokens
    k, v = page_format.key_items, page_format.value_items
    numbers = pages.contiguous().view(_ITEM_TYPES[page_format.item_bytes])
    if page_format.order == "rows":
        rows = numbers.reshape(blocks, heads, tokens, k + v).permute(0, 2, 1, 3)
        keys, values = rows[..., :k], rows[..., k:]
    else:
        keys, values = numbers[..., : tokens * k], numbers[..., tokens * k :]
    if page_format.order == "vec":
        keys = keys.reshape(blocks, heads, k, tokens).permute(0, 3, 1, 2)
        values = values.reshape(blocks, heads, tokens, v).permute(0, 2, 1, 3)
    if page_format.order == "amx":
        keys = keys.reshape(blocks, heads, tokens // 16, k // 2, 16, 2).permute(0, 2, 4, 1, 3, 5)
        values = values.reshape(blocks, heads, v // 16, tokens // 2, 16, 2)
        values = values.permute(0, 3, 5, 1, 2, 4)
    return keys.reshape(blocks * tokens, heads, k), values.reshape(blocks * tokens, heads, v)


def write_tokens(keys: torch.Tensor, values: torch.Tensor, page_format: PageFormat) -> torch.Tensor:
    """Pages ``[blocks, heads, slice_bytes]``, as bytes, of what ``read_tokens`` returns.

    The number of tokens is a multiple of the block's.
    """
    tokens = page_format.block_tokens
    k, v = page_format.key_items, page_format.value_items
    heads, blocks = keys.shape[1], keys.shape[0] // tokens
    keys = keys.reshape(blocks, tokens, heads, k).permute(0, 2, 1, 3)
    values = values.reshape(blocks, tokens, heads, v).permute(0, 2, 1, 3)
    if page_format.order == "rows":
        numbers = torch.cat((keys, values), dim=3)  # [blocks, heads, tokens, k + v]
        return numbers.reshape(blocks, heads, -1).view(torch.uint8)
    if page_format.order == "vec":
        keys = keys.permute(0, 1, 3, 2)  # [blocks, heads, k, tokens]
    if page_format.order == "amx":
        keys = keys.reshape(blocks, heads, tokens // 16, 16, k // 2, 2).permute(0, 1, 2, 4, 3, 5)
        values = values.reshape(blocks, heads, tokens // 2, 2, v // 16, 16)
        values = values.permute(0, 1, 4, 2, 5, 3)
    parts = (keys.reshape(blocks, heads, tokens * k), values.reshape(blocks, heads, tokens * v))
    return torch.cat(parts, dim=2).view(torch.uint8)


def convert_pages(
    source: torch.Tensor, source_format: PageFormat, target_format: PageFormat
) -> torch.Tensor:
    """The same tokens in another format: bytes ``[blocks, heads, slice_bytes]`` in and out."""
    require_same_numbers(source_format, target_format)
    return write_tokens(*read_tokens(source, source_format), target_format)
