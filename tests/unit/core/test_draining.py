"""Nodes that leave or restart by order: who is asked, who waits, and that no request fails."""

from __future__ import annotations

from typing import Any

import pytest
from router_stubs.core_story import Driver, description, ended, names

from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.effects import (
    AcceptNode,
    AnnounceDeath,
    AnswerDrain,
    AnswerError,
    AnswerForget,
    DismissNode,
    DrainNode,
    Effect,
    StartAlone,
    StartPair,
)


def drain(driver: Driver, node: str, *, restarts: bool = False, **changes: Any) -> list[Effect]:
    """An operator asks, under ticket 7."""
    return driver.do(ev.DrainRequested(7, node, restarts, **changes))


def gone(driver: Driver, node: str, *, owed_nothing: bool = True) -> list[Effect]:
    """The node's first engine has ended."""
    return driver.do(ev.NodeDied(node, f"{node}-1", "drained", owed_nothing))


def back(driver: Driver, node: str) -> list[Effect]:
    """The node's second engine serves."""
    effects = driver.join(node, incarnation=f"{node}-2")
    return effects + driver.report(node, incarnation=f"{node}-2")


def stream(driver: Driver, request_id: str, attempt: int = 1) -> list[Effect]:
    """The request's whole answer comes."""
    driver.do(ev.FirstDataArrived(request_id, attempt))
    driver.do(ev.PrefillAnswered(request_id, attempt, 200))
    return driver.do(ev.DecodeEnded(request_id, attempt))


def test_an_idle_node_is_dismissed_at_once() -> None:
    """The agent hears of the drain, then of its end; new work goes elsewhere."""
    driver = Driver("p0", "d0", "d1")
    assert drain(driver, "d0") == [
        AnswerDrain(7, "draining", "d0 gets no new work"),
        DrainNode("d0", "d0-1", restarts=False),
        DismissNode("d0", "d0-1"),
    ]
    assert names(driver.request("r1")) == ["StartPair"]
    assert driver.node("d1").decode_legs == 1
    assert driver.report("d0", phase="draining") == []
    assert gone(driver, "d0") == [AnnounceDeath("d0-1")]
    assert driver.core.next_deadline() is not None
    assert not driver.core.drain_dues


def test_a_decode_node_is_dismissed_when_its_streams_have_ended() -> None:
    """Not before, whatever its reports say."""
    driver = Driver("p0", "d0", "d1")
    driver.request("r1")
    assert names(drain(driver, "d0")) == ["AnswerDrain", "DrainNode"]
    assert driver.report("d0", phase="draining") == []
    assert ended(stream(driver, "r1")).outcome == "ok"
    assert driver.report("d0", phase="draining") == [DismissNode("d0", "d0-1")]
    assert driver.report("d0", phase="draining") == []


def test_a_prefill_node_is_dismissed_when_its_legs_are_answered() -> None:
    """What it holds for decode nodes then is known to its engine; its agent asks."""
    driver = Driver("p0", "p1", "d0")
    driver.request("r1")
    assert names(drain(driver, "p0")) == ["AnswerDrain", "DrainNode"]
    assert driver.do(ev.PrefillAnswered("r1", 1, 200)) == []
    assert driver.report("p0", phase="draining", leased_blocks=3) == [DismissNode("p0", "p0-1")]
    assert gone(driver, "p0") == [AnnounceDeath("p0-1")]
    driver.do(ev.FirstDataArrived("r1", 1))
    assert ended(driver.do(ev.DecodeEnded("r1", 1))).outcome == "ok"
    assert driver.is_idle()


def test_a_prefill_node_that_died_owing_is_replaced() -> None:
    """It was dismissed, but its engine did not get to the end of what it owed."""
    driver = Driver("p0", "p1", "d0")
    driver.request("r1")
    drain(driver, "p0")
    driver.do(ev.PrefillAnswered("r1", 1, 200))
    driver.report("p0", phase="draining", leased_blocks=3)
    effects = gone(driver, "p0", owed_nothing=False)
    assert names(effects) == ["AnnounceDeath", "RetargetTransfer", "StartPrefill"]


def test_pages_that_a_second_decode_node_wants_are_replaced() -> None:
    """The first one had them when the prefill node let go; the second one may not."""
    driver = Driver("p0", "p1", "d0", "d1", "d2")
    driver.request("r1")
    drain(driver, "p0")
    driver.do(ev.PrefillAnswered("r1", 1, 200))
    driver.report("p0", phase="draining")
    assert names(driver.do(ev.DecodeFailed("r1", 1, "reset"))) == ["CancelLeg", "StartDecode"]
    assert names(gone(driver, "p0"))[1:] == ["RetargetTransfer", "StartPrefill"]


def test_retries_do_not_choose_a_draining_node() -> None:
    """Neither a prefill's nor a decode's."""
    driver = Driver("p0", "p1", "d0", "d1")
    driver.request("r1")
    drain(driver, "p1")
    drain(driver, "d1")
    assert names(driver.do(ev.PrefillFailed("r1", 1, "reset"))) == ["CancelLeg", "FailTransfer"]
    assert ended(driver.do(ev.DecodeFailed("r1", 1, "reset"))).status == 502
    assert driver.is_idle()


def test_the_last_prefill_node_may_leave() -> None:
    """The operator is told what follows; a prompt that waits for its slot waits no longer."""
    driver = Driver("p0", "d0", placement={"prefill_ahead_requests": 0})
    driver.request("r1")
    assert driver.request("r2") == []
    effects = drain(driver, "p0")
    assert names(effects) == ["AnswerDrain", "DrainNode", "StartAlone"]
    assert "decode nodes compute the prompts" in effects[0].message  # type: ignore[union-attr]


@pytest.mark.parametrize("node", ["d9", ""])
def test_an_unknown_node_is_refused(node: str) -> None:
    """Naming those that there are."""
    effects = drain(Driver("p0", "d0"), node)
    message = f"the router knows no node {node!r}; known: d0, p0"
    assert effects == [AnswerDrain(7, "unknown_node", message)]


def test_the_last_decode_node_is_kept() -> None:
    """One that is silent, gone or draining does not count as another one."""
    driver = Driver("p0", "d0", "d1", "d2")
    driver.do(ev.NodeDisconnected("d1", "d1-1"))
    drain(driver, "d2")
    (answer,) = drain(driver, "d0", restarts=True)
    assert isinstance(answer, AnswerDrain)
    assert answer.verdict == "last_decode_node"
    assert driver.node("d0").is_usable
    assert names(drain(driver, "d0", is_forced=True))[:2] == ["AnswerDrain", "DrainNode"]


def test_requests_do_not_wait_for_a_decode_node_that_leaves() -> None:
    """By force: those that wait are refused as without a decode node, and those that come."""
    driver = Driver("p0", "d0", placement={"prefill_ahead_requests": 0})
    driver.request("r1")
    driver.request("r2")
    effects = drain(driver, "d0", is_forced=True)
    assert AnswerError("r2", 503, "no decode node is ready", 5) in effects
    assert names(driver.request("r3")) == ["AnswerError", "EndRequest"]
    assert ended(stream(driver, "r1")).outcome == "ok"


def test_requests_wait_for_a_decode_node_that_restarts() -> None:
    """By force: those that wait, those that come, and one whose leg breaks; all are placed when it
    is back.
    """
    driver = Driver("p0", "d0", placement={"prefill_ahead_requests": 0})
    driver.request("r1")
    driver.request("r2")
    drain(driver, "d0", restarts=True, is_forced=True)
    assert driver.request("r3") == []
    assert "AnswerError" not in names(driver.do(ev.DecodeFailed("r1", 1, "reset")))
    assert driver.report("d0", phase="draining") == [DismissNode("d0", "d0-1")]
    assert gone(driver, "d0") == [AnnounceDeath("d0-1")]
    assert driver.do(ev.NodeDisconnected("d0", "d0-1")) == []
    assert list(driver.core.queue) == ["r1", "r2", "r3"]
    assert [e for e in back(driver, "d0") if isinstance(e, StartPair)] == [
        StartPair("r1", 2, "r1.2", description("p0"), description("d0", incarnation="d0-2"))
    ]
    assert not driver.core.membership.returning


def test_a_request_may_wait_for_the_only_node_that_has_not_failed_it() -> None:
    """The others behind it do not wait for that node."""
    driver = Driver("p0", "d0", "d1")
    driver.request("r1")
    drain(driver, "d1", restarts=True)
    assert driver.do(ev.DecodeFailed("r1", 1, "reset")) != []
    assert list(driver.core.queue) == ["r1"]
    (start,) = driver.request("r2")
    assert isinstance(start, StartPair)
    assert start.decode.node == "d0"
    gone(driver, "d1")
    started = [e for e in back(driver, "d1") if isinstance(e, StartPair)]
    assert [(e.request_id, e.decode.incarnation) for e in started] == [("r1", "d1-2")]
    assert not driver.core.queue


def test_who_waits_for_a_restart_waits_at_most_as_in_any_queue() -> None:
    """queue_timeout_s, with the node still away."""
    driver = Driver("p0", "d0", queue_timeout_s=10)
    drain(driver, "d0", restarts=True, is_forced=True)
    driver.request("r1")
    assert ended(driver.pass_time(10)).status == 503


@pytest.mark.parametrize("failure", ["never", "dies again", "refused"])
def test_nobody_waits_for_a_node_that_does_not_come_back(failure: str) -> None:
    """Its new engine has failed, or is another one than before, or takes too long."""
    driver = Driver("p0", "d0", node_return_limit_s=5, queue_timeout_s=60)
    drain(driver, "d0", restarts=True, is_forced=True)
    driver.now += 3
    gone(driver, "d0")
    assert driver.request("r1") == []
    if failure == "never":
        assert driver.pass_time(4.9) == []
        effects = driver.pass_time(0.1)
    elif failure == "dies again":
        assert gone(driver, "d0") == []
        effects = driver.do(ev.NodeDied("d0", "d0-2", "out of memory"))
    else:
        effects = driver.join("d0", incarnation="d0-2", block_tokens=32)
    assert AnswerError("r1", 503, "no decode node is ready", 5) in effects
    assert driver.is_idle()


def test_the_deadline_ends_a_drain() -> None:
    """Then the node is sent away, whatever is out on it; its loss is an ordinary one."""
    driver = Driver("p0", "d0", "d1")
    driver.request("r1")
    driver.do(ev.FirstDataArrived("r1", 1))
    drain(driver, "d0", timeout_s=3)
    assert driver.core.next_deadline() == driver.now + 3
    assert driver.pass_time(2.9) == []
    assert driver.pass_time(0.1) == [DismissNode("d0", "d0-1", at_once=True)]
    effects = gone(driver, "d0", owed_nothing=False)
    assert ended(effects).status == 502


def test_a_drain_without_a_deadline_outlasts_every_request() -> None:
    """No request that would have ended in time is ended by it."""
    driver = Driver("p0", "d0", "d1", request_deadline_s=60)
    driver.request("r1")
    driver.do(ev.FirstDataArrived("r1", 1))
    drain(driver, "d0")
    effects = driver.pass_time(60)
    assert ended(effects).status == 504
    assert isinstance(effects[-1], DismissNode)


def test_a_second_drain_changes_the_first() -> None:
    """Deadline and whether it comes back; the agent hears all of it again."""
    driver = Driver("p0", "d0", "d1")
    drain(driver, "d0", restarts=True)
    assert drain(driver, "d0", timeout_s=5)[1:] == [
        DrainNode("d0", "d0-1", restarts=False),
        DismissNode("d0", "d0-1"),
    ]
    assert not driver.core.membership.returning
    assert driver.core.drain_dues == {"d0": driver.now + 5}


def test_an_agent_that_was_away_hears_of_its_drain() -> None:
    """When it comes back with the same engine."""
    driver = Driver("p0", "d0", "d1")
    drain(driver, "d0", restarts=True)
    driver.do(ev.NodeDisconnected("d0", "d0-1"))
    assert driver.join("d0") == [
        AcceptNode("d0"),
        DrainNode("d0", "d0-1", restarts=True),
        DismissNode("d0", "d0-1"),
    ]
    assert not driver.node("d0").is_usable


def test_another_engine_of_a_draining_node_serves() -> None:
    """The drain was of the engine that is gone."""
    driver = Driver("p0", "d0", "d1")
    driver.request("r1")
    drain(driver, "d0", restarts=True)
    effects = back(driver, "d0")
    assert "DrainNode" not in names(effects)
    assert driver.node("d0").is_usable
    assert not driver.core.drain_dues


def test_a_restarted_router_goes_on_with_a_drain() -> None:
    """It knows from the agent's phase: the node gets no work, and is dismissed."""
    driver = Driver("p0", "d0")
    driver.join("p1")
    assert driver.report("p1", phase="draining") == [DismissNode("p1", "p1-1")]
    assert driver.report("p1", phase="draining") == []


def test_a_draining_prefill_node_leaves_nothing_to_split() -> None:
    """Until it is back."""
    driver = Driver("p0", "d0")
    drain(driver, "p0", restarts=True)
    gone(driver, "p0")
    assert driver.request("r1") == [StartAlone("r1", 1, description("d0"))]
    back(driver, "p0")
    assert names(driver.request("r2")) == ["StartPair"]


def test_a_drain_of_an_earlier_router_is_not_changed_when_the_agent_comes_again() -> None:
    """Whether the node leaves or restarts only its agent knows: it is dismissed, and told no more;
    an operator's order says it anew.
    """
    driver = Driver("p0", "d0", "d1")
    driver.report("d0", phase="draining")
    assert names(driver.join("d0")) == ["AcceptNode", "DismissNode"]
    orders = driver.do(ev.DrainRequested(1, "d0", True, False, None))
    assert names(orders) == ["AnswerDrain", "DrainNode", "DismissNode"]


def test_a_node_is_forgotten_when_it_has_gone() -> None:
    """Not while it takes part or is expected back; then another one of its name has the role that
    its agent says.
    """
    driver = Driver("p0", "d0", "d1")
    driver.do(ev.FlipRequested(1, "d1", "prefill"))
    (kept,) = driver.do(ev.ForgetRequested(2, "d1"))
    assert (kept.ticket, kept.verdict) == (2, "takes_part")
    drain(driver, "d1", restarts=True)
    gone(driver, "d1")
    (kept,) = driver.do(ev.ForgetRequested(3, "d1"))
    assert kept.verdict == "takes_part"
    back(driver, "d1")
    assert driver.node("d1").role == "prefill"
    drain(driver, "d1")
    driver.do(ev.NodeDied("d1", driver.node("d1").description.incarnation, "drained"))
    assert driver.do(ev.ForgetRequested(4, "d1")) == [
        AnswerForget(4, "forgotten", "d1 is no part of the cluster")
    ]
    driver.join("d1")
    assert driver.node("d1").role == "decode"
