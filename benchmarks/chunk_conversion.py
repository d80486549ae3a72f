"""What does it cost that a chunk was stored by an engine with other pages?

One core. ``--megabytes`` of KV, layer by layer in chunks of 256 tokens, are turned from one page
format into another, as the worker of an engine does it when it loads and saves: ``convert`` from
chunk to chunk, ``gather`` from random pages of an engine's memory into a chunk, ``scatter`` from a
chunk into random pages. In every round each case and the plain copy of the same bytes, layer by
layer too, run one after the other. Before anything is timed, the bytes are compared with the torch
reference. The ratio is the plain copy's time over the case's: 1 is a copy.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from harness import report
from harness.stats import summarise

from splitserve.kernels import reference
from splitserve.kernels.convert_pages import convert_pages
from splitserve.kernels.host_pages import gather_pages, scatter_pages
from splitserve.kernels.page_formats import PageFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

CHUNK_TOKENS = 256
GB = 1e9


@dataclass(frozen=True)
class Model:
    """What decides how large pages are."""

    name: str
    heads: int
    head_size: int
    item_bytes: int
    large_block: int
    small_block: int
    has_amx_pages: bool

    def pages(self, order: str, block_tokens: int) -> PageFormat:
        """A format of this model."""
        size = self.head_size
        return PageFormat(block_tokens, size, size, self.item_bytes, order)


MODELS = (
    Model("SmolLM2-135M, float32", 3, 64, 4, 128, 32, has_amx_pages=False),
    Model("Llama-3-8B, 2 bytes", 8, 128, 2, 128, 16, has_amx_pages=True),
)


class Case:
    """Two formats and their memory: ``[layers, blocks, heads, slice_bytes]`` on both sides."""

    def __init__(self, model: Model, source: PageFormat, target: PageFormat, size: int) -> None:
        self.name = " -> ".join(f"{side.order} {side.block_tokens}" for side in (source, target))
        self.source_format, self.target_format = source, target
        layer_bytes = CHUNK_TOKENS * model.heads * source.token_items * source.item_bytes
        self.layers = max(1, size // layer_bytes)
        self.bytes = self.layers * layer_bytes
        random = np.random.default_rng(1)
        self.source = self._memory(source, model.heads)
        self.source[:] = random.integers(0, 256, self.source.shape, np.uint8)
        self.target = self._memory(target, model.heads)
        self.copied = np.zeros_like(self.source)
        self.source_ids = random.permutation(self.source.shape[1]).tolist()
        self.target_ids = random.permutation(self.target.shape[1]).tolist()

    def _memory(self, page_format: PageFormat, heads: int) -> npt.NDArray[np.uint8]:
        blocks = CHUNK_TOKENS // page_format.block_tokens
        return np.zeros((self.layers, blocks, heads, page_format.slice_bytes), np.uint8)

    def plain(self) -> None:
        """As many bytes, as they are."""
        for layer in range(self.layers):
            np.copyto(self.copied[layer], self.source[layer])

    def convert(self) -> None:
        """Chunk to chunk."""
        for source, target in zip(self.source, self.target, strict=True):
            convert_pages(source, self.source_format, self.target_format, target)

    def gather(self) -> None:
        """The source's pages into a chunk of the target's format."""
        for source, target in zip(self.source, self.target, strict=True):
            gather_pages(source, self.source_ids, self.source_format, self.target_format, target)

    def scatter(self) -> None:
        """A chunk of the source's format into the target's pages."""
        for source, target in zip(self.source, self.target, strict=True):
            scatter_pages(source, self.source_format, target, self.target_ids, self.target_format)

    def check(self) -> None:
        """Each of the three gives the reference's bytes, in the first and the last layer."""
        for action in (self.convert, self.gather, self.scatter):
            action()
            for layer in (0, self.layers - 1):
                pages, converted = self.source[layer], self.target[layer]
                if action == self.gather:
                    pages = pages[self.source_ids]
                if action == self.scatter:
                    converted = converted[self.target_ids]
                assert np.array_equal(converted, self._expected(pages)), (self.name, action)

    def _expected(self, pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        formats = (self.source_format, self.target_format)
        expected: npt.NDArray[np.uint8] = reference.convert_pages(
            torch.from_numpy(pages), *formats
        ).numpy()
        return expected


def cases(model: Model, size: int) -> list[Case]:
    """Equal pages, other blocks, other orders and both."""
    vec, rows = (model.pages(order, model.large_block) for order in ("vec", "rows"))
    small_vec, small_rows = (replace(f, block_tokens=model.small_block) for f in (vec, rows))
    pairs = [
        (vec, vec),
        (vec, small_vec),
        (small_vec, vec),
        (rows, small_rows),
        (small_rows, rows),
        (rows, vec),
        (small_rows, vec),
        (vec, rows),
        (vec, small_rows),
    ]
    if model.has_amx_pages:
        amx = replace(vec, order="amx")
        pairs += [(small_rows, amx), (amx, small_rows), (vec, amx), (amx, vec)]
    return [Case(model, source, target, size) for source, target in pairs]


def seconds(action: Callable[[], None]) -> float:
    """CPU time of this thread, which does all of it: waiting for the core is not the copy's."""
    begun = time.thread_time()
    action()
    return time.thread_time() - begun


def measure(case: Case, rounds: int) -> dict[str, object]:
    """GB/s of the plain copy and of each way, and ratios round by round."""
    case.check()
    actions = {"plain": case.plain, "convert": case.convert}
    actions |= {"gather": case.gather, "scatter": case.scatter}
    took: dict[str, list[float]] = defaultdict(list)
    names = list(actions)
    for turn in range(rounds):
        for index in range(len(names)):
            name = names[(turn + index) % len(names)]
            took[name].append(seconds(actions[name]))
    plain = took["plain"]
    return {
        "case": case.name,
        "bytes": case.bytes,
        "gb_per_s": {
            name: summarise([case.bytes / GB / t for t in times]).as_dict()
            for name, times in took.items()
        },
        "ratio": {
            name: summarise([p / t for p, t in zip(plain, times, strict=True)]).as_dict()
            for name, times in took.items()
            if name != "plain"
        },
    }


def row(result: dict[str, object]) -> list[str]:
    """A line of the table."""
    speeds, ratios = result["gb_per_s"], result["ratio"]
    assert isinstance(speeds, dict)
    assert isinstance(ratios, dict)
    cells = [str(result["case"]), f"{speeds['plain']['median']:.1f}"]
    for name, ratio in ratios.items():
        cells.append(
            f"{speeds[name]['median']:.1f} ({ratio['median']:.2f} "
            f"[{ratio['low']:.2f} to {ratio['high']:.2f}])"
        )
    return cells


def main() -> None:
    """Measure and write the results."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=9, help="repeats of every measurement")
    options.add_argument("--megabytes", type=int, default=94, help="KV per measurement")
    options.add_argument("--core", type=int, default=0, help="where it runs")
    options.add_argument("--name", default="chunk-conversion", help="name of the result files")
    given = options.parse_args()
    os.sched_setaffinity(0, {given.core})
    torch.set_num_threads(1)
    header = ["pages", "plain copy", "convert", "gather", "scatter"]
    payload: dict[str, object] = {"rounds": given.rounds}
    sections = ["GB/s on one core, and in brackets the ratio to the plain copy of the same round."]
    for model in MODELS:
        results = []
        for case in cases(model, given.megabytes * 1_000_000):
            results.append(measure(case, given.rounds))
            print(model.name, *row(results[-1]), sep="  ", flush=True)
        payload[model.name] = results
        sections += [f"## {model.name}", report.table(header, [row(result) for result in results])]
    print(report.write(given.name, "Chunks of other pages", payload, sections))


if __name__ == "__main__":
    main()
