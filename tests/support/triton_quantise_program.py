"""The Triton kernel that dequantises into pages, in a process of its own (``triton_program.py``
says why): ``interpret`` on CPU tensors, ``cuda`` on the GPU. Prints one JSON line: the number of
cases and those that differ from the reference.
"""

from __future__ import annotations

import json
import os
import sys

MODE = sys.argv[1]
if MODE == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402

from splitserve.kernels.convert_pages import convert_pages  # noqa: E402
from splitserve.kernels.page_formats import PageFormat  # noqa: E402
from splitserve.kernels.quantise import (  # noqa: E402
    QuantisedRows,
    dequantise_rows,
    quantise_rows,
    widened,
)
from splitserve.kernels.triton_quantise import (  # noqa: E402
    QuantisedTensors,
    dequantise_into_pages,
)

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CASES = [
    ("rows", "bfloat16", (16, 64, 64), 3, True), ("rows", "float32", (5, 5, 3), 2, True),
    ("vec", "bfloat16", (16, 32, 48), 2, False), ("vec", "float32", (8, 16, 16), 1, True),
    ("amx", "bfloat16", (16, 32, 32), 2, True), ("rows", "float16", (16, 160, 32), 1, False),
    ("rows", "bfloat16", (4, 24, 0), 2, False),
]  # fmt: skip
"""Order, kind of number, (block tokens, key items, value items), heads, whether means go first."""
PAGES, USED = 5, 3


def is_right(
    order: str, number: str, sizes: tuple[int, int, int], heads: int, centred: bool
) -> bool:
    """The pages are the reference's bytes, and no other byte has changed."""
    block_tokens, key_items, value_items = sizes
    items = key_items + value_items
    dtype = TYPES[number]
    page_format = PageFormat(block_tokens, key_items, value_items, dtype.itemsize, order)
    rng = np.random.default_rng(5)
    tokens = USED * block_tokens
    rows = rng.standard_normal((heads, tokens, items)).astype(np.float32) * 7
    quantised = quantise_rows(rows, key_items, 127, centred=centred)
    expected = np.empty((heads, tokens, items * dtype.itemsize), np.uint8)
    dequantise_rows(quantised, number, expected)
    whole = PageFormat(tokens, key_items, value_items, dtype.itemsize, "rows")
    pages = convert_pages(expected.reshape(1, heads, -1), whole, page_format)
    device = "cuda" if MODE == "cuda" else "cpu"
    memory = torch.full((PAGES, heads, block_tokens, items), 3.0, dtype=dtype, device=device)
    before = _bytes(memory)
    ids = torch.tensor([4, 1, 2], dtype=torch.int32)
    dequantise_into_pages(_tensors(quantised, device), memory, ids.to(device), page_format)
    before[ids.numpy()] = pages
    return bool(np.array_equal(_bytes(memory), before))


def _tensors(quantised: QuantisedRows, device: str) -> QuantisedTensors:
    keys, key_scales, means, values, value_scales = quantised
    wide = widened(key_scales)[:, 0]
    offsets = np.zeros_like(wide) if means is None else widened(means)[:, 0]
    scales = widened(value_scales)[..., 0]
    parts = (keys, wide, offsets, values, scales)
    return QuantisedTensors(*(torch.from_numpy(part.copy()).to(device) for part in parts))


def _bytes(memory: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """``[pages, heads, slice_bytes]``."""
    flat: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = (
        memory.cpu().contiguous().view(torch.uint8).numpy().copy()
    )
    return flat.reshape(memory.shape[0], memory.shape[1], -1)


print(json.dumps({"cases": len(CASES), "wrong": [str(c) for c in CASES if not is_right(*c)]}))
