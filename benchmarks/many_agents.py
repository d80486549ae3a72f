"""What do 256 agents cost the router that only report to it?

The agents are real links (``RouterLink``) with real messages, in a process of their own, without
engines; each reports twice a second, as agents do: the state of its engine with the counters of its
connector, most of which stay as they are, and now and then what its prefix cache has got. The
router is a real process. Its CPU time is read from /proc in windows, first while no agent is
connected; the difference is what the agents cost. At the end the router must know all of them as
usable.

    python benchmarks/many_agents.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil
import uvloop
from harness import report
from harness.fake_engines import MODEL, SECRET
from harness.stats import summarise
from router import free_ports, start, wait_for

from splitserve.orchestrator.agent.link import RouterLink
from splitserve.orchestrator.agent.messages import (
    AgentHello,
    NodeDescription,
    NodePrefixes,
    NodeState,
    ToAgent,
)
from splitserve.orchestrator.config import ClusterConfig, dump_resolved
from splitserve.orchestrator.core.membership import DECODE, PREFILL

AGENTS = 256
REPORT_S = 0.5
BLOCKS = 20_000
COUNTERS = 40
MOVING_COUNTERS = 8
"""Of a node that works."""
PREFIXES_EVERY = 8
"""Reports between two of prefixes."""
PREFIX_MARKS = 16
WINDOW_S = 10.0
JOIN_TIMEOUT_S = 60.0
BAR_PERCENT = 5.0


class Speaker:
    """One agent without an engine."""

    def __init__(self, number: int, router_url: str) -> None:
        self._role = (PREFILL, DECODE)[number % 2]
        self.name = f"{self._role}-{number}"
        self._random = Random(number)
        self._counters = {f"counter_{n}_total": float(n) for n in range(COUNTERS)}
        self._free = BLOCKS
        self._reports = 0
        self._link = RouterLink(router_url, bytes.fromhex(SECRET), self._hear)

    async def _hear(self, message: ToAgent) -> None:
        """Nothing that the router says matters here."""

    async def speak(self) -> None:
        """Until cancelled."""
        self._link.hello(AgentHello(description=self._description(), role=self._role))
        running = asyncio.create_task(self._link.run())
        try:
            # Agents do not start in step
            await asyncio.sleep(self._random.random() * REPORT_S)
            while True:
                self._report()
                await asyncio.sleep(REPORT_S)
        finally:
            running.cancel()

    def _report(self) -> None:
        self._reports += 1
        for n in range(MOVING_COUNTERS):
            self._counters[f"counter_{n}_total"] += self._random.randrange(100)
        self._free = BLOCKS - self._random.randrange(BLOCKS // 2)
        self._link.fresh(
            NodeState(
                node=self.name,
                incarnation=self.name,
                phase="ready",
                role=self._role,
                running=self._random.randrange(32),
                free_blocks=self._free,
                total_blocks=BLOCKS,
                counters=self._counters,
            )
        )
        if self._reports % PREFIXES_EVERY == 1:
            self._link.prefixes(
                NodePrefixes(
                    node=self.name,
                    incarnation=self.name,
                    is_first=self._reports == 1,
                    added=self._random.randbytes(8 * PREFIX_MARKS),
                    tokens=tuple(128 * (n + 1) for n in range(PREFIX_MARKS)),
                )
            )

    def _description(self) -> NodeDescription:
        return NodeDescription(
            node=self.name,
            pool=self._role,
            incarnation=self.name,
            engine_url="http://127.0.0.1:9",
            engine_api_key="engine-key",
            control_addresses=("tcp://127.0.0.1:9",),
            model=MODEL,
            max_model_len=8192,
            block_tokens=16,
            total_blocks=BLOCKS,
            tensor_parallel=1,
            transport="tcp",
            fingerprint={f"key{n}": "value" for n in range(12)},
            reports_prefixes=True,
        )


async def speak_all(port: int, agents: int) -> None:
    """All agents, until killed."""
    url = f"http://127.0.0.1:{port}"
    await asyncio.gather(*(Speaker(number, url).speak() for number in range(agents)))


def usable(port: int) -> int:
    """Nodes that get work, as the router says."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        return sum(json.loads(answer.read())["ready_nodes"].values())


def percent_of_a_core(router: psutil.Process, windows: int, window_s: float) -> list[float]:
    """What the router took in each of so many windows."""
    found = []
    for _ in range(windows):
        used, began = cpu_s(router), time.monotonic()
        time.sleep(window_s)
        found.append(100 * (cpu_s(router) - used) / (time.monotonic() - began))
    return found


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(agents: int, windows: int, window_s: float) -> dict[str, Any]:
    """The router without and with agents. Raises ``RuntimeError`` when they do not join or stay."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (port,) = free_ports(1)
        config = ClusterConfig.model_validate(
            {"engine": "mock", "model": {"path": MODEL}, "router": {"port": port}}
        )
        resolved, log = folder / "resolved.json", folder / "router.log"
        resolved.write_text(dump_resolved(config))
        argv = [sys.executable, "-m", "splitserve.orchestrator.router", "--config", str(resolved)]
        process = start(stack, argv, log, SPLITSERVE_SECRET=SECRET)
        wait_for(port, "/metrics", process, log)
        router = psutil.Process(process.pid)
        idle = percent_of_a_core(router, windows, window_s)
        began = time.monotonic()
        speakers = [sys.executable, __file__, "--speak", str(port), "--agents", str(agents)]
        start(stack, speakers, folder / "agents.log")
        joined_s = wait_for_all(port, agents, began)
        busy = percent_of_a_core(router, windows, window_s)
        if usable(port) != agents:
            raise RuntimeError(f"only {usable(port)} of {agents} agents are still there")
    return {
        "agents": agents,
        "windows": windows,
        "window_s": window_s,
        "all_joined_s": round(joined_s, 2),
        "idle_percent": summarise(idle).as_dict(),
        "with_agents_percent": summarise(busy).as_dict(),
        "added_percent": round(median(busy) - median(idle), 2),
        "bar_percent": BAR_PERCENT,
    }


def wait_for_all(port: int, agents: int, began: float) -> float:
    """Seconds until the router used all of them."""
    while usable_or_none(port) != agents:
        if time.monotonic() > began + JOIN_TIMEOUT_S:
            raise RuntimeError(f"only {usable_or_none(port)} of {agents} agents have joined")
        time.sleep(0.05)
    return time.monotonic() - began


def usable_or_none(port: int) -> int:
    """``usable``; 0 while ``/health`` answers that there is no node."""
    try:
        return usable(port)
    except urllib.error.HTTPError:
        return 0


def main() -> int:
    """Measure, write the report; 1 when the bar is missed."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--agents", type=int, default=AGENTS)
    options.add_argument("--windows", type=int, default=6)
    options.add_argument("--window-s", type=float, default=WINDOW_S)
    options.add_argument("--name", default="many-agents")
    options.add_argument("--speak", type=int, metavar="PORT", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.speak:
        uvloop.run(speak_all(chosen.speak, chosen.agents))
        return 0
    found = measure(chosen.agents, chosen.windows, chosen.window_s)
    idle, busy = found["idle_percent"], found["with_agents_percent"]
    lines = [
        [
            name,
            f"{row['median']:.2f} % [{row['low']:.2f} to {row['high']:.2f}]",
        ]
        for name, row in (("no agent", idle), (f"{chosen.agents} agents", busy))
    ]
    lines.append(["added", f"{found['added_percent']:.2f} % (bar: {BAR_PERCENT:.0f} %)"])
    text = report.table(["router's CPU time, of one core", "median of windows"], lines)
    note = (
        f"{chosen.windows} windows of {chosen.window_s:g} s each; all agents had joined after "
        f"{found['all_joined_s']} s."
    )
    path = report.write(chosen.name, "What agents cost the router", found, [note, text])
    print(path.read_text())
    return 0 if found["added_percent"] <= BAR_PERCENT else 1


if __name__ == "__main__":
    raise SystemExit(main())
