"""Which nodes a prompt goes to when some have its beginning."""

from __future__ import annotations

from typing import Any

import pytest
from router_stubs.core_story import Driver, ended, names

from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.effects import Effect, StartAlone, StartPair

MARKS = [number.to_bytes(8, "big") for number in range(8)]
"""Of a prompt of 4,096 bytes and 512 tokens: 64 tokens apart."""
LONG: dict[str, Any] = {
    "prompt_tokens": 512,
    "marks": tuple(MARKS),
    "prompt_bytes": 4_096,
}


class Cluster(Driver):
    """Nodes that report their prefixes, with room for 62 prompts of 512 tokens."""

    def __init__(self, *nodes: str, placement: dict[str, Any] | None = None) -> None:
        super().__init__(placement={"prefill_ahead_requests": 9} | (placement or {}))
        for node in nodes:
            self.add(node)

    def add(self, node: str, **changes: Any) -> None:
        large = {"total_blocks": 2_000, "reports_prefixes": True}
        self.join(node, **(large | changes))
        self.report(node, free_blocks=2_000, total_blocks=2_000)

    def hold(self, node: str, marks: int, *, is_first: bool = False) -> None:
        """The node's prefix cache has the first so many marks of the prompt."""
        added = tuple((mark, 60 * (n + 1)) for n, mark in enumerate(MARKS[:marks]))
        self.do(ev.NodePrefixesReported(node, f"{node}-1", is_first, added, ()))

    def pair(self, request_id: str, **changes: Any) -> tuple[str, str]:
        """Where a long prompt is computed and decoded."""
        return placed(self.request(request_id, **(LONG | changes)))


def placed(effects: list[Effect]) -> tuple[str, str]:
    """(prefill node, decode node) of the request that starts; "" for none."""
    (start,) = [e for e in effects if isinstance(e, StartPair | StartAlone)]
    prefill = start.prefill.node if isinstance(start, StartPair) else ""
    return prefill, start.decode.node


def finish(driver: Driver, request_id: str) -> Any:
    """The request's timeline, after its answer."""
    request = driver.core.requests[request_id]
    if request.has_prefill_leg:
        driver.do(ev.PrefillAnswered(request_id, request.prefill_attempt, 200))
    driver.do(ev.FirstDataArrived(request_id, request.decode_attempt))
    return ended(driver.do(ev.DecodeEnded(request_id, request.decode_attempt)))


def test_a_prompt_goes_where_its_beginning_is() -> None:
    """Again and again while nothing else is on the nodes, and to each pool's own holder."""
    driver = Cluster("p0", "p1", "p2", "d0", "d1")
    driver.hold("p1", 6)
    driver.hold("p2", 3)
    driver.hold("d1", 2)
    for number in range(3):
        assert driver.pair(f"r{number}") == ("p1", "d1")
        timeline = finish(driver, f"r{number}")
        assert (timeline.decision, timeline.expected_cached_tokens) == ("split", 360)
    assert driver.is_idle()


def test_without_marks_or_holders_nodes_take_turns() -> None:
    """As if there were no index."""
    driver = Cluster("p0", "p1", "d0")
    driver.hold("p1", 6)
    turns = [driver.pair(f"r{n}", marks=(), prompt_bytes=0)[0] for n in range(4)]
    assert sorted(turns[:2]) == sorted(turns[2:]) == ["p0", "p1"]


@pytest.mark.parametrize(("marks", "busy_tokens", "expected"), [(6, 384, "p1"), (6, 385, "p0")])
def test_no_prompt_goes_to_a_node_that_is_busier_by_more_than_it_saves(
    marks: int, busy_tokens: int, expected: str
) -> None:
    """Six marks save 384 tokens: so many tokens may be waiting on the node, and not one more."""
    driver = Cluster("p0", "p1", "d0")
    driver.hold("p1", marks)
    driver.node("p1").prefill_tokens = busy_tokens
    assert driver.pair("r")[0] == expected


def test_a_prompt_leaves_a_node_that_drains() -> None:
    """Whatever that node has."""
    driver = Cluster("p0", "p1", "d0")
    driver.hold("p1", 8)
    driver.do(ev.DrainRequested(1, "p1", restarts=False))
    assert driver.pair("r")[0] == "p0"


def test_a_burst_with_one_beginning_spreads_over_the_nodes() -> None:
    """Only what is not computed there counts against the holder: it gets more of them, not all."""
    driver = Cluster("p0", "p1", "d0")
    driver.hold("p1", 6)
    nodes = [driver.pair(f"r{n}")[0] for n in range(8)]
    assert nodes[0] == "p1"
    assert 4 < nodes.count("p1") < 8
    assert driver.node("p1").prefill_tokens == 128 * nodes.count("p1")
    for number in range(8):
        finish(driver, f"r{number}")
    assert driver.is_idle()


def test_a_decode_node_is_chosen_by_what_it_has_and_what_it_was_promised() -> None:
    """The holder while its promised tokens exceed the other's by no more than it saves."""
    driver = Cluster("p0", "d0", "d1")
    driver.hold("d1", 8)
    assert driver.pair("r1", prompt_tokens=520, prompt_bytes=4_160)[1] == "d1"
    assert driver.pair("r2", prompt_tokens=520, prompt_bytes=4_160)[1] == "d0"


@pytest.mark.parametrize(("marks", "decision"), [(6, "alone_cached_prefix"), (5, "split")])
def test_a_short_uncached_suffix_is_computed_on_the_decode_node(marks: int, decision: str) -> None:
    """With min_uncached_tokens 150: of 512 tokens 128 are left behind six marks, 192 behind
    five.
    """
    driver = Cluster("p0", "d0", "d1", placement={"min_uncached_tokens": 150})
    driver.hold("d0", marks)
    assert driver.pair("r") == (("", "d0") if "alone" in decision else ("p0", "d0"))
    if "alone" in decision:
        assert driver.node("d0").own_prompt_tokens == 128
    timeline = finish(driver, "r")
    assert timeline.decision == decision
    assert timeline.expected_cached_tokens == (60 * marks if "alone" in decision else 0)
    assert driver.is_idle()


def test_the_cache_of_a_host_serves_the_nodes_on_it_that_use_it() -> None:
    """Nodes elsewhere, and nodes without it, are passed over; the node's own prefix is better than
    an equal one in its host's cache.
    """
    driver = Cluster("p0", "p1", "d0")
    driver.add("p2", host="h2", uses_cache=True)
    driver.add("p3", host="h3", uses_cache=True)
    driver.add("p4", host="h2")
    added = tuple((mark, 1) for mark in MARKS[:4])
    driver.do(ev.CachePrefixesReported("h2", True, added, ()))
    for number in range(3):
        assert driver.pair(f"r{number}")[0] == "p2"
        finish(driver, f"r{number}")
    driver.hold("p0", 4)
    assert driver.pair("own")[0] == "p0"
    finish(driver, "own")
    driver.do(ev.NodePrefixesReported("p0", "p0-1", True, (), ()))
    driver.do(ev.CacheLost("h2"))
    assert len(driver.core.prefixes) == 0


def test_a_lost_node_is_lost_to_the_index() -> None:
    """Its next life begins with nothing, and late reports of the old one change nothing."""
    driver = Cluster("p0", "p1", "d0")
    driver.hold("p1", 8)
    driver.do(ev.NodeDied("p1", "p1-1", "killed"))
    assert len(driver.core.prefixes) == 0
    driver.hold("p1", 8)
    driver.add("p1", incarnation="p1-2")
    driver.hold("p1", 8)
    assert len(driver.core.prefixes) == 0


def test_the_replacement_of_a_failed_prefill_node_is_chosen_the_same_way() -> None:
    """And what is counted on it is given back."""
    driver = Cluster("p0", "p1", "p2", "d0")
    driver.hold("p1", 8)
    driver.hold("p2", 7)
    assert driver.pair("r")[0] == "p1"
    effects = driver.do(ev.PrefillAnswered("r", 1, 500))
    assert names(effects) == ["CancelLeg", "RetargetTransfer", "StartPrefill"]
    assert driver.core.requests["r"].timeline.prefill_node == "p2"
    assert driver.node("p2").prefill_tokens == 64
    assert finish(driver, "r").expected_cached_tokens == 420
    assert driver.is_idle()


def test_marks_are_wanted_only_where_they_are_of_use() -> None:
    """By a cache; or by nodes that say what they have, of which one is to be chosen, or on which it
    depends whether a prompt is split. Never with prefix_routing off.
    """
    assert not Driver("p0", "p1", "d0").core.wants_marks
    alone = Cluster("p0", "d0")
    assert not alone.core.wants_marks
    alone.add("d1")
    assert alone.core.wants_marks
    alone.do(ev.NodeDied("d0", "d0-1", "killed"))
    assert not alone.core.wants_marks
    alone.add("d1", uses_cache=True)
    assert alone.core.wants_marks
    assert Cluster("d0", placement={"min_uncached_tokens": 1}).core.wants_marks
    assert not Cluster("p0", "p1", placement={"prefix_routing": False}).core.wants_marks
