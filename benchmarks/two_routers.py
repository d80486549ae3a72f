"""Do two routers leave each other the decode nodes' pages?

Routers share nothing; what one has placed, the other hears of from the nodes' agents. Where decode
memory is tight, a router that promises pages which the other one has promised makes its request
wait inside the decode engine: the *page wait*, from the moment both legs have left until the decode
node has reserved the request's pages. A single router nearly never promises what is not there.

Two clusters of mock engines, alike but for the number of routers, are loaded in turn: 200 requests
in flight at the single router, or 100 at each of the two, far more than the decode nodes have pages
for, so that most requests wait in the routers' queues. Each round has the single router twice,
whose difference is what the machine does by itself, in rotating order. Every answer is compared
with what one engine says.

    python benchmarks/two_routers.py
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
from harness import report
from harness.product import RunningCluster
from harness.stats import percentile

from splitserve.orchestrator.engines.mock.model import KvShape, MockModel, reference_answer
from splitserve.orchestrator.engines.mock.tokenizer import decode
from splitserve.orchestrator.launch.ports import free_run

IN_FLIGHT = 200
"""Over all routers of a cluster."""
PROMPT_TOKENS, ANSWER_TOKENS = (64, 512), (16, 64)
BLOCK_TOKENS = 32
NODES = 2
"""Of each role."""
DECODE_BLOCKS = 129
"""Of each decode node, one of which is never given: room for about ten requests."""
SECONDS_PER_STEP = 0.02
WINDOWS = ("single", "two", "single again")
GOAL = 1.2
"""Longest page wait of two routers, in those of one."""
LOG_LOOK_S, LOG_LOOKS = 0.2, 100
"""How often the logs are looked at until every request has its line."""


@dataclass
class Window:
    """What one window's requests met, in milliseconds."""

    kind: str
    round: int
    seconds: float = 0.0
    page_wait_ms: list[float] = field(default_factory=list)
    queue_ms: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: int = 0
    retried: int = 0
    by_router: list[int] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU time of all routers, and of all agents."""

    def row(self) -> dict[str, Any]:
        """For the result."""
        return {
            "window": self.kind,
            "round": self.round,
            "requests": len(self.page_wait_ms),
            "requests_per_s": round(len(self.page_wait_ms) / self.seconds, 1),
            "page_wait_ms": {
                "median": round(median(self.page_wait_ms), 2),
                "p90": round(percentile(self.page_wait_ms, 0.9), 2),
                "p99": round(percentile(self.page_wait_ms, 0.99), 2),
                "max": round(max(self.page_wait_ms), 2),
            },
            "queue_ms_median": round(median(self.queue_ms), 1),
            "served_by_router": self.by_router,
            "cpu_ms_per_request": {
                name: round(1000 * seconds / len(self.page_wait_ms), 3)
                for name, seconds in self.cpu_s.items()
            },
            "failed": len(self.failed),
            "wrong": self.wrong,
            "retried": self.retried,
        }


class Cluster(RunningCluster):
    """One running cluster with its routers."""

    def __init__(self, routers: int, folder: Path) -> None:
        folder.mkdir()
        self._logs = folder / "cluster"
        port = free_run(["127.0.0.1"], routers)
        self.urls = [f"http://127.0.0.1:{port + index}" for index in range(routers)]
        shape = KvShape()
        block_bytes = BLOCK_TOKENS * shape.layers * shape.heads * shape.head_bytes
        pool: dict[str, Any] = {
            "replicas": NODES,
            "kv_cache_bytes": DECODE_BLOCKS * block_bytes,
            "engine_args": {
                "block_size": BLOCK_TOKENS,
                "max_model_len": 1024,
                "seconds_per_step": SECONDS_PER_STEP,
            },
            "transfer": {"transport": "tcp"},
        }
        described = {
            "name": f"bench-{os.getpid()}-{routers}",
            "engine": "mock",
            "model": {"path": "mock"},
            "router": {"port": port, "replicas": routers},
            "prefill": pool | {"kv_cache_bytes": 4 * DECODE_BLOCKS * block_bytes},
            "decode": pool,
            "observability": {"log_dir": str(self._logs)},
        }
        super().__init__(described, folder)

    def cpu_s(self) -> dict[str, float]:
        """CPU time so far of its routers, and of its agents."""
        spent = {"routers": 0.0, "agents": 0.0}
        assert self._process is not None
        for process in psutil.Process(self._process.pid).children(recursive=True):
            for name in spent:
                if f"splitserve.orchestrator.{name[:-1]}" in process.cmdline():
                    times = process.cpu_times()
                    spent[name] += times.user + times.system
        return spent

    def records(self, prefix: str) -> list[dict[str, Any]]:
        """The routers' log lines of requests whose ids begin so."""
        found = []
        for path in self._logs.glob("router*.log"):
            for line in path.read_bytes().splitlines():
                if b'"event":"request"' in line and prefix.encode() in line:
                    record = json.loads(line)
                    if record["request_id"].startswith(prefix):
                        found.append(record | {"log": path.name})
        return found


class Bench:
    """Both clusters, and the prompts with their right answers."""

    def __init__(self, settings: argparse.Namespace, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._session = session
        draw = random.Random(1)
        model = MockModel(shape=KvShape())
        self._work = []
        for _ in range(settings.requests):
            prompt = [draw.randrange(4, 250) for _ in range(draw.randrange(*PROMPT_TOKENS))]
            tokens = draw.randrange(*ANSWER_TOKENS)
            self._work.append((prompt, tokens, decode(reference_answer(model, prompt, tokens))))

    async def run(self, cluster: Cluster, kind: str, number: int) -> Window:
        """One window: all prompts once, ``IN_FLIGHT`` at a time."""
        window = Window(kind, number)
        prefix = f"{kind.replace(' ', '-')}-{number}."
        routers = len(cluster.urls)
        shares = [iter(list(enumerate(self._work))[router::routers]) for router in range(routers)]
        began, before = time.monotonic(), cluster.cpu_s()
        await asyncio.gather(
            *(
                self._client(cluster.urls[router], shares[router], prefix, window)
                for router in range(routers)
                for _ in range(IN_FLIGHT // routers)
            )
        )
        window.seconds = time.monotonic() - began
        window.cpu_s = {name: used - before[name] for name, used in cluster.cpu_s().items()}
        await self._read_logs(cluster, prefix, window)
        return window

    async def _client(self, url: str, work: Any, prefix: str, window: Window) -> None:
        for index, (prompt, tokens, right) in work:
            body = {
                "model": "mock",
                "prompt": prompt,
                "max_tokens": tokens,
                "ignore_eos": True,
                # Nothing is cached from the window before
                "cache_salt": prefix,
            }
            headers = {"X-Request-Id": f"{prefix}{index}"}
            try:
                async with self._session.post(
                    f"{url}/v1/completions", json=body, headers=headers
                ) as response:
                    answer = await response.json()
                    if response.status != 200:
                        window.failed.append(f"{response.status}: {answer}")
                    elif answer["choices"][0]["text"] != right:
                        window.wrong += 1
            except aiohttp.ClientError as error:
                window.failed.append(repr(error))

    async def _read_logs(self, cluster: Cluster, prefix: str, window: Window) -> None:
        """A record is written when both nodes have told what they know of its transfer."""
        expected = self._settings.requests - len(window.failed)
        for _ in range(LOG_LOOKS):
            if len(records := cluster.records(prefix)) >= expected:
                break
            await asyncio.sleep(LOG_LOOK_S)
        counts: dict[str, int] = {}
        for record in records:
            counts[record["log"]] = counts.get(record["log"], 0) + 1
            if record["attempts"] != 1:
                window.retried += 1
            elif record["reserved_ms"] is not None:
                window.page_wait_ms.append(record["reserved_ms"] - record["dispatched_ms"])
                window.queue_ms.append(record["dispatched_ms"])
        window.by_router = [counts[name] for name in sorted(counts)]


async def measured(settings: argparse.Namespace, folder: Path) -> list[Window]:
    """All windows of all rounds, after one of each cluster that nobody looks at."""
    windows: list[Window] = []
    with ExitStack() as stack:
        clusters = {
            routers: stack.enter_context(Cluster(routers, folder / str(routers)))
            for routers in (1, 2)
        }
        for cluster in clusters.values():
            await cluster.start()
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            bench = Bench(settings, session)
            for number in range(settings.rounds + 1):
                order = itertools.islice(itertools.cycle(WINDOWS), number % 3, number % 3 + 3)
                for kind in order:
                    window = await bench.run(clusters[2 if kind == "two" else 1], kind, number)
                    print(json.dumps(window.row()), flush=True)
                    if window.failed:
                        print(window.failed[:3])
                    if number:
                        windows.append(window)
    return windows


def summary(windows: list[Window]) -> dict[str, Any]:
    """Medians over rounds of each window's figures, and two routers in those of one."""
    figures: dict[str, Any] = {}
    for kind in WINDOWS:
        rows = [window.row() for window in windows if window.kind == kind]
        figures[kind] = {
            "page_wait_ms_median": median(row["page_wait_ms"]["median"] for row in rows),
            "page_wait_ms_p90": median(row["page_wait_ms"]["p90"] for row in rows),
            "requests_per_s": median(row["requests_per_s"] for row in rows),
            "cpu_ms_per_request": {
                name: median(row["cpu_ms_per_request"][name] for row in rows)
                for name in ("routers", "agents")
            },
            "failed": sum(row["failed"] + row["wrong"] for row in rows),
        }
    for name in ("page_wait_ms_median", "page_wait_ms_p90", "requests_per_s"):
        pairs = []
        for round_ in sorted({window.round for window in windows}):
            of = {w.kind: summary_of(w)[name] for w in windows if w.round == round_}
            pairs.append((of["two"], (of["single"] + of["single again"]) / 2, of))
        figures[f"{name}_ratio"] = round(median(two / one for two, one, _ in pairs), 3)
        figures[f"{name}_ratio_of_single_with_itself"] = round(
            median(of["single again"] / of["single"] for _, _, of in pairs), 3
        )
    return figures


def summary_of(window: Window) -> dict[str, float]:
    """The figures of one window that are compared."""
    row = window.row()
    return {
        "page_wait_ms_median": row["page_wait_ms"]["median"],
        "page_wait_ms_p90": row["page_wait_ms"]["p90"],
        "requests_per_s": row["requests_per_s"],
    }


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=600, help="of each window")
    parser.add_argument("--no-result", action="store_true", help="print only")
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        windows = asyncio.run(measured(settings, Path(folder)))
    figures = summary(windows)
    print(json.dumps(figures, indent=1))
    if settings.no_result:
        return
    rows = [
        [
            kind,
            f"{figures[kind]['page_wait_ms_median']:.1f} ms",
            f"{figures[kind]['page_wait_ms_p90']:.1f} ms",
            f"{figures[kind]['requests_per_s']:.1f}",
            f"{figures[kind]['cpu_ms_per_request']['routers']:.2f} ms",
            f"{figures[kind]['cpu_ms_per_request']['agents']:.2f} ms",
            str(figures[kind]["failed"]),
        ]
        for kind in WINDOWS
    ]
    header = [
        "routers",
        "page wait, median",
        "p90",
        "requests per s",
        "routers' CPU per request",
        "agents'",
        "failed or wrong",
    ]
    ratios = [figures["page_wait_ms_median_ratio"], figures["page_wait_ms_p90_ratio"]]
    report.write(
        "two_routers",
        "Page wait with two routers, against one",
        {
            "in_flight": IN_FLIGHT,
            "decode_blocks": NODES * (DECODE_BLOCKS - 1),
            "goal_ratio": GOAL,
            "summary": figures,
            "windows": [window.row() for window in windows],
        },
        [
            report.table(header, rows),
            f"Two routers in those of one: {ratios[0]:.2f} (median), {ratios[1]:.2f} (p90); the "
            f"goal is at most {GOAL}. Medians over {settings.rounds} rounds of "
            f"{settings.requests} requests.",
        ],
    )


if __name__ == "__main__":
    main()
