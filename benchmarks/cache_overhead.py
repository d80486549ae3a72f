"""What does the cache cost when there is nothing to reuse?

Two single engines with the connector, ``on`` with a cache (memory and disk, chunks of 256 tokens)
and ``off`` without one, each on a core of its own, one of them working at a time. They are started
several times, with the cores swapped, for two starts of one engine differ by some percent; a
round's ratio is ``on`` over ``off`` of the same prompts, and the ratio of a start pair is the
geometric mean over both ways round. No prompt is used twice.

The engines take turns after every prompt and every load: what the machine does meets both.

1. *TTFT*: one request at a time. The step that computes a prompt also saves it.
2. *Throughput*: so many requests at once, each of which fills a chunk.
3. *ITL*: streams whose prompts are all but computed already, so that steps are decode steps, while
   every answer fills a chunk that is saved at its end: a save per stream and 128 steps.

Bars: TTFT and throughput within 2 %, or inside the A/A spread: how far two halves of one engine's
own measurements lie apart. For the 99th percentile of ITL only the ratio is told.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

from harness import options, report
from harness.cache_host import CacheServerProcess, LoneSystem
from harness.client import new_session
from harness.engine import SERVED_NAME, EnginePark
from harness.prompts import random_prompt
from harness.stats import aa_ratio_spread, percentile, summarise

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    import aiohttp

CHUNK_TOKENS = 256
LIMIT = 0.02
MISSED = "MISSED"
HALVES = (0, 1)
TTFT_TOKENS, TTFT_REPEATS = 513, 8
LOAD_REQUESTS, LOAD_CONCURRENCY, LOAD_REPEATS = 3, 3, 4
LOAD_PROMPT_TOKENS, LOAD_ANSWER_TOKENS = 257, 16
STREAMS = 4
SHARED_TOKENS = 128
STREAM_ANSWER_TOKENS = 130
ARENA_BYTES = 1_000_000_000
DISK_BYTES = 8_000_000_000
LEAST_CHUNKS = 20
"""Of the 32 of each half: some may be shed while the disk is busy."""
QUANTITIES = ("ttft_ms", "requests_per_s", "itl_p50_ms", "itl_p99_ms")


@dataclass(frozen=True)
class Row:
    """What one engine did in one half of a round."""

    start: int
    round: int
    half: int
    system: str
    ttft_ms: float
    requests_per_s: float
    itl_p50_ms: float
    itl_p99_ms: float
    load_average: float


class UnequalAnswerError(Exception):
    """The engine with a cache answers differently."""


class NothingSavedError(Exception):
    """The cache did not work, so its cost says nothing."""


class Meter:
    """Measures one engine at a time; the same prompts on each."""

    def __init__(self, session: aiohttp.ClientSession, seed: str) -> None:
        self._session = session
        self._seed = seed

    async def first_token(self, system: LoneSystem, turn: int) -> tuple[float, str]:
        """Milliseconds to the first token of one prompt, and the text."""
        prompt = random_prompt(TTFT_TOKENS, self._seed, "ttft", turn)
        answer = await self._ask(system, prompt, 2)
        return answer.ttft * 1e3, answer.text

    async def load(self, system: LoneSystem, turn: int) -> tuple[float, str]:
        """Requests per second, and the texts."""
        gate = asyncio.Semaphore(LOAD_CONCURRENCY)

        async def one(index: int) -> str:
            prompt = random_prompt(LOAD_PROMPT_TOKENS, self._seed, "load", turn, index)
            async with gate:
                return str((await self._ask(system, prompt, LOAD_ANSWER_TOKENS)).text)

        begun = time.monotonic()
        texts = await asyncio.gather(*(one(index) for index in range(LOAD_REQUESTS)))
        return LOAD_REQUESTS / (time.monotonic() - begun), "".join(texts)

    async def gaps(self, system: LoneSystem) -> list[float]:
        """Milliseconds between the tokens of all streams."""
        shared = random_prompt(SHARED_TOKENS, "shared")
        await self._ask(system, [*shared, 100], 1)

        async def stream(number: int) -> list[float]:
            own = random_prompt(1, self._seed, "stream", number)
            answer = await self._ask(system, shared + own, STREAM_ANSWER_TOKENS)
            return [gap * 1e3 for gap in answer.gaps]

        found = await asyncio.gather(*(stream(number) for number in range(STREAMS)))
        return [gap for gaps in found for gap in gaps]

    async def _ask(self, system: LoneSystem, prompt: list[int], tokens: int) -> Any:
        body = {
            "model": SERVED_NAME,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        return (await system.serve(self._session, body)).streamed


async def measure(arguments: argparse.Namespace, start: int, logs: Path) -> list[Row]:
    """One start of both engines. Raises ``NothingSavedError``."""
    flags, place = options.engine_flags(arguments), options.placement(arguments)
    cores = [place.prefill_core, place.decode_core]
    on_core, off_core = cores if start % 2 == 0 else reversed(cores)
    folder = logs / f"start-{start}"
    rows: list[Row] = []
    with (
        CacheServerProcess(folder / "cache", CHUNK_TOKENS, ARENA_BYTES, DISK_BYTES) as server,
        EnginePark(folder) as park,
    ):
        common: dict[str, Any] = {"transport": arguments.transport, "log_folder": folder}
        on = LoneSystem("on", flags, place, **common, core=on_core, cache=server)
        off = LoneSystem("off", flags, place, **common, core=off_core)
        await asyncio.gather(on.start(park), off.start(park))
        async with new_session() as session:
            for turn in range(-1, arguments.rounds):
                for half in HALVES if turn >= 0 else (0,):
                    rows += await _half(session, (on, off), start, turn, half)
        saved = len(list((folder / "cache" / "disk" / "chunks").glob("??/*")))
    halves = len(rows) // 2
    print(f"start {start}: {saved} chunks on the disk after {halves} halves", flush=True)
    if saved < halves * LEAST_CHUNKS:
        raise NothingSavedError(f"only {saved} chunks in {halves} halves")
    return [row for row in rows if row.round >= 0]


async def _half(
    session: aiohttp.ClientSession,
    systems: tuple[LoneSystem, LoneSystem],
    start: int,
    turn: int,
    half: int,
) -> list[Row]:
    """The engines take turns after every prompt and every load, so that what the machine does
    meanwhile meets both.
    """
    meter = Meter(session, f"{start}/{turn}/{half}")
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    order = systems if (turn + half) % 2 else systems[::-1]
    for measure_one, name, repeats in (
        (meter.first_token, "ttft_ms", TTFT_REPEATS),
        (meter.load, "requests_per_s", LOAD_REPEATS),
    ):
        for repeat in range(repeats):
            texts = set()
            for system in order if repeat % 2 else order[::-1]:
                value, text = await measure_one(system, repeat)
                samples[system.name, name].append(value)
                texts.add(text)
            if len(texts) > 1:
                raise UnequalAnswerError(f"start {start}, round {turn}, {name}")
    for system in order:
        samples[system.name, "gaps"] = await meter.gaps(system)
    load = round(os.getloadavg()[0], 2)
    return [_row(start, turn, half, system.name, samples, load) for system in systems]


def _row(
    start: int,
    turn: int,
    half: int,
    name: str,
    samples: dict[tuple[str, str], list[float]],
    load: float,
) -> Row:
    gaps_ms = samples[name, "gaps"]
    found = {
        "ttft_ms": median(samples[name, "ttft_ms"]),
        "requests_per_s": median(samples[name, "requests_per_s"]),
        "itl_p50_ms": median(gaps_ms),
        "itl_p99_ms": percentile(gaps_ms, 0.99),
    }
    shown = ", ".join(f"{key} {value:.2f}" for key, value in found.items())
    print(f"start {start} round {turn}/{half} {name}: {shown}, load {load}", flush=True)
    return Row(start, turn, half, name, **found, load_average=load)


def result(rows: list[Row], quantity: str) -> dict[str, Any]:
    """Ratio of on to off, its spread over rounds, and the A/A spread."""
    values = {(r.start, r.round, r.half, r.system): getattr(r, quantity) for r in rows}
    pairs = sorted({(r.start, r.round, r.half) for r in rows})
    ratios = {pair: values[*pair, "on"] / values[*pair, "off"] for pair in pairs}
    starts = sorted({start for start, _, _ in pairs})
    by_start = [median(ratios[pair] for pair in pairs if pair[0] == start) for start in starts]
    noise = max(
        aa_ratio_spread(
            *([values[start, turn, half, name] for start, turn, h in pairs if h == half]
              for half in HALVES)
        )
        for name in ("on", "off")
    )  # fmt: skip
    ratio = geometric_mean(by_start)
    return {
        "quantity": quantity,
        "on": summarise([values[*pair, "on"] for pair in pairs]).as_dict(),
        "off": summarise([values[*pair, "off"] for pair in pairs]).as_dict(),
        "ratio": round(ratio, 4),
        "ratio_of_starts": [round(value, 4) for value in by_start],
        "ratio_of_rounds": summarise(list(ratios.values())).as_dict(),
        "aa_spread": round(noise, 4),
        "verdict": "" if "itl" in quantity else _verdict(_cost(quantity, ratio), noise),
    }


def _verdict(cost: float, noise: float) -> str:
    """A cost inside a large spread is not shown to be small; the report says which one it is."""
    if cost <= LIMIT:
        return "within 2 %"
    return "inside the A/A spread" if cost <= noise else MISSED


def _cost(quantity: str, ratio: float) -> float:
    return 1 / ratio - 1 if quantity.endswith("per_s") else ratio - 1


def sections(results: dict[str, Any]) -> list[str]:
    """The Markdown report."""
    lines = [
        [
            found["quantity"],
            *(f"{found[name]['median']:.2f}" for name in ("on", "off")),
            f"{found['ratio']:.3f}",
            ", ".join(f"{value:.3f}" for value in found["ratio_of_starts"]),
            f"{found['ratio_of_rounds']['low']:.3f} to {found['ratio_of_rounds']['high']:.3f}",
            f"{found['aa_spread']:.3f}",
            found["verdict"],
        ]
        for found in results["results"]
    ]
    header = ["", "on", "off", "on/off", "per start", "rounds", "A/A", "verdict"]
    return [
        f"{results['starts']} starts with the cores swapped, {results['rounds']} rounds x 2 each; "
        f"TTFT of {TTFT_TOKENS:,} tokens, {TTFT_REPEATS} times; {LOAD_REPEATS} loads of "
        f"{LOAD_REQUESTS} requests of {LOAD_PROMPT_TOKENS} tokens, "
        f"{LOAD_CONCURRENCY} at once; ITL of {STREAMS} streams with a save per stream and 128 "
        "steps. All prompts fresh, all texts equal. Load average while measuring: "
        f"{results['load_average']}.",
        report.table(header, lines),
    ]


async def main(arguments: argparse.Namespace) -> int:
    """All starts and the report; 1 when a bar was missed."""
    logs = options.log_folder(arguments)
    print(f"logs: {logs}", flush=True)
    rows: list[Row] = []
    for start in range(arguments.starts):
        rows += await measure(arguments, start, logs / f"run-{os.getpid()}")
    averages = [row.load_average for row in rows]
    results = {
        "starts": arguments.starts,
        "rounds": arguments.rounds,
        "load_average": f"{min(averages)} to {max(averages)}",
        "results": [result(rows, quantity) for quantity in QUANTITIES],
        "rows": [asdict(row) for row in rows],
    }
    title = "The cost of a cache with nothing to reuse"
    path = report.write(arguments.name or "cache-overhead", title, results, sections(results))
    print(path.read_text())
    return 0 if all(found["verdict"] != MISSED for found in results["results"]) else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = options.parser("TTFT, throughput and ITL with a cache and without", rounds=3)
    parser.add_argument("--starts", type=int, default=2, help="an even number swaps cores fairly")
    parser.set_defaults(kv_cache_bytes=400_000_000)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.starts = 1, 1
    return arguments


if __name__ == "__main__":
    options.run(main(parse()))
