"""How many requests does the simulator get through in a second?

Three figures, each with the whole router core in it:

* a mix of prompts of 2,000 and answers of 300 tokens on the average, on 8 nodes, one process;
* an hour of chats (``data/README.md``, 12,031 requests, prefixes shared) on 16 nodes at every
  ratio, not disaggregating included, with one process per core: the seconds that all of it takes;
* the mix on 1,000 nodes, at 125 times the rate.

The peer is the plainest simulation of the same mix: one decode step at a time, for one node, with
no router (``stepwise``). Both must say the same, within 2 %, before anything is timed: mean gap
between tokens of the same batch.

    python benchmarks/simulator_speed.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import report
from harness.stats import summarise

from splitserve.orchestrator.traces import TraceRequest, read_trace
from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    EngineLimits,
    PrefillTime,
    Profile,
    TransferTime,
    exactly,
)
from splitserve.orchestrator.tuner.simulator import simulate
from splitserve.orchestrator.tuner.workload import Lengths, Mix, drawn_requests, spread_ticks

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACE = Path(__file__).parent / "data" / "mooncake_conversation_trace.jsonl.gz"
TRACE_BLOCK_TOKENS = 512
TRACE_NODES = 16
PER_CORE_BAR = 3_000.0
TRACE_BAR_S = 60.0
MIX = Mix(Lengths(2_000, 0.8), Lengths(300, 0.8), rate_per_s=16.0)
MIX_REQUESTS = 6_000
MIX_PREFILL, MIX_DECODE = 4, 4
MANY = 125
PROFILE = Profile(
    model="m",
    engine="model",
    hardware="model",
    limits=EngineLimits(
        step_tokens=8_192,
        sequences=256,
        block_tokens=16,
        total_blocks=40_000,
        max_model_len=131_072,
    ),
    kv_bytes_per_token=100_000,
    prefill=PrefillTime(exactly(0.01), exactly(1e-4), exactly(1e-9)),
    decode=DecodeTime(exactly(0.012), exactly(1e-4), exactly(2e-8)),
    transfers=(TransferTime("", "", exactly(0.002), exactly(1e10)),),
)


class WrongTimesError(Exception):
    """The simulator does not say what single steps say."""


def stepwise(sequences: int, context: int, tokens: int) -> float:
    """Seconds per token of so many answers side by side, one step after the other."""
    seconds = 0.0
    for step in range(1, tokens):
        seconds += PROFILE.decode.seconds(sequences, sequences * (context + step))
    return seconds / (tokens - 1)


def check() -> None:
    """Answers of equal length that start together take what their single steps take. Raises
    ``WrongTimesError``.
    """
    requests = [TraceRequest(0.0, 100, 200, ()) for _ in range(8)]
    found = simulate(requests, PROFILE, prefill=0, decode=1)
    expected = stepwise(8, 100, 200)
    if abs(found.itl_percentile(50) - expected) > 0.02 * expected:
        raise WrongTimesError(f"{found.itl_percentile(50)} s per token, {expected} step by step")


def rate(requests: Sequence[TraceRequest], prefill: int, decode: int) -> float:
    """Requests simulated per second. All must have been answered."""
    began = time.perf_counter()
    found = simulate(requests, PROFILE, prefill=prefill, decode=decode)
    seconds = time.perf_counter() - began
    assert len(found.ttft_s) == len(requests)
    return len(requests) / seconds


def one_ratio(prefill: int) -> tuple[int, float, float]:
    """(prefill nodes, seconds, p50 of the TTFT) of the whole trace."""
    requests = spread_ticks(list(read_trace(TRACE, TRACE_BLOCK_TOKENS)))
    began = time.perf_counter()
    found = simulate(requests, PROFILE, prefill=prefill, decode=TRACE_NODES - prefill)
    return prefill, time.perf_counter() - began, found.ttft_percentile(50)


def all_ratios(processes: int) -> dict[str, Any]:
    """The trace at every ratio."""
    began = time.perf_counter()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        rows = list(pool.map(one_ratio, range(TRACE_NODES)))
    seconds = time.perf_counter() - began
    return {"seconds": round(seconds, 1), "processes": processes, "ratios": rows}


def main() -> int:
    """Check, measure, write the report; 1 when a bar is missed."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--name", default="simulator-speed")
    chosen = options.parse_args()
    check()
    requests = drawn_requests(MIX, MIX_REQUESTS, 1)
    many_mix = Mix(MIX.inputs, MIX.outputs, MIX.rate_per_s * MANY)
    many = drawn_requests(many_mix, 4 * MIX_REQUESTS, 1)
    mixed, wide = [], []
    for _ in range(chosen.rounds):
        mixed.append(rate(requests, MIX_PREFILL, MIX_DECODE))
        wide.append(rate(many, MIX_PREFILL * MANY, MIX_DECODE * MANY))
    trace = all_ratios(chosen.processes)
    per_core, thousand = summarise(mixed), summarise(wide)
    results = {
        "rounds": chosen.rounds,
        "requests_per_s": per_core.as_dict(),
        "per_core_bar": PER_CORE_BAR,
        "trace": trace,
        "trace_bar_s": TRACE_BAR_S,
        "thousand_nodes_requests_per_s": thousand.as_dict(),
    }
    is_met = per_core.median >= PER_CORE_BAR and trace["seconds"] <= TRACE_BAR_S
    lines = [
        [
            f"mix, {MIX_PREFILL}:{MIX_DECODE} nodes, requests/s of one process",
            f"{per_core.median:,.0f} [{per_core.low:,.0f} to {per_core.high:,.0f}]",
            f"at least {PER_CORE_BAR:,.0f}",
        ],
        [
            f"12,031 chats, {TRACE_NODES} nodes, {TRACE_NODES} ratios, {chosen.processes} "
            "processes, seconds",
            f"{trace['seconds']:.1f}",
            f"at most {TRACE_BAR_S:.0f}",
        ],
        [
            f"mix at {MANY} times the rate, 1,000 nodes, requests/s of one process",
            f"{thousand.median:,.0f} [{thousand.low:,.0f} to {thousand.high:,.0f}]",
            "",
        ],
    ]
    text = report.table(["what", "figure", "bar"], lines)
    path = report.write(chosen.name, "Speed of the simulator", results, [text])
    print(path.read_text())
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
