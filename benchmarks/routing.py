"""What routing by prefixes brings, and what it costs.

* *Hits*: conversations of six turns on a cluster of mock engines, beside an equal cluster with
  ``prefix_routing`` off, which gives each prompt to the least busy node, in turns when all are
  idle. The answers of both are compared with each other; a hit rate is the share of prompt tokens
  that the prefill engines did not compute. No routing could avoid more than the *ceiling*: every
  whole block of each turn's prompt that an earlier turn of its conversation had.
* *Marks*: CPU time per prompt beside one BLAKE2b hash over the same bytes.
* *Router*: throughput and CPU time per request with marks beside without, before engines that
  answer at once. Where other processes share the cores these say little; *added* is what marks add
  in a router without sockets, in one thread's CPU time, as a share of what a request takes of a
  real router without them.

Everything is interleaved, and every figure but the marks' absolute time is a ratio of one round.

    python benchmarks/routing.py --rounds 7
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import yaml
from harness import fake_engines, report
from harness.desk import Desk
from harness.fake_engines import MODEL, SECRET
from harness.http_load import Row, Target, load
from harness.stats import summarise
from router import answer_of, free_ports, start, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

PREFILL_NODES = 3
TALKS, TURNS = 8, 6
TALKS_AT_A_TIME = 4
TURN_BYTES = 1_200
THINK_S = 0.3
"""Between an answer and the next turn of its conversation."""
BLOCK_TOKENS = 32
COUNTERS_S = 1.5
"""After so long the router has every engine's counters."""
KIB = 1024
MARK_SIZES_KIB = (2, 8, 32, 128)
MARKS_BAR_US = 150.0
"""For 32 KiB."""
LOSS_BAR = 0.03
DESK_REQUESTS = 200
TURNS_A_ROUND = 5
"""At the routers: short turns side by side share what else the machine does."""
LOADS = [
    Row("8-word prompt", 64, True),
    Row("2000-word prompt", 64, True, 2000),
    Row("6000-word prompt, non-stream", 64, False, 6000),
]


# Hits


class Cluster:
    """Mock engines behind a router, as ``splitserve up`` starts them."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, *, is_on: bool) -> None:
        (port,) = free_ports(1)
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        folder = folder / name
        folder.mkdir()
        pool = {
            "kv_cache_bytes": "64 MiB",
            "engine_args": {"block_size": BLOCK_TOKENS, "max_model_len": 16384},
            "transfer": {"transport": "tcp"},
        }
        config = {
            "name": f"bench-routing-{name}-{os.getpid()}",
            "engine": "mock",
            "model": {"path": "mock"},
            "router": {"port": port},
            "prefill": pool | {"replicas": PREFILL_NODES},
            "decode": pool,
            "policy": {"prefix_routing": is_on},
        }
        (folder / "cluster.yaml").write_text(yaml.safe_dump(config))
        argv = [sys.executable, "-m", "splitserve.orchestrator.cli.main", "up"]
        log = folder / "up.log"
        process = start(
            stack, [*argv, str(folder / "cluster.yaml")], log, XDG_STATE_HOME=str(folder / "state")
        )
        self._ready = lambda: wait_for(port, "/health", process, log)

    def wait_until_ready(self) -> None:
        """All nodes serve."""
        self._ready()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                ready = json.loads(answer.read())["ready_nodes"]
            if ready == {"prefill": PREFILL_NODES, "decode": 1}:
                return
            time.sleep(0.1)
        raise RuntimeError(f"{self.name}: only {ready} nodes are ready")

    async def computed(self, session: aiohttp.ClientSession) -> float:
        """Prompt tokens that the prefill engines have computed."""
        await asyncio.sleep(COUNTERS_S)
        async with session.get(f"{self.url}/internal/status") as response:
            nodes = (await response.json())["nodes"]
        return sum(
            node["counters"]["prompt_tokens_computed"]
            for node in nodes.values()
            if node["role"] == "prefill"
        )


async def converse(
    session: aiohttp.ClientSession, cluster: Cluster, topic: str, gate: asyncio.Semaphore
) -> tuple[list[str], list[int]]:
    """(answers, prompt tokens) of one conversation's turns."""
    messages: list[dict[str, str]] = []
    answers, tokens = [], []
    for turn in range(TURNS):
        text = " ".join(f"{topic}, turn {turn}, sentence {n}." for n in range(200))[:TURN_BYTES]
        messages.append({"role": "user", "content": text})
        body = {"model": "mock", "messages": messages, "max_tokens": 16, "ignore_eos": True}
        async with gate, session.post(f"{cluster.url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            answer = await response.json()
        answers.append(answer["choices"][0]["message"]["content"])
        tokens.append(answer["usage"]["prompt_tokens"])
        messages.append({"role": "assistant", "content": answers[-1]})
        await asyncio.sleep(THINK_S)
    return answers, tokens


async def one_round(
    session: aiohttp.ClientSession, cluster: Cluster, number: int
) -> tuple[list[list[str]], float, float]:
    """(answers, hit rate, ceiling) of new conversations."""
    gate = asyncio.Semaphore(TALKS_AT_A_TIME)
    before = await cluster.computed(session)
    talks = await asyncio.gather(
        *(converse(session, cluster, f"round {number} talk {n}", gate) for n in range(TALKS))
    )
    spent = await cluster.computed(session) - before
    counts = [tokens for _, tokens in talks]
    total = sum(map(sum, counts))
    earlier = sum(n // BLOCK_TOKENS * BLOCK_TOKENS for tokens in counts for n in tokens[:-1])
    return [answers for answers, _ in talks], 1 - spent / total, earlier / total


async def measure_hits(rounds: int, folder: Path) -> dict[str, Any]:
    """Hit rates of both clusters, round by round. Raises ``ValueError`` when answers differ."""
    rates: dict[str, list[float]] = {"on": [], "off": []}
    ceilings: list[float] = []
    with ExitStack() as stack:
        clusters = [Cluster(stack, folder, name, is_on=name == "on") for name in rates]
        for cluster in clusters:
            cluster.wait_until_ready()
        async with aiohttp.ClientSession() as session:
            for number in range(rounds):
                order = clusters if number % 2 else clusters[::-1]
                answers = []
                for cluster in order:
                    found, rate, ceiling = await one_round(session, cluster, number)
                    answers.append(found)
                    rates[cluster.name].append(rate)
                ceilings.append(ceiling)
                if answers[0] != answers[1]:
                    raise ValueError(f"round {number}: the clusters' answers differ")
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    shares = [on / ceiling for on, ceiling in zip(rates["on"], ceilings, strict=True)]
    return {
        "shape": f"{TALKS} conversations of {TURNS} turns of {TURN_BYTES} bytes, {TALKS_AT_A_TIME} "
        f"at a time, {PREFILL_NODES} prefill nodes, blocks of {BLOCK_TOKENS} tokens",
        "hit_rate_on": summarise(rates["on"]).as_dict(),
        "hit_rate_off": summarise(rates["off"]).as_dict(),
        "ratio": summarise(ratios).as_dict(),
        "share_of_ceiling": summarise(shares).as_dict(),
    }


# Marks


def requests_of(size: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """(endpoint, body) of each kind of prompt, of so many canonical bytes."""
    text = "word " * (size // 5 + 1)
    part = {"role": "user", "content": text[:1_000]}
    return {
        "chat": ("chat", {"model": MODEL, "messages": [part] * (size // 1_033 or 1)}),
        "text": ("completions", {"model": MODEL, "prompt": text[:size]}),
        "ids": ("completions", {"model": MODEL, "prompt": [n % 30_000 for n in range(size // 4)]}),
    }


def timed(call: Callable[[], object], repeats: int) -> float:
    """Microseconds of CPU time of one call."""
    start_ns = time.thread_time_ns()
    for _ in range(repeats):
        call()
    return (time.thread_time_ns() - start_ns) / repeats / 1e3


def measure_marks(rounds: int) -> list[dict[str, Any]]:
    """Each kind and size. Raises ``ValueError`` when a longer prompt has other marks."""
    from splitserve.orchestrator.router.prompt_marks import PromptMarks

    marks, rows = PromptMarks(bytes(32)), []
    for size_kib in MARK_SIZES_KIB:
        for kind, (endpoint, body) in requests_of(size_kib * KIB).items():
            found = marks.of(endpoint, body, "", "")
            _, longer = requests_of(2 * size_kib * KIB)[kind]
            if not marks.of(endpoint, longer, "", "").joined.startswith(found.joined):
                raise ValueError(f"{kind} of {size_kib} KiB: the marks of the beginning are lost")
            data, repeats = bytes(found.prompt_bytes), 2_000 // size_kib
            ours, plain = [], []
            for _ in range(rounds):
                ours.append(timed(lambda e=endpoint, b=body: marks.of(e, b, "", ""), repeats))
                plain.append(timed(lambda d=data: hashlib.blake2b(d).digest(), repeats))
            ratios = [a / b for a, b in zip(ours, plain, strict=True)]
            rows.append(
                {
                    "kind": kind,
                    "kib": size_kib,
                    "microseconds": summarise(ours).as_dict(),
                    "ratio_to_one_hash": summarise(ratios).as_dict(),
                }
            )
    return rows


# Router


class Router(Target):
    """A router whose CPU time is read to the nanosecond; it has one thread that does work."""

    def cpu_s(self) -> float:
        assert self.process is not None
        path = Path(f"/proc/{self.process.pid}/schedstat")
        return int(path.read_text().split()[0]) / 1e9


def start_routers(stack: ExitStack, folder: Path) -> list[Target]:
    """Two routers before the same engines: with marks, and without."""
    from splitserve.orchestrator.config import ClusterConfig, dump_resolved

    p_port, d_port, *router_ports = free_ports(4)
    this = [sys.executable, fake_engines.__file__]
    for port in (p_port, d_port):
        log = folder / f"engine-{port}.log"
        wait_for(port, "/health", start(stack, [*this, "engine", str(port)], log), log)
    targets = []
    for name, port in zip(("on", "off"), router_ports, strict=True):
        config = ClusterConfig.model_validate(
            {
                "engine": "mock",
                "model": {"path": MODEL},
                "router": {"port": port, "prefill_ahead_requests": 64},
                "policy": {"prefix_routing": name == "on"},
            }
        )
        resolved, log = folder / f"{name}.json", folder / f"{name}.log"
        resolved.write_text(dump_resolved(config))
        argv = [sys.executable, "-m", "splitserve.orchestrator.router", "--config", str(resolved)]
        process = start(stack, argv, log, SPLITSERVE_SECRET=SECRET)
        wait_for(port, "/metrics", process, log)
        agents = [*this, "agents", *map(str, (port, p_port, d_port, p_port))]
        start(stack, agents, folder / f"agents-{name}.log")
        wait_for(port, "/health", process, log)
        targets.append(Router(name, port, psutil.Process(process.pid)))
    return targets


def measure_added(row: Row, rounds: int) -> list[float]:
    """Microseconds of CPU time that marks add to a request."""

    async def measure() -> list[float]:
        on, off = Desk(prefix_routing=True), Desk(prefix_routing=False)
        added = []
        for number in range(rounds + 1):
            first, second = (on, off) if number % 2 else (off, on)
            took = {desk: desk.serve(row, DESK_REQUESTS) for desk in (first, second)}
            added.append(took[on] - took[off])
        on.close()
        off.close()
        return added[1:]

    return asyncio.run(measure())


def measure_router(rounds: int, seconds: float, folder: Path) -> list[dict[str, Any]]:
    """Each load. Raises ``ValueError`` when the routers' answers differ."""
    rows = []
    with ExitStack() as stack:
        targets = start_routers(stack, folder)
        for row in LOADS:
            if answer_of(targets[0], row) != answer_of(targets[1], row):
                raise ValueError(f"{row.name}: the routers' answers differ")
            runs: dict[str, list[dict[str, float]]] = {t.name: [] for t in targets}
            for target in targets:
                load(target, row, seconds / 3)
            for number in range(rounds):
                for target in targets if number % 2 else targets[::-1]:
                    runs[target.name].append(load(target, row, seconds))

            added_us = measure_added(row, rounds)
            whole_us = median(run["router_cpu_us_per_request"] for run in runs["off"])

            def ratio(key: str, runs: dict[str, list[dict[str, float]]] = runs) -> dict[str, float]:
                pairs = zip(runs["on"], runs["off"], strict=True)
                return summarise([on[key] / off[key] for on, off in pairs]).as_dict()

            rows.append(
                {
                    "row": f"c={row.concurrency}, {row.name}",
                    "added_us": summarise(added_us).as_dict(),
                    "router_us_without": round(whole_us, 1),
                    "added_share": summarise([us / whole_us for us in added_us]).as_dict(),
                    "throughput_ratio": ratio("requests_per_s"),
                    "cpu_ratio": ratio("router_cpu_us_per_request"),
                }
            )
    return rows


# The report


def text(figures: dict[str, float], digits: int = 2) -> str:
    """``median [low to high]``."""
    low, high = figures["low"], figures["high"]
    return f"{figures['median']:.{digits}f} [{low:.{digits}f} to {high:.{digits}f}]"


def sections(results: dict[str, Any]) -> list[str]:
    """The Markdown report."""
    hits = results["hits"]
    hit_rows = [
        ("hit rate, routed by prefixes", text(hits["hit_rate_on"])),
        ("hit rate, least busy node", text(hits["hit_rate_off"])),
        ("ratio", text(hits["ratio"])),
        ("share of the ceiling", text(hits["share_of_ceiling"])),
    ]
    mark_rows = [
        (row["kind"], str(row["kib"]), text(row["microseconds"], 0), text(row["ratio_to_one_hash"]))
        for row in results["marks"]
    ]
    keys = ("throughput_ratio", "cpu_ratio")
    router_rows = [
        (
            row["row"],
            text(row["added_us"], 1),
            f"{row['router_us_without']:.0f}",
            text(row["added_share"], 3),
            *(text(row[key], 3) for key in keys),
        )
        for row in results["router"]
    ]
    router_head = ("load", "added us", "us without", "added", "throughput ratio", "CPU ratio")
    return [
        "## Hits",
        hits["shape"] + ".",
        report.table(("", "median [lowest to highest round]"), hit_rows),
        "## Marks",
        f"Bar: at most {MARKS_BAR_US:.0f} us for 32 KiB.",
        report.table(("prompt", "KiB", "us per request", "ratio to one BLAKE2b hash"), mark_rows),
        "## Router, marks on beside off",
        f"Bar: at most {LOSS_BAR:.2f} added.",
        report.table(router_head, router_rows),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of each part")
    parser.add_argument("--seconds", type=float, default=0.5, help="one turn at a router")
    parser.add_argument("--quick", action="store_true", help="two short rounds: a smoke test")
    parser.add_argument("--name", default="routing", help="name of the result files")
    arguments = parser.parse_args()
    rounds, seconds = (2, 0.1) if arguments.quick else (arguments.rounds, arguments.seconds)
    with tempfile.TemporaryDirectory() as folder:
        results = {
            "rounds": rounds,
            "hits": asyncio.run(measure_hits(rounds, Path(folder))),
            "marks": measure_marks(rounds),
            "router": measure_router(TURNS_A_ROUND * rounds, seconds, Path(folder)),
        }
    shown = sections(results)
    print("\n\n".join(shown))
    if not arguments.quick:
        print(report.write(arguments.name, "Routing by prefixes", results, shown))


if __name__ == "__main__":
    main()
