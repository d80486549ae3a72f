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
from dataclasses import dataclass
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
BENCHMARK_REQUESTS_BYTES = 1_000_000_000


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
    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    """Not timed."""


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

    def measure(
        self, label: tuple[str, str], chunks: Chunks, contestants: list[Contestant], reads: bool
    ) -> None:
        """Rounds of all of them; the last one is the peer. ``label`` is (what, size)."""
        if reads:
            for contestant in contestants:
                chunks.check(contestant)
        speeds: dict[str, list[float]] = defaultdict(list)
        cpu: dict[str, list[float]] = defaultdict(list)
        for number in range(self.rounds):
            first = number % len(contestants)
            for contestant in contestants[first:] + contestants[:first]:
                contestant.before()
                busy, began = time.process_time(), time.perf_counter()
                contestant.run()
                seconds = time.perf_counter() - began
                cpu[contestant.name].append((time.process_time() - busy) / chunks.total_bytes * GB)
                speeds[contestant.name].append(chunks.total_bytes / seconds / GB)
        peer = speeds[contestants[-1].name]
        for contestant in contestants:
            values = speeds[contestant.name]
            ratios = [value / other for value, other in zip(values, peer, strict=True)]
            row = {
                "what": label[0],
                "size": label[1],
                "chunks": len(chunks.written),
                "who": contestant.name,
                "gb_per_s": summarise(values).as_dict(),
                "ratio": summarise(ratios).as_dict(),
                "cpu_s_per_gb": summarise(cpu[contestant.name]).as_dict(),
            }
            self.rows.append(row)
            ratio = summarise(ratios).text(2)
            print(f"{label[0]:18} {label[1]:8} {contestant.name:22} {ratio}", flush=True)


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

        def plain(paths: list[Path] = paths, flags: int = flags) -> None:
            for path, chunk in zip(paths, chunks.read, strict=True):
                _preadv(path, chunk, flags)

        def reads(tier: Tier = tier, verified: bool = False) -> None:
            tier_reads(tier, chunks, verified)

        def verified(tier: Tier = tier) -> None:
            tier_reads(tier, chunks, True)

        cold = lambda paths=paths: _forget(paths)  # noqa: E731
        contestants = [
            Contestant("tier, verified", verified, cold),
            Contestant("tier", reads, cold),
            Contestant("preadv", plain, cold),
        ]
        results.measure((f"disk {io}, cold", size), chunks, contestants, reads=True)
        if io == "buffered":
            warm = [Contestant(c.name, c.run, plain) for c in contestants]
            results.measure((f"disk {io}, warm", size), chunks, warm, reads=True)
        writers = [
            Contestant("tier", lambda tier=tier: tier_writes(tier, chunks), os.sync),
            Contestant("writev", lambda f=flags, p=paths: _writev(p, chunks, f), os.sync),
        ]
        results.measure((f"disk {io}, write", size), chunks, writers, reads=False)
        tier.close()
        shutil.rmtree(place)


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
    readers = [
        Contestant("tier, verified", lambda: tier_reads(tier, chunks, True)),
        Contestant("tier", lambda: tier_reads(tier, chunks, False)),
    ]
    for reader in readers:
        chunks.check(reader)
    results.measure(
        ("redis, read", size), chunks, [*readers, Contestant("redis-py", plain)], reads=False
    )
    ours = results.rows[-3:-1]
    judged = [redis_benchmark(port, names[0], chunks.chunk_bytes) for _ in range(results.rounds)]
    for row in ours:
        row["of_redis_benchmark"] = row["gb_per_s"]["median"] / summarise(judged).median
    results.rows[-1]["redis_benchmark_gb_per_s"] = summarise(judged).as_dict()
    writers = [
        Contestant("tier", lambda: tier_writes(tier, chunks)),
        Contestant("redis-py", plain_writes),
    ]
    results.measure(("redis, write", size), chunks, writers, reads=False)
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

    readers = [
        Contestant("tier, verified", lambda: tier_reads(tier, chunks, True)),
        Contestant("tier", lambda: tier_reads(tier, chunks, False)),
    ]
    for reader in readers:
        chunks.check(reader)
    results.measure(
        ("s3, read", size), chunks, [*readers, Contestant("obstore ranges", plain)], reads=False
    )
    tier.close()
    threads.shutdown()


def table(rows: list[dict[str, Any]]) -> str:
    """The report's table."""
    lines = []
    for row in rows:
        cells = [
            f"{row[key]['median']:.2f} [{row[key]['low']:.2f} to {row[key]['high']:.2f}]"
            for key in ("gb_per_s", "ratio")
        ]
        also = f"{row['of_redis_benchmark']:.2f}" if "of_redis_benchmark" in row else ""
        busy = f"{row['cpu_s_per_gb']['median']:.2f}"
        lines.append([row["what"], row["size"], row["who"], *cells, also, busy])
    header = ["what", "chunk", "who", "GB/s", "of the peer", "of redis-benchmark", "CPU s/GB"]
    return report.table(header, lines)


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
        f"{chosen.rounds} rounds, median [lowest to highest]; the last of each group is the peer. "
        f"Other work: load average {load_before:.1f} before the run.",
        table(results.rows),
    ]
    payload = {"rounds": chosen.rounds, "load_before": load_before, "rows": results.rows}
    print(tables[1])
    print(report.write(chosen.name, "Tiers of the cache", payload, tables))


if __name__ == "__main__":
    main()
