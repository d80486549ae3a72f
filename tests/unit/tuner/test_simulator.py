"""What the simulator says of small loads is what one can add up by hand."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from support.simulated import PROFILE, asked, profile_with

from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.core.placement import PlacementLimits
from splitserve.orchestrator.traces import TraceRequest
from splitserve.orchestrator.tuner.profile import exactly
from splitserve.orchestrator.tuner.simulator import (
    FlipError,
    Simulation,
    SimulationSettings,
    run_fixed,
    simulate,
)

REQUEST_S, LATENCY_S = PROFILE.request_s, 0.002


def prefill_s(new: int, cached: int = 0) -> float:
    """One step over a prompt."""
    return PROFILE.prefill.seconds(new, cached)


def decode_s(*contexts: int) -> float:
    """One step for sequences of those lengths."""
    return PROFILE.decode.seconds(len(contexts), sum(contexts))


def test_one_request_on_an_idle_pair() -> None:
    """The first token comes after the request's own time, the prompt, the landing and one decode
    step; each further one a decode step later.
    """
    outcome = simulate(asked((1.0, 100, 4)), PROFILE, prefill=1, decode=1)
    first = REQUEST_S + prefill_s(100) + LATENCY_S + decode_s(100)
    assert outcome.arrived_s.tolist() == [1.0]
    assert outcome.ttft_s[0] == pytest.approx(first)
    assert outcome.itl_s[0] == pytest.approx((decode_s(101) + decode_s(102) + decode_s(103)) / 3)
    assert outcome.ended_s[0] == pytest.approx(1.0 + first + 3 * decode_s(102))
    assert outcome.gap_counts.sum() == 3


def test_a_long_prompt_takes_several_steps() -> None:
    """Each step has its own base and is at most ``step_tokens`` long."""
    outcome = simulate(asked((0.0, 1200, 1)), PROFILE, prefill=1, decode=1)
    steps = prefill_s(512) + prefill_s(512, 512) + prefill_s(176, 1024)
    assert outcome.ttft_s[0] == pytest.approx(REQUEST_S + steps + LATENCY_S + decode_s(1200))


def test_sending_takes_time_of_the_prefill_node() -> None:
    """More for each token of a split prompt, in each of its steps; not of one that stays."""
    prefill = msgspec.structs.replace(PROFILE.prefill, sending_s=exactly(2e-4))
    profile = msgspec.structs.replace(PROFILE, prefill=prefill)
    requests = asked((0.0, 1200, 3))
    split, plain = (simulate(requests, p, prefill=1, decode=1) for p in (profile, PROFILE))
    assert split.ttft_s[0] - plain.ttft_s[0] == pytest.approx(1200 * 2e-4)
    assert split.itl_s[0] == pytest.approx(plain.itl_s[0])
    alone, before = (simulate(requests, p, prefill=0, decode=1) for p in (profile, PROFILE))
    assert alone.ttft_s[0] == before.ttft_s[0]


def test_a_slow_network_decides_when_a_prompt_lands() -> None:
    """1 MB at 0.5 MB/s takes two seconds from the beginning of the prompt, whose computation it
    hides; the next request's bytes wait for the link.
    """
    profile = profile_with(bytes_per_s=5e5)
    outcome = simulate(asked((0.0, 1000, 1), (0.0, 1000, 1)), profile, prefill=1, decode=1)
    first = REQUEST_S + 2.0 + LATENCY_S + decode_s(1000)
    assert outcome.ttft_s == pytest.approx([first, first + 2.0])


def test_the_last_step_sends_its_own_bytes() -> None:
    """A step that computes faster than its bytes travel has landed a network's time after its
    begin.
    """
    profile = profile_with(bytes_per_s=2e5)
    outcome = simulate(asked((0.0, 100, 1)), profile, prefill=1, decode=1)
    assert outcome.ttft_s[0] == pytest.approx(REQUEST_S + 0.5 + LATENCY_S + decode_s(100))


def test_without_prefill_nodes_the_decode_node_computes() -> None:
    """The step that ends the prompt samples the first token; nothing is moved."""
    outcome = simulate(asked((0.0, 100, 3)), PROFILE, prefill=0, decode=1)
    assert outcome.ttft_s[0] == pytest.approx(REQUEST_S + prefill_s(100))
    assert outcome.itl_s[0] == pytest.approx((decode_s(101) + decode_s(102)) / 2)


def test_a_prompt_beside_an_answer_slows_it() -> None:
    """On one node the step of a newcomer's prompt is a gap in the answer that runs."""
    answer, newcomer = (0.0, 16, 30), (0.2, 400, 1)
    alone = simulate(asked(answer), PROFILE, prefill=0, decode=1)
    both = simulate(asked(answer, newcomer), PROFILE, prefill=0, decode=1)
    added = prefill_s(400) - min(PROFILE.prefill.base_s.value, PROFILE.decode.base_s.value)
    assert both.ended_s[0] - alone.ended_s[0] == pytest.approx(added)
    apart = simulate(asked(answer, newcomer), PROFILE, prefill=1, decode=1)
    assert apart.itl_s[0] < both.itl_s[0]


def test_short_prompts_stay_on_the_decode_node() -> None:
    """With a threshold the core sends a short prompt to a decode node alone."""
    placement = PlacementLimits(min_uncached_tokens=200)
    settings = SimulationSettings(CoreLimits(placement=placement))
    run = run_fixed(asked((0.0, 100, 1), (5.0, 300, 1)), PROFILE, 1, 1, settings)
    short, long = run.outcome().ttft_s
    assert short == pytest.approx(REQUEST_S + prefill_s(100))
    assert long == pytest.approx(REQUEST_S + prefill_s(300) + LATENCY_S + decode_s(300))


def test_a_prompt_that_a_node_has_is_not_computed_again() -> None:
    """Whole blocks of the trace are taken from the node's cache, but never the whole prompt."""
    requests = asked((0.0, 1100, 1), (9.0, 1100, 1), blocks=(1, 2, 3))
    outcome = simulate(requests, PROFILE, prefill=1, decode=1)
    rest = REQUEST_S + LATENCY_S + decode_s(1100)
    assert outcome.ttft_s[1] == pytest.approx(rest + prefill_s(76, 1024))
    whole = simulate(
        asked((0.0, 1024, 1), (9.0, 1024, 1), blocks=(1, 2)), PROFILE, prefill=1, decode=1
    )
    rest = REQUEST_S + LATENCY_S + decode_s(1024)
    assert whole.ttft_s[1] == pytest.approx(rest + prefill_s(512, 512))
    settings = SimulationSettings(prefix_caching=False)
    without = simulate(requests, PROFILE, prefill=1, decode=1, settings=settings)
    assert without.ttft_s[1] == pytest.approx(without.ttft_s[0])


def test_the_core_sends_a_prompt_to_who_has_it() -> None:
    """Of two idle prefill nodes the one that has the prompt's beginning computes it."""
    requests = [
        TraceRequest(0.0, 1100, 1, (1, 2, 3)),
        TraceRequest(5.0, 1100, 1, (4, 5, 6)),
        TraceRequest(10.0, 1100, 1, (4, 5, 7)),
        TraceRequest(15.0, 1100, 1, (1, 2, 8)),
    ]
    outcome = simulate(requests, PROFILE, prefill=2, decode=2)
    rest = REQUEST_S + LATENCY_S + decode_s(1100)
    assert outcome.ttft_s[2:] == pytest.approx([rest + prefill_s(76, 1024)] * 2)


def test_what_fits_on_no_node_fails() -> None:
    """A prompt longer than the model takes is refused, as an engine would; the next one is fine."""
    outcome = simulate(asked((0.0, 9000, 5), (1.0, 100, 1)), PROFILE, prefill=1, decode=1)
    assert math.isnan(outcome.ttft_s[0])
    assert math.isnan(outcome.itl_s[0])
    assert outcome.ttft_s[1] < 1


def test_a_full_queue_refuses_and_a_long_wait_ends() -> None:
    """The router's own bounds hold: of ten at once two wait, and one of these for too long."""
    limits = CoreLimits(
        queue_limit_requests=2,
        queue_timeout_s=1.0,
        placement=PlacementLimits(prefill_ahead_requests=0),
    )
    requests = asked(*[(0.0, 500, 1)] * 10)
    run = run_fixed(requests, PROFILE, 1, 1, SimulationSettings(limits))
    outcome = run.outcome()
    assert np.isnan(outcome.ttft_s).tolist() == [False, False, *[True] * 8]
    assert outcome.ended_s[2] == pytest.approx(1.0)
    assert outcome.ended_s[3] == 0.0
    assert not run.core.requests


def test_a_first_token_that_comes_too_late_is_given_up() -> None:
    """Legs that are cancelled leave the nodes, and give their blocks back."""
    limits = CoreLimits(first_token_deadline_s=1.0)
    requests = asked((0.0, 3000, 5), (0.0, 100, 2), (20.0, 100, 2))
    run = run_fixed(requests, PROFILE, 1, 1, SimulationSettings(limits))
    assert np.isnan(run.outcome().ttft_s).tolist() == [True, True, False]
    assert {node.free_blocks for node in run.nodes()} == {1000}


def test_is_the_same_for_the_same_seed() -> None:
    """All arrays are equal; another seed of noisy nodes gives others."""
    requests = asked(*[(0.1 * number, 100 + 37 * number % 400, 20) for number in range(50)])
    settings = SimulationSettings(noise=0.2)
    first, again, other = (
        simulate(requests, PROFILE, prefill=2, decode=2, settings=settings, seed=seed)
        for seed in (1, 1, 2)
    )
    for name in ("arrived_s", "ttft_s", "itl_s", "ended_s", "gaps_s", "gap_counts"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert not np.array_equal(first.ttft_s, other.ttft_s)


def test_a_slower_node_takes_longer() -> None:
    """At half the speed its steps take twice the time, all else stays."""
    settings = SimulationSettings(speeds={"prefill-0": 0.5})
    outcome = simulate(asked((0.0, 100, 3)), PROFILE, prefill=1, decode=1, settings=settings)
    rest = REQUEST_S + LATENCY_S + decode_s(100)
    assert outcome.ttft_s[0] == pytest.approx(rest + 2 * prefill_s(100))
    assert outcome.itl_s[0] == pytest.approx(decode_s(101, 0) - 0.001 + 0.5e-5)


def test_golden() -> None:
    """A mixed load on three nodes with noise, as it was when this was written."""
    requests = asked(
        *[(0.3 * number, 50 + 61 * number % 700, 1 + 17 * number % 60) for number in range(120)]
    )
    settings = SimulationSettings(noise=0.1)
    outcome = simulate(requests, PROFILE, prefill=2, decode=1, settings=settings, seed=7)
    found = [outcome.ttft_percentile(50), outcome.ttft_percentile(90)]
    found += [outcome.itl_percentile(50), outcome.itl_percentile(90), outcome.ended_s.max()]
    assert found == pytest.approx(
        [0.4542922, 0.7896622, 0.0438849, 0.0503577, 37.2914397], rel=1e-5
    )


class TestStepping:
    """A simulation goes on from where it was, and can be looked at and changed."""

    def test_in_pieces_as_at_once(self) -> None:
        """Offered and run second by second it comes out as at once."""
        requests = asked(*[(0.2 * number, 300, 25) for number in range(40)])
        at_once = simulate(requests, PROFILE, prefill=1, decode=2)
        nodes = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
        run = Simulation(PROFILE, nodes)
        for second in range(20):
            run.offer(r for r in requests if second <= r.at_s < second + 1)
            run.run_until(second + 1.0)
            assert run.now == second + 1.0
        run.run_to_end()
        assert np.array_equal(run.outcome().ended_s, at_once.ended_s)
        assert run.arrived == len(run.ended) == 40

    def test_says_what_nodes_do(self) -> None:
        """Queues, running and parked requests are seen while they last."""
        run = Simulation(PROFILE, {"p": "prefill", "d": "decode"})
        run.offer(asked(*[(0.0, 400, 10)] * 4))
        run.run_until(0.1)
        prefill, decode = run.nodes()
        assert (prefill.name, prefill.role, prefill.running, prefill.waiting) == (
            "p",
            "prefill",
            1,
            1,
        )
        assert (decode.parked, decode.running, run.queued) == (2, 0, 2)
        run.run_to_end()
        assert [ended.output_tokens for ended in run.ended] == [10] * 4
        assert 0 < run.busy_shares()["decode"] < run.busy_shares()["prefill"] <= 1

    def test_offers_come_in_time(self) -> None:
        """A request of the past is refused."""
        run = Simulation(PROFILE, {"p": "prefill", "d": "decode"})
        run.run_until(5.0)
        with pytest.raises(ValueError, match=r"offered at 5 s"):
            run.offer(asked((4.0, 1, 1)))

    def test_a_flip_fails_nothing(self) -> None:
        """A node that computes prompts becomes a decode node, and back; every request ends well,
        and new answers come from it.
        """
        run = Simulation(PROFILE, {"a": "prefill", "b": "prefill", "c": "decode"})
        run.offer(asked(*[(0.1 * number, 400, 30) for number in range(100)]))
        run.run_until(2.0)
        run.flip("b", "decode")
        run.run_until(6.0)
        assert {node.name: node.role for node in run.nodes()}["b"] == "decode"
        assert run.nodes()[1].running + run.nodes()[1].parked > 0
        run.flip("b", "prefill")
        run.run_to_end()
        assert not np.isnan(run.outcome().ttft_s).any()
        assert {node.free_blocks for node in run.nodes()} == {1000}

    def test_the_last_decode_node_stays(self) -> None:
        """The core's own refusal is passed on."""
        run = Simulation(PROFILE, {"a": "prefill", "c": "decode"})
        with pytest.raises(FlipError, match="last decode node"):
            run.flip("c", "prefill")
