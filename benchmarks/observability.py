"""What being seen costs the router: requests per second with observability on, against off.

Five routers stand before the same two fake engines that answer at once; one of them is loaded at a
time, their turns interleaved:

- off: no line per request, nobody scrapes it, no traces
- off again: the same once more; what differs between the two is noise
- log and metrics: a line per request into a file, scraped once a second
- sampled: the same, and one request in ten is traced
- traced: the same, and every request is traced

Traces go to a collector on this host that throws them away. Spans are made in a process of their
own, whose CPU time is told beside the router's. Client, engines, routers, collector and those
processes share the machine's cores, so with few cores the ratio of throughputs holds what all of
them cost together; the router's own CPU time per request does not.

Before that, the same variants without sockets, in one thread: what a request takes there is CPU
time that other processes hardly change, so the difference is known to a fraction of a microsecond
also on a machine that is not quiet (scrapes are left out).

    python benchmarks/observability.py --output benchmarks/results/observability.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop
from harness import fake_collector, fake_engines
from harness.desk import Desk
from harness.fake_engines import MODEL, SECRET
from harness.http_load import Row, Target, load
from router import KEY, answer_of, free_ports, spread, start, wait_for

SCRAPE_INTERVAL_S = 1.0
SETTLE_S = 1.0
"""Without CPU time of the helpers: longer than a batch of spans waits for others."""
SETTLE_LIMIT_S = 20.0
BASE = "off"
DESK_ROW = Row("desk", 1, True)
DESK_REQUESTS = 100
DESK_ROUNDS = 300
GOAL = 0.97
"""Least share of the throughput that is to be left."""

ROWS = [
    Row("c=64, stream, one write", 64, True),
    Row("c=64, non-stream", 64, False),
    Row("c=1, stream, one write", 1, True),
]
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {"log_level": "warning"},
    "off again": {"log_level": "warning"},
    "log and metrics": {"log_level": "info"},
    "sampled": {"log_level": "info", "tracing": {"sample_ratio": 0.1}},
    "traced": {"log_level": "info", "tracing": {"sample_ratio": 1.0}},
}
SCRAPED = ("log and metrics", "sampled", "traced")


@dataclass
class Router:
    """One variant: where it is, and its processes."""

    target: Target
    process: psutil.Process

    def helpers_cpu_s(self) -> float:
        """CPU time so far of the process that makes spans; none without traces."""
        times = [child.cpu_times() for child in self.process.children(recursive=True)]
        return float(sum(t.user + t.system for t in times))


def start_router(
    stack: ExitStack, folder: Path, name: str, engines: tuple[int, int], collector: int
) -> Router:
    """The router of a variant and its agents, ready."""
    from splitserve.orchestrator.config import ClusterConfig, dump_resolved

    (port,) = free_ports(1)
    observability = dict(VARIANTS[name])
    if "tracing" in observability:
        url = f"http://127.0.0.1:{collector}"
        observability["tracing"] = {"otlp_endpoint": url} | observability["tracing"]
    config = ClusterConfig.model_validate(
        {
            "engine": "mock",
            "model": {"path": MODEL},
            "router": {"port": port},
            "security": {"api_keys": [{"tenant": "bench", "key_env": "BENCH_KEY"}]},
            "observability": observability,
        }
    )
    slug = name.replace(" ", "-")
    resolved = folder / f"{slug}.json"
    resolved.write_text(dump_resolved(config))
    argv = [sys.executable, "-m", "splitserve.orchestrator.router", "--config", str(resolved)]
    log = folder / f"{slug}.log"
    process = start(stack, argv, log, SPLITSERVE_SECRET=SECRET, BENCH_KEY=KEY)
    wait_for(port, "/metrics", process, log)
    agents = [sys.executable, fake_engines.__file__, "agents", *map(str, (port, *engines))]
    start(stack, agents, folder / f"{slug}-agents.log")
    wait_for(port, "/health", process, log)
    found = psutil.Process(process.pid)
    key = f"Authorization: Bearer {KEY}\r\n".encode()
    return Router(Target(name, port, found, key), found)


def settled_cpu_s(router: Router) -> float:
    """CPU time of its helpers once they have nothing left to do, so that no turn pays for the one
    before.
    """
    end, last, since = time.monotonic() + SETTLE_LIMIT_S, -1.0, time.monotonic()
    while time.monotonic() < min(end, since + SETTLE_S):
        time.sleep(0.1)
        if (now := router.helpers_cpu_s()) != last:
            last, since = now, time.monotonic()
    return last


class Scraper(threading.Thread):
    """Reads a router's metrics once a second, as Prometheus would, while it is loaded."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._end = threading.Event()
        self.start()

    def run(self) -> None:
        while True:
            with urllib.request.urlopen(self._url, timeout=10) as answer:
                answer.read()
            if self._end.wait(SCRAPE_INTERVAL_S):
                return

    def stop(self) -> None:
        """No scrape is under way afterwards."""
        self._end.set()
        self.join(10)


def turn(router: Router, row: Row, seconds: float) -> dict[str, float]:
    """One turn's figures."""
    scraper = Scraper(router.target.port) if router.target.name in SCRAPED else None
    before = router.helpers_cpu_s()
    found = load(router.target, row, seconds)
    if scraper is not None:
        scraper.stop()
    count = found["requests_per_s"] * seconds
    spent = settled_cpu_s(router) - before if "tracing" in VARIANTS[router.target.name] else 0.0
    found["spans_cpu_us_per_request"] = spent / count * 1e6
    return found


def summarise(row: Row, runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Figures of each variant, and its share of the throughput of ``BASE`` round by round."""
    result: dict[str, Any] = {"row": row.name}
    for name, rounds in runs.items():
        figures = {key: spread([found[key] for found in rounds]) for key in rounds[0]}
        ratios = [
            found["requests_per_s"] / base["requests_per_s"]
            for found, base in zip(rounds, runs[BASE], strict=True)
        ]
        cpu = [
            found["router_cpu_us_per_request"] / base["router_cpu_us_per_request"]
            for found, base in zip(rounds, runs[BASE], strict=True)
        ]
        figures["throughput_ratio"] = spread(ratios)
        figures["router_cpu_ratio"] = spread(cpu)
        result[name] = figures
    return result


def measure_desk(rounds: int) -> dict[str, Any]:
    """Microseconds of CPU per request of each variant without sockets, and what each adds."""

    async def run(folder: Path) -> dict[str, list[float]]:
        desks = {}
        for name, observability in VARIANTS.items():
            log = (folder / f"desk-{name}.log").open("wb")
            ratio = observability.get("tracing", {}).get("sample_ratio")
            is_logged = observability["log_level"] == "info"
            desks[name] = Desk(
                prefix_routing=True, log=log if is_logged else None, sample_ratio=ratio
            )
        found: dict[str, list[float]] = {name: [] for name in desks}
        for number in range(rounds + 1):
            names = list(desks)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                took = desks[name].serve(DESK_ROW, DESK_REQUESTS)
                if number:  # The first round warms up
                    found[name].append(took)
        for desk in desks.values():
            desk.close()
        return found

    with tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(run(Path(folder)))
    result = {}
    print(f"\nwithout sockets, {DESK_REQUESTS} requests a turn, {rounds} rounds")
    for name, values in found.items():
        added = spread([one - base for one, base in zip(values, found[BASE], strict=True)])
        least = min(values) - min(found[BASE])
        result[name] = {"cpu_us": spread(values), "added_us": added, "added_to_least_us": least}
        print(
            f"  {name:16} {statistics.median(values):6.1f} us [{min(values):.1f}-{max(values):.1f}]"
            f"  added: median {added['median']:+.1f} us, between the quickest turns {least:+.1f} us"
        )
    return result


def counted(port: int) -> dict[str, float]:
    """What became of traced requests."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    lines = [x for x in text.splitlines() if x.startswith("splitserve_traced_requests_total{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


def measure(rounds: int, seconds: float, only: str) -> dict[str, Any]:
    """The whole benchmark."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        *engines, collector = free_ports(3)
        for port in engines:
            log = folder / f"engine-{port}.log"
            engine = start(stack, [sys.executable, fake_engines.__file__, "engine", str(port)], log)
            wait_for(port, "/health", engine, log)
        taker = [sys.executable, fake_collector.__file__, str(collector)]
        log = folder / "collector.log"
        wait_for(collector, "/", start(stack, taker, log), log)
        routers = [
            start_router(stack, folder, name, (engines[0], engines[1]), collector)
            for name in VARIANTS
        ]
        direct = Target("direct", engines[1], None)
        for row in ROWS:
            expected = answer_of(direct, row)
            for router in routers:
                got = answer_of(router.target, row)
                if row.is_streaming and got != expected:
                    raise ValueError(f"{row.name}: {router.target.name} answered {got!r}")
        print("answers through every router equal the engine's own")
        results = []
        for row in ROWS:
            if only not in row.name:
                continue
            runs: dict[str, list[dict[str, float]]] = {r.target.name: [] for r in routers}
            for router in routers:
                load(router.target, row, seconds / 3)
            for number in range(rounds):
                for place in range(len(routers)):
                    router = routers[(place + number) % len(routers)]
                    runs[router.target.name].append(turn(router, row, seconds))
            results.append(summarise(row, runs))
            show(results[-1])
        traces = {r.target.name: counted(r.target.port) for r in routers}
    worst = {
        name: min(result[name]["throughput_ratio"]["median"] for result in results)
        for name in VARIANTS
    }
    print(f"\nworst rows, share of the throughput that is left (goal {GOAL:.2f}): {worst}")
    print(f"traced requests: {traces['sampled']} sampled, {traces['traced']} traced")
    return {
        "command": shlex.join(["python", *sys.argv]),
        "rounds": rounds,
        "seconds_per_turn": seconds,
        "cpus": os.cpu_count(),
        "worst_throughput_ratio": worst,
        "traces": traces,
        "rows": results,
    }


def show(result: dict[str, Any]) -> None:
    """One row for people."""
    print(f"\n{result['row']}")
    for name in VARIANTS:
        found = result[name]
        rate, ratio, cpu = (
            found["requests_per_s"],
            found["throughput_ratio"],
            found["router_cpu_us_per_request"],
        )
        print(
            f"  {name:16} {rate['median']:7.0f} [{rate['min']:.0f}-{rate['max']:.0f}] requests/s"
            f"  of off: {ratio['median']:.3f} [{ratio['min']:.2f}-{ratio['max']:.2f}]"
            f"  CPU per request: router {cpu['median']:.0f} us, least {cpu['min']:.0f}"
            f" ({found['router_cpu_ratio']['median']:.3f} of off),"
            f" spans {found['spans_cpu_us_per_request']['median']:.0f} us"
            f"  p50 {found['p50_ms']['median']:.2f} ms"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds per row")
    parser.add_argument("--seconds", type=float, default=0.4, help="length of one turn")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--desk", action="store_true", help="only without sockets")
    parser.add_argument("--output", type=Path, help="file for the results (JSON)")
    arguments = parser.parse_args()
    desk = measure_desk(DESK_ROUNDS)
    if arguments.desk:
        return
    results = measure(arguments.rounds, arguments.seconds, arguments.only) | {"desk": desk}
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
