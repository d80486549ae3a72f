"""How fast does the cache's mooncake tier read and write chunks, beside Mooncake's own client?

One real master and one owner of memory, each a process on loopback. Chunks lie in an arena, headers
too: those of the cache server's readers are in shared memory as well. In every round each
contestant moves the same chunks, in an order that rotates; ratios are to the bare client of the
same round.

- *bare*: ``batch_put_from_multi_buffers`` and ``batch_get_into_multi_buffers`` in this process, all
  memory registered once, as many chunks to a call as the tier takes. Twice, with the same code:
  what the second says of the first is what noise says (A/A).
- *bare, one a call*: the same without batches.
- *tier*: ``read`` in sixteens, as the cache server's threads do; ``write`` of all. Its client runs
  in a process of its own.

What is written is removed before each measurement, untimed. Before anything is timed, every
contestant has read the right bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import report
from harness.stats import summarise
from harness.store_servers import mooncake_store

from splitserve.kv_transfer.cache.arena import Arena
from splitserve.kv_transfer.cache.settings import TierSettings
from splitserve.kv_transfer.cache.tier_workers import READ_BATCH_LIMIT
from splitserve.kv_transfer.cache.tiers.base import (
    HEADER_BYTES,
    ChunkBuffers,
    ReadOutcome,
    WriteOutcome,
)
from splitserve.kv_transfer.cache.tiers.mooncake import GROUP_BYTES
from splitserve.kv_transfer.cache.tiers.registry import create

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.kv_transfer.cache.tiers.base import Tier

GB = 1e9
KIB, MIB = 1 << 10, 1 << 20
SIZES = {"256 KiB": (256 * KIB, 64), "4 MiB": (4 * MIB, 32), "11.8 MB": (2880 * 4096, 12)}
"""Name to bytes of a body and number of chunks; the last is 256 tokens of SmolLM2-135M."""
ARENA_BYTES = 320 * MIB
SEGMENT_MB = 1024
TARGET = 0.8


class Chunks:
    """Chunks of one size to be stored, and places that they are read into, all in the arena."""

    def __init__(self, arena: Arena, body_bytes: int, count: int) -> None:
        self.written, self.read = [], []
        size = HEADER_BYTES + body_bytes
        for number in range(count):
            key = os.urandom(32)
            for chunks, first in ((self.written, 0), (self.read, count)):
                start = (first + number) * size
                whole = arena.memory.view[start : start + size]
                chunks.append(ChunkBuffers(key, whole[:HEADER_BYTES], whole[HEADER_BYTES:]))
                whole[:] = os.urandom(size)
                whole.release()
        self.names = [f"bare:{chunk.key.hex()}" for chunk in self.written]
        self.total_bytes = count * (HEADER_BYTES + body_bytes)

    def forget(self) -> None:
        """What was read is gone."""
        for chunk in self.read:
            chunk.header[:] = bytes(HEADER_BYTES)
            chunk.body[:] = bytes(len(chunk.body))

    def check(self, who: str) -> None:
        """Every byte that was written has been read."""
        for got, put in zip(self.read, self.written, strict=True):
            assert got.header == put.header, f"{who}: a wrong header"
            assert got.body == put.body, f"{who}: a wrong body"

    def release(self) -> None:
        """The arena may be closed."""
        for chunk in (*self.written, *self.read):
            chunk.header.release()
            chunk.body.release()


class Bare:
    """Mooncake's client in this process, for one set of chunks."""

    def __init__(self, store: Any, chunks: Chunks, chunks_per_call: int) -> None:
        self._store, self._names = store, chunks.names
        self._chunks_per_call = chunks_per_call
        self._written = _places(chunks.written)
        self._read = _places(chunks.read)

    def write(self) -> None:
        addresses, sizes = self._written
        for part in self._parts(self._chunks_per_call):
            done = self._store.batch_put_from_multi_buffers(
                self._names[part], addresses[part], sizes[part]
            )
            assert set(done) == {0}

    def read(self) -> None:
        addresses, sizes = self._read
        for part in self._parts(min(self._chunks_per_call, READ_BATCH_LIMIT)):
            done = self._store.batch_get_into_multi_buffers(
                self._names[part], addresses[part], sizes[part]
            )
            assert done == [sum(each) for each in sizes[part]]

    def remove(self) -> None:
        self._store.batch_remove(self._names, True)

    def _parts(self, step: int) -> list[slice]:
        return [slice(start, start + step) for start in range(0, len(self._names), step)]


class OfTier:
    """The tier, for one set of chunks."""

    def __init__(self, tier: Tier, chunks: Chunks, remove: Callable[[Sequence[str]], None]) -> None:
        self._tier, self._chunks, self._remove = tier, chunks, remove

    def write(self) -> None:
        assert set(self._tier.write(self._chunks.written)) == {WriteOutcome.WRITTEN}

    def read(self) -> None:
        chunks = self._chunks.read
        for start in range(0, len(chunks), READ_BATCH_LIMIT):
            batch = chunks[start : start + READ_BATCH_LIMIT]
            outcomes = [outcome for _, outcome in self._tier.read(batch)]
            assert outcomes == [ReadOutcome.HIT] * len(batch)

    def remove(self) -> None:
        self._remove([f"tier:{chunk.key.hex()}" for chunk in self._chunks.written])


def measure(
    what: str, size: str, chunks: Chunks, contestants: dict[str, Bare | OfTier], rounds: int
) -> list[dict[str, Any]]:
    """A row for each of them."""
    rates: dict[str, list[float]] = defaultdict(list)
    names = list(contestants)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            contestant = contestants[name]
            if what == "write":
                contestant.remove()
            began = time.perf_counter()
            contestant.write() if what == "write" else contestant.read()
            rates[name].append(chunks.total_bytes / (time.perf_counter() - began) / GB)
    rows = []
    for name in names:
        row = {"what": what, "size": size, "chunks": len(chunks.names), "who": name}
        row["gb_per_s"] = summarise(rates[name]).as_dict()
        pairs = zip(rates[name], rates["bare"], strict=True)
        row["to_bare"] = summarise([one / other for one, other in pairs]).as_dict()
        rows.append(row)
        print(f"{what:6} {size:8} {name:16} {row['gb_per_s']['median']:.2f} GB/s", flush=True)
    return rows


def run(rounds: int, sizes: Sequence[str]) -> list[dict[str, Any]]:
    """Everything, on one store."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    from mooncake.store import MooncakeDistributedStore

    rows: list[dict[str, Any]] = []
    with mooncake_store(_program, SEGMENT_MB) as (port, admin_port):
        store, arena = MooncakeDistributedStore(), Arena(ARENA_BYTES)
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", f"127.0.0.1:{port}") == 0
        arena.memory.touch(0, arena.size_bytes, writes=True)
        assert store.register_buffer(arena.memory.address, arena.size_bytes) == 0
        options = {"prefix": "tier:", "admin_port": str(admin_port)}
        url = f"mooncake://127.0.0.1:{port}"
        tier = create(TierSettings(type="mooncake", url=url, options=options))
        tier.use_memory(arena.shared)
        tier.check()
        with contextlib.ExitStack() as stack:
            stack.callback(arena.close)
            stack.callback(store.close)
            stack.callback(tier.close)
            for size in sizes:
                body_bytes, count = SIZES[size]
                chunks = Chunks(arena, body_bytes, count)
                per_call = max(1, GROUP_BYTES // (HEADER_BYTES + body_bytes))
                contestants: dict[str, Bare | OfTier] = {
                    "bare": Bare(store, chunks, per_call),
                    "bare again": Bare(store, chunks, per_call),
                    "bare, one a call": Bare(store, chunks, 1),
                    "tier": OfTier(tier, chunks, lambda names: store.batch_remove(names, True)),
                }
                for name, contestant in contestants.items():
                    chunks.forget()
                    contestant.remove()
                    contestant.write()
                    contestant.read()
                    chunks.check(name)
                for what in ("write", "read"):
                    rows += measure(what, size, chunks, contestants, rounds)
                for contestant in contestants.values():
                    contestant.remove()
                chunks.release()
    return rows


def _places(chunks: Sequence[ChunkBuffers]) -> tuple[list[list[int]], list[list[int]]]:
    addresses = [[_address(chunk.header), _address(chunk.body)] for chunk in chunks]
    return addresses, [[len(chunk.header), len(chunk.body)] for chunk in chunks]


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _program(name: str) -> str:
    """The path of one of Mooncake's programs."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]) / name)


def table(rows: list[dict[str, Any]]) -> str:
    """The report's table."""
    lines = [
        [row["what"], row["size"], row["who"], _shown(row["gb_per_s"]), _shown(row["to_bare"])]
        for row in rows
    ]
    return report.table(["what", "chunk", "who", "GB/s", "of bare"], lines)


def _shown(summary: dict[str, float]) -> str:
    return f"{summary['median']:.2f} [{summary['low']:.2f} to {summary['high']:.2f}]"


def main() -> None:
    """Measure, print and write the report."""
    options = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--rounds", type=int, default=21)
    options.add_argument("--sizes", default=",".join(SIZES))
    options.add_argument("--name", default="mooncake-tier", help="name of the result files")
    chosen = options.parse_args()
    load_before = os.getloadavg()[0]
    rows = run(chosen.rounds, chosen.sizes.split(","))
    ratios = {
        f"{r['what']} {r['size']}": r["to_bare"]["median"] for r in rows if r["who"] == "tier"
    }
    verdict = "met" if min(ratios.values()) >= TARGET else "missed"
    tables = [
        f"{chosen.rounds} rounds, median [lowest to highest]. Other work: load average "
        f"{load_before:.1f} before the run. Target: at least {TARGET} of bare; {verdict} (lowest "
        f"median {min(ratios.values()):.2f}).",
        table(rows),
    ]
    payload = {"rounds": chosen.rounds, "load_before": load_before, "rows": rows}
    print(tables[1])
    print(report.write(chosen.name, "Mooncake tier", payload, tables))


if __name__ == "__main__":
    main()
