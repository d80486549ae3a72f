"""Is the split that `splitserve tune` recommends nearly the best one, and does it say when not to
disaggregate?

Cases: an hour of chats (``data/README.md``) at several rates on 4, 8 and 16 nodes; mixes with the
means and medians of six hours of four services (derived from alibaba/ServeGen,
https://arxiv.org/abs/2505.09999, Apache-2.0); and random mixes on random node models. The tuner
gets a profile with bands of 10 % and its own draw of the mix. What it recommends is judged by
simulations that it has not seen: every coefficient is off by up to 10 %, every node is up to 10 %
faster or slower than the others, steps vary by 5 %, and the arrivals are drawn anew. In each judged
world every ratio is tried, so the best one is known; a case has five worlds. The simulator itself
is measured against running systems elsewhere (``simulator_accuracy.py``).

Peers, in the same worlds: half of the nodes for each role, and nodes in proportion to the work of
prompts and answers by the profile (at least one each).

    python benchmarks/tuner_recommendation.py
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import msgspec
from harness import report
from harness.stats import summarise

from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.traces import TraceRequest, read_trace
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    EngineLimits,
    Estimate,
    PrefillTime,
    Profile,
    TransferTime,
    exactly,
)
from splitserve.orchestrator.tuner.simulator import SimulationSettings, run_fixed
from splitserve.orchestrator.tuner.trial import Split
from splitserve.orchestrator.tuner.tuning import Wish, tune
from splitserve.orchestrator.tuner.workload import (
    Lengths,
    Mix,
    drawn_requests,
    rate_of,
    spread_ticks,
    window,
    with_rate,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACE = Path(__file__).parent / "data" / "mooncake_conversation_trace.jsonl.gz"
SERVICES = {
    # name: mean and median of prompts, mean and median of answers, in tokens
    "m-small": (112.1, 45, 13.0, 3),
    "m-mid": (362.4, 184, 42.2, 26),
    "m-large": (1316.7, 872, 195.6, 48),
    "deepseek-r1": (2133.7, 270, 1404.9, 578),
}
RANDOM_MIXES = 24
REQUESTS = 1_200
WORLDS = 5
BAND = 0.10
SPEEDS = 0.10
NOISE = 0.05
BAR = 0.95
AGGREGATED_WINS = 1.05


@dataclass(frozen=True)
class Case:
    """What the tuner is asked."""

    name: str
    profile: Profile
    nodes: int
    targets: Targets
    mix: Mix | None = None
    trace_rate_per_s: float = 0.0
    first_world: int = 1000
    """Seed of the first world in which the answer is judged."""

    def requests(self, seed: int) -> list[TraceRequest]:
        """That come: another draw for each seed, or the trace's busiest part."""
        if self.mix is not None:
            return drawn_requests(self.mix, REQUESTS, seed, self.profile.limits.max_model_len)
        return with_rate(window(spread_ticks(_trace()), REQUESTS), self.trace_rate_per_s)


_kept: list[TraceRequest] = []


def _trace() -> list[TraceRequest]:
    if not _kept:
        _kept.extend(read_trace(TRACE, 512))
    return _kept


# Cases


def held_out(seed: int) -> list[Case]:
    """Other loads of the services and other mixes, in other worlds: no rule of the tuner was chosen
    on them.
    """
    found = mixes(Random(seed), Random(seed))
    return [replace(case, first_world=10 * seed) for case in found]


def cases() -> list[Case]:
    """Traces, services, random mixes; the same ones in every run."""
    found = [
        _case(f"chats, {nodes} nodes, load {load}", random, nodes, load, None)
        for random in [Random(1)]
        for nodes in (4, 8, 16)
        for load in (0.6, 0.9)
    ]
    return found + mixes(Random(2), Random(3))


def mixes(for_services: Random, for_mixes: Random) -> list[Case]:
    """Services with loads drawn from the one, and mixes drawn from the other."""
    found = []
    random = for_services
    for name, (in_mean, in_p50, out_mean, out_p50) in SERVICES.items():
        mix = Mix(
            Lengths(in_mean, _spread(in_mean, in_p50)),
            Lengths(out_mean, _spread(out_mean, out_p50)),
            1.0,
        )
        found.append(_case(name, random, random.choice((4, 6, 8)), random.uniform(0.5, 1), mix))
    random = for_mixes
    for number in range(RANDOM_MIXES):
        mix = Mix(
            Lengths(_log_uniform(random, 100, 6000), random.choice((0.0, 0.5, 1.0))),
            Lengths(_log_uniform(random, 20, 600), random.choice((0.0, 0.5, 1.0))),
            1.0,
        )
        load = random.uniform(0.4, 1.1)
        found.append(_case(f"random {number + 1}", random, random.randint(2, 8), load, mix))
    return found


def _case(name: str, random: Random, nodes: int, load: float, mix: Mix | None) -> Case:
    """With a node model, targets and a rate that ``load`` nodes' worth of work makes."""
    profile = _node_model(random)
    if mix is not None:
        inputs, outputs = mix.inputs.mean, mix.outputs.mean
        high = inputs * (1 + mix.inputs.spread)
    else:
        lengths = window(_trace(), REQUESTS)
        # Half of the prompts are found in caches or short
        inputs = fmean(one.input_tokens for one in lengths) * 0.7
        outputs = fmean(one.output_tokens for one in lengths)
        high = 2.5 * inputs
    base = profile.decode.base_s.value
    itl_s = base * random.uniform(1.4, 3.0)
    prompt_s, answer_s = _work(profile, inputs, outputs, itl_s)
    targets = Targets(
        ttft_s=0.1 + profile.prefill.seconds(high, 0) * random.uniform(2, 6), itl_s=itl_s
    )
    rate = load * nodes / (prompt_s + answer_s)
    if mix is None:
        return Case(name, profile, nodes, targets, trace_rate_per_s=rate)
    return Case(name, profile, nodes, targets, replace(mix, rate_per_s=rate))


def _node_model(random: Random) -> Profile:
    """Somewhere between a large model on a small GPU and a small one on a large GPU."""
    draw = lambda low, high: _banded(_log_uniform(random, low, high))  # noqa: E731
    return Profile(
        model="m",
        engine="model",
        hardware="model",
        limits=EngineLimits(
            step_tokens=random.choice((2048, 8192)),
            sequences=random.choice((64, 128, 256)),
            block_tokens=16,
            total_blocks=30_000,
            max_model_len=131_072,
        ),
        kv_bytes_per_token=100_000,
        prefill=PrefillTime(draw(0.004, 0.03), draw(2e-5, 3e-4), draw(2e-10, 4e-9)),
        decode=DecodeTime(draw(0.006, 0.03), draw(3e-5, 4e-4), draw(5e-9, 8e-8)),
        transfers=(TransferTime("", "", draw(0.001, 0.02), draw(1e9, 2e10)),),
    )


def _work(profile: Profile, inputs: float, outputs: float, itl_s: float) -> tuple[float, float]:
    """Node seconds of a prompt, and of an answer in batches that just meet ``itl_s``."""
    decode = profile.decode
    per_sequence = decode.sequence_s.value + decode.context_s.value * (inputs + outputs / 2)
    batch = min(max((itl_s - decode.base_s.value) / per_sequence, 1), profile.limits.sequences)
    chunks = math.ceil(inputs / profile.limits.step_tokens)
    prompt_s = profile.prefill.seconds(inputs, 0) + profile.prefill.base_s.value * (chunks - 1)
    return prompt_s, outputs * decode.seconds(batch, batch * (inputs + outputs / 2)) / batch


def _banded(value: float) -> Estimate:
    return Estimate(value, value * (1 - BAND), value * (1 + BAND))


def _log_uniform(random: Random, low: float, high: float) -> float:
    return math.exp(random.uniform(math.log(low), math.log(high)))


def _spread(mean: float, middle: float) -> float:
    """Coefficient of variation of the lognormal distribution with this mean and median."""
    return min(math.sqrt((mean / middle) ** 2 - 1), 4.0)


# Worlds


def world(profile: Profile, seed: int) -> Profile:
    """The profile as it is in truth: every coefficient is off by up to ``BAND``."""
    random = Random(seed)

    def off(estimate: Estimate) -> Estimate:
        return exactly(estimate.value * random.uniform(1 - BAND, 1 + BAND))

    prefill, decode, transfer = profile.prefill, profile.decode, profile.transfers[0]
    return msgspec.structs.replace(
        profile,
        prefill=PrefillTime(off(prefill.base_s), off(prefill.token_s), off(prefill.attention_s)),
        decode=DecodeTime(off(decode.base_s), off(decode.sequence_s), off(decode.context_s)),
        transfers=(TransferTime("", "", off(transfer.latency_s), off(transfer.bytes_per_s)),),
    )


def judged(case: Case, splits: Sequence[Split], number: int) -> dict[Split, float]:
    """Goodput of each split in one world."""
    seed = case.first_world + number
    truth = world(case.profile, seed)
    random = Random(seed)
    speeds = [random.uniform(1 - SPEEDS, 1 + SPEEDS) for _ in range(case.nodes)]
    requests = case.requests(seed)
    found = {}
    for split in splits:
        names = [f"prefill-{n}" for n in range(split.prefill)]
        names += [f"decode-{n}" for n in range(split.decode)]
        limits = CoreLimits()
        placement = replace(limits.placement, min_uncached_tokens=split.threshold_tokens)
        settings = SimulationSettings(
            limits=replace(limits, placement=placement),
            noise=NOISE,
            speeds=dict(zip(names, speeds, strict=True)),
        )
        done = run_fixed(requests, truth, split.prefill, split.decode, settings, seed)
        found[split] = done.outcome().goodput(case.targets)
    return found


# Answers


def answer(case: Case) -> dict[str, Any]:
    """One row: what is recommended, and what it serves in every world beside the best there."""
    began = time.monotonic()
    requests = case.requests(0)
    source = case.mix or requests
    mix_s = REQUESTS / case.mix.rate_per_s if case.mix else 0.0
    wish = Wish(case.nodes, case.targets, mix_s=mix_s, seed=0)
    tuned = tune(source, case.profile, wish)
    took_s = time.monotonic() - began
    chosen = tuned.recommendation.split
    ratios = [Split(prefill, case.nodes - prefill) for prefill in range(case.nodes)]
    worlds = [judged(case, dict.fromkeys([*ratios, chosen]), n) for n in range(WORLDS)]
    peers = {
        "half_and_half": Split(case.nodes // 2, case.nodes - case.nodes // 2),
        "by_work": _by_work(case, requests),
    }
    means = {split: fmean(goods[split] for goods in worlds) for split in ratios}
    means.setdefault(chosen, fmean(goods[chosen] for goods in worlds))
    best_split = max(mean for split, mean in means.items() if not split.is_aggregated)
    return {
        "case": case.name,
        "nodes": case.nodes,
        "rate_per_s": round(rate_of(requests), 3),
        "recommended": str(chosen),
        "best": str(max(ratios, key=means.__getitem__)),
        "of_best": summarise([_of(goods, chosen) for goods in worlds]).as_dict(),
        **{
            name: summarise([_of(goods, split) for goods in worlds]).as_dict()
            for name, split in peers.items()
        },
        "good_share": round(means[chosen] / rate_of(requests), 3),
        "aggregated_of_best_split": round(means[ratios[0]] / best_split, 3) if best_split else None,
        "says_aggregated": chosen.is_aggregated,
        "tune_s": round(took_s, 1),
    }


def _of(goods: dict[Split, float], split: Split) -> float:
    """Of the best of all in that world; 1 where nothing serves anything."""
    best = max(goods.values())
    return goods[split] / best if best else 1.0


def _by_work(case: Case, requests: Sequence[TraceRequest]) -> Split:
    """Nodes in proportion to the work of prompts and of answers."""
    inputs = fmean(one.input_tokens for one in requests)
    outputs = fmean(one.output_tokens for one in requests)
    assert case.targets.itl_s is not None
    prompt_s, answer_s = _work(case.profile, inputs, outputs, case.targets.itl_s)
    prefill = round(case.nodes * prompt_s / (prompt_s + answer_s))
    prefill = min(max(prefill, 1), case.nodes - 1)
    return Split(prefill, case.nodes - prefill)


def verdicts(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The bars over all cases."""
    medians = [row["of_best"]["median"] for row in rows]
    must_say = [
        row for row in rows if (row["aggregated_of_best_split"] or math.inf) > AGGREGATED_WINS
    ]
    return {
        "cases": len(rows),
        "of_best": summarise(medians).as_dict(),
        "at_least": BAR,
        "cases_below": [row["case"] for row in rows if row["of_best"]["median"] < BAR],
        "half_and_half": summarise([row["half_and_half"]["median"] for row in rows]).as_dict(),
        "by_work": summarise([row["by_work"]["median"] for row in rows]).as_dict(),
        "aggregated_wins": len(must_say),
        "aggregated_said": sum(row["says_aggregated"] for row in must_say),
        "not_said": [row["case"] for row in must_say if not row["says_aggregated"]],
    }


def sections(rows: Sequence[dict[str, Any]], found: dict[str, Any]) -> list[str]:
    """The Markdown report."""
    header = [
        "case",
        "nodes",
        "recommended",
        "best",
        "of the best",
        "half and half",
        "by work",
        "good",
        "aggregated / best split",
    ]
    lines = [
        [
            row["case"],
            str(row["nodes"]),
            row["recommended"],
            row["best"],
            *(_spread_text(row[name]) for name in ("of_best", "half_and_half", "by_work")),
            f"{row['good_share']:.0%}",
            "-"
            if row["aggregated_of_best_split"] is None
            else str(row["aggregated_of_best_split"]),
        ]
        for row in rows
    ]
    return [
        f"{found['cases']} cases, {WORLDS} worlds each: goodput in that of the best ratio of the "
        "same world, median [lowest to highest]. Worlds differ from the profile: coefficients by "
        f"up to {BAND:.0%}, speeds of nodes by up to {SPEEDS:.0%}, steps by {NOISE:.0%}, arrivals "
        "are drawn anew. *Best* is the ratio with the greatest mean over the worlds; a "
        "recommendation from so many tokens on is a split beside it.",
        f"Over the cases' medians: recommended {_spread_text(found['of_best'])}, half and half "
        f"{_spread_text(found['half_and_half'])}, by work {_spread_text(found['by_work'])}; cases "
        f"below {BAR}: {', '.join(found['cases_below']) or 'none'}. Not disaggregating wins by "
        f"more than 5 % in {found['aggregated_wins']} cases and is recommended in "
        f"{found['aggregated_said']} of them.",
        report.table(header, lines),
    ]


def _spread_text(found: dict[str, float]) -> str:
    return f"{found['median']:.3f} [{found['low']:.3f} to {found['high']:.3f}]"


def check() -> None:
    """The judge finds what must be true: more nodes of both kinds serve no less, and a world that
    is the profile itself has the tuner's own figures.
    """
    case = cases()[-1]
    requests = case.requests(0)
    small, large = (
        run_fixed(requests, case.profile, count, count).outcome().goodput(case.targets)
        for count in (1, 8)
    )
    assert large >= small, (small, large)
    settings = SimulationSettings()
    again = [run_fixed(requests, case.profile, 1, 1, settings, 5).outcome() for _ in range(2)]
    assert again[0].goodput(case.targets) == again[1].goodput(case.targets)


def main() -> int:
    """Check, measure and write the report; 1 when a bar is missed."""
    options = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--cases", type=int, default=0, help="only so many of the cases; 0: all")
    options.add_argument(
        "--held-out", type=int, default=0, help="seed of other cases; 0: the usual"
    )
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--name", default="tuner-recommendation", help="name of the result files")
    chosen = options.parse_args()
    check()
    asked = held_out(chosen.held_out) if chosen.held_out else cases()
    if chosen.cases:
        asked = asked[:: max(1, len(asked) // chosen.cases)]
    rows = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.processes, context) as pool:
        for row in pool.map(answer, asked):
            rows.append(row)
            print(
                f"{row['case']}: {row['recommended']} (best {row['best']}), "
                f"{_spread_text(row['of_best'])} of the best",
                flush=True,
            )
    found = verdicts(rows)
    results = {"requests": REQUESTS, "worlds": WORLDS, "verdict": found, "rows": rows}
    path = report.write(chosen.name, "Recommended ratios", results, sections(rows, found))
    print(path.read_text())
    return 0 if median(r["of_best"]["median"] for r in rows) >= BAR and not found["not_said"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
