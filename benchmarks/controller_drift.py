"""Does the controller follow a load whose input:output ratio drifts?

Eight nodes in virtual time. The load is that of ``data/servegen_windows_6h.csv`` (model
``m-large``; ``harness/drifts.py`` says how requests are made of it), 6 hours in 20 minutes. The
controller plans with a profile; the nodes that judge it are others: their steps have noise, and are
up to 20 % faster or slower than the profile says, each node by itself (``nodes``), or all prefill
steps one way and all decode steps the other way (``kinds``).

Its peers, on the same requests and the same nodes: every fixed split, and a *clairvoyant* that has
for each half of a window the best split of all, found by simulating every one on the judging nodes,
and that changes for free: each half begins with empty nodes. A drift counts when no fixed split
reaches 0.95 of the clairvoyant. The controller begins with the split that its own closed form calls
best for the first window's mix, and changes one node at most every 5 minutes.

    python benchmarks/controller_drift.py
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from harness import report
from harness.drifts import Drift, read_drift, requests_of
from harness.stats import summarise

from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.core.placement import PlacementLimits
from splitserve.orchestrator.tuner.capacity import Assumptions, ClosedForm, Sample
from splitserve.orchestrator.tuner.controller import (
    Controller,
    ControllerSettings,
    Finished,
    NodeSeen,
)
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.paces import paced
from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    EngineLimits,
    PrefillTime,
    Profile,
    TransferTime,
    exactly,
)
from splitserve.orchestrator.tuner.simulator import Simulation, SimulationSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.traces import TraceRequest

TRACE = Path(__file__).parent / "data" / "servegen_windows_6h.csv"
MODEL = "m-large"
NODES = 8
WINDOWS = 6
WINDOW_S = 1200.0
ROUNDS = 12
PARTS = 2
"""Of a window, for each of which the clairvoyant has a split of its own."""
FIRSTS = (0, 4, 16, 37, 48, 2, 17)
"""First windows of the drifts."""
DEMAND = 0.65
NOISE = 0.1
PERTURBATION = 0.2
PERTURBATIONS = ("nodes", "kinds: slow prefill", "kinds: slow decode")
TARGETS = Targets(ttft_s=6.0, itl_s=0.16)
STEP_TOKENS = 2048
TICK_S = 30.0
CHANGE_INTERVAL_S = 300.0
QUALIFIES_BELOW = 0.95
BAR = 0.9
PROFILE = Profile(
    model=MODEL,
    engine="simulated",
    hardware="eight slow nodes, so that a run has few requests",
    limits=EngineLimits(
        step_tokens=STEP_TOKENS,
        sequences=64,
        block_tokens=16,
        total_blocks=6000,
        max_model_len=32_768,
    ),
    kv_bytes_per_token=100_000,
    prefill=PrefillTime(exactly(0.02), exactly(1.6e-3), exactly(4e-9)),
    decode=DecodeTime(exactly(0.08), exactly(2.4e-3), exactly(1.6e-6)),
    transfers=(TransferTime("", "", exactly(0.005), exactly(2e9)),),
    request_s=0.005,
)
"""What the controller knows."""


@dataclass(frozen=True)
class Judge:
    """The nodes as they are."""

    perturbation: str
    profile: Profile
    settings: SimulationSettings
    seed: int

    def cluster(self, prefill: int) -> Simulation:
        """An empty cluster with so many prefill nodes."""
        roles = {f"n{n}": "prefill" if n < prefill else "decode" for n in range(NODES)}
        return Simulation(self.profile, roles, self.settings, self.seed)


@dataclass(frozen=True)
class Round:
    """One drift on one set of nodes; requests served in time."""

    first_window: int
    perturbation: str
    requests: int
    clairvoyant: int
    clairvoyant_splits: str
    fixed: dict[str, int]
    controller: int
    changes: list[str]
    least_between_s: float

    @property
    def best_fixed(self) -> int:
        """Of all fixed splits."""
        return max(self.fixed.values())

    @property
    def qualifies(self) -> bool:
        """Whether a fixed split is not nearly as good."""
        return self.best_fixed < QUALIFIES_BELOW * self.clairvoyant


def judge_of(number: int) -> Judge:
    """The nodes of a round."""
    random = Random(1000 + number)
    limits = CoreLimits(placement=PlacementLimits(prefill_batch_tokens=STEP_TOKENS))
    settings = SimulationSettings(limits=limits, noise=NOISE)
    kind = PERTURBATIONS[number % len(PERTURBATIONS)]
    slow, fast = 1 + PERTURBATION, 1 - PERTURBATION
    profile = PROFILE
    if kind == "nodes":
        speeds = {f"n{n}": 1 / random.uniform(fast, slow) for n in range(NODES)}
        settings = replace(settings, speeds=speeds)
    elif kind == "kinds: slow prefill":
        profile = paced(PROFILE, slow, fast)
    else:
        profile = paced(PROFILE, fast, slow)
    return Judge(kind, profile, settings, number)


def good_of(requests: Sequence[TraceRequest], prefill: int, judge: Judge) -> int:
    """Requests in time with one split."""
    cluster = judge.cluster(prefill)
    cluster.offer(requests)
    cluster.run_to_end()
    return int(cluster.outcome().is_good(TARGETS).sum())


def clairvoyant(
    requests: Sequence[TraceRequest], drift: Drift, judge: Judge
) -> tuple[int, list[int]]:
    """Requests in time with the best split for each part, and the prefill nodes of each."""
    good, splits = 0, []
    part_s = drift.window_s / PARTS
    for number in range(len(drift.mixes) * PARTS):
        start = number * part_s
        part = [
            msgspec.structs.replace(request, at_s=request.at_s - start)
            for request in requests
            if start <= request.at_s < start + part_s
        ]
        best, prefill = max((good_of(part, prefill, judge), prefill) for prefill in splits_of())
        good += best
        splits.append(prefill)
    return good, splits


def splits_of() -> range:
    """Prefill nodes of every split."""
    return range(1, NODES)


def controlled(
    requests: Sequence[TraceRequest], drift: Drift, judge: Judge
) -> tuple[int, list[tuple[float, str]]]:
    """Requests in time with the controller, and its changes."""
    controller = Controller(
        PROFILE,
        ControllerSettings(
            TARGETS,
            window_s=TICK_S,
            change_interval_s=CHANGE_INTERVAL_S,
            missed_interval_s=CHANGE_INTERVAL_S,
            batch_tokens=STEP_TOKENS,
        ),
    )
    cluster = judge.cluster(first_split(drift))
    cluster.offer(requests)
    controller.begin(0.0)
    arrived = ended = 0
    changes = []
    for tick in range(1, int(drift.span_s / TICK_S) + 1):
        now = tick * TICK_S
        cluster.run_until(now)
        for request in requests[arrived : cluster.arrived]:
            controller.arrived(request.at_s, request.input_tokens)
        arrived = cluster.arrived
        for request in cluster.ended[ended:]:
            if math.isnan(request.ttft_s):
                controller.failed(request.ended_s)
            else:
                prompt = request.input_tokens
                seen = Finished(prompt, 0, request.output_tokens, prompt)
                controller.served(request.ended_s, seen, request.ttft_s, request.itl_s)
        ended = len(cluster.ended)
        nodes = [
            NodeSeen(view.name, view.role, legs=view.running + view.waiting + view.parked)
            for view in cluster.nodes()
        ]
        decision = controller.decide(now, nodes, cluster.queued)
        if decision.is_change:
            cluster.flip(decision.node, decision.role)
            controller.changed(now)
            changes.append((now, decision.why))
    cluster.run_to_end()
    return int(cluster.outcome().is_good(TARGETS).sum()), changes


def first_split(drift: Drift) -> int:
    """Prefill nodes that the closed form calls best for the first mix."""
    requests = requests_of(
        replace(drift, mixes=drift.mixes[:1]), PROFILE, TARGETS, NODES, DEMAND, seed=0
    )
    prompts = np.array([request.input_tokens for request in requests], dtype=np.float64)
    answers = np.array([request.output_tokens for request in requests], dtype=np.float64)
    assumed = Assumptions(TARGETS, batch_tokens=STEP_TOKENS)
    form = ClosedForm(PROFILE, assumed, Sample(prompts, np.zeros(len(prompts)), answers))
    rate = len(requests) / drift.window_s
    return max(splits_of(), key=lambda p: form.expected(rate, p, NODES - p).good_share)


def round_of(number: int) -> Round:
    """One drift, judged."""
    drift = read_drift(TRACE, MODEL, FIRSTS[number % len(FIRSTS)], WINDOWS, WINDOW_S)
    judge = judge_of(number)
    requests = requests_of(drift, PROFILE, TARGETS, NODES, DEMAND, seed=number)
    good, changes = controlled(requests, drift, judge)
    most, splits = clairvoyant(requests, drift, judge)
    fixed = {f"{p}:{NODES - p}": good_of(requests, p, judge) for p in splits_of()}
    times = [at_s for at_s, _ in changes]
    between = [later - earlier for earlier, later in itertools.pairwise(times)]
    return Round(
        drift.first,
        judge.perturbation,
        len(requests),
        most,
        " ".join(map(str, splits)),
        fixed,
        good,
        [f"{at_s / 60:.1f} min: {why}" for at_s, why in changes],
        min(between, default=math.inf),
    )


def check() -> None:
    """A run repeats itself, and a cluster with every node in one split serves what it can."""
    drift = read_drift(TRACE, MODEL, 0, 1, 300.0)
    requests = requests_of(drift, PROFILE, TARGETS, NODES, 0.2, seed=0)
    judge = judge_of(0)
    prefill = first_split(drift)
    first, second = (good_of(requests, prefill, judge) for _ in range(2))
    assert first == second, "two equal runs differ"
    assert first > 0.95 * len(requests), f"{first} of {len(requests)} in time at a low load"


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Ratios over the rounds that count, and the verdict."""
    counted = [found for found in rounds if found.qualifies]
    assert counted, "in every drift some fixed split is nearly as good as the clairvoyant"
    of_clairvoyant = [found.controller / found.clairvoyant for found in counted]
    of_fixed = [found.controller / found.best_fixed for found in counted]
    bars = {
        "at least 0.9 of the clairvoyant, in every round": min(of_clairvoyant) >= BAR,
        "above every fixed split, in every round": min(of_fixed) > 1,
        "no more than one change per 5 minutes": all(
            found.least_between_s >= CHANGE_INTERVAL_S for found in rounds
        ),
    }
    return {
        "rounds_that_count": len(counted),
        "controller_of_clairvoyant": summarise(of_clairvoyant).as_dict(),
        "controller_of_best_fixed": summarise(of_fixed).as_dict(),
        "best_fixed_of_clairvoyant": summarise(
            [found.best_fixed / found.clairvoyant for found in counted]
        ).as_dict(),
        "bars": bars,
    }


def sections(results: dict[str, Any], rounds: Sequence[Round]) -> list[str]:
    """The Markdown report."""
    lines = [
        [
            str(found.first_window),
            found.perturbation,
            f"{found.requests:,}",
            f"{found.clairvoyant / found.requests:.3f}",
            max(found.fixed, key=found.fixed.__getitem__),
            f"{found.best_fixed / found.clairvoyant:.3f}",
            f"{found.controller / found.clairvoyant:.3f}",
            str(len(found.changes)),
            "" if found.qualifies else "no",
        ]
        for found in rounds
    ]
    header = [
        "from window",
        "perturbed",
        "requests",
        "clairvoyant in time",
        "best fixed",
        "best fixed / clairvoyant",
        "controller / clairvoyant",
        "changes",
        "counts",
    ]
    bars = [[bar, "yes" if met else "NO"] for bar, met in results["bars"].items()]
    ratios = [
        [name, *(f"{results[key][value]:.3f}" for value in ("median", "low", "high"))]
        for name, key in (
            ("controller / clairvoyant", "controller_of_clairvoyant"),
            ("controller / best fixed", "controller_of_best_fixed"),
            ("best fixed / clairvoyant", "best_fixed_of_clairvoyant"),
        )
    ]
    return [
        f"{NODES} nodes; drifts of {WINDOWS} windows, each in {WINDOW_S:g} s; the work is "
        f"{DEMAND:g} of what the nodes can do; steps with a noise of {NOISE:g}, and up to "
        f"{PERTURBATION:g} off the profile; first token within {TARGETS.ttft_s:g} s, tokens within "
        f"{TARGETS.itl_s:g} s.",
        report.table(header, lines),
        f"Over the {results['rounds_that_count']} rounds that count:",
        report.table(["ratio", "median", "lowest", "highest"], ratios),
        report.table(["bar", "met"], bars),
    ]


def main() -> int:
    """Check, judge and write the report; 1 when a bar is missed."""
    options = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--jobs", type=int, default=2, help="processes")
    options.add_argument("--name", default="controller-drift", help="name of the result files")
    chosen = options.parse_args()
    begun = time.monotonic()
    check()
    with ProcessPoolExecutor(chosen.jobs) as pool:
        rounds = []
        for found in pool.map(round_of, range(chosen.rounds)):
            rounds.append(found)
            share = found.controller / found.clairvoyant
            print(
                f"from window {found.first_window}: {share:.3f} of the clairvoyant, best fixed "
                f"{found.best_fixed / found.clairvoyant:.3f}, {len(found.changes)} changes",
                flush=True,
            )
    results = summary(rounds) | {
        "seconds": round(time.monotonic() - begun),
        "rounds": [asdict(found) for found in rounds],
    }
    path = report.write(chosen.name, "A drifting load", results, sections(results, rounds))
    print(path.read_text())
    return 0 if all(results["bars"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
