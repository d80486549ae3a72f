"""A simulated node does what a scheduler does that takes one step after the other."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import pytest

from splitserve.orchestrator.tuner.node_model import Job, Kind, NodeModel, What
from splitserve.orchestrator.tuner.prefix_cache_model import BlockPool
from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    EngineLimits,
    PrefillTime,
    Profile,
    TransferTime,
    exactly,
)
from splitserve.orchestrator.tuner.simulated_request import SimulatedRequest

PROFILE = Profile(
    model="m",
    engine="none 1",
    hardware="none",
    limits=EngineLimits(
        step_tokens=100, sequences=6, block_tokens=10, total_blocks=80, max_model_len=1000
    ),
    kv_bytes_per_token=1000,
    prefill=PrefillTime(exactly(0.01), exactly(0.001), exactly(1e-6)),
    decode=DecodeTime(exactly(0.02), exactly(0.001), exactly(1e-5)),
    transfers=(TransferTime("", "", exactly(0.002), exactly(1e9)),),
)


class Ask(NamedTuple):
    """A leg that comes to the node."""

    at_s: float
    prompt: int
    output: int
    kind: Kind = Kind.ALONE
    lands_s: float = 0.0
    """When the prompt of a decode leg lands."""


class Times(NamedTuple):
    """When a leg had its first and its last token, or its prompt for a prefill leg."""

    first_s: float
    ended_s: float


def by_jumps(asks: list[Ask]) -> list[Times]:
    """What the model says."""
    pool = BlockPool(PROFILE.limits.total_blocks, PROFILE.limits.block_tokens, 0)
    node = NodeModel("n", PROFILE, pool, speed=1.0, noise=0.0, rng=Random(0))
    jobs = [
        Job(
            SimulatedRequest(str(number), ask.at_s, ask.prompt, ask.output, ()),
            ask.kind,
            ask.prompt,
            0 if ask.kind is Kind.PREFILL else ask.output,
        )
        for number, ask in enumerate(asks)
    ]
    coming = sorted(
        [(ask.at_s, number, False) for number, ask in enumerate(asks)]
        + [(ask.lands_s, n, True) for n, ask in enumerate(asks) if ask.kind is Kind.DECODE]
    )
    first: dict[int, float] = {}
    ended: dict[int, float] = {}
    while coming or node.end_s is not None:
        first_s = node.first_token_s()
        times = [t for t in (node.end_s, first_s) if t is not None]
        if coming and (not times or coming[0][0] <= min(times)):
            now, number, has_landed = coming.pop(0)
            if has_landed:
                node.land(jobs[number], now)
            else:
                node.arrive(jobs[number], now)
                node.reserve(now)
            if coming and coming[0][0] == now:
                continue
        elif first_s is not None and first_s <= (node.end_s or 0):
            now = first_s
            first |= {int(job.request.id): now for job in node.take_fresh()}
        else:
            now = node.end_s or 0.0
            for what, job, *_ in node.finish_jump(now):
                number = int(job.request.id)
                if what is What.FIRST:
                    first[number] = now
                else:
                    ended[number] = now
                if what is What.PROMPT:
                    first[number] = now
                    node.release(job, now)
        node.begin(now)
        assert pool.used_blocks <= pool.total_blocks
        assert node.running <= PROFILE.limits.sequences
    assert pool.used_blocks == 0
    return [Times(first[number], ended[number]) for number in range(len(asks))]


class Running:
    """A leg in the plain scheduler."""

    def __init__(self, number: int, ask: Ask) -> None:
        self.number, self.ask = number, ask
        self.computed = ask.prompt if ask.kind is Kind.DECODE else 0
        self.sampled = 0
        self.blocks = -(-(ask.prompt + ask.output * (ask.kind is not Kind.PREFILL)) // 10)


def by_steps(asks: list[Ask]) -> list[Times]:
    """The same, one step after the other."""
    limits = PROFILE.limits
    coming = sorted(
        (ask.lands_s if ask.kind is Kind.DECODE else ask.at_s, ask.kind is Kind.DECODE, number)
        for number, ask in enumerate(asks)
    )
    prompts: list[Running] = []
    decoding: list[Running] = []
    waiting: list[Running] = []
    landed: list[Running] = []
    first: dict[int, float] = {}
    ended: dict[int, float] = {}
    now = 0.0
    while coming or prompts or decoding or waiting or landed:
        if not (prompts or decoding or waiting or landed):
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            _, is_landed, number = coming.pop(0)
            (landed if is_landed else waiting).append(Running(number, asks[number]))
        while landed and len(decoding) + len(prompts) < limits.sequences:
            decoding.append(landed.pop(0))
        budget = limits.step_tokens - len(decoding)
        chunks: list[tuple[Running, int]] = []
        for leg in prompts:
            chunks.append((leg, min(budget, leg.ask.prompt - leg.computed)))
            budget -= chunks[-1][1]
        while waiting and budget and len(decoding) + len(prompts) < limits.sequences:
            used = sum(leg.blocks for leg in (*prompts, *decoding, *landed))
            if used + waiting[0].blocks > limits.total_blocks:
                break
            leg = waiting.pop(0)
            prompts.append(leg)
            chunks.append((leg, min(budget, leg.ask.prompt)))
            budget -= chunks[-1][1]
        new = sum(tokens for _, tokens in chunks)
        attended = sum(tokens * (leg.computed + tokens / 2) for leg, tokens in chunks)
        context = sum(leg.ask.prompt + leg.sampled for leg in decoding)
        now += PROFILE.step_seconds(new, attended, len(decoding), context)
        for leg in list(decoding):
            _sample(leg, now, first, ended)
            if leg.number in ended:
                decoding.remove(leg)
        for leg, tokens in chunks:
            leg.computed += tokens
            if leg.computed < leg.ask.prompt:
                continue
            prompts.remove(leg)
            _sample(leg, now, first, ended)
            if leg.number not in ended:
                decoding.append(leg)
    return [Times(first[number], ended[number]) for number in range(len(asks))]


def _sample(leg: Running, now: float, first: dict[int, float], ended: dict[int, float]) -> None:
    leg.sampled += 1
    first.setdefault(leg.number, now)
    if leg.sampled == leg.ask.output or leg.ask.kind is Kind.PREFILL:
        ended[leg.number] = now


@pytest.mark.parametrize("seed", range(40))
def test_jumps_are_steps(seed: int) -> None:
    """Every first and last token comes when it comes step by step, in any mix of legs."""
    random = Random(seed)
    asks = []
    now = 0.0
    for _ in range(random.randint(1, 40)):
        now += random.choice([0.0, random.expovariate(random.choice([0.5, 3.0, 20.0]))])
        prompt, output = random.randint(1, 350), random.choice([1, 2, random.randint(1, 60)])
        kind = random.choice([Kind.ALONE, Kind.PREFILL]) if seed % 2 else Kind.ALONE
        asks.append(Ask(now, prompt, output, kind))
    for said, right in zip(by_jumps(asks), by_steps(asks), strict=True):
        assert tuple(said) == pytest.approx(tuple(right), abs=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_legs_that_landed_join_the_batch(seed: int) -> None:
    """The same with decode legs, whose prompts land while others decode or compute theirs."""
    random = Random(seed)
    asks = []
    now = 0.0
    for _ in range(random.randint(1, 12)):
        now += random.expovariate(2.0)
        ask = Ask(now, random.randint(1, 60), random.choice([1, 2, random.randint(1, 30)]))
        if random.random() < 0.7:
            ask = ask._replace(kind=Kind.DECODE, lands_s=now + random.uniform(0, 1))
        asks.append(ask)
    asks = [ask for number, ask in enumerate(asks) if number < 4 or ask.kind is Kind.DECODE][:5]
    for said, right in zip(by_jumps(asks), by_steps(asks), strict=True):
        assert tuple(said) == pytest.approx(tuple(right), abs=1e-9)


def test_a_leg_that_is_dropped_leaves_nothing() -> None:
    """Cancelled while it decodes, while its prompt is computed, and while it waits: the blocks are
    free, the others go on, and nothing is said of it any more.
    """
    pool = BlockPool(80, 10, 0)
    node = NodeModel("n", PROFILE, pool, speed=1.0, noise=0.0, rng=Random(0))
    jobs = [
        Job(SimulatedRequest(str(number), 0.0, prompt, output, ()), Kind.ALONE, prompt, output)
        for number, (prompt, output) in enumerate([(10, 50), (10, 40), (300, 5), (300, 5)])
    ]
    now = 0.0
    for job in jobs[:2]:
        node.arrive(job, now)
    node.begin(now)
    while node.decoding < 2:
        assert node.end_s is not None
        now = node.end_s
        node.finish_jump(now)
        node.begin(now)
    for job in jobs[2:]:
        node.arrive(job, now)
    assert node.end_s is not None
    now = node.end_s
    node.finish_jump(now)
    node.begin(now)
    assert node.prompts == [jobs[2]]
    for job in (jobs[0], jobs[2], jobs[3]):
        node.drop(job, now)
    facts = []
    while node.end_s is not None:
        now = node.end_s
        facts += node.finish_jump(now)
        node.begin(now)
    assert [(fact.what, fact.job) for fact in facts] == [(What.ENDED, jobs[1])]
    assert (pool.used_blocks, node.context, node.running, len(node.waiting)) == (0, 0, 0, 0)
