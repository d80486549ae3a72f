"""What do clients notice when nodes change their roles?

One cluster, two prefill and two decode nodes, and open-loop arrivals (Poisson, the same times in
every window of a round). Each round has three windows in rotating order: ``quiet`` twice, whose
difference is the A/A spread, and ``flips``, in which a decode node and a prefill node change their
roles at the same time, and back: the ratio stays what it was, so that what is seen is the cost of
the flips and not that of another ratio. Every text is compared with that of a single engine, which
is asked before without a transfer.

A flip may cost what the work that runs on the node takes to drain, which is measured: from the
order until the router says that the node owes nothing of its old role. A time to first token above
the longest one of the round's quiet windows plus the longest drain is an *outlier*; how many each
quiet window has beside the other one says what the machine does by itself.

By default the engines are mock ones whose steps take time; ``--vllm`` takes real ones with a tiny
model, one prefill and two decode nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness import options, report
from harness.client import RequestFailedError, new_session, stream_completion
from harness.engine import SERVED_NAME, free_port
from harness.product import RunningCluster
from harness.stats import aa_ratio_spread, percentile, summarise

if TYPE_CHECKING:
    from pathlib import Path

    import aiohttp

WINDOWS = ("quiet", "flips", "quiet again")
SWAPS = (
    (("decode-0", "prefill"), ("prefill-0", "decode")),
    (("prefill-0", "prefill"), ("decode-0", "decode")),
)
POLL_S = 0.02
SETTLE_S = 1.0
"""Between two windows."""


@dataclass
class Window:
    """What one window's clients saw."""

    kind: str
    round: int
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: int = 0
    drain_s: list[float] = field(default_factory=list)
    """How long each flipped node owed something of its old role."""


class Bench:
    """One running cluster, its prompts and the right answers."""

    def __init__(
        self, cluster: RunningCluster, session: aiohttp.ClientSession, settings: argparse.Namespace
    ) -> None:
        draw = random.Random(1)
        self.cluster, self.session, self.settings = cluster, session, settings
        self.prompts = [
            [draw.randrange(4, 250) for _ in range(draw.randrange(*settings.prompt_tokens))]
            for _ in range(settings.prompts)
        ]
        self.right: list[str] = []

    async def look_up_right_texts(self) -> None:
        """One engine's own answers, asked without a transfer."""
        url = (await self._nodes())["prefill-0"]["engine_url"]
        headers = self.cluster.engine_headers(url)
        for prompt in self.prompts:
            answer = await stream_completion(self.session, url, self._body(prompt), headers)
            self.right.append(answer.text)

    async def run(self, kind: str, number: int) -> Window:
        """One window."""
        window = Window(kind, number)
        draw, at = random.Random(f"arrivals {number}"), 0.0
        tasks = []
        if kind == "flips":
            tasks.append(asyncio.create_task(self._flip_all(window)))
        begun = time.monotonic()
        while (at := at + draw.expovariate(self.settings.rate)) < self.settings.window_s:
            case = draw.randrange(len(self.prompts))
            await asyncio.sleep(max(0.0, begun + at - time.monotonic()))
            tasks.append(asyncio.create_task(self._ask(case, window)))
        await asyncio.gather(*tasks)
        await asyncio.sleep(SETTLE_S)
        return window

    async def _ask(self, case: int, window: Window) -> None:
        body = self._body(self.prompts[case])
        try:
            answer = await stream_completion(self.session, self.cluster.url, body)
        except RequestFailedError as error:
            window.failed.append(str(error))
            return
        window.ttft_s.append(answer.ttft)
        window.itl_s += answer.gaps
        window.wrong += answer.text != self.right[case]

    async def _flip_all(self, window: Window) -> None:
        """The swaps, evenly over the window."""
        pause_s = self.settings.window_s / (len(SWAPS) + 1)
        begun = time.monotonic()
        for number, swap in enumerate(SWAPS, 1):
            await asyncio.sleep(max(0.0, begun + number * pause_s - time.monotonic()))
            ordered = [(node, await self._order(node, role)) for node, role in swap]
            drains = [self._settled(node, at) for node, at in ordered]
            window.drain_s += await asyncio.gather(*drains)

    async def _order(self, node: str, role: str) -> float:
        """When the flip was ordered."""
        url = f"{self.cluster.url}/internal/nodes/{node}/flip"
        ordered = time.monotonic()
        headers = self.cluster.operator_headers()
        async with self.session.post(url, json={"role": role}, headers=headers) as response:
            if response.status != 202:
                raise RuntimeError(f"{node} was not flipped: {await response.text()}")
        return ordered

    async def _settled(self, node: str, ordered: float) -> float:
        """Seconds until the node owed nothing of its old role."""
        while True:
            if not (await self._nodes())[node]["is_flipping"]:
                return time.monotonic() - ordered
            await asyncio.sleep(POLL_S)

    async def _nodes(self) -> dict[str, Any]:
        async with self.session.get(f"{self.cluster.url}/internal/status") as response:
            nodes: dict[str, Any] = (await response.json())["nodes"]
            return nodes

    async def incarnations(self) -> dict[str, str]:
        """Which life each engine is in."""
        return {name: node["incarnation"] for name, node in (await self._nodes()).items()}

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        return {
            "model": SERVED_NAME,
            "prompt": prompt,
            "max_tokens": self.settings.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


def described(settings: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """The YAML of the cluster."""
    args: dict[str, Any] = {"block_size": 32, "max_model_len": 1024, "enable_prefix_caching": False}
    pool: dict[str, Any] = {
        "kv_cache_bytes": 16 * 2**20,
        "transfer": {"transport": settings.transport},
        "replicas": 2,
    }
    prefill, decode = dict(pool), dict(pool)
    if settings.vllm:
        args |= {"dtype": "float32", "enforce_eager": True, "max_num_batched_tokens": 256}
        prefill |= {"replicas": 1, "cpus": [[0]], "kv_cache_bytes": settings.kv_cache_bytes}
        # The two that change roles share a core, so that neither is the faster one
        decode |= {"cpus": [[0], [1]], "kv_cache_bytes": settings.kv_cache_bytes}
    else:
        args |= {"seconds_per_step": 0.01, "seconds_per_prompt_token": 0.0002}
    return {
        "name": f"bench-{os.getpid()}",
        "engine": "vllm" if settings.vllm else "mock",
        "model": {"path": _model(settings, logs), "served_name": SERVED_NAME},
        "router": {"port": free_port()},
        "prefill": prefill | {"engine_args": args},
        "decode": decode | {"engine_args": args},
        "allow_shared_devices": True,
        "observability": {"log_dir": str(logs / "cluster")},
    }


def _model(settings: argparse.Namespace, logs: Path) -> str:
    if not settings.vllm:
        return "mock"
    from splitserve.orchestrator.models.tiny import TinyModel

    return str(TinyModel().write(logs / "tiny"))


def figures(windows: list[Window]) -> dict[str, Any]:
    """Ratios of the windows with flips to the quiet ones of the same round, and what went wrong."""
    rounds = sorted({window.round for window in windows})
    by_place = {(window.round, window.kind): window for window in windows}
    found: dict[str, Any] = {"requests": sum(len(w.ttft_s) + len(w.failed) for w in windows)}
    found["failed"] = sum(len(window.failed) for window in windows)
    found["wrong_texts"] = sum(window.wrong for window in windows)
    found["flips"] = sum(len(window.drain_s) for window in windows)
    drains = [drain for window in windows for drain in window.drain_s]
    found["drain_s"] = summarise(drains).as_dict()
    found["outliers"] = sum(_outliers(number, by_place) for number in rounds)
    found["outliers_of_quiet"] = sum(_outliers_of_quiet(number, by_place) for number in rounds)
    for name, share in (("ttft_p50", 0.5), ("ttft_p99", 0.99), ("itl_p99", 0.99)):
        series = "itl_s" if name.startswith("itl") else "ttft_s"
        first, flips, second = (
            [percentile(getattr(by_place[number, kind], series), share) for number in rounds]
            for kind in ("quiet", "flips", "quiet again")
        )
        ratios = [b / ((a + c) / 2) for a, b, c in zip(first, flips, second, strict=True)]
        found[name] = {
            "ratio": summarise(ratios).as_dict(),
            "aa_spread": round(aa_ratio_spread(first, second), 4),
            "quiet_ms": summarise([*first, *second]).scaled(1000).as_dict(),
        }
    return found


def _outliers(number: int, windows: dict[tuple[int, str], Window]) -> int:
    quiet = [*windows[number, "quiet"].ttft_s, *windows[number, "quiet again"].ttft_s]
    flips = windows[number, "flips"]
    return sum(ttft > max(quiet) + max(flips.drain_s) for ttft in flips.ttft_s)


def _outliers_of_quiet(number: int, windows: dict[tuple[int, str], Window]) -> int:
    """Of each quiet window beside the other one."""
    drain_s = max(windows[number, "flips"].drain_s)
    pair = [windows[number, kind].ttft_s for kind in ("quiet", "quiet again")]
    limits = [max(ttft_s) + drain_s for ttft_s in reversed(pair)]
    return sum(ttft > limit for ttft_s, limit in zip(pair, limits, strict=True) for ttft in ttft_s)


def sections(results: dict[str, Any]) -> list[str]:
    """The Markdown report."""
    found = results["figures"]
    drain = found["drain_s"]
    lines = [
        [
            name,
            f"{found[name]['ratio']['median']:.2f}",
            f"{found[name]['ratio']['low']:.2f} to {found[name]['ratio']['high']:.2f}",
            f"{found[name]['aa_spread']:.2f}",
            f"{found[name]['quiet_ms']['median']:.0f} ms",
        ]
        for name in ("ttft_p50", "ttft_p99", "itl_p99")
    ]
    return [
        f"{results['rounds']} rounds of three windows of {results['window_s']:g} s, "
        f"{results['rate']:g} requests/s; {found['requests']:,} requests, {found['flips']} flips: "
        f"{found['failed']} failed, {found['wrong_texts']} wrong texts, {found['outliers']} times "
        "to first token beyond the longest quiet one plus the drain (quiet windows beside each "
        f"other: {found['outliers_of_quiet']}); engines restarted: {results['restarted']}.",
        f"Drain of a flipped node: {drain['median']:.2f} s [{drain['low']:.2f} to "
        f"{drain['high']:.2f}].",
        report.table(["figure", "flips : quiet", "range", "A/A spread", "quiet"], lines),
    ]


async def main(settings: argparse.Namespace) -> int:
    """Run all rounds and write the report; 1 when a request failed or a text was wrong."""
    logs = options.log_folder(settings)
    print(f"logs: {logs}", flush=True)
    windows: list[Window] = []
    with RunningCluster(described(settings, logs), logs) as cluster:
        await cluster.start()
        async with new_session() as session:
            bench = Bench(cluster, session, settings)
            await bench.look_up_right_texts()
            before = await bench.incarnations()
            for number in range(settings.rounds):
                for place in range(len(WINDOWS)):
                    window = await bench.run(WINDOWS[(place + number) % len(WINDOWS)], number)
                    windows.append(window)
                    print(
                        f"round {number}, {window.kind}: {len(window.ttft_s)} answers", flush=True
                    )
            restarted = before != await bench.incarnations()
    results = {
        "rounds": settings.rounds,
        "window_s": settings.window_s,
        "rate": settings.rate,
        "output_tokens": settings.output_tokens,
        "transport": settings.transport,
        "figures": figures(windows),
        "restarted": restarted,
        "failures": [text for window in windows for text in window.failed][:10],
        "ttft_ms": [
            {"round": w.round, "window": w.kind, "ttft": [round(t * 1000, 1) for t in w.ttft_s]}
            for w in windows
        ],
    }
    name = settings.name or ("flip_vllm" if settings.vllm else "flip")
    path = report.write(name, "Flips under load", results, sections(results))
    print(path.read_text())
    found = results["figures"]
    return 1 if found["failed"] or found["wrong_texts"] or restarted else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Flips under load", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--vllm", action="store_true", help="real engines with a tiny model instead of mock ones")
    add("--rounds", type=int, default=5)
    add("--window-s", type=float, default=10.0, help="length of a window")
    add("--rate", type=float, default=None, help="requests per second; default 8, with --vllm 2")
    add("--output-tokens", type=int, default=24)
    add("--prompts", type=int, default=16, help="different prompts")
    add("--transport", default=None, help="default: tcp, with --vllm nixl")
    add("--kv-cache-bytes", type=int, default=100_000_000, help="of each vLLM engine")
    add("--quick", action="store_true", help="one short round: a smoke test")
    add("--log-folder", type=options.Path, default=None, help="default: temporary")
    add("--name", default=None, help="name of the result files")
    settings = parser.parse_args()
    settings.prompt_tokens = (50, 400)
    settings.rate = settings.rate or (2.0 if settings.vllm else 8.0)
    settings.transport = settings.transport or ("nixl" if settings.vllm else "tcp")
    if settings.quick:
        settings.rounds, settings.window_s = 1, 5.0
    return settings


if __name__ == "__main__":
    options.run(main(parse()))
