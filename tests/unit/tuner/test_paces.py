"""Whether nodes that are not what the profile says are found out, and slow ones told apart."""

from __future__ import annotations

import pytest
from msgspec import structs
from support.controlled import BATCH_TOKENS, PROFILE

from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.core.placement import PlacementLimits
from splitserve.orchestrator.tuner.forecast import Finished
from splitserve.orchestrator.tuner.paces import SLOWEST, Paces, crowded, paced
from splitserve.orchestrator.tuner.profile import exactly
from splitserve.orchestrator.tuner.simulator import Simulation, SimulationSettings
from splitserve.orchestrator.tuner.slow_nodes import LEAST_LEGS, LEGS, SlowNodes
from splitserve.orchestrator.tuner.workload import Lengths, Mix, drawn_requests

WINDOW_S = 30.0


@pytest.mark.parametrize(("prefill", "decode"), [(1.0, 1.0), (1.2, 0.85), (0.85, 1.2)])
def test_the_paces_of_simulated_nodes_are_found(prefill: float, decode: float) -> None:
    """From first tokens and gaps alone, within a tenth, at a load at which some requests wait."""
    nodes = {"a": "prefill", "b": "prefill", "c": "decode", "d": "decode"}
    limits = CoreLimits(placement=PlacementLimits(prefill_batch_tokens=BATCH_TOKENS))
    truth = paced(PROFILE, prefill, decode)
    cluster = Simulation(truth, nodes, SimulationSettings(limits=limits, noise=0.1))
    cluster.offer(drawn_requests(Mix(Lengths(500, 0.8), Lengths(150, 0.8), 4.0), 2400, seed=1))
    paces, seen = Paces(PROFILE), 0
    for window in range(1, 21):
        cluster.run_until(window * WINDOW_S)
        for ended in cluster.ended[seen:]:
            request = Finished(ended.input_tokens, 0, ended.output_tokens, ended.input_tokens)
            paces.note(request, ended.ttft_s, ended.itl_s)
        seen = len(cluster.ended)
        paces.close_window(WINDOW_S, decode_nodes=2)
    assert paces.prefill == pytest.approx(prefill, rel=0.1)
    assert paces.decode == pytest.approx(decode, rel=0.1)
    learnt = paces.profile.prefill.seconds(500, 0) / PROFILE.prefill.seconds(500, 0)
    assert learnt == pytest.approx(paces.prefill)


def test_paces_are_bounded_and_slow_to_move() -> None:
    """Times that cannot be the nodes' own do not make a plan absurd."""
    paces = Paces(PROFILE)
    for _ in range(100):
        for _ in range(20):
            paces.note(Finished(100, 0, 10, 100), ttft_s=1000.0, itl_s=100.0)
        paces.close_window(WINDOW_S, 1)
    assert paces.prefill == pytest.approx(SLOWEST)
    assert paces.decode <= SLOWEST


def test_a_plan_counts_on_busy_neighbours() -> None:
    """Steps take as long as while all nodes of the host compute; what it is beyond that is learnt,
    and nothing is counted twice.
    """
    apart = structs.replace(PROFILE, nodes_per_host=3)
    assert crowded(apart).prefill.seconds(100, 0) == PROFILE.prefill.seconds(100, 0)
    slowed = structs.replace(
        apart,
        prefill=structs.replace(PROFILE.prefill, neighbour=exactly(0.1)),
        decode=structs.replace(PROFILE.decode, neighbour=exactly(0.25)),
    )
    told = Paces(crowded(slowed)).profile
    assert told.prefill.seconds(100, 0) == pytest.approx(1.2 * PROFILE.prefill.seconds(100, 0))
    assert told.decode.seconds(4, 900) == pytest.approx(1.5 * PROFILE.decode.seconds(4, 900))


def test_few_requests_tell_nothing() -> None:
    """Nor do answers of one token, nor a window without decode nodes."""
    paces = Paces(PROFILE)
    for count, answer, decode in ((3, 100, 1), (50, 1, 1), (50, 100, 0)):
        for _ in range(count):
            paces.note(Finished(100, 0, answer, 100), ttft_s=50.0, itl_s=5.0)
        paces.close_window(WINDOW_S, decode)
    assert (paces.prefill, paces.decode) == (1.0, 1.0)


def told(paces: dict[str, float], legs: int = LEGS) -> SlowNodes:
    """Decode nodes whose tokens take so long."""
    nodes = SlowNodes()
    for node, pace in paces.items():
        for number in range(legs):
            nodes.note(node, "decode", pace * (0.9 + 0.2 * (number % 2)))
    return nodes


def test_a_slow_node_is_told_from_the_others() -> None:
    """Not one that is a fifth slower, and only in its role."""
    nodes = told({"a": 1.0, "b": 1.2, "c": 2.0, "d": 0.9})
    assert nodes.slow("decode") == {"c"}
    assert nodes.slow("prefill") == frozenset()


def test_a_slow_node_that_recovers_is_none() -> None:
    """Its latest legs count; and a node that is another one now is not known."""
    nodes = told({"a": 1.0, "b": 1.0, "c": 2.0})
    for _ in range(LEGS):
        nodes.note("c", "decode", 1.0)
    assert nodes.slow("decode") == frozenset()
    nodes = told({"a": 1.0, "b": 1.0, "c": 2.0})
    nodes.forget("c")
    assert nodes.slow("decode") == frozenset()


def test_two_nodes_and_few_legs_tell_nothing() -> None:
    """Of two either could be the odd one, and some legs are slow by chance."""
    assert told({"a": 1.0, "b": 9.0}).slow("decode") == frozenset()
    few = told({"a": 1.0, "b": 1.0, "c": 9.0}, legs=LEAST_LEGS - 1)
    assert few.slow("decode") == frozenset()
