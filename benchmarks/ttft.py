"""Is a split first token as early as one engine's? Do incoming pages disturb running streams?

1. *TTFT*: one request at a time, ``splitserve`` against one plain engine on P's core; with
   ``--router`` also through the whole product. Two starts of the same plain engine differ by some
   percent (where their memory came to lie), so two are measured: the baseline is the median over
   both, and their difference is part of the A/A spread. Bar: the ratio of medians is at most 1.02,
   within the A/A spread.
2. *Interference*: decode streams run on D while P computes prompts one after another, each followed
   by one token on D. ``on``: these are split requests, their pages arrive on D. ``off``: P computes
   such prompts and transfers nothing; D's one token comes out of its own prefix cache, so D parses
   and decodes the same. Windows alternate on, off, off, on. Bar: the 99th percentile of the
   streams' gaps is at most 1.10 of that without transfers.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from harness import options, report
from harness.client import complete, new_session, stream_completion
from harness.engine import SERVED_NAME, EngineFlags, EnginePark
from harness.product import Product
from harness.prompts import random_prompt
from harness.rounds import HALVES, Setting, cells, check, idle_cost, measure, summaries, values
from harness.stats import aa_ratio_spread, aa_spread, percentile
from harness.systems import SplitserveSystem, make_system

if TYPE_CHECKING:
    import argparse

    import aiohttp
    from harness.rounds import Row

LENGTHS = (512, 1024, 2048)
TTFT_RATIO_LIMIT = 1.02
ITL_RATIO_LIMIT = 1.10
STREAM_PROMPT_TOKENS = 64
STREAM_TOKENS = 1500
FIRST_TOKENS_DEADLINE_S = 120.0
WINDOWS = ("on", "off", "off", "on")


@dataclass(frozen=True)
class Window:
    """One stretch of interference: the gaps of all decode streams while P computed."""

    kind: str
    round: int
    seconds: float
    gaps_ms: list[float]

    @property
    def p99_ms(self) -> float:
        """99th percentile of the gaps."""
        return percentile(self.gaps_ms, 0.99)


class DecodeLoad:
    """Long streams on one engine; ``arrivals`` holds each one's token times so far."""

    def __init__(self, session: aiohttp.ClientSession, url: str, count: int, seed: str) -> None:
        self._session = session
        self._url = url
        self._seed = seed
        self.arrivals: list[list[float]] = [[] for _ in range(count)]
        self._tasks: list[asyncio.Task[object]] = []

    async def __aenter__(self) -> DecodeLoad:
        """Every stream is past its first tokens."""
        for index, times in enumerate(self.arrivals):
            body = {
                "model": SERVED_NAME,
                "prompt": random_prompt(STREAM_PROMPT_TOKENS, "stream", self._seed, index),
                "max_tokens": STREAM_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            stream = stream_completion(self._session, self._url, body, on_token=times.append)
            self._tasks.append(asyncio.create_task(stream))
        deadline = time.monotonic() + FIRST_TOKENS_DEADLINE_S
        while min(len(times) for times in self.arrivals) < 3:
            if time.monotonic() > deadline:
                raise TimeoutError("the decode streams did not start")
            await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        ended_early = [task for task in self._tasks if task.done()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if ended_early:
            raise RuntimeError("a decode stream ended inside the window: use fewer prompts")

    def gaps_ms(self, begun: float, ended: float) -> list[float]:
        """Gaps of all streams that lie in the stretch."""
        return [
            (later - earlier) * 1e3
            for times in self.arrivals
            for earlier, later in pairwise(times)
            if begun <= earlier and later <= ended
        ]


def one_token(prompt: list[int]) -> dict[str, Any]:
    """A completion of one token."""
    return {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}


async def measure_window(
    system: SplitserveSystem,
    session: aiohttp.ClientSession,
    kind: str,
    turn: int,
    seed: str,
    shape: argparse.Namespace,
) -> Window:
    """Run the decode load while P computes ``shape.prompts`` prompts one after another."""
    prefill, decode = system.engines
    cached = one_token(random_prompt(shape.prompt_tokens, "cached"))
    await complete(session, decode.url, cached)
    async with DecodeLoad(session, decode.url, shape.streams, seed) as load:
        begun = time.monotonic()
        for index in range(shape.prompts):
            body = one_token(random_prompt(shape.prompt_tokens, "window", seed, index))
            if kind == "on":
                await system.serve(session, body)
            else:
                await complete(session, prefill.url, body)
                await stream_completion(session, decode.url, cached)
        ended = time.monotonic()
    return Window(kind, turn, ended - begun, load.gaps_ms(begun, ended))


async def interference(
    system: SplitserveSystem, session: aiohttp.ClientSession, shape: argparse.Namespace
) -> list[Window]:
    """All windows of all rounds."""
    windows = []
    for turn in range(shape.rounds):
        for place, kind in enumerate(WINDOWS):
            found = await measure_window(system, session, kind, turn, f"{turn}/{place}", shape)
            windows.append(found)
            print(
                f"interference round {turn} {kind}: {len(found.gaps_ms)} gaps, "
                f"p99 {found.p99_ms:.0f} ms",
                flush=True,
            )
    return windows


def interference_result(windows: list[Window], shape: argparse.Namespace) -> dict[str, Any]:
    """Pooled percentiles per kind, their ratio, and the A/A spread of the windows without
    transfers.
    """
    pooled = {
        kind: [gap for window in windows if window.kind == kind for gap in window.gaps_ms]
        for kind in ("on", "off")
    }
    off = [window.p99_ms for window in windows if window.kind == "off"]
    ratio = percentile(pooled["on"], 0.99) / percentile(pooled["off"], 0.99)
    noise = aa_ratio_spread(off[0::2], off[1::2])
    return {
        "streams": shape.streams,
        "prompt_tokens": shape.prompt_tokens,
        "prompts_per_window": shape.prompts,
        "gaps": {kind: len(gaps) for kind, gaps in pooled.items()},
        "p50_ms": {kind: round(median(gaps), 2) for kind, gaps in pooled.items()},
        "p99_ms": {kind: round(percentile(gaps, 0.99), 2) for kind, gaps in pooled.items()},
        "p99_ratio": round(ratio, 3),
        "aa_spread": round(noise, 3),
        "limit": ITL_RATIO_LIMIT,
        "met": ratio <= ITL_RATIO_LIMIT + noise,
    }


def ttft_result(rows: list[Row]) -> list[dict[str, Any]]:
    """Ratio of median TTFT to that of both plain engines, per system and length."""
    grouped = cells(rows)
    out = []
    for (group, link, name, length), members in grouped.items():
        if name in ("plain", "again"):
            continue
        starts = [grouped[group, link, plain, length] for plain in ("plain", "again")]
        both = [row for rows in starts for row in rows]
        medians = [median(values(found, "ttft_s")) for found in (members, both)]
        first, second = (median(values(found, "ttft_s")) for found in starts)
        noise = max(abs(first - second) / medians[1], *map(_aa_share, (members, *starts)))
        ratio = medians[0] / medians[1]
        out.append(
            {
                "system": name,
                "length": length,
                "ttft_ms": round(medians[0], 1),
                "plain_ttft_ms": round(medians[1], 1),
                "ratio": round(ratio, 3),
                "aa_spread": round(noise, 3),
                "limit": TTFT_RATIO_LIMIT,
                "met": ratio <= TTFT_RATIO_LIMIT + noise,
            }
        )
    return out


def _aa_share(rows: list[Row]) -> float:
    halves = [[row.ttft_s for row in rows if row.half == half] for half in HALVES]
    return aa_spread(*halves) / median([*halves[0], *halves[1]])


async def main(arguments: argparse.Namespace) -> int:
    """Both parts and the report; 1 when an answer was wrong."""
    logs = options.log_folder(arguments)
    print(f"engine logs: {logs}", flush=True)
    flags, place = options.engine_flags(arguments), options.placement(arguments)
    with EnginePark(logs) as park, Product(flags, place, arguments.transport, logs) as product:
        plain, again = (make_system(name, flags, place, logs) for name in ("plain", "again"))
        system = SplitserveSystem(
            "splitserve", flags, place, transport=arguments.transport, log_folder=logs
        )
        async with new_session() as session:
            systems = [plain, again, system]
            for engines in systems:
                await engines.start(park)
            if arguments.router:
                await product.start()
                systems.append(product.as_system(flags, place))
            setting = Setting("ttft", "host", systems, session, arguments.output_tokens)
            await check(setting, arguments.lengths)
            facts = await idle_cost(systems)
            rows = await measure(setting, arguments.lengths, arguments.rounds)
            windows = await interference(system, session, arguments)
    results = {
        "rounds": arguments.rounds,
        "output_tokens": arguments.output_tokens,
        "transport": arguments.transport,
        "facts": facts,
        "ttft": ttft_result(rows),
        "interference": interference_result(windows, arguments),
        "summaries": summaries(rows),
        "rows": [asdict(row) for row in rows],
        "windows": [asdict(window) | {"p99_ms": window.p99_ms} for window in windows],
    }
    title = "Time to first token, and decode under incoming transfers"
    path = report.write(arguments.name or "ttft", title, results, sections(results))
    print(path.read_text())
    return 0 if all(row.equal for row in rows) else 1


def sections(results: dict[str, Any]) -> list[str]:
    """The Markdown report."""
    ttft, found = results["ttft"], results["interference"]
    equal = sum(row["equal"] for row in results["rows"])
    header = list(ttft[0])
    lines = [[str(entry[key]) for key in header] for entry in ttft]
    return [
        f"{results['rounds']} rounds x 2, one request at a time, transport "
        f"`{results['transport']}`; {equal} of {len(results['rows'])} answers equal the plain "
        f"engine's. Idle cost: `{results['facts']}`.",
        "## TTFT beside one plain engine on P's core (two starts of it)",
        report.table(header, lines),
        "## Decode streams on D while P computes",
        f"{found['streams']} streams, {found['prompt_tokens']}-token prompts on P one after "
        f"another, {found['prompts_per_window']} per window, windows on/off/off/on.",
        report.table(
            ["transfers", "gaps", "ITL p50 ms", "ITL p99 ms"],
            [
                [kind, *(str(found[key][kind]) for key in ("gaps", "p50_ms", "p99_ms"))]
                for kind in ("on", "off")
            ],
        ),
        f"p99 ratio {found['p99_ratio']} (limit {found['limit']}, A/A spread "
        f"{found['aa_spread']}): {'met' if found['met'] else 'MISSED'}.",
    ]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = options.parser("TTFT and decode interference of a split request", rounds=5)
    parser.add_argument("--lengths", type=options.numbers, default=",".join(map(str, LENGTHS)))
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--router", action="store_true", help="also through the whole product")
    parser.add_argument("--streams", type=int, default=4, help="decode streams on D")
    parser.add_argument(
        "--prompt-blocks", type=int, default=8, help="full blocks of P's prompts; one token follows"
    )
    parser.add_argument("--prompts", type=int, default=8, help="P's prompts per window")
    parser.set_defaults(kv_cache_bytes=400_000_000)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.lengths, arguments.prompts = 1, [512], 3
    arguments.prompt_tokens = arguments.prompt_blocks * EngineFlags.block_tokens + 1
    return arguments


if __name__ == "__main__":
    options.run(main(parse()))
