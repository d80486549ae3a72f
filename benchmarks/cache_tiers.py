"""How fast do the cache's tiers read and write chunks, beside a plain client of the same store?

Chunks of SmolLM2-135M with 128 and 256 tokens, and small ones. In every round each contestant moves
the same chunks, one after the other, in an order that rotates; ratios are to the plain peer of the
same round. ``verified`` is what a reader of the cache pays: the header decoded and every layer's
checksum compared, beside the bare transport of ``tier``. Before anything is timed, every contestant
has read the right bytes.

- *disk*: peer: ``preadv`` of the same files into the same kind of buffers, in the same mode. Cold:
  the files are thrown out of the page cache before each measurement. Warm: they are in it.
- *redis*: peers: ``redis-py`` GET and SET, and ``redis-benchmark`` with one client.
- *s3*: peer: ranged GETs of the library ``obstore`` with as many threads, its buffers left where
  they are. The server (moto, in Python) is the slower half, so look at processor time too: that of
  this process, in seconds per GB.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
import redis
from harness import report
from harness.stats import summarise
from harness.store_servers import redis_server, s3_server
from obstore.store import from_url

from splitserve.kv_transfer.cache.chunk_format import (
    Header,
    body_checksums,
    decode_header,
    encode_header,
    verify_body,
)
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.settings import TierSettings
from splitserve.kv_transfer.cache.tiers.base import (
    HEADER_BYTES,
    ChunkBuffers,
    ReadOutcome,
    Tier,
    WriteOutcome,
)
from splitserve.kv_transfer.cache.tiers.registry import create

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODEL = bytes(32)
GB = 1e9
S3_THREADS = 4
BENCHMARK_REQUESTS_BYTES = 300_000_000


def _geometry(layers: int, tokens: int, heads: int) -> ChunkGeometry:
    return ChunkGeometry(
        layers=layers,
        chunk_tokens=tokens,
        block_tokens=64,
        heads=heads,
        key_bytes=256,
        value_bytes=256,
        item_bytes=4,
        order="rows",
    )


SIZES = {"256 KiB": (_geometry(4, 64, 2), 64), "5.9 MB": (_geometry(30, 128, 3), 24)}
SIZES["11.8 MB"] = (_geometry(30, 256, 3), 12)
"""Name to geometry and number of chunks."""


@dataclass(frozen=True)
class Contestant:
    """Somebody who moves all chunks of a set."""

    name: str
    run: Callable[[], float | None]
    """Returns its own GB/s where it is another program that measures itself."""
    before: Callable[[], object] = lambda: None
    """Not timed."""
    is_peer: bool = False
    reads: bool = False
    """Into the chunks' buffers."""


class Chunks:
    """Chunks to be stored, and buffers that they are read into."""

    def __init__(self, geometry: ChunkGeometry, count: int) -> None:
        self.written = [self._make(geometry, seed) for seed in range(count)]
        self.read = [
            ChunkBuffers(chunk.key, *_buffers(len(chunk.body), fill=True)) for chunk in self.written
        ]
        self.chunk_bytes = HEADER_BYTES + geometry.chunk_bytes
        self.total_bytes = count * self.chunk_bytes

    def _make(self, geometry: ChunkGeometry, seed: int) -> ChunkBuffers:
        chance = random.Random(seed)
        key = chance.randbytes(32)
        header, body = _buffers(geometry.chunk_bytes)
        body[:] = chance.randbytes(len(body))
        sums = body_checksums(body, geometry, 1)
        said = Header(key=key, model=MODEL, geometry=geometry, pieces=1, checksums=sums)
        header[:] = encode_header(said)
        return ChunkBuffers(key, header, body)

    def check(self, contestant: Contestant) -> None:
        """It reads what was written, every byte."""
        for chunk in self.read:
            chunk.body[:] = bytes(len(chunk.body))
        contestant.before()
        contestant.run()
        for got, put in zip(self.read, self.written, strict=True):
            assert got.header == put.header, f"{contestant.name}: wrong header"
            assert got.body == put.body, f"{contestant.name}: wrong body"


def _buffers(body_bytes: int, fill: bool = False) -> tuple[memoryview, memoryview]:
    whole = memoryview(mmap.mmap(-1, HEADER_BYTES + body_bytes))
    if fill:
        whole[:] = bytes(len(whole))  # memory is touched before anything is timed
    return whole[:HEADER_BYTES], whole[HEADER_BYTES:]


def tier_reads(tier: Tier, chunks: Chunks, verified: bool) -> None:
    """Every chunk is in its buffers."""
    hits = 0
    for index, outcome in tier.read(chunks.read):
        assert outcome is ReadOutcome.HIT
        hits += 1
        if verified:
            chunk = chunks.read[index]
            verify_body(decode_header(chunk.header, chunk.key, MODEL), chunk.body)
    assert hits == len(chunks.read)


def tier_writes(tier: Tier, chunks: Chunks) -> None:
    """Every chunk is in the store."""
    assert set(tier.write(chunks.written)) == {WriteOutcome.WRITTEN}


class Results:
    """Everything measured."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.rows: list[dict[str, Any]] = []

    def measure(self, what: str, size: str, chunks: Chunks, contestants: list[Contestant]) -> None:
        """Rounds of all of them, after each has proven that it reads right."""
        for contestant in contestants:
            if contestant.reads:
                chunks.check(contestant)
        speeds: dict[str, list[float]] = defaultdict(list)
        cpu: dict[str, list[float]] = defaultdict(list)
        for number in range(self.rounds):
            first = number % len(contestants)
            for contestant in contestants[first:] + contestants[:first]:
                contestant.before()
                busy, began = time.process_time(), time.perf_counter()
                told = contestant.run()
                seconds = time.perf_counter() - began
                cpu[contestant.name].append((time.process_time() - busy) / chunks.total_bytes * GB)
                speeds[contestant.name].append(told or chunks.total_bytes / seconds / GB)
        peers = [contestant.name for contestant in contestants if contestant.is_peer]
        for contestant in contestants:
            name = contestant.name
            row = {"what": what, "size": size, "chunks": len(chunks.written), "who": name}
            row["gb_per_s"] = summarise(speeds[name]).as_dict()
            row["cpu_s_per_gb"] = summarise(cpu[name]).as_dict()
            row["ratios"] = {
                peer: summarise(
                    [one / other for one, other in zip(speeds[name], speeds[peer], strict=True)]
                ).as_dict()
                for peer in peers
                if not contestant.is_peer
            }
            self.rows.append(row)
            shown = {peer: ratio["median"] for peer, ratio in row["ratios"].items()}
            print(f"{what:20} {size:8} {name:16} {shown}", flush=True)


def measure_disk(results: Results, folder: Path, size: str, chunks: Chunks) -> None:
    """Reads cold and warm and writes, direct and buffered."""
    for io, flags in (("direct", os.O_DIRECT), ("buffered", 0)):
        place = folder / f"{io}-{len(chunks.written[0].body)}"
        settings = TierSettings(
            type="disk", url=str(place), capacity_bytes=chunks.total_bytes, options={"io": io}
        )
        tier = create(settings)
        tier.check()
        tier_writes(tier, chunks)
        paths = [next(place.rglob(chunk.key.hex())) for chunk in chunks.written]

        _measure_mode(results, f"disk {io}", size, chunks, tier, paths, flags)
        tier.close()
        shutil.rmtree(place)


def _measure_mode(
    results: Results,
    what: str,
    size: str,
    chunks: Chunks,
    tier: Tier,
    paths: list[Path],
    flags: int,
) -> None:
    def plain() -> None:
        for path, chunk in zip(paths, chunks.read, strict=True):
            _preadv(path, chunk, flags)

    def measure(kind: str, before: Callable[[], object]) -> None:
        contestants = [
            Contestant("tier, verified", lambda: tier_reads(tier, chunks, True), before),
            Contestant("tier", lambda: tier_reads(tier, chunks, False), before),
            Contestant("preadv", plain, before, is_peer=True),
        ]
        contestants = [replace(contestant, reads=True) for contestant in contestants]
        results.measure(f"{what}, {kind}", size, chunks, contestants)

    measure("cold", lambda: _forget(paths))
    if flags == 0:
        measure("warm", plain)
    writers = [
        Contestant("tier", lambda: tier_writes(tier, chunks), os.sync),
        Contestant("writev", lambda: _writev(paths, chunks, flags), os.sync, is_peer=True),
    ]
    results.measure(f"{what}, write", size, chunks, writers)


def _forget(paths: list[Path]) -> None:
    """None of these files is in the page cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _preadv(path: Path, chunk: ChunkBuffers, flags: int) -> None:
    file = os.open(path, os.O_RDONLY | flags)
    got = os.preadv(file, [chunk.header, chunk.body], 0)
    assert got == HEADER_BYTES + len(chunk.body)
    os.close(file)


def _writev(paths: list[Path], chunks: Chunks, flags: int) -> None:
    for path, chunk in zip(paths, chunks.written, strict=True):
        new = path.with_suffix(".plain")
        file = os.open(new, os.O_CREAT | os.O_WRONLY | flags, 0o600)
        assert os.writev(file, [chunk.header, chunk.body]) == chunks.chunk_bytes
        os.close(file)
        os.replace(new, path)


def measure_redis(results: Results, port: int, size: str, chunks: Chunks) -> None:
    """Beside ``redis-py`` and ``redis-benchmark``."""
    tier = create(TierSettings(type="redis", url=f"redis://127.0.0.1:{port}"))
    tier.check()
    tier_writes(tier, chunks)
    client = redis.Redis(port=port)
    names = [f"splitserve:{chunk.key.hex()}" for chunk in chunks.written]
    values = [bytes(chunk.header) + bytes(chunk.body) for chunk in chunks.written]

    def plain() -> None:
        for name in names:
            client.get(name)

    def plain_writes() -> None:
        for name, value in zip(names, values, strict=True):
            client.set(name, value)

    assert [client.get(name) for name in names] == values

    def benchmark() -> float:
        return redis_benchmark(port, names[0], chunks.chunk_bytes)

    contestants = [
        *_tier_readers(tier, chunks),
        Contestant("redis-py", plain, is_peer=True),
        Contestant("redis-benchmark", benchmark, is_peer=True),
    ]
    results.measure("redis, read", size, chunks, contestants)
    writers = [
        Contestant("tier", lambda: tier_writes(tier, chunks)),
        Contestant("redis-py", plain_writes, is_peer=True),
    ]
    results.measure("redis, write", size, chunks, writers)
    client.flushall()
    client.close()
    tier.close()


def redis_benchmark(port: int, name: str, value_bytes: int) -> float:
    """GB/s of its one client that asks for that value again and again."""
    count = max(50, BENCHMARK_REQUESTS_BYTES // value_bytes)
    command = ["redis-benchmark", "-p", str(port), "-c", "1", "-n", str(count), "--csv"]
    done = subprocess.run([*command, "GET", name], capture_output=True, text=True, check=True)
    requests_per_s = float(done.stdout.splitlines()[1].split(",")[1].strip('"'))
    return requests_per_s * value_bytes / GB


def measure_s3(results: Results, endpoint: str, size: str, chunks: Chunks) -> None:
    """Beside ranged GETs of the library."""
    secrets = {"access_key": "a", "secret_key": "b", "region": "us-east-1", "endpoint": endpoint}
    options = {**secrets, "concurrency": str(S3_THREADS), "timeout_s": "60"}
    tier = create(TierSettings(type="s3", url="s3://chunks/bench", options=options))
    tier.check()
    tier_writes(tier, chunks)
    config = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
    config["endpoint"] = endpoint
    store = from_url("s3://chunks/bench", config=config, client_options={"allow_http": True})
    size_of = chunks.chunk_bytes
    threads = ThreadPoolExecutor(S3_THREADS)

    def get(chunk: ChunkBuffers) -> int:
        return len(obstore.get_range(store, chunk.key.hex(), start=0, end=size_of))

    def plain() -> None:
        assert set(threads.map(get, chunks.written)) == {size_of}

    contestants = [*_tier_readers(tier, chunks), Contestant("obstore ranges", plain, is_peer=True)]
    results.measure("s3, read", size, chunks, contestants)
    tier.close()
    threads.shutdown()


def _tier_readers(tier: Tier, chunks: Chunks) -> list[Contestant]:
    return [
        Contestant("tier, verified", lambda: tier_reads(tier, chunks, True), reads=True),
        Contestant("tier", lambda: tier_reads(tier, chunks, False), reads=True),
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The report's table."""
    lines = []
    for row in rows:
        ratios = ", ".join(f"{spread(r)} of {peer}" for peer, r in row["ratios"].items())
        busy = f"{row['cpu_s_per_gb']['median']:.2f}" if row["who"] != "redis-benchmark" else ""
        lines.append([row["what"], row["size"], row["who"], spread(row["gb_per_s"]), ratios, busy])
    return report.table(["what", "chunk", "who", "GB/s", "ratio", "CPU s/GB"], lines)


def spread(summary: dict[str, float]) -> str:
    """``median [low to high]``."""
    return f"{summary['median']:.2f} [{summary['low']:.2f} to {summary['high']:.2f}]"


def each(chosen: list[str]) -> Iterator[tuple[str, Chunks]]:
    """The chunks of each size, made once."""
    for name in chosen:
        geometry, count = SIZES[name]
        yield name, Chunks(geometry, count)


def main() -> None:
    """Measure, print and write the report."""
    options = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--tiers", default="disk,redis,s3")
    options.add_argument("--sizes", default=",".join(SIZES))
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--folder", default=".", help="on the disk to measure")
    options.add_argument("--name", default="cache-tiers", help="name of the result files")
    chosen = options.parse_args()
    tiers = chosen.tiers.split(",")
    results = Results(chosen.rounds)
    load_before = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="cache-tiers-", dir=Path(chosen.folder).resolve()))
    try:
        with redis_server() as port, s3_server("chunks") as endpoint:
            for size, chunks in each(chosen.sizes.split(",")):
                if "disk" in tiers:
                    measure_disk(results, folder, size, chunks)
                if "redis" in tiers:
                    measure_redis(results, port, size, chunks)
                if "s3" in tiers:
                    measure_s3(results, endpoint, size, chunks)
    finally:
        shutil.rmtree(folder)
    tables = [
        f"{chosen.rounds} rounds, median [lowest to highest]. "
        f"Other work: load average {load_before:.1f} before the run.",
        table(results.rows),
    ]
    payload = {"rounds": chosen.rounds, "load_before": load_before, "rows": results.rows}
    print(tables[1])
    print(report.write(chosen.name, "Tiers of the cache", payload, tables))


if __name__ == "__main__":
    main()
