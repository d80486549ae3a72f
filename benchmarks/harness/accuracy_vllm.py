"""The simulator beside two vLLM engines on the two cores: one of each role, and both answering
alone.

The profile is what ``splitserve profile`` measures on them. The same requests are replayed in
rounds, the two splits in turn and in changing order, with other prompts each time; what two rounds
of one split differ by is its A/A spread. Bars: for each split the error of the median TTFT and of
the median ITL is at most that spread plus 5 %.
"""

from __future__ import annotations

import asyncio
import sys
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

from harness import options, report
from harness.accuracy import FIGURES, described, figure, spread
from harness.client import new_session, stream_completion
from harness.engine import SERVED_NAME
from harness.product import Product
from harness.prompts import english_text
from harness.replay import draw_trace, replay
from splitserve.orchestrator.config.loading import parse
from splitserve.orchestrator.router.app import limits_of
from splitserve.orchestrator.traces import TraceRequest
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.profile import parse_profile
from splitserve.orchestrator.tuner.simulation_settings import SimulationSettings
from splitserve.orchestrator.tuner.simulator import simulate

if TYPE_CHECKING:
    import argparse

    import aiohttp

    from splitserve.orchestrator.tuner.outcome import Outcome

ROUNDS = 5
SPLITS = ((1, 1), (0, 2))
SECONDS, RATE_PER_S = 40.0, 0.5
INPUT_TOKENS, OUTPUT_TOKENS = 120, 32
ALLOWED = 0.05
TARGETS = Targets(ttft_s=3.0, itl_s=0.15)
LATE_LIMIT_S = 0.25
"""The client shares its cores with engines that compute all the time."""
PROFILE_MINUTES = 3.0
PROFILE_DEADLINE_S = 420.0
PLAIN_IDS = range(1000, 20_000)
"""Token ids that any vocabulary of this size has, without special ones."""


def body_of(seed: object, request: TraceRequest) -> dict[str, Any]:
    """A greedy completion of the request's lengths; prompts of two seeds share no block."""
    source = Random(f"prompt/{seed}")
    return {
        "model": SERVED_NAME,
        "prompt": [source.choice(PLAIN_IDS) for _ in range(request.input_tokens)],
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def main(arguments: argparse.Namespace) -> int:
    """All rounds and the report; 1 when a bar is missed."""
    logs = options.log_folder(arguments)
    print(f"logs: {logs}", flush=True)
    flags, place = options.engine_flags(arguments), options.placement(arguments)
    requests = draw_trace(
        arguments.seed,
        seconds=SECONDS,
        per_s=RATE_PER_S,
        input_tokens=INPUT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
    )
    outcomes: dict[tuple[int, int], list[Outcome]] = {split: [] for split in SPLITS}
    with Product(flags, place, arguments.transport, logs) as product:
        await product.start()
        async with new_session() as session:
            await check(session, product)
            profile_path = logs / "profile.json"
            await run_profile(product, str(profile_path))
            profile = parse_profile(profile_path.read_bytes(), str(profile_path))
            print(profile, flush=True)
            for turn in range(arguments.rounds):
                for split in SPLITS[:: 1 if turn % 2 else -1]:
                    await take_role(session, product, "prefill" if split[0] else "decode")
                    bodies = [body_of((turn, split, n), r) for n, r in enumerate(requests)]
                    outcome = await replay(session, product.url, requests, bodies, LATE_LIMIT_S)
                    outcomes[split].append(outcome)
                    told = described(outcome, TARGETS)
                    print(f"round {turn} {split}: {told}", flush=True)
        limits = limits_of(parse((logs / "cluster.yaml").read_text()))
    settings = SimulationSettings(limits=limits, prefix_caching=False)
    rows = []
    for prefill, decode in SPLITS:
        simulated = simulate(requests, profile, prefill=prefill, decode=decode, settings=settings)
        rows.append(row_of(f"{prefill}:{decode}", outcomes[prefill, decode], simulated))
    results = {
        "model": arguments.model,
        "rounds": arguments.rounds,
        "requests": len(requests),
        "rate_per_s": RATE_PER_S,
        "profile": profile_path.read_text(),
        "splits": rows,
        "is_met": all(row["is_met"] for row in rows),
    }
    path = report.write(
        arguments.name or "simulator-accuracy-vllm",
        "Does the simulator say what two vLLM engines do?",
        results,
        sections(results),
    )
    print(path.read_text())
    return 0 if results["is_met"] else 1


async def check(session: aiohttp.ClientSession, product: Product) -> None:
    """The two splits answer alike. Raises ``RuntimeError``."""
    body = body_of("check", TraceRequest(0.0, INPUT_TOKENS, 8, ()))
    body["prompt"] = english_text()[:400]
    texts = []
    for role in ("prefill", "decode", "prefill"):
        await take_role(session, product, role)
        texts.append((await stream_completion(session, product.url, body)).text)
    if len(set(texts)) != 1:
        raise RuntimeError(f"the splits answer differently: {texts}")


async def take_role(session: aiohttp.ClientSession, product: Product, role: str) -> None:
    """The first node has that role. Raises ``RuntimeError``."""
    url = f"{product.url}/internal/nodes/prefill-0/flip"
    body = {"role": role, "force": True}
    async with session.post(url, json=body, headers=product.operator_headers()) as response:
        answer = await response.json()
        if answer.get("verdict") not in ("flipped", "same_role"):
            raise RuntimeError(f"prefill-0 does not become a {role} node: {answer}")


async def run_profile(product: Product, path: str) -> None:
    """``splitserve profile`` has measured the cluster. Raises ``RuntimeError``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "splitserve.orchestrator.cli.main", "profile", product.name),
        *("--out", path, "--minutes", str(PROFILE_MINUTES), "--longest-ms", "1500"),
    )
    async with asyncio.timeout(PROFILE_DEADLINE_S):
        if await process.wait():
            raise RuntimeError(f"`splitserve profile` ended with {process.returncode}")


def row_of(split: str, measured: list[Outcome], simulated: Outcome) -> dict[str, Any]:
    """One split in the report: medians over the rounds, A/A spreads and errors."""
    row: dict[str, Any] = {
        "split": split,
        "measured": [described(outcome, TARGETS) for outcome in measured],
        "simulated": described(simulated, TARGETS),
        "measured_requests": [times_of(outcome) for outcome in measured],
        "simulated_requests": times_of(simulated),
        "is_met": True,
    }
    for what, percent in FIGURES:
        values = [figure(outcome, what, percent) for outcome in measured]
        told = figure(simulated, what, percent)
        apart = spread(values)
        error = abs(told - median(values)) / median(values)
        key = f"{what}_p{percent}"
        row[key] = {
            "measured_s": round(median(values), 4),
            "simulated_s": round(told, 4),
            "error": round(error, 4),
            "aa_spread": round(apart, 4),
        }
        if percent == 50:
            row["is_met"] = row["is_met"] and error <= apart + ALLOWED
    return row


def times_of(outcome: Outcome) -> dict[str, list[float]]:
    """Of each request in the order of the trace, so that single ones can be compared."""
    return {
        "ttft_s": [round(float(seconds), 4) for seconds in outcome.ttft_s],
        "itl_s": [round(float(seconds), 4) for seconds in outcome.itl_s],
    }


def sections(results: dict[str, Any]) -> list[str]:
    """The Markdown report."""
    rows = []
    for split in results["splits"]:
        for what, percent in FIGURES:
            one = split[f"{what}_p{percent}"]
            rows.append(
                [
                    split["split"],
                    f"{what.upper()} p{percent}",
                    f"{one['measured_s']:.3f}",
                    f"{one['simulated_s']:.3f}",
                    f"{one['error']:.1%}",
                    f"{one['aa_spread']:.1%}",
                ]
            )
    header = ["P:D", "figure", "measured s", "simulated s", "error", "A/A spread"]
    return [
        f"{results['rounds']} rounds of {results['requests']} requests, "
        f"{results['rate_per_s']:g} per second, `{results['model']}`. 0:2 is without splitting.",
        report.table(header, rows),
        f"Bars {'met' if results['is_met'] else 'MISSED'}: at p50, error at most the A/A spread "
        f"plus {ALLOWED:.0%}.",
    ]
