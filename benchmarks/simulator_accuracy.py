"""Does the simulator say what the running system does?

Eight mock engines take the times of a profile; nothing else of them is modelled: requests go
through the router's sockets, legs through the engines' schedulers, KV through the transfer threads.
The same requests are replayed against every split of the nodes, one after the other, and simulated
from the same profile. What a request takes beyond steps and transfers is measured on the idle
cluster first, as ``splitserve profile`` does.

Bars: over the splits, the median error of the median TTFT and of the median ITL is at most 5 %, of
their 90th percentiles at most 15 %; splits are ranked by goodput as measured (Kendall's tau, ties
counted, at least 0.9).

``--vllm`` asks the same of two vLLM engines (``harness/accuracy_vllm.py``).
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
from harness import accuracy_vllm, options, report
from harness.accuracy import FIGURES, Pair, kendall_tau
from harness.client import new_session, stream_completion
from harness.mock_nodes import HEADS, LAYERS, MockNodes
from harness.replay import CHAT_BLOCK_TOKENS, draw_chats, draw_trace, prompt_of, replay

from splitserve.orchestrator.engines.mock.model import KvShape, MockModel, reference_answer
from splitserve.orchestrator.engines.mock.tokenizer import decode as text_of
from splitserve.orchestrator.traces import TraceRequest
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    EngineLimits,
    PrefillTime,
    Profile,
    TransferTime,
    exactly,
)
from splitserve.orchestrator.tuner.simulator import SimulationSettings, simulate

if TYPE_CHECKING:
    import argparse

    import aiohttp

NODES = 8
LIMITS = {50: 0.05, 90: 0.15}
TAU_LIMIT = 0.9
IDLE_PROBES = 12
SIMULATIONS = 9
NOISE = 0.02
"""Of steps: near saturation who is served where hangs on milliseconds, so one simulation says
little.
"""

PROFILE = Profile(
    model="mock",
    engine="mock",
    hardware="none",
    limits=EngineLimits(
        step_tokens=512, sequences=12, block_tokens=32, total_blocks=800, max_model_len=4096
    ),
    kv_bytes_per_token=64,
    prefill=PrefillTime(exactly(0.030), exactly(0.001), exactly(2e-7)),
    decode=DecodeTime(exactly(0.060), exactly(0.002), exactly(3e-6)),
    transfers=(TransferTime("", "", exactly(0.010), exactly(1_000_000.0)),),
)
"""Slow, so that neither the cores nor the clock's grain matter; a prompt's KV is on its way for
tens of milliseconds.
"""
INPUT_TOKENS, OUTPUT_TOKENS = 450, 40
TURN_TOKENS = 300
QUEUE_TIMEOUT_S = 8.0
TARGETS = Targets(ttft_s=2.0, itl_s=0.1)


def body_of(seed: object, request: TraceRequest) -> dict[str, Any]:
    """A completion of the request's lengths."""
    return {
        "model": PROFILE.model,
        "prompt": prompt_of(seed, request),
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
    }


async def check(session: aiohttp.ClientSession, url: str) -> None:
    """A split answer is that of one engine. Raises ``RuntimeError``."""
    limits = PROFILE.limits
    head_bytes = PROFILE.kv_bytes_per_token // (LAYERS * HEADS)
    shape = KvShape(LAYERS, HEADS, limits.block_tokens, head_bytes)
    body = body_of("check", TraceRequest(0.0, 300, 8, ()))
    answer = await stream_completion(session, url, body)
    expected = text_of(reference_answer(MockModel(shape), body["prompt"], 8))
    if answer.text != expected:
        raise RuntimeError(f"the cluster answers {answer.text!r}, one engine {expected!r}")


async def measured_request_s(session: aiohttp.ClientSession, url: str) -> float:
    """What a first token takes beyond steps and transfers, on an idle cluster."""
    request = TraceRequest(0.0, INPUT_TOKENS, 2, ())
    told = float(simulate([request], PROFILE, prefill=1, decode=1).ttft_s[0])
    found = []
    for number in range(IDLE_PROBES):
        answer = await stream_completion(session, url, body_of(f"idle {number}", request))
        found.append(answer.ttft - told)
    return max(0.0, median(found))


async def main(arguments: argparse.Namespace) -> int:
    """All splits and the report; 1 when a bar is missed."""
    logs = arguments.log_folder or Path(tempfile.mkdtemp(prefix="simulator-accuracy-"))
    print(f"logs: {logs}", flush=True)
    splits = [int(text) for text in arguments.prefill.split(",")]
    requests = draw(arguments)
    pairs = []
    shares = []
    with MockNodes(
        PROFILE, logs, prefill=NODES // 2, decode=NODES // 2, queue_timeout_s=QUEUE_TIMEOUT_S
    ) as nodes:
        await nodes.start()
        async with new_session() as session:
            await check(session, nodes.url)
            request_s = await measured_request_s(session, nodes.url)
            print(f"a request takes {request_s * 1e3:.1f} ms beside its steps", flush=True)
            profile = msgspec.structs.replace(PROFILE, request_s=request_s)
            settings = SimulationSettings(
                limits=nodes.core_limits, trace_block_tokens=CHAT_BLOCK_TOKENS, noise=NOISE
            )
            for prefill in splits:
                await nodes.take_roles(session, prefill)
                cpu_s, began = nodes.router_cpu_s(), asyncio.get_running_loop().time()
                bodies = [body_of(prefill, request) for request in requests]
                measured = await replay(session, nodes.url, requests, bodies)
                elapsed_s = asyncio.get_running_loop().time() - began
                shares.append((nodes.router_cpu_s() - cpu_s) / elapsed_s)
                decode = NODES - prefill
                simulated = [
                    simulate(
                        requests,
                        profile,
                        prefill=prefill,
                        decode=decode,
                        settings=settings,
                        seed=seed,
                    )
                    for seed in range(SIMULATIONS)
                ]
                pairs.append(Pair(prefill, decode, measured, simulated))
                print(pairs[-1].as_dict(TARGETS), flush=True)
    results = summary(pairs) | {
        "requests": len(requests),
        "kind": "turns of chats" if arguments.chats else "requests",
        "rate_per_s": arguments.rate,
        "seed": arguments.seed,
        "request_s": round(request_s, 5),
        "router_cpu_share": round(max(shares), 3),
        "splits": [pair.as_dict(TARGETS) for pair in pairs],
    }
    path = report.write(
        arguments.name or f"simulator-accuracy{'-chats' if arguments.chats else ''}",
        "Does the simulator say what the running system does?",
        results,
        sections(results),
    )
    print(path.read_text())
    return 0 if results["is_met"] else 1


def draw(arguments: argparse.Namespace) -> list[TraceRequest]:
    """The requests that every split gets."""
    lengths = {"output_tokens": OUTPUT_TOKENS, "per_s": arguments.rate}
    if arguments.chats:
        lengths["turn_tokens"] = TURN_TOKENS
        return draw_chats(arguments.seed, seconds=arguments.seconds, **lengths)
    lengths["input_tokens"] = INPUT_TOKENS
    return draw_trace(arguments.seed, seconds=arguments.seconds, **lengths)


def summary(pairs: list[Pair]) -> dict[str, Any]:
    """Median errors over the splits, the ranking, and whether all bars are met."""
    errors = {
        f"{what}_p{percent}": median(pair.error(what, percent) for pair in pairs)
        for what, percent in FIGURES
    }
    goodputs = [pair.goodputs(TARGETS) for pair in pairs]
    tau = kendall_tau([found for found, _ in goodputs], [told for _, told in goodputs])
    are_near = all(errors[f"{what}_p{percent}"] <= LIMITS[percent] for what, percent in FIGURES)
    return {
        "median_errors": {name: round(error, 4) for name, error in errors.items()},
        "kendall_tau": round(tau, 4),
        "is_met": tau >= TAU_LIMIT and are_near,
    }


def sections(results: dict[str, Any]) -> list[str]:
    """The Markdown report."""
    header = ["P:D", "goodput/s", "failed", "TTFT p50 s", "p90", "ITL p50 ms", "p90"]
    rows = []
    for split in results["splits"]:
        found, told = split["measured"], split["simulated"]
        row = [split["split"]]
        row.append(f"{found['goodput_per_s']:.2f} / {told['goodput_per_s']:.2f}")
        row.append(f"{found['failed']} / {told['failed']}")
        for what, percent in FIGURES:
            key, factor = f"{what}_p{percent}", 1 if what == "ttft" else 1000
            values = (factor * one[f"{key}_s"] for one in (found, told))
            shown = " / ".join(f"{value:.{2 if what == 'ttft' else 1}f}" for value in values)
            row.append(f"{shown} ({split[f'{key}_error']:.1%})")
        rows.append(row)
    errors = results["median_errors"]
    return [
        f"{results['requests']} {results['kind']}, {results['rate_per_s']:g} per second, on {NODES}"
        " mock engines; measured / simulated (error). Simulated is the median of "
        f"{SIMULATIONS} simulations with {NOISE:.0%} noise; 0:8 is without splitting.",
        report.table(header, rows),
        "Median errors: "
        + ", ".join(f"{name} {error:.1%}" for name, error in errors.items())
        + f". Kendall's tau of goodput {results['kendall_tau']:.2f} (first token within "
        f"{TARGETS.ttft_s:g} s, {1000 * (TARGETS.itl_s or 0):g} ms between tokens). Bars "
        f"{'met' if results['is_met'] else 'MISSED'}: 5 % at p50, 15 % at p90, tau 0.9.",
        f"The router took at most {results['router_cpu_share']:.0%} of a core; a request takes "
        f"{results['request_s'] * 1e3:.1f} ms beside its steps.",
    ]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__.splitlines()[0], rounds=accuracy_vllm.ROUNDS)
    parser.add_argument("--vllm", action="store_true", help="two real engines; needs --model")
    parser.add_argument(
        "--chats", action="store_true", help="prompts repeat earlier ones, and engines keep them"
    )
    parser.add_argument("--prefill", default="4,0,1,2,3,5,6", help="splits: nodes with that role")
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals per split")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    chosen = parse()
    options.run(accuracy_vllm.main(chosen) if chosen.vllm else main(chosen))
