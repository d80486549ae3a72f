"""How early is the first token of a prompt whose beginning is cached, by where it is cached?

The whole product, one prefill and one decode node, tiers ``cpu``, ``disk`` and ``redis`` (a server
on loopback). Each round takes new prompts of two shapes: ``whole``, where the cache has all of the
prompt, so that the decode node needs nobody else (``min_uncached_tokens: 8``), and ``suffix``,
where it lacks the last 16 tokens, which the prefill node computes and sends. A prompt
is asked *cold* first, which stores its chunks in every tier, and then once per tier: before each
question the engines forget their own prefixes and the tiers above are emptied, so the order of the
tiers is fixed. Bars: medians of TTFT over that of the same prompt cold, in the same round.

Correctness first: an answer whose token ids differ from the cold one fails the run. Whether the
decode node has loaded all chunks, and only from the tier in question, is counted by the engines and
told (where both nodes load, what one has just brought into memory the other one finds there; a
node whose look-up is late computes or receives instead).

Beside it stands the *exposed load*: from the worker's question for the chunks to the last byte in
its pages, and raw moves of as many bytes in the same round: a plain copy, direct reads of the very
files one after the other, GETs of the very values with plain redis-py. A first token also takes one
*step* of the engine; the median gap between the answer's tokens stands for it. Raw move and step
are the floor.

The reference is ``engine``: the decode node is asked once more while it still has the prompt's KV
itself, so that nothing is moved at all. Where even that is above a bar, the machine computes the
prompt too quickly for the bar: no cache can reach it.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import redis
from harness import options, report
from harness.cached_cluster import CachedCluster
from harness.client import new_session, stream_completion
from harness.engine import SERVED_NAME, free_port
from harness.product import Product
from harness.prompts import random_prompt
from harness.raw_bytes import RawBytes, RedisServer
from harness.stats import summarise

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from harness.client import Streamed

CHUNK_TOKENS = 256
SUFFIX_TOKENS = 16
TIERS = ("cpu", "disk", "redis")
REFERENCE = "engine"
LIMITS = {"cpu": 0.02, "disk": 0.03, "redis": 0.05}
OUTPUT_TOKENS = 8
SHAPES = ("whole", "suffix")
WARM_UP_ROUNDS = 1
SETTLE_S = 0.5
"""Before each question: writes and reports of the last one end."""
HEADER_BYTES = 16 * 1024


@dataclass(frozen=True)
class Row:
    """One question."""

    shape: str
    source: str
    """``cold``, a tier, or ``REFERENCE``."""
    round: int
    ttft_s: float
    cold_share: float
    """TTFT over that of the same prompt cold."""
    equal: bool
    loaded_from_there: bool
    load_s: float
    """Exposed, on the decode node."""
    raw_s: float
    """The same bytes by the raw way of that tier."""
    step_s: float
    """Between two tokens of the answer."""
    load_average: float


class UnequalAnswerError(Exception):
    """A cached prompt is answered differently."""


class Bench:
    """One running cluster and what is asked of it."""

    def __init__(self, url: str, cluster: CachedCluster, session: Any, place: Place) -> None:
        self._url = url
        self._cluster = cluster
        self._session = session
        self._place = place

    async def ask(self, prompt: list[int]) -> Streamed:
        """A greedy answer through the router."""
        body = {
            "model": SERVED_NAME,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return await stream_completion(self._session, self._url, body)

    async def measure(self, shape: str, turn: int, prefix_tokens: int) -> list[Row]:
        """One prompt: cold, then from each tier."""
        length = prefix_tokens + (SUFFIX_TOKENS if shape == "suffix" else 0)
        prompt = random_prompt(length, "cache", shape, turn)
        await self._cluster.forget_in_engines()
        cold = await self.ask(prompt)
        rows = [self._row(shape, "cold", turn, cold, cold, True, 0.0, 0.0)]
        await self._cluster.wait_until_held(prompt, TIERS)
        raw = self._place.raw_seconds(prefix_tokens // CHUNK_TOKENS)
        for above, tier in zip(("", *TIERS), TIERS, strict=False):
            await asyncio.sleep(SETTLE_S)
            for emptied in sorted({above, "cpu"}) if above else ():
                await self._cluster.operate("clear", {"tier": emptied})
            before = await self._cluster.forget_in_engines()
            warm = await self.ask(prompt)
            chunks = prefix_tokens // CHUNK_TOKENS
            counted = await self._cluster.loaded_since(before, "decode", chunks)
            splits = shape == "suffix"
            other = await self._cluster.loaded_since(before, "prefill", chunks if splits else 0)
            from_there = _came_from(tier, counted + other, counted, chunks)
            load_s = counted["cache_load_seconds"]
            row = self._row(shape, tier, turn, warm, cold, from_there, load_s, raw[tier])
            if not row.equal:
                raise UnequalAnswerError(f"{row}: {warm.token_ids}, cold {cold.token_ids}")
            if shape == "whole" and tier == TIERS[0]:
                again = await self.ask(prompt)
                rows.append(self._row(shape, REFERENCE, turn, again, cold, True, 0.0, 0.0))
                assert rows[-1].equal, rows[-1]
            if not from_there:
                print({"decode": _of_cache(counted), "prefill": _of_cache(other)}, flush=True)
            rows.append(row)
        return rows

    def _row(
        self,
        shape: str,
        source: str,
        turn: int,
        found: Streamed,
        cold: Streamed,
        from_there: bool,
        load_s: float,
        raw_s: float,
    ) -> Row:
        row = Row(
            shape,
            source,
            turn,
            ttft_s=found.ttft,
            cold_share=found.ttft / cold.ttft,
            equal=found.token_ids == cold.token_ids and len(cold.token_ids) == OUTPUT_TOKENS,
            loaded_from_there=from_there,
            load_s=load_s,
            raw_s=raw_s,
            step_s=median(found.gaps),
            load_average=round(os.getloadavg()[0], 2),
        )
        print(
            f"round {turn} {shape} {source}: TTFT {row.ttft_s * 1e3:.0f} ms "
            f"({row.cold_share:.4f} of cold), load {load_s * 1e3:.0f} ms, raw {raw_s * 1e3:.0f} ms,"
            f" step {row.step_s * 1e3:.0f} ms, equal {row.equal}, from there {from_there}, "
            f"load average {row.load_average}",
            flush=True,
        )
        return row


def _of_cache(counted: Counter[str]) -> dict[str, float]:
    return {name: n for name, n in counted.items() if name.startswith("cache_") and n}


def _came_from(tier: str, both: Counter[str], decode: Counter[str], chunks: int) -> bool:
    """Whether the decode node has loaded all chunks, and no tier but this one and the memory above
    it was read.
    """
    names = [f"cache_load_chunks_tier_{number}" for number in range(len(TIERS))]
    own = names[TIERS.index(tier)]
    strange = [name for name in names if name not in (own, names[0]) and both[name]]
    is_whole = sum(decode[name] for name in names) == chunks == decode["cache_loaded_chunks"]
    return is_whole and both[own] > 0 and not strange


class Place:
    """Where the lower tiers keep their chunks."""

    def __init__(self, disk: Path, client: redis.Redis) -> None:
        self._chunks = disk / "chunks"
        self._client = client
        self._moves: RawBytes | None = None
        """Kept, so that its buffers are as cold as the cache's when they are used."""

    def raw_seconds(self, count: int) -> dict[str, float]:
        """Raw moves of the ``count`` chunks that were stored last, by tier."""
        files = sorted(self._chunks.glob("??/*"), key=lambda file: file.stat().st_mtime_ns)[-count:]
        assert len(files) == count, f"{len(files)} files of {count} chunks in {self._chunks}"
        if self._moves is None:
            self._moves = RawBytes(sum(file.stat().st_size - HEADER_BYTES for file in files))
        moves = self._moves
        return {
            "cpu": moves.copy(),
            "disk": moves.read(files),
            "redis": moves.get(self._client, [f"splitserve:{file.name}" for file in files]),
        }


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """Medians and extremes per shape and source, and the bars."""
    grouped: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row.shape, row.source].append(row)
    out = []
    for (shape, source), found in grouped.items():
        share = summarise([row.cold_share for row in found])
        entry: dict[str, Any] = {
            "shape": shape,
            "source": source,
            "count": len(found),
            "ttft_ms": summarise([row.ttft_s * 1e3 for row in found]).as_dict(),
            "cold_share": share.as_dict(),
        }
        if source in TIERS:
            loaded = [row for row in found if row.loaded_from_there] or found
            entry["loaded_from_there"] = sum(row.loaded_from_there for row in found)
            entry["load_ms"] = summarise([row.load_s * 1e3 for row in loaded]).as_dict()
            entry["raw_ms"] = summarise([row.raw_s * 1e3 for row in loaded]).as_dict()
            entry["step_ms"] = summarise([row.step_s * 1e3 for row in loaded]).as_dict()
            colds = [row.ttft_s / row.cold_share for row in loaded]
            floors = [row.raw_s + row.step_s for row in loaded]
            shares = [floor / cold for floor, cold in zip(floors, colds, strict=True)]
            entry["floor_share"] = round(median(shares), 4)
            entry["load_over_raw"] = round(median(row.load_s / row.raw_s for row in loaded), 2)
        if source in TIERS and shape == "whole":
            entry["limit"] = LIMITS[source]
            entry["met"] = share.median <= LIMITS[source]
            nothing_moved = {r.round: r.ttft_s for r in grouped[shape, REFERENCE]}
            over = [row.ttft_s / nothing_moved[row.round] for row in found]
            entry["of_engine"] = summarise(over).as_dict()
        out.append(entry)
    return out


def sections(results: dict[str, Any]) -> list[str]:
    """The Markdown report."""
    lines = []
    for entry in results["summary"]:
        share = entry["cold_share"]
        source = entry["source"]
        met = {True: "met", False: "MISSED"}.get(entry.get("met"), "")
        keys = ("load_ms", "raw_ms", "step_ms")
        loads = [entry[key]["median"] if key in entry else None for key in keys]
        lines.append(
            [
                entry["shape"],
                source,
                f"{entry['ttft_ms']['median']:.0f} [{entry['ttft_ms']['low']:.0f} to "
                f"{entry['ttft_ms']['high']:.0f}]",
                f"{share['median']:.4f} [{share['low']:.4f} to {share['high']:.4f}]",
                f"{entry['limit']} {met}" if "limit" in entry else "",
                *("" if value is None else f"{value:.0f}" for value in loads),
                f"{entry['floor_share']:.4f}" if source in TIERS else "",
                f"{entry['of_engine']['median']:.2f}" if "of_engine" in entry else "",
                f"{entry['loaded_from_there']}/{entry['count']}" if source in TIERS else "",
            ]
        )
    header = [
        "shape",
        "from",
        "TTFT ms",
        "of cold",
        "limit",
        "exposed load ms",
        "raw ms",
        "step ms",
        "floor of cold",
        "of engine",
        "from there",
    ]
    return [
        f"{results['rounds']} rounds, prefix of {results['prefix_tokens']:,} tokens, "
        f"{results['chunk_bytes'] / 1e6:.1f} MB per chunk of {CHUNK_TOKENS} tokens, `suffix`: "
        f"{SUFFIX_TOKENS} more. Every answer's token ids equal the cold one's. Medians [lowest to "
        f"highest]. Load average while measuring: {results['load_average']}.",
        report.table(header, lines),
        "Raw: a plain copy of as many bytes; direct reads of the same files; GETs of the same "
        "values with redis-py. Floor: raw and one step. `engine`: asked again while the decode "
        "node has all of the prompt's KV itself. A bar below the floor, or below `engine`, is out "
        "of reach of any cache on this machine.",
    ]


async def main(arguments: argparse.Namespace) -> int:
    """All rounds and the report; 1 when a bar was missed."""
    logs = options.log_folder(arguments)
    print(f"logs: {logs}", flush=True)
    flags, place = options.engine_flags(arguments), options.placement(arguments)
    disk = logs / f"disk-{os.getpid()}"  # An older one would make cold prompts warm.
    with RedisServer(free_port(), logs) as server:
        cache = {
            "chunk_tokens": CHUNK_TOKENS,
            "tiers": [
                {"type": "cpu", "capacity_bytes": arguments.arena_bytes},
                {"type": "disk", "capacity_bytes": arguments.disk_bytes, "path": str(disk)},
                {"type": "redis", "url": f"redis://127.0.0.1:{server.port}/0"},
            ],
        }
        client = redis.Redis(port=server.port)
        policy = {"conditional": {"min_uncached_tokens": 8}}
        with Product(
            flags, place, arguments.transport, logs, {"cache": cache, "policy": policy}
        ) as product:
            await product.start()
            async with new_session() as session:
                cluster = CachedCluster(product, session)
                bench = Bench(product.url, cluster, session, Place(disk, client))
                rows = []
                for turn in range(-WARM_UP_ROUNDS, arguments.rounds):
                    for shape in SHAPES:
                        rows += await bench.measure(shape, turn, arguments.prefix_tokens)
        sizes = [client.strlen(name) for name in client.scan_iter("splitserve:*", count=100)]
    measured = [row for row in rows if row.round >= 0]
    averages = [row.load_average for row in measured]
    results = {
        "rounds": arguments.rounds,
        "prefix_tokens": arguments.prefix_tokens,
        "chunk_bytes": max(sizes) - HEADER_BYTES,
        "load_average": f"{min(averages)} to {max(averages)}",
        "summary": summary(measured),
        "rows": [asdict(row) for row in rows],
    }
    title = "Time to first token of a cached prefix"
    path = report.write(arguments.name or "cache-ttft", title, results, sections(results))
    print(path.read_text())
    return 0 if all(entry.get("met", True) for entry in results["summary"]) else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = options.parser("TTFT of a cached prefix by tier", rounds=5)
    parser.add_argument("--prefix-tokens", type=int, default=2048, help="whole chunks of 256")
    parser.add_argument("--arena-bytes", type=int, default=1_000_000_000)
    parser.add_argument("--disk-bytes", type=int, default=4_000_000_000)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.prefix_tokens = 1, 512
    return arguments


if __name__ == "__main__":
    options.run(main(parse()))
