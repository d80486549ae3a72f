"""Nodes of one host slow each other, as far as the profile says so."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import numpy as np
import pytest
from support.simulated import PROFILE, asked

from splitserve.orchestrator.tuner.node_model import Job, Kind, NodeModel, What
from splitserve.orchestrator.tuner.prefix_cache_model import BlockPool
from splitserve.orchestrator.tuner.profile import Profile, exactly
from splitserve.orchestrator.tuner.simulated_request import SimulatedRequest
from splitserve.orchestrator.tuner.simulator import SimulationSettings, simulate

PREFILL_SLOWED, DECODE_SLOWED = 0.3, 0.5
REQUEST_S = PROFILE.request_s


def neighbourly(per_host: int, prefill: float, decode: float) -> Profile:
    """``PROFILE``, measured on hosts with so many nodes that slow each other."""
    return msgspec.structs.replace(
        PROFILE,
        nodes_per_host=per_host,
        prefill=msgspec.structs.replace(PROFILE.prefill, neighbour=exactly(prefill)),
        decode=msgspec.structs.replace(PROFILE.decode, neighbour=exactly(decode)),
    )


SLOWED = neighbourly(2, PREFILL_SLOWED, DECODE_SLOWED)


def by_jumps(changes: list[tuple[float, int]], prompts: list[int], output: int) -> list[float]:
    """When the tokens of the model's node were all sampled, and its first ones."""
    node = NodeModel("n", SLOWED, BlockPool(1000, 16, 0), speed=0.8, noise=0.0, rng=Random(0))
    for number, prompt in enumerate(prompts):
        request = SimulatedRequest(str(number), 0.0, prompt, output, ())
        node.arrive(Job(request, Kind.ALONE, prompt, output), 0.0)
    node.begin(0.0)
    coming, moments = list(changes), []
    while node.end_s is not None:
        if coming and coming[0][0] <= node.end_s:
            at_s, by = coming.pop(0)
            node.neighbour_changed(by, at_s)
            continue
        now = node.end_s
        facts = node.finish_jump(now)
        moments += [now for fact in facts if fact.what in (What.FIRST, What.ENDED)]
        node.begin(now)
    assert node.busy_s == pytest.approx(now)  # it has never rested
    return moments


def by_steps(changes: list[tuple[float, int]], prompts: list[int], output: int) -> list[float]:
    """The same, one step after the other, each of which is worked off at the present pace."""
    left = [(prompt, 0) for prompt in prompts]
    decoding: list[list[int]] = []
    moments: list[float] = []
    now, busy, coming = 0.0, 0, list(changes)
    while left or decoding:
        budget, chunks = SLOWED.limits.step_tokens - len(decoding), []
        for prompt, computed in left:
            tokens = min(prompt - computed, budget)
            budget -= tokens
            if tokens:
                chunks.append((computed, tokens))
        new = sum(tokens for _, tokens in chunks)
        attended = sum(tokens * (computed + tokens / 2) for computed, tokens in chunks)
        amounts = (new, attended, len(decoding), sum(context for context, _ in decoding))
        alone_s = SLOWED.step_seconds(*amounts) / 0.8
        slowed_s = SLOWED.neighbour_seconds(*amounts) / 0.8
        undone = 1.0
        while True:
            pace_s = alone_s + busy * slowed_s
            if not coming or now + undone * pace_s < coming[0][0]:
                now += undone * pace_s
                break
            undone -= (coming[0][0] - now) / pace_s
            now, busy = coming[0][0], busy + coming.pop(0)[1]
        for answer in decoding:
            answer[0], answer[1] = answer[0] + 1, answer[1] + 1
        moments += [now for _, sampled in decoding if sampled == output]
        decoding = [answer for answer in decoding if answer[1] < output]
        for number, (_, tokens) in enumerate(chunks):
            left[number] = (left[number][0], left[number][1] + tokens)
        done = [prompt for prompt, computed in left if computed == prompt]
        left = [entry for entry in left if entry[1] < entry[0]]
        moments += [now] * len(done)
        decoding += [[prompt + 1, 1] for prompt in done]
    return moments


@pytest.mark.parametrize("seed", range(30))
def test_jumps_beside_neighbours_are_steps(seed: int) -> None:
    """Whenever neighbours begin and rest, several times within a step too, every token comes when
    it comes step by step.
    """
    random = Random(seed)
    now, busy, changes = 0.0, 0, []
    for _ in range(random.randint(1, 40)):
        now += random.expovariate(random.choice([2.0, 20.0, 200.0]))
        by = random.choice([1, -1]) if busy else 1
        busy += by
        changes.append((now, by))
    prompts = [random.randint(2, 1500) for _ in range(random.randint(1, 4))]
    output = random.randint(2, 60)
    said, right = by_jumps(changes, prompts, output), by_steps(changes, prompts, output)
    assert said == pytest.approx(right, abs=1e-9)


def test_two_answers_on_one_host() -> None:
    """Two nodes that decode side by side take as much longer as the profile says; on hosts of their
    own, or in a host that only one of them uses, they do not.
    """
    requests = asked((0.0, 100, 200), (0.0, 100, 200))
    alone = simulate(requests, PROFILE, prefill=0, decode=2)
    beside = simulate(requests, SLOWED, prefill=0, decode=2)
    apart = simulate(requests, neighbourly(1, 0.3, 0.5), prefill=0, decode=2)
    assert np.array_equal(apart.itl_s, alone.itl_s)
    assert beside.itl_s == pytest.approx(alone.itl_s * (1 + DECODE_SLOWED), rel=1e-6)
    first = (alone.ttft_s - REQUEST_S) * (1 + PREFILL_SLOWED) + REQUEST_S
    assert beside.ttft_s == pytest.approx(first)
    single = simulate(requests[:1], SLOWED, prefill=0, decode=2)
    assert single.itl_s[0] == pytest.approx(alone.itl_s[0], rel=1e-6)


def test_hosts_are_filled_in_order() -> None:
    """Of three decode nodes in hosts of two the third has no neighbour."""
    requests = asked(*[(0.0, 100, 100)] * 3)
    found = simulate(requests, SLOWED, prefill=0, decode=3)
    alone = simulate(requests, PROFILE, prefill=0, decode=3)
    slower = sorted(found.itl_s / alone.itl_s)
    assert slower == pytest.approx([1.0, 1.5, 1.5], rel=0.02)


def test_every_busy_neighbour_counts() -> None:
    """With three others that decode a step takes three times as much longer."""
    requests = asked(*[(0.0, 100, 100)] * 4)
    found = simulate(requests, neighbourly(4, 0.0, 0.1), prefill=0, decode=4)
    alone = simulate(requests, PROFILE, prefill=0, decode=4)
    assert found.itl_s == pytest.approx(alone.itl_s * 1.3, rel=1e-6)


@pytest.mark.parametrize("per_host", [2, 4])
def test_what_does_not_slow_anybody_changes_nothing(per_host: int) -> None:
    """Nodes that share hosts without a slowdown give the outcome of nodes that do not, to the
    bit.
    """
    requests = asked(*[(0.05 * number, 50 + 7 * number, 30) for number in range(60)])
    assumed = SimulationSettings(noise=0.1)
    found, plain = (
        simulate(requests, profile, prefill=2, decode=2, settings=assumed)
        for profile in (neighbourly(per_host, 0.0, 0.0), PROFILE)
    )
    assert np.array_equal(found.ttft_s, plain.ttft_s)
    assert np.array_equal(found.ended_s, plain.ended_s)


def test_more_slowdown_is_never_faster_in_all() -> None:
    """Under a steady load on full hosts mean times grow with the slowdown, every request ends, and
    the same seed gives the same.
    """
    requests = asked(*[(0.08 * number, 80 + 11 * (number % 40), 25) for number in range(200)])
    assumed = SimulationSettings(noise=0.1)
    means = []
    for slowdown in (0.0, 0.2, 0.4):
        profile = neighbourly(4, slowdown, slowdown)
        found, again = (
            simulate(requests, profile, prefill=2, decode=2, settings=assumed) for _ in range(2)
        )
        assert np.array_equal(found.ended_s, again.ended_s)
        assert found.gap_counts.sum() == sum(r.output_tokens - 1 for r in requests)
        means.append((found.ttft_s.mean(), found.itl_s.mean()))
    for less, more in pairwise(means):
        assert less[0] < more[0]
        assert less[1] < more[1]
