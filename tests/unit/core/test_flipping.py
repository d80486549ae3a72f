"""Nodes that change their role: what stops, what goes on, who is told, and who may not."""

from __future__ import annotations

from typing import Any

import pytest
from router_stubs.core_story import Driver, ended, names

from splitserve.kv_transfer.holdings import LEASED, RECEIVES, SENDS, WAITS_FOR_PAGES, Holding
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.effects import (
    AcceptNode,
    AnswerError,
    AnswerFlip,
    DrainNode,
    Effect,
    SetRole,
)
from splitserve.orchestrator.core.membership import Owed


def flip(driver: Driver, node: str, role: str, *, is_forced: bool = False) -> list[Effect]:
    """An operator asks, under ticket 7."""
    return driver.do(ev.FlipRequested(7, node, role, is_forced))


def places(driver: Driver, request_id: str) -> tuple[str, str]:
    """(prefill, decode) of a request that arrives now."""
    driver.request(request_id)
    choice = driver.core.requests[request_id].choice
    assert choice is not None
    return choice.prefill.name if choice.prefill else "", choice.decode.name


def serve(driver: Driver, request_id: str, attempt: int = 1) -> Any:
    """Both legs of a pair end well; the request's timeline."""
    driver.do(ev.PrefillAnswered(request_id, attempt, 200))
    driver.do(ev.FirstDataArrived(request_id, attempt))
    return ended(driver.do(ev.DecodeEnded(request_id, attempt)))


def held(side: str, state: str, blocks: int = 2) -> Holding:
    """Something that an engine holds for a peer."""
    return Holding("r1.1", "x", side, state, blocks, 0.0, "peer-1")


def test_an_idle_node_has_its_new_role_at_once() -> None:
    """Who asked and the agent are told; the next request is placed accordingly."""
    driver = Driver("p0", "d0", "d1")
    assert flip(driver, "d1", "prefill") == [
        AnswerFlip(7, "flipped", "d1 takes prefill work from now on"),
        SetRole("d1", "prefill", 1),
    ]
    assert [places(driver, f"r{n}") for n in range(2)] == [("p0", "d0"), ("d1", "d0")]
    assert driver.core.flips == 1


def test_what_is_out_stays_where_it_is() -> None:
    """A decode node that prefills from now on goes on with its streams, and a prefill node that
    decodes with its prefill legs: no order but the two, and no request is touched.
    """
    driver = Driver("p0", "p1", "d0", "d1")
    assert places(driver, "r1") == ("p0", "d0")
    assert names(flip(driver, "d0", "prefill")) == ["AnswerFlip", "SetRole"]
    assert names(flip(driver, "p0", "decode")) == ["AnswerFlip", "SetRole"]
    assert (driver.node("d0").decode_legs, driver.node("p0").prefill_legs) == (1, 1)
    assert driver.node("d0").is_flipping
    assert driver.node("p0").is_flipping
    for number in range(2, 6):
        prefill, decode = places(driver, f"r{number}")
        assert prefill in ("p1", "d0")
        assert decode in ("p0", "d1")
    timeline = serve(driver, "r1")
    assert (timeline.outcome, timeline.attempts) == ("ok", 1)
    assert (timeline.prefill_node, timeline.decode_node) == ("p0", "d0")
    assert not driver.node("p0").is_flipping
    assert not driver.node("d0").is_flipping


def test_the_answer_says_what_is_owed() -> None:
    """Legs as the router counts them, transfers and leased blocks as the engine reported them."""
    driver = Driver("p0", "p1", "d0", "d1")
    places(driver, "r1")
    driver.report("p0", leased_blocks=3, holdings=(held(SENDS, LEASED), held(SENDS, LEASED)))
    (answer, _) = flip(driver, "p0", "decode")
    assert answer.message == (  # type: ignore[union-attr]
        "p0 takes decode work from now on; it still owes 1 prefill leg, 2 open transfers, "
        "3 leased blocks"
    )


def test_what_a_node_owes_of_its_old_role() -> None:
    """Only that: a decode node that was a prefill node still sends, one that was the other thing
    still receives.
    """
    driver = Driver("p0", "p1", "d0", "d1")
    sends, receives = held(SENDS, LEASED), held(RECEIVES, WAITS_FOR_PAGES)
    driver.report("p0", leased_blocks=2, holdings=(sends,))
    driver.report("d0", holdings=(receives, receives))
    assert not driver.node("p0").is_flipping
    assert not driver.node("d0").is_flipping
    flip(driver, "p0", "decode")
    flip(driver, "d0", "prefill")
    assert driver.node("p0").owed == Owed(0, 1, 2)
    assert driver.node("d0").owed == Owed(0, 2, 0)
    driver.report("p0", holdings=(receives,))
    driver.report("d0", leased_blocks=2, holdings=(sends,))
    assert not driver.node("p0").is_flipping
    assert not driver.node("d0").is_flipping


def test_a_waiting_request_goes_to_a_node_that_has_become_of_use() -> None:
    """One that waits for a prefill slot gets that of the new prefill node."""
    driver = Driver("p0", "d0", "d1", placement={"prefill_ahead_requests": 0})
    driver.request("r1")
    assert driver.request("r2") == []
    assert names(flip(driver, "d1", "prefill")) == ["AnswerFlip", "SetRole", "StartPair"]
    assert driver.node("d1").prefill_legs == 1


def test_the_loss_of_a_flipped_node_is_told_to_requests_of_both_kinds() -> None:
    """The one that it still decodes and the one that it prefills are both taken elsewhere."""
    driver = Driver("p0", "d0", "d1")
    assert places(driver, "old") == ("p0", "d0")
    flip(driver, "d0", "prefill")
    assert places(driver, "new") == ("d0", "d1")
    effects = driver.do(ev.NodeDied("d0", "d0-1", "killed"))
    assert names(effects) == [
        "AnnounceDeath",
        "CancelLeg",
        "StartDecode",
        "CancelLeg",
        "RetargetTransfer",
        "StartPrefill",
    ]
    driver.do(ev.PrefillAnswered("new", 2, 200))
    driver.do(ev.FirstDataArrived("new", 1))
    assert ended(driver.do(ev.DecodeEnded("new", 1))).outcome == "ok"
    driver.do(ev.PrefillAnswered("old", 1, 200))
    driver.do(ev.FirstDataArrived("old", 2))
    assert ended(driver.do(ev.DecodeEnded("old", 2))).outcome == "ok"
    assert driver.is_idle()


def test_a_silent_flipped_node_is_left_by_requests_of_both_kinds() -> None:
    """As one that has had its role all the time."""
    driver = Driver("p0", "d0", "d1", node_silence_limit_s=5.0)
    assert places(driver, "old") == ("p0", "d0")
    flip(driver, "d0", "prefill")
    assert places(driver, "new") == ("d0", "d1")
    driver.now += 3.0
    for name in ("p0", "d1"):
        driver.report(name)
    effects = driver.keep_silent(2.0)
    assert names(effects).count("StartDecode") == 1
    assert names(effects).count("StartPair") == 1
    assert driver.node("d0").prefill_legs == driver.node("d0").decode_legs == 0


def test_no_node_sends_pages_to_itself() -> None:
    """The decode node of a request has become the only other prefill node, or the prefill node the
    only other decode node: it is not taken for both.
    """
    driver = Driver("p0", "d0", "d1")
    assert places(driver, "r1") == ("p0", "d0")
    flip(driver, "d0", "prefill")
    effects = driver.do(ev.PrefillFailed("r1", 1, "reset"))
    assert names(effects) == ["CancelLeg", "FailTransfer"]
    assert driver.node("d0").own_prompt_tokens == 32
    driver = Driver("p0", "p1", "d0")
    assert places(driver, "r1") == ("p0", "d0")
    flip(driver, "p0", "decode")
    effects = driver.do(ev.DecodeFailed("r1", 1, "reset"))
    assert names(effects) == ["CancelLeg", "FailTransfer", "CancelLeg", "StartPair"]
    choice = driver.core.requests["r1"].choice
    assert choice is not None
    assert choice.prefill is driver.node("p1")
    assert choice.decode is driver.node("p0")


def test_a_request_that_no_other_node_may_answer_ends() -> None:
    """It has failed on the decode nodes that are left."""
    driver = Driver("p0", "d0", "d1", max_attempts=3)
    assert places(driver, "r1") == ("p0", "d0")
    driver.report("d1", free_blocks=0, leased_blocks=100)
    driver.do(ev.DecodeFailed("r1", 1, "reset"))
    assert driver.core.queue.size == 1
    effects = flip(driver, "d1", "prefill")
    assert names(effects) == ["AnswerFlip", "SetRole", "AnswerError", "EndRequest"]
    (error,) = [effect for effect in effects if isinstance(effect, AnswerError)]
    assert error.status == 503


@pytest.mark.parametrize(
    ("node", "role", "verdict", "words"),
    [
        ("d9", "prefill", "unknown_node", "knows no node 'd9'; known: d0, d1, d2, p0, p1"),
        ("d0", "decode", "same_role", "d0 is a decode node already"),
        ("d0", "both", "not_flippable", "'both' is neither"),
        ("d1", "prefill", "leaving", "d1 is leaving"),
        ("d2", "prefill", "not_flippable", "cannot change its role: a is 1 but b is 2"),
    ],
)
def test_what_is_refused(node: str, role: str, verdict: str, words: str) -> None:
    """With the reason; nobody else is told anything."""
    driver = Driver("p0", "p1", "d0", "d1", "d2")
    driver.join("d2", flip_obstacle="a is 1 but b is 2")
    driver.do(ev.DrainRequested(1, "d1", restarts=False))
    (answer,) = flip(driver, node, role)
    assert isinstance(answer, AnswerFlip)
    assert (answer.ticket, answer.verdict) == (7, verdict)
    assert words in answer.message
    assert not driver.core.membership.ordered_roles


def test_the_last_decode_node_keeps_its_role() -> None:
    """Also by force; one that is silent or drains does not count as another one."""
    driver = Driver("p0", "d0", "d1")
    driver.do(ev.DrainRequested(1, "d1", restarts=True))
    for is_forced in (False, True):
        (answer,) = flip(driver, "d0", "prefill", is_forced=is_forced)
        assert answer.verdict == "last_decode_node"  # type: ignore[union-attr]
    assert driver.node("d0").role == "decode"


def test_the_last_prefill_node_changes_its_role_by_force_only() -> None:
    """Then decode nodes compute the prompts, and a prompt that waits for its slot waits no more."""
    driver = Driver("p0", "d0", placement={"prefill_ahead_requests": 0})
    driver.request("r1")
    assert driver.request("r2") == []
    (answer,) = flip(driver, "p0", "decode")
    assert answer.verdict == "last_prefill_node"  # type: ignore[union-attr]
    effects = flip(driver, "p0", "decode", is_forced=True)
    assert names(effects) == ["AnswerFlip", "SetRole", "StartAlone"]
    assert "no prefill node is left" in effects[0].message  # type: ignore[union-attr]


def test_an_agent_that_has_missed_its_order_is_told_again() -> None:
    """With its hello and with each report, until it says the same."""
    driver = Driver("p0", "d0", "d1")
    flip(driver, "d1", "prefill")
    assert driver.report("d1", role="decode") == [SetRole("d1", "prefill", 1)]
    assert driver.join("d1", role="decode") == [AcceptNode("d1"), SetRole("d1", "prefill", 1)]
    assert driver.report("d1", role="prefill", role_epoch=1) == []
    assert driver.join("d1", role="prefill") == [AcceptNode("d1")]
    assert driver.node("d1").role == "prefill"


def test_a_role_outlasts_the_engine() -> None:
    """Another life of it has the role that the node was given, whatever its agent had heard."""
    driver = Driver("p0", "d0", "d1")
    flip(driver, "d1", "prefill")
    driver.do(ev.NodeDied("d1", "d1-1", "killed"))
    effects = driver.join("d1", role="decode", incarnation="d1-2")
    assert names(effects) == ["AcceptNode", "AnnounceDeath", "SetRole"]
    driver.report("d1", incarnation="d1-2")
    assert [places(driver, f"r{n}")[0] for n in range(2)] == ["p0", "d1"]


def test_a_router_that_knows_nothing_takes_the_agents_word() -> None:
    """After its restart."""
    driver = Driver("p0", "d0")
    assert driver.join("d1", role="prefill") == [AcceptNode("d1")]
    assert driver.report("d1", role="prefill") == []
    assert [places(driver, f"r{n}")[0] for n in range(2)] == ["p0", "d1"]


def test_a_node_that_restarts_is_not_flipped_before_it_is_back() -> None:
    """Then it is awaited in its new role, and requests no longer wait for it in the old one."""
    driver = Driver("p0", "d0", "d1")
    driver.do(ev.DrainRequested(1, "d1", restarts=True))
    driver.do(ev.NodeDied("d1", "d1-1", "drained", owed_nothing=True))
    (answer,) = flip(driver, "d1", "prefill")
    assert answer.verdict == "leaving"  # type: ignore[union-attr]
    driver.join("d1", incarnation="d1-2")
    assert driver.core.membership.awaits("decode")
    flip(driver, "d1", "prefill")
    assert not driver.core.membership.awaits("decode")
    assert driver.core.membership.awaits("prefill")
    driver.report("d1", incarnation="d1-2")
    assert not driver.core.membership.awaits("prefill")


def test_a_flipped_node_drains_with_all_that_it_owes() -> None:
    """It is dismissed when its legs of both kinds are over."""
    driver = Driver("p0", "d0", "d1")
    assert places(driver, "old") == ("p0", "d0")
    flip(driver, "d0", "prefill")
    assert places(driver, "new") == ("d0", "d1")
    drained = driver.do(ev.DrainRequested(1, "d0", restarts=False))
    assert drained[1:] == [DrainNode("d0", "d0-1", restarts=False)]
    assert serve(driver, "old").outcome == "ok"
    assert driver.report("d0", phase="draining") == []
    driver.do(ev.PrefillAnswered("new", 1, 200))
    assert names(driver.report("d0", phase="draining")) == ["DismissNode"]


def test_marks_are_wanted_where_a_flip_gives_a_choice() -> None:
    """Two nodes of a role that say what they have cached; one of each leaves nothing to choose."""
    driver = Driver()
    for name in ("p0", "d0", "d1"):
        driver.join(name, reports_prefixes=True)
        driver.report(name)
    driver.do(ev.NodeDied("p0", "p0-1", "killed"))
    assert driver.core.wants_marks
    flip(driver, "d1", "prefill")
    assert not driver.core.wants_marks
    driver.join("p1", reports_prefixes=True)
    driver.report("p1")
    flip(driver, "d1", "decode")
    assert driver.core.wants_marks
