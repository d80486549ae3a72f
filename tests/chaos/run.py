"""``python -m chaos.run --minutes 30 --in-flight 50 --seed 1``: torment a cluster and judge it.

The run is made of rounds: load and faults, then quiet, in which everything must be idle again. It
prints a summary, writes ``benchmarks/results/chaos.json``, and ends with 1 when a bar is not met;
then the seed, the stories of the requests and the ends of the logs are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any

import aiohttp
import uvloop

from chaos.cache_faults import CACHE_KINDS, ENGINE_KINDS, CacheChaos, CacheTally
from chaos.cache_stores import CacheStores
from chaos.cluster import VLLM_BOUNDS, Bounds, ChaosCluster, Shape, log_faults, told
from chaos.faults import KINDS, Chaos, Fault, Watch
from chaos.load import MARGIN_S, Load, Story, asked_prompts, chat_prompts, mock_prompts
from chaos.verdict import Judged, Outcome, Touch, Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
IDLE_POLL_S = 0.25
STORIES_SHOWN = 12
REASONS_SHOWN = 8


@dataclass(frozen=True)
class Plan:
    """What a run does."""

    seed: int
    seconds: float
    in_flight: int = 50
    round_s: float = 60.0
    shape: Shape = field(default_factory=Shape)
    kinds: tuple[str, ...] = KINDS
    prompts: int = 200
    start_limit_s: float = 120.0
    ends_an_agent: bool = True
    with_cache: bool = False
    """A shared cache with a small arena, a small disk and a Redis, and faults of them."""
    each_kind: bool = False
    """On a slow machine it lasts longer, until every kind of fault has been made."""


@dataclass
class Result:
    """What came of it."""

    plan: Plan
    stories: list[Story]
    faults: list[Fault]
    verdict: Verdict
    idle_after_s: list[float]
    seconds: float
    logs: str = ""
    cache: dict[str, Any] = field(default_factory=dict)
    """What the shared cache has done, where there was one."""

    def summary(self) -> dict[str, Any]:
        """For the file and the terminal."""
        return {
            "seed": self.plan.seed,
            "seconds": round(self.seconds, 1),
            "engine": self.plan.shape.engine,
            "transport": self.plan.shape.transport,
            "nodes": list(self.plan.shape.nodes),
            "in_flight": self.plan.in_flight,
            "requests": len(self.stories),
            "requests_by_touch_and_outcome": self.verdict.counts,
            "early_success_share_with_spare": round(self.verdict.early_success_share, 4),
            "failures_by_touch_and_reason": _reasons(self.verdict.judged),
            "faults": _fault_table(self.faults),
            "idle_after_s": [round(seconds, 2) for seconds in self.idle_after_s],
            "longest_request_s": round(max(s.ended - s.started for s in self.stories), 2),
            **({"cache": self.cache} if self.cache else {}),
            "violations": [text.splitlines()[0][:300] for text in self.verdict.violations[:50]],
            "violations_count": len(self.verdict.violations),
        }


async def torment(plan: Plan, folder: Path) -> Result:
    """Start the cluster, torment it, stop it."""
    stores = await asyncio.to_thread(CacheStores, folder) if plan.with_cache else None
    try:
        cluster = ChaosCluster(plan.shape, folder, "" if stores is None else stores.yaml)
        try:
            return await _tormented(plan, cluster, stores)
        finally:
            await asyncio.to_thread(cluster.close)
    finally:
        if stores is not None:
            await asyncio.to_thread(stores.close)


async def _tormented(plan: Plan, cluster: ChaosCluster, stores: CacheStores | None) -> Result:
    began = time.monotonic()
    await asyncio.to_thread(cluster.up.wait_until_serving, plan.start_limit_s)
    watch = Watch(cluster)
    load = await _load(plan, cluster.url, Random(plan.seed))
    watching = [asyncio.create_task(watch.run())]
    draws = Random(plan.seed + 1)
    tally = None
    if stores is None:
        chaos = Chaos(cluster, watch, draws)
    else:
        chaos = CacheChaos(cluster, watch, draws, stores)
        tally = CacheTally(stores, watch)
        watching.append(asyncio.create_task(tally.run()))
    idle_after: list[float] = []
    problems = await _rounds(plan, cluster, load, chaos, idle_after, tally)
    for task in watching:
        task.cancel()
    await asyncio.wait(watching)
    cache = {}
    if tally is not None:
        cache = tally.summary()
        problems += tally.problems(len(load.stories))
    problems += await asyncio.to_thread(cluster.stop)
    problems += log_faults(cluster.up)
    verdict = judge(load.stories, chaos.faults, plan.shape.nodes, problems)
    logs = cluster.up.story() if verdict.violations else ""
    seconds = time.monotonic() - began
    return Result(plan, load.stories, chaos.faults, verdict, idle_after, seconds, logs, cache)


async def _load(plan: Plan, url: str, rng: Random) -> Load:
    share = 0.5
    if plan.with_cache:
        prompts = await asyncio.to_thread(chat_prompts, rng, plan.prompts)
        share = 0.1
    elif plan.shape.engine == "mock":
        prompts = await asyncio.to_thread(mock_prompts, rng, plan.prompts)
    else:
        prompts = await asked_prompts(url, rng, plan.prompts, 384)
    deadline_s = plan.shape.bounds.request_deadline_s
    return Load(url, prompts, rng, plan.in_flight, deadline_s, salted_share=share)


async def _rounds(
    plan: Plan,
    cluster: ChaosCluster,
    load: Load,
    chaos: Chaos,
    idle_after: list[float],
    tally: CacheTally | None,
) -> list[str]:
    """What was not idle after a round; the run ends with that."""
    end = time.monotonic() + plan.seconds
    while True:
        now = time.monotonic()
        is_last = now + 1.5 * plan.round_s > end
        stop = asyncio.Event()
        asking = asyncio.create_task(load.run(stop))
        until = end if is_last else now + plan.round_s
        await chaos.run(until, plan.kinds, each=plan.each_kind)
        if is_last and plan.ends_an_agent:
            await chaos.terminate_an_agent()
        stop.set()
        await asking
        seconds, problems = await until_idle(cluster)
        if tally is not None:
            problems += await tally.until_idle()
        idle_after.append(seconds)
        shown = f"{len(load.stories)} requests, {len(chaos.faults)} faults, idle {seconds:.1f} s"
        print(f"  {time.monotonic() - end + plan.seconds:6.0f} s: {shown} after", flush=True)
        if is_last or problems:
            return problems


async def until_idle(cluster: ChaosCluster) -> tuple[float, list[str]]:
    """Seconds until nothing was held by anybody, and what still was at the limit."""
    bounds = cluster.shape.bounds
    limit_s = bounds.lease_s + bounds.transfer_deadline_s + bounds.engine_silence_limit_s + MARGIN_S
    began = time.monotonic()
    async with aiohttp.ClientSession() as session:
        while True:
            busy = _busy(cluster, await cluster.status(session))
            seconds = time.monotonic() - began
            if not busy or seconds > limit_s:
                return seconds, busy
            await asyncio.sleep(IDLE_POLL_S)


def _busy(cluster: ChaosCluster, view: dict[str, Any] | None) -> list[str]:
    """What somebody still holds."""
    if view is None:
        return ["the router does not answer"]
    busy = [f"router: {view['requests']}"] if _requests(view) else []
    for name in cluster.shape.nodes:
        node = view["nodes"].get(name)
        if node is None:
            busy += [] if cluster.has_left(name) else [f"{name} is not there"]
            continue
        held = {
            key: node[key]
            for key in (
                "prefill_legs",
                "decode_legs",
                "committed_blocks",
                "running",
                "waiting",
                "open_transfers",
                "leased_blocks",
            )
            if node[key]
        }
        if not node["is_usable"]:
            held["is_usable"] = False
        if node["free_blocks"] != node["total_blocks"] - 1:
            held["free_blocks"] = f"{node['free_blocks']} of {node['total_blocks'] - 1}"
        if held:
            busy.append(f"{name} still holds {told(held)}")
    return busy


def _requests(view: dict[str, Any]) -> int:
    requests = view["requests"]
    return int(requests["waiting"]) + int(requests["running"])


def _fault_table(faults: Sequence[Fault]) -> dict[str, dict[str, float]]:
    table = {}
    for kind in sorted({fault.kind for fault in faults}):
        seconds = [fault.seconds for fault in faults if fault.kind == kind]
        table[kind] = {
            "count": len(seconds),
            "seconds_median": round(statistics.median(seconds), 2),
            "seconds_max": round(max(seconds), 2),
        }
    return table


def _reasons(judged: Sequence[Judged]) -> dict[str, dict[str, int]]:
    """The most frequent reasons of failures, with numbers made equal."""
    found: dict[str, Counter[str]] = {}
    for one in judged:
        if one.outcome not in (Outcome.OK, Outcome.LEFT):
            why = re.sub(r"[0-9]+", "N", one.why.splitlines()[0] if one.why else "")
            reason = f"{one.outcome.value}: {why[:150]}"
            found.setdefault(one.touch.value, Counter())[reason] += 1
    return {touch: dict(reasons.most_common(REASONS_SHOWN)) for touch, reasons in found.items()}


def story_of(one: Judged, began: float) -> str:
    """A request and the faults that touched it, with times since the run's beginning."""
    story = one.story
    shown = {
        "started": round(story.started - began, 2),
        "first_data": None if story.first_data is None else round(story.first_data - began, 2),
        "ended": round(story.ended - began, 2),
        "status": story.status,
        "prompt_tokens": story.prompt_tokens,
        "tokens": story.tokens,
        "streamed": story.streamed,
        "timeline": story.timeline,
    }
    lines = [f"{story.id}: {one.outcome.value}, touched {one.touch.value}: {one.why}", told(shown)]
    for fault in one.faults:
        ended = "open" if fault.ended is None else f"{fault.ended - began:.2f}"
        lines.append(
            f"    {fault.kind} {fault.node} {fault.detail} {fault.began - began:.2f} to {ended}"
        )
    return "\n".join(lines)


def explain(result: Result) -> str:
    """Why a run has failed: the seed, the violations, stories and logs."""
    began = min(story.started for story in result.stories)
    bad = [
        one
        for one in result.verdict.judged
        if one.outcome in (Outcome.WRONG, Outcome.HANG, Outcome.UGLY)
        or (one.outcome is Outcome.RESET and one.touch is not Touch.ROUTER)
        or (one.touch is Touch.NONE and one.outcome not in (Outcome.OK, Outcome.LEFT))
    ]
    failed = [
        one
        for one in result.verdict.judged
        if one.touch is Touch.EARLY_SPARED and one.outcome not in (Outcome.OK, Outcome.LEFT)
    ]
    reasons = Counter(f"{one.outcome.value}: {one.why[:200]}" for one in failed)
    return "\n".join(
        [
            f"seed {result.plan.seed}",
            *result.verdict.violations[:40],
            "--- failures before the first token while a spare node existed",
            *(f"{count} x {reason}" for reason, count in reasons.most_common(20)),
            "--- stories",
            *(story_of(one, began) for one in [*bad[:STORIES_SHOWN], *failed[:STORIES_SHOWN]]),
            result.logs,
        ]
    )


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m chaos.run", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=30.0)
    add(
        "--in-flight",
        type=int,
        default=None,
        help="requests (default: 50, with vLLM 6, with --cache 24)",
    )
    add("--seed", type=int, default=None, help="repeats the draws of an earlier run")
    add("--round-s", type=float, default=60.0, help="seconds of faults before everything must rest")
    add("--prefill", type=int, default=2)
    add("--decode", type=int, default=2)
    add("--engine", choices=("mock", "vllm"), default="mock")
    add("--model", default="mock", help="folder of the model, for vLLM")
    add("--transport", default="tcp")
    add("--cache", action="store_true", help="with a shared cache, and faults of it")
    known = ", ".join(dict.fromkeys((*KINDS, *CACHE_KINDS)))
    add("--kinds", default="", help=f"comma separated; known: {known}")
    add("--output", type=Path, default=None, help="default: a file of benchmarks/results")
    add("--stories", type=Path, default=None, help="where every request's story goes")
    add("--logs", type=Path, default=None, help="where the story of a failed run goes")
    options = parser.parse_args(arguments)
    if options.engine == "vllm" and options.model == "mock":
        parser.error("--engine vllm needs --model FOLDER")
    if options.engine == "vllm" and options.cache:
        parser.error("--cache goes with the mock engine")
    plan = plan_of(options)
    print(f"chaos with seed {plan.seed} for {plan.seconds:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        result = uvloop.run(torment(plan, Path(folder)))
    summary = {"command": _command(plan), **result.summary()}
    output = options.output or RESULTS / ("chaos-cache.json" if plan.with_cache else "chaos.json")
    output.write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    if options.stories is not None:
        began = min(story.started for story in result.stories)
        stories = (story_of(one, began) for one in result.verdict.judged)
        options.stories.write_text("\n\n".join(stories))
    if not result.verdict.violations:
        return 0
    text = explain(result)
    if options.logs is not None:
        options.logs.write_text(text)
    else:
        print(text)
    return 1


def _command(plan: Plan) -> str:
    """What repeats the run's draws."""
    shape = plan.shape
    words = ["--minutes", f"{plan.seconds / 60:g}", "--in-flight", str(plan.in_flight)]
    words += ["--seed", str(plan.seed), "--round-s", f"{plan.round_s:g}"]
    words += ["--prefill", str(shape.prefill), "--decode", str(shape.decode)]
    words += ["--engine", shape.engine, "--transport", shape.transport]
    words += ["--cache"] if plan.with_cache else []
    if plan.kinds not in (KINDS, ENGINE_KINDS, CACHE_KINDS):
        words += ["--kinds", ",".join(plan.kinds)]
    return f"make chaos ARGS={shlex.quote(shlex.join(words))}"


def plan_of(options: argparse.Namespace) -> Plan:
    """What the options ask for."""
    is_mock = options.engine == "mock"
    kinds = tuple(kind.strip() for kind in options.kinds.split(",") if kind.strip())
    return Plan(
        seed=SystemRandom().randrange(10**6) if options.seed is None else options.seed,
        seconds=options.minutes * 60,
        in_flight=options.in_flight or (24 if options.cache else 50 if is_mock else 6),
        round_s=options.round_s if is_mock else max(options.round_s, 180.0),
        shape=Shape(
            options.prefill,
            options.decode,
            options.engine,
            options.model,
            options.transport,
            Bounds() if is_mock else VLLM_BOUNDS,
        ),
        kinds=kinds or (CACHE_KINDS if options.cache else KINDS if is_mock else ENGINE_KINDS),
        prompts=200 if is_mock else 24,
        start_limit_s=60.0 if is_mock else 600.0,
        ends_an_agent=is_mock and not kinds,
        with_cache=options.cache,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
