"""Does splitting pay? Reported, without a bar.

``split``: one prefill and one decode node behind splitserve's router. ``plain``: two plain engines
on the same cores behind ``vllm-router`` (round robin). Both stay loaded; rounds alternate, with the
same Poisson arrivals. The offered rate is ``pressure`` divided by what one request takes on an idle
plain engine, so pressure is the mean number of requests in flight if nothing were slowed down.

Goodput: requests per second that met both limits, TTFT within three times and mean time per output
token within twice the idle plain engine's for that shape. ITL percentiles pool the gaps of all
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp
from harness import options, report
from harness.client import RequestFailedError, new_session, stream_completion
from harness.engine import SERVED_NAME, EnginePark, EngineSpec, free_port
from harness.product import Product
from harness.prompts import english_text
from harness.stats import percentile, summarise

if TYPE_CHECKING:
    import argparse

    from harness.client import Streamed

TTFT_LIMIT_FACTOR = 3.0
TPOT_LIMIT_FACTOR = 2.0
ROUTER_DEADLINE_S = 60.0
CHARACTERS_PER_TOKEN = 4.0


@dataclass(frozen=True)
class Load:
    """One shape of traffic."""

    name: str
    prompt_tokens: int
    output_tokens: int
    pressure: float


LOADS = (
    Load("prefill-heavy", prompt_tokens=1024, output_tokens=16, pressure=1.2),
    Load("decode-heavy", prompt_tokens=128, output_tokens=96, pressure=4.0),
)


@dataclass(frozen=True)
class Limits:
    """What a good request keeps, from the idle plain engine."""

    ttft_s: float
    tpot_s: float
    rate_per_s: float


@dataclass(frozen=True)
class Outcome:
    """One system under one load in one round."""

    system: str
    load: str
    round: int
    requests: int
    failed: int
    good: int
    seconds: float
    ttft_s: list[float]
    gaps_s: list[float]
    output_tokens: int

    @property
    def goodput(self) -> float:
        """Good requests per second."""
        return self.good / self.seconds


class Prompts:
    """Distinct English prompts of about a given number of tokens; no two share a first block."""

    def __init__(self) -> None:
        self._text = english_text()

    def make(self, tokens: int, *seed: object) -> str:
        """A prompt; equal for equal seeds."""
        source = random.Random("/".join(map(str, seed)))
        size = int(tokens * CHARACTERS_PER_TOKEN)
        start = source.randrange(len(self._text) - size)
        return f"Note {source.randrange(10**9)}. {self._text[start : start + size]}"


def request(load: Load, prompt: str) -> dict[str, Any]:
    """A greedy completion of the load's length."""
    return {
        "model": SERVED_NAME,
        "prompt": prompt,
        "max_tokens": load.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


class PlainRouter(contextlib.AbstractContextManager["PlainRouter"]):
    """``vllm-router`` before plain engines; leaving the block stops it."""

    def __init__(self, logs: Path) -> None:
        self._log = logs / "vllm-router.log"
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, engine_urls: list[str]) -> None:
        """Requests are served. Raises ``TimeoutError``."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [str(Path(sys.executable).parent / "vllm-router"), "--port", str(port)]
        command += ["--worker-urls", *engine_urls, "--policy", "round_robin"]
        command += ["--log-level", "warning", "--prometheus-port", str(free_port())]
        command += ["--max-concurrent-requests", "1024"]
        self._launch(command)
        deadline = time.monotonic() + ROUTER_DEADLINE_S
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < deadline:
                with contextlib.suppress(aiohttp.ClientError, RequestFailedError):
                    body = request(LOADS[0], "Hello") | {"max_tokens": 1}
                    await stream_completion(session, self.url, body)
                    return
                await asyncio.sleep(0.5)
        raise TimeoutError(f"vllm-router does not serve: {self._log.read_text()[-2000:]}")

    def _launch(self, command: list[str]) -> None:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()


class Bench:
    """Two systems behind URLs, and the measurements on them."""

    def __init__(self, session: aiohttp.ClientSession, urls: dict[str, str], count: int) -> None:
        self._session = session
        self._urls = urls
        self._count = count
        self._prompts = Prompts()

    async def check(self) -> None:
        """Both systems answer alike. Raises ``RuntimeError``."""
        for load in LOADS:
            body = request(load, self._prompts.make(load.prompt_tokens, "check"))
            texts = {}
            for name, url in self._urls.items():
                texts[name] = (await stream_completion(self._session, url, body)).text
            if len(set(texts.values())) != 1:
                raise RuntimeError(f"the systems answer {load.name} differently: {texts}")

    async def idle_limits(self, load: Load) -> Limits:
        """Limits and rate from three requests to the idle plain engines."""
        found = []
        for index in range(3):
            body = request(load, self._prompts.make(load.prompt_tokens, "idle", index))
            found.append(await stream_completion(self._session, self._urls["plain"], body))
        return Limits(
            TTFT_LIMIT_FACTOR * median(one.ttft for one in found),
            TPOT_LIMIT_FACTOR * median(one.mean_itl for one in found),
            load.pressure / median(one.e2e for one in found),
        )

    async def run(self, system: str, load: Load, limits: Limits, turn: int) -> Outcome:
        """Offer the load once; all requests have ended afterwards."""
        arrivals = random.Random(f"arrivals/{load.name}/{turn}")
        tasks: list[asyncio.Task[Streamed]] = []
        begun = time.monotonic()
        due = begun
        for index in range(self._count):
            due += arrivals.expovariate(limits.rate_per_s) if index else 0.0
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            prompt = self._prompts.make(load.prompt_tokens, load.name, turn, index)
            stream = stream_completion(self._session, self._urls[system], request(load, prompt))
            tasks.append(asyncio.create_task(stream))
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        seconds = time.monotonic() - begun
        served = [one for one in ended if not isinstance(one, BaseException)]
        good = [
            one for one in served if one.ttft <= limits.ttft_s and one.mean_itl <= limits.tpot_s
        ]
        return Outcome(
            system,
            load.name,
            turn,
            requests=len(ended),
            failed=len(ended) - len(served),
            good=len(good),
            seconds=seconds,
            ttft_s=[one.ttft for one in served],
            gaps_s=[gap for one in served for gap in one.gaps],
            output_tokens=sum(one.completion_tokens for one in served),
        )


async def main(arguments: argparse.Namespace) -> int:
    """All rounds and the report; 1 when a request failed."""
    logs = options.log_folder(arguments)
    print(f"engine logs: {logs}", flush=True)
    flags, place = options.engine_flags(arguments), options.placement(arguments)
    cores = (place.prefill_core, place.decode_core)
    specs = [EngineSpec(f"plain-{core}", core, flags) for core in cores]
    outcomes: list[Outcome] = []
    with (
        EnginePark(logs) as park,
        PlainRouter(logs) as router,
        Product(flags, place, arguments.transport, logs) as product,
    ):
        engines = await park.start(specs)
        await router.start([engine.url for engine in engines])
        await product.start()
        async with new_session() as session:
            urls = {"split": product.url, "plain": router.url}
            bench = Bench(session, urls, arguments.requests)
            await bench.check()
            limits = {load.name: await bench.idle_limits(load) for load in LOADS}
            for turn in range(arguments.rounds):
                for load in LOADS:
                    for system in list(urls)[:: 1 if turn % 2 else -1]:
                        outcome = await bench.run(system, load, limits[load.name], turn)
                        outcomes.append(outcome)
                        print(
                            f"round {turn} {load.name} {system}: {outcome.good} of "
                            f"{outcome.requests} good in {outcome.seconds:.0f} s",
                            flush=True,
                        )
    results = {
        "rounds": arguments.rounds,
        "requests_per_round": arguments.requests,
        "transport": arguments.transport,
        "loads": [asdict(load) | asdict(limits[load.name]) for load in LOADS],
        "table": table(outcomes),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    path = report.write(
        arguments.name or "goodput", "Does splitting pay?", results, sections(results)
    )
    print(path.read_text())
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def table(outcomes: list[Outcome]) -> list[dict[str, str]]:
    """One row per load and system, pooled over rounds."""
    rows = []
    for load in LOADS:
        for system in ("split", "plain"):
            found = [o for o in outcomes if (o.load, o.system) == (load.name, system)]
            ttft = [value for outcome in found for value in outcome.ttft_s]
            gaps = [value * 1e3 for outcome in found for value in outcome.gaps_s]
            tokens_per_s = [outcome.output_tokens / outcome.seconds for outcome in found]
            rows.append(
                {
                    "load": load.name,
                    "system": system,
                    "goodput requests/s": summarise([o.goodput for o in found]).text(3),
                    "good": f"{sum(o.good for o in found)} of {sum(o.requests for o in found)}",
                    "failed": str(sum(o.failed for o in found)),
                    "TTFT p50 / p99 s": f"{median(ttft):.2f} / {percentile(ttft, 0.99):.2f}",
                    "ITL p50 / p99 ms": f"{median(gaps):.0f} / {percentile(gaps, 0.99):.0f}",
                    "tokens/s": summarise(tokens_per_s).text(1),
                }
            )
    return rows


def sections(results: dict[str, Any]) -> list[str]:
    """The Markdown report."""
    shapes = [
        f"- {load['name']}: {load['prompt_tokens']} tokens in, {load['output_tokens']} out, "
        f"pressure {load['pressure']}: {load['rate_per_s']:.3f} requests/s; good is TTFT <= "
        f"{load['ttft_s']:.2f} s and time per token <= {load['tpot_s'] * 1e3:.0f} ms"
        for load in results["loads"]
    ]
    header = list(results["table"][0])
    return [
        f"{results['rounds']} rounds of {results['requests_per_round']} requests per load, Poisson "
        f"arrivals, transport `{results['transport']}`. `split`: 1 prefill + 1 decode node behind "
        "splitserve's router; `plain`: two engines behind vllm-router; same two cores.",
        "\n".join(shapes),
        report.table(header, [[row[key] for key in header] for row in results["table"]]),
    ]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = options.parser("Goodput of 1P1D beside two plain engines", rounds=3)
    parser.add_argument("--requests", type=int, default=24, help="per load, system and round")
    parser.set_defaults(kv_cache_bytes=800_000_000)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.requests = 1, 6
    return arguments


if __name__ == "__main__":
    options.run(main(parse()))
