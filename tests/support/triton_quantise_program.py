"""The Triton kernels that dequantise into pages and quantise out of them, in a process of its own
(``triton_program.py`` says why): ``interpret`` on CPU tensors, ``cuda`` on the GPU. Prints one JSON
line: the number of cases and those that differ from the reference, of either direction.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

MODE = sys.argv[1]
if MODE == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402

from splitserve.kernels.convert_pages import convert_pages  # noqa: E402
from splitserve.kernels.page_formats import PageFormat  # noqa: E402
from splitserve.kernels.quantise import (  # noqa: E402
    LARGEST,
    QuantisedRows,
    can_quantise,
    dequantise_rows,
    quantise_rows,
    read_numbers,
    widened,
    write_numbers,
)
from splitserve.kernels.triton_dequantise import (  # noqa: E402
    QuantisedTensors,
    dequantise_into_pages,
)
from splitserve.kernels.triton_quantise import quantise_pages  # noqa: E402

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CASES = [
    ("rows", "bfloat16", (16, 64, 64), 2, True, 4), ("rows", "float32", (5, 5, 3), 2, True, 4),
    ("vec", "bfloat16", (16, 32, 48), 2, False, 0), ("vec", "float32", (8, 16, 16), 1, True, 0),
    ("amx", "bfloat16", (16, 32, 32), 2, True, 4), ("rows", "float16", (16, 160, 32), 1, False, 0),
    ("rows", "bfloat16", (4, 24, 0), 2, False, 4), ("rows", "float16", (1, 2, 1), 1, True, 0),
    ("vec", "float16", (12, 7, 130), 1, True, 5),
]  # fmt: skip
"""Order, kind of number, (block tokens, key items, value items), heads, whether means go first,
sinks.
"""
LIMITS = [("float32", 3.3e38), ("float16", 6.4e4), ("bfloat16", 3.3e38)]
"""A number of each kind that is only just taken."""
PAGES, USED = 5, 3
DEVICE = "cuda" if MODE == "cuda" else "cpu"
IDS = torch.tensor([4, 1, 2], dtype=torch.int32).to(DEVICE)


def fills_pages(
    order: str, number: str, sizes: tuple[int, int, int], heads: int, centred: bool, sinks: int
) -> bool:
    """The pages are the reference's bytes, and no other byte has changed."""
    page_format, dtype = _format(order, number, sizes), TYPES[number]
    tokens = USED * page_format.block_tokens
    rows = _kv(number, heads, tokens, page_format)
    numbers = read_numbers(rows[:, sinks:].copy(), number)
    quantised = quantise_rows(numbers, page_format.key_items, 127, centred=centred)
    expected = rows.copy()
    dequantise_rows(quantised, number, expected[:, sinks:])
    memory = torch.full(
        (PAGES, heads, page_format.block_tokens, page_format.token_items), 3.0, dtype=dtype
    ).to(DEVICE)
    before = _bytes(memory)
    kept = torch.from_numpy(rows[:, :sinks].copy()).view(dtype).to(DEVICE) if sinks else None
    given = _tensors(quantised)._replace(sinks=kept)
    dequantise_into_pages(given, memory, IDS, page_format)
    before[IDS.cpu().numpy()] = _pages(expected, page_format)
    return bool(np.array_equal(_bytes(memory), before))


def reads_pages(
    order: str, number: str, sizes: tuple[int, int, int], heads: int, centred: bool, sinks: int
) -> bool:
    """What is made of pages is the reference's to the bit, with the codecs' numbers of levels."""
    page_format = _format(order, number, sizes)
    levels = 15 if centred else 127
    rows = _kv(number, heads, USED * page_format.block_tokens, page_format)
    numbers = read_numbers(rows[:, sinks:].copy(), number)
    if not can_quantise(numbers, number):
        return False
    expected = _tensors(quantise_rows(numbers, page_format.key_items, levels, centred=centred))
    made, can_be = quantise_pages(
        _memory(rows, number, page_format), IDS, page_format, levels, centred=centred, sinks=sinks
    )
    if not bool(can_be) or (made.sinks is None) == bool(sinks):
        return False
    kept = b"" if made.sinks is None else made.sinks.cpu().view(torch.uint8).numpy().tobytes()
    return kept == rows[:, :sinks].tobytes() and all(
        one.cpu().numpy().tobytes() == other.cpu().numpy().tobytes()
        for one, other in zip(made[:5], expected[:5], strict=True)
    )


def refuses(number: str, taken: float) -> bool:
    """One number that the reference does not take says so, in a key or a value of any row but the
    sinks; the largest that it takes does not.
    """
    page_format, size = _format("rows", number, (1, 2, 1)), TYPES[number].itemsize
    beyond = LARGEST[number]
    places = [(taken, 1, 0), (-taken, 2, 2), (beyond, 1, 2), (-beyond, 2, 1), (np.inf, 2, 0),
              (np.nan, 1, 2), (np.nan, 0, 1)]  # fmt: skip
    found = []
    for value, token, item in places:
        rows = _kv(number, 1, USED, page_format)
        one = np.array([[value]], np.float32)
        write_numbers(one, number, rows[:, token, item * size : (item + 1) * size])
        expected = can_quantise(read_numbers(rows[:, 1:].copy(), number), number)
        memory = _memory(rows, number, page_format)
        _, can_be = quantise_pages(memory, IDS, page_format, 127, centred=False, sinks=1)
        found.append(bool(can_be) == expected == (abs(value) == taken or token == 0))
    return all(found)


def _format(order: str, number: str, sizes: tuple[int, int, int]) -> PageFormat:
    return PageFormat(*sizes, TYPES[number].itemsize, order)


def _kv(number: str, heads: int, tokens: int, page_format: PageFormat) -> Bytes:
    """Rows ``[heads, tokens, bytes]``: some channels are far from zero, one and one token are zero,
    one channel is too small for a scale, and one lies at halves of its scale.
    """
    rng = np.random.default_rng(5)
    items = page_format.token_items
    numbers = rng.standard_normal((heads, tokens, items)).astype(np.float32) * 7
    numbers[..., ::5] += 40
    numbers[:, tokens // 2] = 0
    if page_format.key_items > 3:
        numbers[..., 1], numbers[..., 2] = -0.0, numbers[..., 2] * np.float32(1e-40)
        numbers[..., 3] = rng.integers(-254, 255, (heads, tokens)) / 2
    out = np.empty((heads, tokens, items * TYPES[number].itemsize), np.uint8)
    write_numbers(numbers, number, out)
    return out


def _memory(rows: Bytes, number: str, page_format: PageFormat) -> torch.Tensor:
    """Pages of which those of ``IDS`` hold the rows, the others what no codec takes."""
    heads = rows.shape[0]
    shape = (PAGES, heads, page_format.block_tokens, page_format.token_items)
    memory = torch.full(shape, float("nan"), dtype=TYPES[number])
    flat = memory.view(torch.uint8).numpy().reshape(PAGES, heads, -1)
    flat[IDS.cpu().numpy()] = _pages(rows, page_format)
    return memory.to(DEVICE)


def _pages(rows: Bytes, page_format: PageFormat) -> Bytes:
    """``[pages, heads, slice_bytes]``."""
    whole = PageFormat(
        rows.shape[1], page_format.key_items, page_format.value_items, page_format.item_bytes,
        "rows",
    )  # fmt: skip
    return convert_pages(rows.reshape(1, rows.shape[0], -1), whole, page_format)


def _tensors(quantised: QuantisedRows) -> QuantisedTensors:
    keys, key_scales, means, values, value_scales = quantised
    wide = widened(key_scales)[:, 0]
    offsets = np.zeros_like(wide) if means is None else widened(means)[:, 0]
    scales = widened(value_scales)[..., 0]
    parts = (keys, wide, offsets, values, scales)
    return QuantisedTensors(*(torch.from_numpy(part.copy()).to(DEVICE) for part in parts))


def _bytes(memory: torch.Tensor) -> Bytes:
    """``[pages, heads, slice_bytes]``."""
    flat: Bytes = memory.cpu().contiguous().view(torch.uint8).numpy().copy()
    return flat.reshape(memory.shape[0], memory.shape[1], -1)


wrong = [f"{of.__name__}{c}" for of in (fills_pages, reads_pages) for c in CASES if not of(*c)]
wrong += [f"refuses{c}" for c in LIMITS if not refuses(*c)]
print(json.dumps({"cases": 2 * len(CASES) + len(LIMITS), "wrong": wrong}))
