"""How fast does each transport move scattered pages from process to process, beside a plain copy?

Writer and receiver are two processes on two cores, their memory touched beforehand. In every round
each transport and the plain copy move the same bytes in the same random pages, one after the other;
the plain copy is one ``memmove`` per page inside one process, and one single ``memmove`` of as many
bytes. Which memory a process gets from the system matters (by a fifth, here): so every round starts
all processes anew, in another order. Before anything is timed, the receiver's pages are compared
with the writer's.

1. *bandwidth*: ``--megabytes`` in writes of 16 MiB that are all open at once.
2. *latency*: one write of one page of 192 KiB (SmolLM2-135M, blocks of 128 tokens), from ``write``
   to its event.
3. *batch*: writes of n pages, each begun when the one before has landed; the smallest n that has
   90 % of the best bandwidth. Times the page size it guides ``stream_min_bytes``.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
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
BATCH_TOTAL_BYTES = 8 * MIB
LATENCY_WRITES = 100
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

    def send_one_by_one(
        self, page_bytes: int, local: list[int], remote: list[int], batch: int
    ) -> list[float]:
        """Seconds of each write of ``batch`` pages, one after the other."""
        arguments = {"page_bytes": page_bytes, "local": local, "remote": remote, "batch": batch}
        took: list[float] = self.writer.do("send_one_by_one", **arguments)
        return took

    def end(self) -> None:
        """End both processes."""
        self.writer.end()
        self.receiver.end()


def choose(seed: int, pages: int, of: int) -> tuple[list[int], list[int]]:
    """Random pages of both sides, the same for every transport of a round."""
    generator = np.random.default_rng(seed)
    return generator.permutation(of)[:pages].tolist(), generator.permutation(of)[:pages].tolist()


@dataclass
class Samples:
    """Everything measured, over all rounds."""

    speeds: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    ratios: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    latencies_us: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    batches: dict[tuple[str, int, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )


def measure_round(number: int, pairs: dict[str, Pair], size: int, samples: Samples) -> None:
    """One round of all three measurements with fresh processes."""
    for page_bytes in PAGE_SIZES:
        chosen = choose(number, size // page_bytes, size // page_bytes)
        for pair in pairs.values():
            pair.check(page_bytes, *chosen)
    for page_bytes in PAGE_SIZES:
        measure_bandwidth(number, pairs, page_bytes, size, samples)
    pages = size // LATENCY_PAGE_BYTES
    local, remote = choose(number, min(pages, LATENCY_WRITES), pages)
    for name, pair in pairs.items():
        took = pair.send_one_by_one(LATENCY_PAGE_BYTES, local, remote, 1)
        samples.latencies_us[name] += [seconds * 1e6 for seconds in took]
    for page_bytes in PAGE_SIZES:
        pages = size // page_bytes
        for batch in BATCHES:
            if batch * page_bytes > BATCH_BYTES_LIMIT:
                continue
            count = min(pages, max(batch, BATCH_TOTAL_BYTES // page_bytes))
            local, remote = choose(number, count, pages)
            for name, pair in pairs.items():
                took = pair.send_one_by_one(page_bytes, local, remote, batch)
                samples.batches[name, page_bytes, batch] += took


def measure_bandwidth(
    number: int, pairs: dict[str, Pair], page_bytes: int, size: int, samples: Samples
) -> None:
    """The same pages by every transport and by the plain copies, in the order of the round."""
    chosen = choose(number + 1000, size // page_bytes, size // page_bytes)
    copier = next(iter(pairs.values())).writer
    took: dict[str, float] = {}
    who = [*pairs, COPY, COPY_CONTIGUOUS]
    for name in who[number % len(who) :] + who[: number % len(who)]:
        if name == COPY:
            local, remote = chosen
            took[name] = copier.do("copy", page_bytes=page_bytes, local=local, remote=remote)
        elif name == COPY_CONTIGUOUS:
            took[name] = copier.do("copy_contiguous", size=size)
        else:
            took[name] = pairs[name].send(page_bytes, *chosen)
    plain = min(took[COPY], took[COPY_CONTIGUOUS])
    for name, seconds in took.items():
        samples.speeds[page_bytes, name].append(size / seconds / GIB)
        samples.ratios[page_bytes, name].append(plain / seconds)


def summary(samples: Samples) -> dict[str, Any]:
    """The report's figures."""
    return {
        "bandwidth": [
            {
                "page_bytes": page_bytes,
                "who": name,
                "gib_per_s": summarise(values).as_dict(),
                "ratio": summarise(samples.ratios[page_bytes, name]).as_dict(),
            }
            for (page_bytes, name), values in sorted(samples.speeds.items())
        ],
        "latency": [
            {
                "who": name,
                "us": summarise(values).as_dict(),
                "us_p95": round(percentile(values, 0.95), 1),
            }
            for name, values in sorted(samples.latencies_us.items())
        ],
        "batches": [
            batch_row(samples, name, page_bytes)
            for name in sorted(samples.latencies_us)
            for page_bytes in PAGE_SIZES
        ],
    }


def batch_row(samples: Samples, name: str, page_bytes: int) -> dict[str, Any]:
    """GiB/s by pages per write, and the pages that reach 90 % of the best."""
    speeds = {
        batch: batch * page_bytes / median(samples.batches[name, page_bytes, batch]) / GIB
        for batch in BATCHES
        if (name, page_bytes, batch) in samples.batches
    }
    enough = next(batch for batch, speed in speeds.items() if speed >= 0.9 * max(speeds.values()))
    return {
        "who": name,
        "page_bytes": page_bytes,
        "gib_per_s": {batch: round(speed, 3) for batch, speed in speeds.items()},
        "pages_for_90_percent": enough,
        "bytes_for_90_percent": enough * page_bytes,
    }


def sections(results: dict[str, Any]) -> list[str]:
    """The tables of the report."""
    speeds = [
        [
            f"{row['page_bytes'] // KIB} KiB",
            row["who"],
            spread(row["gib_per_s"], 2),
            spread(row["ratio"], 2),
        ]
        for row in results["bandwidth"]
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
        f"{results['rounds']} rounds, median [lowest to highest]. "
        "Ratio: to the faster plain copy of the same round. "
        f"Other work: load average {results['load_before']:.1f} before the run.",
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
    size = chosen.megabytes * MIB
    samples = Samples()
    load_before = os.getloadavg()[0]
    started = time.monotonic()
    names = chosen.transports.split(",")
    for number in range(chosen.rounds):
        pairs: dict[str, Pair] = {}
        first = number % len(names)
        try:
            for name in names[first:] + names[:first]:
                pairs[name] = Pair(name, (writer_core, receiver_core), 2 * size)
            measure_round(number, pairs, size, samples)
        finally:
            for pair in pairs.values():
                pair.end()
    results = {
        "rounds": chosen.rounds,
        "bytes_per_measurement": size,
        "load_before": load_before,
        **summary(samples),
    }
    tables = sections(results)
    print("\n\n".join(tables))
    path = report.write(chosen.name, "Transports", results, tables)
    print(f"\n{path} written after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
