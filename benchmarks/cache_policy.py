"""How many chunks does each eviction policy hit on real chats, and what does the index cost?

One hour of chat requests (``data/README.md``) is replayed, in its order, against the index that the
cache server uses, at 10,000, 20,000 and 50,000 blocks of 512 tokens: look up, then store what is
missing. Its peer is a plain LRU of single blocks, an ``OrderedDict``. A hit is a block
found without a gap from the prompt's beginning on. Every block of the trace counts, the last
partial one of each prompt included, for which a real cache would not use room.

Before anything is counted, the peer's shares of an infinite cache's hits and that cache's own share
are compared with figures that were counted elsewhere, and the index with policy ``lru`` has to have
exactly the peer's hits. Hits are exact and the same in every round;
time is measured in rounds, all systems in turn, as processor time per block stored, the peer's in
the same round as the unit.

    python benchmarks/cache_policy.py
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import report
from harness.stats import summarise

from splitserve.kv_transfer.cache import advice
from splitserve.kv_transfer.cache.eviction import POLICIES
from splitserve.kv_transfer.cache.index import TierIndex
from splitserve.orchestrator.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable

TRACE = Path(__file__).parent / "data" / "mooncake_conversation_trace.jsonl.gz"
BLOCK_TOKENS = 512
CAPACITIES = (10_000, 20_000, 50_000)
KNOWN_BLOCKS = 288_500
KNOWN_CEILING = 0.3664
"""Of all blocks, by a cache without bound."""
KNOWN_LRU = {1_000: 0.122, 5_000: 0.305, 10_000: 0.577, 20_000: 0.785, 50_000: 0.968}
"""Plain LRU's share of the ceiling."""
KNOWN_WITHIN = 0.0006
BARS = {10_000: 1.05, 20_000: 0.99, 50_000: 1.0}
"""Least hits of the default policy, in those of plain LRU."""
DEFAULT = "s3fifo"

Keys = list[tuple[bytes, ...]]


def plain_lru(prompts: Keys, capacity: int) -> int:
    """Hits of a cache that knows no chains: every block of a prompt is used, the last one first, so
    that a prompt's beginning outlives its end (the other way round hits less).
    """
    cache: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for keys in prompts:
        found = 0
        while found < len(keys) and keys[found] in cache:
            found += 1
        hits += found
        for key in reversed(keys):
            if key in cache:
                cache.move_to_end(key)
            else:
                if len(cache) >= capacity:
                    cache.popitem(last=False)
                cache[key] = None
    return hits


def classic_s3fifo(prompts: Keys, capacity: int) -> int:
    """Hits of S3-FIFO as published, for single blocks: a tenth of the room is on probation."""
    probation: OrderedDict[bytes, None] = OrderedDict()
    main: OrderedDict[bytes, None] = OrderedDict()
    ghosts: OrderedDict[bytes, None] = OrderedDict()
    uses: dict[bytes, int] = {}

    def evict_one() -> None:
        before = len(uses)
        while len(uses) == before:
            if len(probation) >= capacity // 10 or not main:
                key, _ = probation.popitem(last=False)
                if uses[key] > 1:
                    main[key] = None
                    continue
                ghosts[key] = None
                if len(ghosts) > capacity * 9 // 10:
                    ghosts.popitem(last=False)
                del uses[key]
            else:
                key, _ = main.popitem(last=False)
                if uses[key] > 0:
                    uses[key] -= 1
                    main[key] = None
                else:
                    del uses[key]

    hits = 0
    for keys in prompts:
        found = 0
        while found < len(keys) and keys[found] in uses:
            found += 1
        hits += found
        for key in keys:
            if key in uses:
                uses[key] = min(3, uses[key] + 1)
                continue
            if len(uses) >= capacity:
                evict_one()
            uses[key] = 0
            if key in ghosts:
                del ghosts[key]
                main[key] = None
            else:
                probation[key] = None
    return hits


def index_with(policy: str) -> Callable[[Keys, int], int]:
    """Hits of the cache server's index."""

    def hits(prompts: Keys, capacity: int) -> int:
        index: TierIndex[None] = TierIndex(capacity, policy)
        for keys in prompts:
            advice.store_missing(index, keys, index.prefix(keys, 0.0))
        assert index.used_bytes <= capacity
        return index.hits

    return hits


SYSTEMS: dict[str, Callable[[Keys, int], int]] = {
    "plain LRU": plain_lru,
    "classic S3-FIFO": classic_s3fifo,
    **{f"index, {policy}": index_with(policy) for policy in POLICIES},
}


def load(trace: Path) -> Keys:
    """The keys of each prompt's blocks; equal ones are one object."""
    known: dict[int, bytes] = {}
    return [
        tuple([known.setdefault(block, advice.key_of(block)) for block in request.blocks])
        for request in read_trace(trace, BLOCK_TOKENS)
    ]


def check(prompts: Keys) -> tuple[int, int]:
    """(blocks, hits of an infinite cache), after the peer's figures were found to be the known
    ones.
    """
    blocks = sum(map(len, prompts))
    whole = [advice.Prompt(keys, len(keys)) for keys in prompts]
    most = advice.ceiling(whole, 1).hit_chunks
    assert blocks == KNOWN_BLOCKS, blocks
    assert round(most / blocks, 4) == KNOWN_CEILING, most / blocks
    for capacity, share in KNOWN_LRU.items():
        found = plain_lru(prompts, capacity) / most
        assert abs(found - share) < KNOWN_WITHIN, (capacity, found, share)
    return blocks, most


def measure(prompts: Keys, rounds: int) -> dict[tuple[str, int], tuple[int, list[float]]]:
    """(hits, processor seconds of each round) of every system at every capacity."""
    measured: dict[tuple[str, int], tuple[int, list[float]]] = {}
    names = list(SYSTEMS)
    for number in range(rounds):
        first = number % len(names)
        for capacity in CAPACITIES:
            for name in names[first:] + names[:first]:
                gc.collect()
                begun = time.process_time()
                hits = SYSTEMS[name](prompts, capacity)
                seconds = time.process_time() - begun
                known, times = measured.setdefault((name, capacity), (hits, []))
                assert hits == known, f"{name} differs from round to round"
                times.append(seconds)
            same = measured["plain LRU", capacity][0] == measured["index, lru", capacity][0]
            assert same, "the index's lru is not LRU"
        print(f"round {number + 1} of {rounds}", flush=True)
    return measured


def summary(
    measured: dict[tuple[str, int], tuple[int, list[float]]], blocks: int, most: int
) -> list[dict[str, Any]]:
    """One row per system and capacity."""
    rows = []
    for capacity in CAPACITIES:
        lru, lru_times = measured["plain LRU", capacity]
        for name in SYSTEMS:
            hits, times = measured[name, capacity]
            misses = blocks - hits
            rows.append(
                {
                    "blocks": capacity,
                    "who": name,
                    "hits": hits,
                    "of_lru": round(hits / lru, 4),
                    "of_ceiling": round(hits / most, 4),
                    "of_all_blocks": round(hits / blocks, 4),
                    "us_per_block": summarise([1e6 * t / misses for t in times]).as_dict(),
                    "time_of_lru": summarise(
                        [t / peer for t, peer in zip(times, lru_times, strict=True)]
                    ).as_dict(),
                }
            )
    return rows


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The default policy's bars."""
    found = {(row["blocks"], row["who"]): row["of_lru"] for row in rows}
    return [
        {
            "blocks": blocks,
            "of_lru": found[blocks, f"index, {DEFAULT}"],
            "at_least": bar,
            "met": found[blocks, f"index, {DEFAULT}"] >= bar,
        }
        for blocks, bar in BARS.items()
    ]


def sections(results: dict[str, Any]) -> list[str]:
    """The Markdown report."""
    lines = [
        [
            f"{row['blocks']:,}",
            row["who"],
            f"{row['hits']:,}",
            f"{row['of_lru']:.3f}",
            f"{row['of_ceiling']:.3f}",
            _spread(row["us_per_block"], 1),
            _spread(row["time_of_lru"], 1),
        ]
        for row in results["rows"]
    ]
    header = ["blocks", "who", "hits", "of plain LRU", "of infinite", "us per block", "time of LRU"]
    bars = [[str(value) for value in entry.values()] for entry in results["verdicts"]]
    return [
        f"{results['trace_blocks']:,} blocks of {BLOCK_TOKENS} tokens in {results['requests']:,} "
        f"requests, replayed in their order; an infinite cache hits {results['ceiling']:,} "
        f"({results['ceiling'] / results['trace_blocks']:.4f}). Time: processor time of the whole "
        f"replay per block that was stored, {results['rounds']} rounds, median [lowest to "
        "highest]; the last column is relative to plain LRU in the same round.",
        report.table(header, lines),
        f"## Bars of the default policy, `{DEFAULT}`",
        report.table(list(results["verdicts"][0]), bars),
    ]


def _spread(found: dict[str, float], digits: int) -> str:
    median, low, high = (f"{found[key]:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} [{low} to {high}]"


def main() -> int:
    """Check, measure and write the report; 1 when a bar is missed."""
    options = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--trace", type=Path, default=TRACE)
    options.add_argument("--name", default="cache_policy", help="name of the result files")
    chosen = options.parse_args()
    prompts = load(chosen.trace)
    blocks, most = check(prompts)
    rows = summary(measure(prompts, chosen.rounds), blocks, most)
    results = {
        "rounds": chosen.rounds,
        "requests": len(prompts),
        "trace_blocks": blocks,
        "ceiling": most,
        "rows": rows,
        "verdicts": verdicts(rows),
    }
    path = report.write(chosen.name, "Eviction policies", results, sections(results))
    print(path.read_text())
    return 0 if all(entry["met"] for entry in results["verdicts"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
