"""What holds of every simulated load.

More nodes or a lower rate can hurt a single request in general: it meets other requests on its
nodes than before. They cannot where requests are alike and only wait for prefill nodes, in one
line, first come first served; there it is exact, and that is what is tested.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import PROFILE, profile_with

from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.core.placement import PlacementLimits
from splitserve.orchestrator.traces import TraceRequest
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.simulator import Simulation, SimulationSettings, simulate

SMALL = profile_with(total_blocks=120)
"""Of 1,920 tokens: blocks run out."""

BLOCK_TOKENS = 64
IN_LINE = SimulationSettings(
    CoreLimits(
        queue_limit_requests=1000,
        queue_timeout_s=1e6,
        placement=PlacementLimits(prefill_ahead_requests=0),
    )
)
"""Requests wait for a prefill node in the router's queue and nowhere else."""
EXACT = profile_with(bytes_per_s=1e12, decode_is_free=True)

gaps = st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.4, 1.5]), min_size=1, max_size=40)


@st.composite
def loads(draw: st.DrawFn) -> list[TraceRequest]:
    """Prompts of a few conversations, of any length that fits, at any times."""
    now, requests = 0.0, []
    for gap in draw(gaps):
        now += gap
        prompt = draw(st.integers(1, 1000))
        output = draw(st.sampled_from([1, 2, 17, 90]))
        base = 1000 * draw(st.integers(0, 3))
        turn = draw(st.integers(1, 3))
        places = range(prompt // BLOCK_TOKENS)
        blocks = tuple(base + place + (200 * turn if place > 3 * turn else 0) for place in places)
        requests.append(TraceRequest(now, prompt, output, blocks))
    return requests


@given(
    requests=loads(),
    prefill=st.integers(0, 3),
    decode=st.integers(1, 3),
    threshold=st.sampled_from([0, 200]),
    noise=st.sampled_from([0.0, 0.3]),
    flips=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 2)), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_every_request_ends_and_leaves_nothing(
    requests: list[TraceRequest],
    prefill: int,
    decode: int,
    threshold: int,
    noise: float,
    flips: list[tuple[float, int]],
) -> None:
    """Whatever comes and whichever nodes change their role: no node has more blocks in use than it
    has, every request ends well, every token has its gap, and in the end nothing is held.
    """
    nodes = {f"p{number}": "prefill" for number in range(prefill)}
    nodes |= {f"d{number}": "decode" for number in range(decode)}
    limits = CoreLimits(placement=PlacementLimits(min_uncached_tokens=threshold))
    assumed = SimulationSettings(limits, trace_block_tokens=BLOCK_TOKENS, noise=noise)
    run = Simulation(SMALL, nodes, assumed)
    run.offer(requests)
    for at_s, number in sorted(flips):
        run.run_until(max(at_s, run.now))
        if number < prefill:
            run.flip(f"p{number}", "decode" if _role(run, f"p{number}") == "prefill" else "prefill")
    at_s = run.now
    while len(run.ended) < len(requests):
        at_s += 0.5
        run.run_until(at_s)
        assert all(0 <= node.free_blocks <= 120 for node in run.nodes())
        assert at_s < 1000
    run.run_until(at_s + 10)
    outcome = run.outcome()
    assert not np.isnan(outcome.ttft_s).any()
    assert (outcome.ttft_s > 0).all()
    assert outcome.gap_counts.sum() == sum(request.output_tokens - 1 for request in requests)
    assert {node.free_blocks for node in run.nodes()} == {120}
    assert all(node.running == node.waiting == node.parked == 0 for node in run.nodes())
    members = run.core.membership.nodes.values()
    assert {(m.committed_blocks, m.prefill_legs, m.decode_legs) for m in members} == {(0, 0, 0)}


def _role(run: Simulation, name: str) -> str:
    return next(node.role for node in run.nodes() if node.name == name)


def alike(times: list[float], tokens: int) -> list[TraceRequest]:
    """Equal requests at intervals of ``times``."""
    return [TraceRequest(float(at_s), tokens, 1, ()) for at_s in np.cumsum(times)]


@given(times=gaps, tokens=st.integers(1, 1200), pairs=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_more_pairs_never_hurt(times: list[float], tokens: int, pairs: int) -> None:
    """With one node more in both pools no request waits longer for its first token."""
    fewer, more = (
        simulate(alike(times, tokens), EXACT, prefill=n, decode=n, settings=IN_LINE)
        for n in (pairs, pairs + 1)
    )
    assert (more.ttft_s <= fewer.ttft_s + 1e-9).all()


@given(
    times=gaps,
    tokens=st.integers(1, 1200),
    factor=st.floats(1.0, 5.0),
    target_s=st.floats(0.1, 5.0),
    prefill=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_a_higher_rate_never_helps(
    times: list[float], tokens: int, factor: float, target_s: float, prefill: int
) -> None:
    """The same requests coming faster wait no shorter, and no larger share of them is good."""
    slow, fast = (
        simulate(
            alike([gap / speed for gap in times], tokens),
            EXACT,
            prefill=prefill,
            decode=2,
            settings=IN_LINE,
        )
        for speed in (1.0, factor)
    )
    assert (fast.ttft_s >= slow.ttft_s - 1e-9).all()
    targets = Targets(target_s)
    assert fast.is_good(targets).sum() <= slow.is_good(Targets(target_s + 1e-9)).sum()


@given(requests=loads(), seed=st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_the_same_seed_gives_the_same(requests: list[TraceRequest], seed: int) -> None:
    """Two runs have equal outcomes, to the bit."""
    assumed = SimulationSettings(trace_block_tokens=BLOCK_TOKENS, noise=0.2)
    first, again = (
        simulate(requests, PROFILE, prefill=2, decode=2, settings=assumed, seed=seed)
        for _ in range(2)
    )
    assert np.array_equal(first.ttft_s, again.ttft_s)
    assert np.array_equal(first.gaps_s, again.gaps_s)
