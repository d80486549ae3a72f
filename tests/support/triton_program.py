"""The Triton kernels in a process of their own, since Triton decides at its first import how it
runs, and vLLM may have switched it off in a test's process.

``interpret``: on CPU tensors; ``cuda``: on the GPU, and then how fast. Prints one JSON line: the
number of cases, those that differ from the reference, and for ``cuda`` seconds per copy.
``compile``: for a GPU that need not be there; prints the memory accesses of each kernel.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from itertools import product
from math import lcm

MODE = sys.argv[1]
if MODE == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # unset it warns; nothing here computes with floats

import torch  # noqa: E402
import triton  # noqa: E402

from splitserve.kernels import reference, triton_pages  # noqa: E402
from splitserve.kernels.page_formats import PageFormat  # noqa: E402

ITEM_TYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}
BLOCKS = ((1, 1), (1, 3), (5, 5), (16, 16), (16, 128), (128, 16), (32, 64), (64, 32), (48, 32))
SIZES = ((32, 32), (64, 64), (96, 96), (128, 128), (64, 0), (160, 32), (5, 3))
ORDERS = tuple(product(("rows", "vec", "amx"), repeat=2))
HEADS = (1, 3, 8)
CASES_PER_ORDERS = 3 if MODE == "interpret" else 40
PROGRAMS_LIMIT = 6 if MODE == "interpret" else 4096
"""Of one copy: the interpreter takes tens of milliseconds for each."""


def cases() -> list[tuple[PageFormat, PageFormat, int, bool]]:
    """Page format, chunk format, heads, whether tokens lie outside heads in the memory."""
    chosen = random.Random(3)
    found = []
    for orders in ORDERS:
        count = 0
        while count < CASES_PER_ORDERS:
            blocks, sizes = chosen.choice(BLOCKS), chosen.choice(SIZES)
            item_bytes = chosen.choice((1, 2) if "amx" in orders else (1, 2, 4))
            if "amx" in orders and (sizes[0] % 2 or any(n % 16 for n in blocks)):
                continue
            page_format = PageFormat(blocks[0], *sizes, item_bytes, orders[0])
            chunk_format = PageFormat(blocks[1], *sizes, item_bytes, orders[1])
            heads = chosen.choice(HEADS)
            tiles = pages(page_format, chunk_format) * page_format.block_tokens
            tiles //= triton_pages.tokens_of_a_tile(page_format, chunk_format)
            if tiles * heads <= PROGRAMS_LIMIT:
                tokens_outside = orders[0] == "rows" and chosen.random() < 0.5
                found.append((page_format, chunk_format, heads, tokens_outside))
                count += 1
    return found


def pages(page_format: PageFormat, chunk_format: PageFormat) -> int:
    """At least two, in a whole number of the chunk's blocks."""
    tokens = lcm(page_format.block_tokens, chunk_format.block_tokens)
    return max(2, tokens // page_format.block_tokens)


def new_memory(
    page_format: PageFormat, blocks: int, heads: int, tokens_outside: bool, device: str
) -> torch.Tensor:
    """Random ``[blocks, heads, tokens, items]``."""
    tokens, items = page_format.block_tokens, page_format.token_items
    shape = (blocks, tokens, heads, items) if tokens_outside else (blocks, heads, tokens, items)
    size = shape[0] * shape[1] * shape[2] * shape[3] * page_format.item_bytes
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8)
    memory = memory.view(ITEM_TYPES[page_format.item_bytes]).reshape(shape).to(device)
    return memory.transpose(1, 2) if tokens_outside else memory


def as_bytes(pages: torch.Tensor) -> torch.Tensor:
    """``[blocks, heads, slice_bytes]``, in memory of their own."""
    pages = pages.contiguous().view(torch.uint8)
    return pages.reshape(pages.shape[0], pages.shape[1], -1).cpu()


def is_right(
    page_format: PageFormat, chunk_format: PageFormat, heads: int, tokens_outside: bool, device: str
) -> bool:
    """Gathered bytes are the reference's; scattered ones are there, and no others have changed."""
    count = pages(page_format, chunk_format)
    memory = new_memory(page_format, 2 * count + 1, heads, tokens_outside, device)
    ids = torch.randperm(2 * count + 1, dtype=torch.int32)
    read, written = ids[:count], ids[count : 2 * count]
    before = as_bytes(memory)
    chunk = triton_pages.gather_pages(memory, read.to(device), page_format, chunk_format)
    expected = reference.convert_pages(before[read], page_format, chunk_format)
    gathered = torch.equal(chunk.cpu(), expected)
    triton_pages.scatter_pages(chunk, chunk_format, memory, written.to(device), page_format)
    before[written] = before[read]
    return gathered and torch.equal(as_bytes(memory), before)


def seconds(page_format: PageFormat, chunk_format: PageFormat) -> dict[str, float]:
    """Of a gather, a scatter and a plain copy of 64 MiB in random pages of the GPU's memory."""
    heads = 8
    count = (64 << 20) // (page_format.slice_bytes * heads)
    memory = new_memory(page_format, 2 * count, heads, False, "cuda")
    ids = torch.randperm(2 * count)[:count].to("cuda")
    chunk = triton_pages.gather_pages(memory, ids, page_format, chunk_format)
    other = torch.empty_like(chunk)
    gather, scatter = triton_pages.gather_pages, triton_pages.scatter_pages
    bench = triton.testing.do_bench
    return {
        "gather": bench(lambda: gather(memory, ids, page_format, chunk_format, chunk)) / 1e3,
        "scatter": bench(lambda: scatter(chunk, chunk_format, memory, ids, page_format)) / 1e3,
        "copy": bench(lambda: other.copy_(chunk)) / 1e3,
    }


def accesses(
    page_format: PageFormat, chunk_format: PageFormat, into_chunk: bool
) -> dict[str, list[str]]:
    """Widths of global loads and stores, compiled for a GPU of today, memory aligned."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = triton_pages.move_tiles
    constants = triton_pages.tile_constants(page_format, chunk_format)
    constants["INTO_CHUNK"] = into_chunk
    numbers = f"*i{8 * page_format.item_bytes}"
    kinds = {"memory": numbers, "block_ids": "*i32", "chunk": numbers}
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {n: "constexpr" if n in constants else kinds.get(n, "i64") for n in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(7)},
    )
    assembly = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return {
        kind: sorted(set(re.findall(rf"{kind}\.global\.([\w.]+)", assembly)))
        for kind in ("ld", "st")
    }


def main() -> dict[str, object]:
    """What is printed."""
    rows, vec = (PageFormat(16, 128, 128, 2, order) for order in ("rows", "vec"))
    large = PageFormat(128, 128, 128, 2, "vec")
    if MODE == "compile":
        pairs = {"equal": (rows, rows), "transposed": (rows, large), "as vec": (vec, large)}
        return {
            f"{name}, {'gather' if gather else 'scatter'}": accesses(*pair, gather)
            for name, pair in pairs.items()
            for gather in (True, False)
        }
    device = "cuda" if MODE == "cuda" else "cpu"
    made = cases()
    wrong = [str(case) for case in made if not is_right(*case, device)]
    answer: dict[str, object] = {"cases": len(made), "wrong": wrong}
    if MODE == "cuda":
        answer["seconds"] = {"equal": seconds(rows, rows), "transposed": seconds(rows, large)}
    return answer


print(json.dumps(main()))
