"""The closed form against the simulator, and what must hold for any load."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support.controlled import BATCH_TOKENS, PROFILE, TARGETS

from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.core.placement import PlacementLimits
from splitserve.orchestrator.tuner.capacity import Assumptions, ClosedForm, Sample
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.profile import exactly
from splitserve.orchestrator.tuner.simulator import SimulationSettings, simulate
from splitserve.orchestrator.tuner.workload import Lengths, drawn_requests
from splitserve.orchestrator.tuner.workload import Mix as Workload

NODES = 5
ASSUMED = Assumptions(TARGETS, batch_tokens=BATCH_TOKENS)


def form_of(requests: list[tuple[int, int]], assumed: Assumptions = ASSUMED) -> ClosedForm:
    """For requests of (prompt, answer) tokens."""
    prompts, answers = np.array(requests, dtype=np.float64).T
    return ClosedForm(PROFILE, assumed, Sample(prompts, np.zeros(len(prompts)), answers))


@pytest.mark.parametrize(
    ("prompt", "answer", "rate"), [(300, 300, 6.0), (700, 100, 7.0), (700, 30, 9.0)]
)
def test_it_finds_the_split_that_the_simulator_finds(prompt: int, answer: int, rate: float) -> None:
    """The best split is the same, and its share of requests in time about the same."""
    mix = Workload(Lengths(prompt, 1.0), Lengths(answer, 1.0), rate)
    requests = drawn_requests(mix, round(120 * rate), seed=1)
    form = form_of([(request.input_tokens, request.output_tokens) for request in requests])
    limits = CoreLimits(placement=PlacementLimits(prefill_batch_tokens=BATCH_TOKENS))
    simulated, expected = {}, {}
    for prefill in range(1, NODES):
        outcome = simulate(
            requests,
            PROFILE,
            prefill=prefill,
            decode=NODES - prefill,
            settings=SimulationSettings(limits=limits),
        )
        simulated[prefill] = outcome.is_good(TARGETS).mean()
        expected[prefill] = form.expected(rate, prefill, NODES - prefill).good_share
    best = max(expected, key=expected.__getitem__)
    assert simulated[best] == max(simulated.values()) > 0.7
    assert expected[best] == pytest.approx(simulated[best], abs=0.15)


def test_sending_is_work_of_prefill_nodes() -> None:
    """They are asked for as much more as it takes; decode nodes are not, and prompts that are not
    split count nothing.
    """
    prefill = structs.replace(PROFILE.prefill, sending_s=exactly(1e-3))
    sample = Sample(np.array([100.0, 900.0]), np.zeros(2), np.full(2, 50.0))
    for threshold, sent_tokens in ((0, 1000), (500, 900), (5000, 0)):
        assumed = Assumptions(TARGETS, split_from_tokens=threshold)
        plain, sending = (
            ClosedForm(profile, assumed, sample).expected(1.0, 2, 3)
            for profile in (PROFILE, structs.replace(PROFILE, prefill=prefill))
        )
        more = sending.prefill_use - plain.prefill_use
        assert more == pytest.approx(sent_tokens / 2 * 1e-3 / 2)
        assert sending.decode_use == pytest.approx(plain.decode_use)


lengths = st.lists(st.tuples(st.integers(1, 8000), st.integers(1, 3000)), min_size=1, max_size=9)


@settings(deadline=None)
@given(lengths, st.floats(0.01, 50), st.integers(1, 20), st.integers(1, 20), st.floats(0, 500))
def test_shares_are_shares_and_load_never_helps(
    requests: list[tuple[int, int]], rate: float, prefill: int, decode: int, waiting: float
) -> None:
    """For every load; more requests per second, and more that wait, are never served better."""
    form = form_of(requests)
    found = form.expected(rate, prefill, decode, waiting)
    assert 0 <= found.good_share <= 1
    assert found.prefill_use >= 0
    assert found.decode_use >= 0
    assert form.expected(rate, prefill, decode).good_share >= found.good_share - 1e-9


@settings(deadline=None)
@given(lengths, st.floats(0.01, 50), st.integers(1, 20), st.integers(1, 20))
def test_more_nodes_are_used_less(
    requests: list[tuple[int, int]], rate: float, prefill: int, decode: int
) -> None:
    """One more of a role takes use from that role."""
    form = form_of(requests)
    found = form.expected(rate, prefill, decode)
    assert form.expected(rate, prefill + 1, decode).prefill_use < found.prefill_use
    assert form.expected(rate, prefill, decode + 1).decode_use < found.decode_use * 1.0001


def test_a_queue_makes_the_first_requests_late() -> None:
    """A pool with room works it off, a pool without does not."""
    form = form_of([(1000, 50)] * 10)
    free = form.expected(2.0, 3, 3)
    queued = form.expected(2.0, 3, 3, waiting=100)
    assert 0.5 < queued.good_share < free.good_share
    assert form.expected(20.0, 3, 3, waiting=100).good_share == pytest.approx(0.0, abs=0.01)


def test_short_prompts_that_are_not_split_use_no_prefill_node() -> None:
    """They take time of the decode nodes instead."""
    split = form_of([(200, 100)] * 10).expected(5.0, 2, 2)
    alone = form_of(
        [(200, 100)] * 10, Assumptions(TARGETS, split_from_tokens=300, batch_tokens=BATCH_TOKENS)
    ).expected(5.0, 2, 2)
    assert alone.prefill_use == 0
    assert alone.decode_use > split.decode_use


def test_without_targets_everything_is_in_time_that_is_carried() -> None:
    """And only too much work is late."""
    form = form_of([(1000, 50)] * 10, Assumptions(Targets(), batch_tokens=BATCH_TOKENS))
    assert form.expected(2.0, 3, 3).good_share == pytest.approx(1.0)
    assert form.expected(50.0, 3, 3).good_share < 0.2
