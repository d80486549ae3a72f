"""How fast does each transport move scattered pages from process to process, beside a plain copy?

Writer and receiver are two processes on two cores, memory touched beforehand. In every round each transport and
the plain copy move the same bytes in the same random pages, one after the other (the order rotates); the plain copy is
one ``memmove`` per page inside one process, and one single ``memmove`` of as many bytes. First the receiver's pages are
compared with the writer's.

1. *bandwidth*: ``--megabytes`` in writes of 16 MiB that are all open at once.
2. *latency*: one write of one page of 192 KiB (SmolLM2-135M, block of 128 tokens), from ``write`` to its event.
3. *batch*: writes of n pages, each begun when the one before has landed: the smallest n whose
   bandwidth is 90 % of the best one's. Times the page size it guides ``stream_min_bytes``.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import time
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from harness import report
from harness.stats import percentile, summarise

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE_SIZES = (16 * KIB, 64 * KIB, 256 * KIB, MIB)
LATENCY_PAGE_BYTES = 192 * KIB
WRITE_BYTES = 16 * MIB
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BATCH_BYTES_LIMIT = 32 * MIB
COPY, COPY_CONTIGUOUS = "memmove per page", "one memmove"
ANSWER_DEADLINE_S = 60.0


class Process:
    """A side of a transport (``harness/transport_side.py``)."""

    def __init__(self, role: str, transport: str, core: int, memory_bytes: int) -> None:
        program = Path(__file__).parent / "harness" / "transport_side.py"
        self._process = subprocess.Popen(
            [sys.executable, str(program), role, transport, str(core), str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def do(self, name: str, **arguments: Any) -> Any:
        """The answer of the process; an error when it gives none in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": name, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], ANSWER_DEADLINE_S)[0]:
            raise TimeoutError(f"no answer to {name} in {ANSWER_DEADLINE_S} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended at {name}: status {self._process.wait(5)}")
        return json.loads(line)

    def end(self) -> None:
        """End the process; by force when it does not follow."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


class Pair:
    """Writer and receiver of one transport."""

    def __init__(self, transport: str, cores: tuple[int, int], memory_bytes: int) -> None:
        self.writer = Process("writer", transport, cores[0], memory_bytes)
        self.receiver = Process("receiver", transport, cores[1], memory_bytes)
        told = self.receiver.do("describe")
        self.receiver.do("expect", pages=memory_bytes // min(PAGE_SIZES))
        for page_bytes in (*PAGE_SIZES, LATENCY_PAGE_BYTES):
            self.writer.do("connect", page_bytes=page_bytes, **told)

    def check(self, page_bytes: int, local: list[int], remote: list[int]) -> None:
        """The receiver's pages hold the writer's bytes."""
        self.send(page_bytes, local, remote)
        sent = self.writer.do("digest", page_bytes=page_bytes, pages=local)
        held = self.receiver.do("digest", page_bytes=page_bytes, pages=remote)
        assert sent == held, f"wrong bytes in pages of {page_bytes}"

    def send(self, page_bytes: int, local: list[int], remote: list[int]) -> float:
        """Seconds until everything has landed."""
        batch = max(1, WRITE_BYTES // page_bytes)
        arguments = {"page_bytes": page_bytes, "local": local, "remote": remote, "batch": batch}
        return float(self.writer.do("send", **arguments))

    def end(self) -> None:
        """End both processes."""
        self.writer.end()
        self.receiver.end()


def choose(seed: int, pages: int, of: int) -> tuple[list[int], list[int]]:
    """Random pages of both sides, the same for every transport of a round."""
    generator = np.random.default_rng(seed)
    return generator.permutation(of)[:pages].tolist(), generator.permutation(of)[:pages].tolist()


def measure_bandwidth(pairs: dict[str, Pair], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows: page size, who, GiB/s, ratio to the faster plain copy of the same round."""
    size = options.megabytes * MIB
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    ratios: dict[tuple[int, str], list[float]] = defaultdict(list)
    some = next(iter(pairs.values())).writer
    for number in range(options.rounds + 1):  # the first round warms up and checks
        for page_bytes in PAGE_SIZES:
            count = size // page_bytes
            chosen = choose(number, count, count)
            if number == 0:
                for pair in pairs.values():
                    pair.check(page_bytes, *chosen)
            took: dict[str, float] = {}
            who = [*pairs, COPY, COPY_CONTIGUOUS]
            for name in who[number % len(who) :] + who[: number % len(who)]:
                if name == COPY:
                    took[name] = some.do(
                        "copy", page_bytes=page_bytes, local=chosen[0], remote=chosen[1]
                    )
                elif name == COPY_CONTIGUOUS:
                    took[name] = some.do("copy_contiguous", size=size)
                else:
                    took[name] = pairs[name].send(page_bytes, *chosen)
            if number == 0:
                continue
            plain = min(took[COPY], took[COPY_CONTIGUOUS])
            for name, seconds in took.items():
                found[page_bytes, name].append(size / seconds / GIB)
                ratios[page_bytes, name].append(plain / seconds)
    return [
        {
            "page_bytes": page_bytes,
            "who": name,
            "gib_per_s": summarise(values).as_dict(),
            "ratio": summarise(ratios[page_bytes, name]).as_dict(),
        }
        for (page_bytes, name), values in found.items()
    ]


def measure_latency(pairs: dict[str, Pair], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows: who, microseconds of one write of one page."""
    took: dict[str, list[float]] = defaultdict(list)
    pages = options.megabytes * MIB // LATENCY_PAGE_BYTES
    for number in range(options.rounds):
        local, remote = choose(number, min(pages, 100), pages)
        for name, pair in pairs.items():
            arguments = {"local": local, "remote": remote, "batch": 1}
            seconds = pair.writer.do("send_one_by_one", page_bytes=LATENCY_PAGE_BYTES, **arguments)
            took[name] += [value * 1e6 for value in seconds]
    return [
        {
            "who": name,
            "us": summarise(values).as_dict(),
            "us_p95": round(percentile(values, 0.95), 1),
        }
        for name, values in took.items()
    ]


def measure_batches(pairs: dict[str, Pair], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows: who, page size, GiB/s by pages per write, and the pages that reach 90 % of the best."""
    took: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for number in range(options.rounds):
        for page_bytes in PAGE_SIZES:
            pages = options.megabytes * MIB // page_bytes
            for batch in BATCHES:
                if batch * page_bytes > BATCH_BYTES_LIMIT:
                    continue
                local, remote = choose(number, min(pages, max(batch, 8 * MIB // page_bytes)), pages)
                for name, pair in pairs.items():
                    arguments = {"local": local, "remote": remote, "batch": batch}
                    took[name, page_bytes, batch] += pair.writer.do(
                        "send_one_by_one", page_bytes=page_bytes, **arguments
                    )
    rows = []
    for name in pairs:
        for page_bytes in PAGE_SIZES:
            speeds = {
                batch: batch * page_bytes / float(np.median(took[name, page_bytes, batch])) / GIB
                for batch in BATCHES
                if (name, page_bytes, batch) in took
            }
            enough = next(b for b, speed in speeds.items() if speed >= 0.9 * max(speeds.values()))
            rows.append(
                {
                    "who": name,
                    "page_bytes": page_bytes,
                    "gib_per_s": {batch: round(speed, 3) for batch, speed in speeds.items()},
                    "pages_for_90_percent": enough,
                    "bytes_for_90_percent": enough * page_bytes,
                }
            )
    return rows


def sections(results: dict[str, Any]) -> list[str]:
    """The tables of the report."""
    speeds = [
        [
            f"{row['page_bytes'] // KIB} KiB",
            row["who"],
            spread(row["gib_per_s"], 2),
            spread(row["ratio"], 2),
        ]
        for row in sorted(results["bandwidth"], key=lambda row: int(row["page_bytes"]))
    ]
    latencies = [
        [row["who"], spread(row["us"], 0), f"{row['us_p95']:.0f}"] for row in results["latency"]
    ]
    batches = [
        [
            row["who"],
            f"{row['page_bytes'] // KIB} KiB",
            ", ".join(f"{n}: {speed:.2f}" for n, speed in row["gib_per_s"].items()),
            str(row["pages_for_90_percent"]),
            f"{row['bytes_for_90_percent'] // KIB} KiB",
        ]
        for row in results["batches"]
    ]
    return [
        "Median [lowest to highest] over the rounds. Ratio: to the faster plain copy of the same "
        "round.",
        "## Bandwidth into scattered pages\n\n"
        + report.table(["page", "who", "GiB/s", "of a plain copy"], speeds),
        "## Latency of one write of 192 KiB (microseconds)\n\n"
        + report.table(["who", "median", "p95"], latencies),
        "## Pages per write, one write at a time\n\n"
        + report.table(
            ["who", "page", "GiB/s by pages per write", "pages for 90 %", "bytes for 90 %"], batches
        ),
    ]


def spread(summary: dict[str, float], digits: int) -> str:
    """``median [low to high]``."""
    median, low, high = (f"{summary[key]:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} [{low} to {high}]"


def main() -> None:
    """Measure, print and write the report."""
    options = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    known = ["local", "nixl", "tcp"] + (["ucx"] if find_spec("ucxx") is not None else [])
    options.add_argument("--transports", default=",".join(known))
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--megabytes", type=int, default=64, help="moved per measurement")
    options.add_argument("--cores", default="0,1", help="core of the writer, core of the receiver")
    options.add_argument("--name", default="transports", help="name of the result files")
    chosen = options.parse_args()
    writer_core, receiver_core = (int(core) for core in chosen.cores.split(","))
    pairs: dict[str, Pair] = {}
    started = time.monotonic()
    try:
        for name in chosen.transports.split(","):
            pairs[name] = Pair(name, (writer_core, receiver_core), 2 * chosen.megabytes * MIB)
        results = {
            "rounds": chosen.rounds,
            "bytes_per_measurement": chosen.megabytes * MIB,
            "bandwidth": measure_bandwidth(pairs, chosen),
            "latency": measure_latency(pairs, chosen),
            "batches": measure_batches(pairs, chosen),
        }
    finally:
        for pair in pairs.values():
            pair.end()
    tables = sections(results)
    print("\n\n".join(tables))
    path = report.write(chosen.name, "Transports", results, tables)
    print(f"\n{path} written after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
