"""Stories of requests, told as lists of effects."""

from __future__ import annotations

import pytest
from router_stubs.core_story import Driver, description, ended, names

from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.effects import (
    AcceptNode,
    AnnounceDeath,
    AnswerError,
    CancelLeg,
    EndRequest,
    FailTransfer,
    PassRefusal,
    RetargetTransfer,
    StartAlone,
    StartDecode,
    StartPair,
    StartPrefill,
)


def pair(request_id: str, prefill: str, decode: str, attempt: int = 1) -> StartPair:
    """The order that starts a pair."""
    transfer = f"{request_id}.{attempt}"
    return StartPair(request_id, attempt, transfer, description(prefill), description(decode))


def test_a_request_runs_over_a_pair() -> None:
    """Both legs start at once; P's answer, D's first data and D's end lead to one timeline and an
    idle core.
    """
    driver = Driver("p0", "d0")
    assert driver.request("r1") == [pair("r1", "p0", "d0")]
    assert driver.node("p0").prefill_legs == 1
    driver.now += 1
    assert driver.do(ev.PrefillAnswered("r1", 1, 200)) == []
    assert driver.node("p0").prefill_legs == 0
    driver.now += 1
    assert driver.do(ev.FirstDataArrived("r1", 1)) == []
    driver.now += 1
    timeline = ended(driver.do(ev.DecodeEnded("r1", 1)))
    assert (timeline.outcome, timeline.status, timeline.decision) == ("ok", 200, "split")
    times = (timeline.received, timeline.prefill_answered, timeline.first_data, timeline.last_data)
    assert times == (100, 101, 102, 103)
    assert driver.is_idle()


def test_the_first_token_may_come_before_prefill_answers() -> None:
    """The client's answer ends first; the prefill leg keeps its slot until its own answer, then all
    is idle.
    """
    driver = Driver("p0", "d0")
    driver.request("r1")
    driver.do(ev.FirstDataArrived("r1", 1))
    assert driver.do(ev.DecodeEnded("r1", 1)) == []
    assert driver.node("p0").prefill_legs == 1
    assert ended(driver.do(ev.PrefillAnswered("r1", 1, 200))).outcome == "ok"
    assert driver.is_idle()


@pytest.mark.parametrize(
    "event",
    [ev.PrefillFailed("r1", 1, "connection refused"), ev.PrefillAnswered("r1", 1, 500)],
    ids=["broken", "status 500"],
)
def test_a_failed_prefill_leg_does_not_fail_the_request(event: ev.Event) -> None:
    """The decode node is told to stop waiting, computes the prompt itself and answers."""
    driver = Driver("p0", "d0")
    driver.request("r1")
    effects = driver.do(event)
    assert [type(e) for e in effects] == [CancelLeg, FailTransfer]
    assert effects[1] == FailTransfer("d0", "r1.1", effects[1].reason)  # type: ignore[union-attr]
    driver.do(ev.FirstDataArrived("r1", 1))
    assert ended(driver.do(ev.DecodeEnded("r1", 1))).outcome == "ok"
    assert driver.is_idle()


def test_a_failed_prefill_goes_to_another_prefill_node() -> None:
    """The decode leg and its pages stay; the decode node is told who delivers now; old news are
    ignored; after ``max_attempts`` nodes the decode node computes itself.
    """
    driver = Driver("p0", "p1", "p2", "d0", max_attempts=2)
    assert driver.request("r1") == [pair("r1", "p0", "d0")]
    effects = driver.do(ev.PrefillFailed("r1", 1, "reset"))
    p1, d0 = description("p1"), description("d0")
    assert effects == [
        CancelLeg("r1", 1, "prefill"),
        RetargetTransfer("d0", "r1.1", 2, p1, "reset"),
        StartPrefill("r1", 2, "r1.1", p1, d0),
    ]
    assert driver.node("p0").prefill_legs == 0
    assert driver.node("p1").prefill_legs == 1
    assert driver.do(ev.PrefillAnswered("r1", 1, 200)) == []
    assert driver.do(ev.PrefillFailed("r1", 1, "again")) == []
    effects = driver.do(ev.NodeDied("p1", "p1-1", "killed"))
    assert names(effects) == ["AnnounceDeath", "CancelLeg", "FailTransfer"]
    driver.do(ev.FirstDataArrived("r1", 1))
    assert ended(driver.do(ev.DecodeEnded("r1", 1))).prefill_node == "p1"
    assert driver.is_idle()


def test_a_prefill_node_that_dies_before_its_pages_landed_is_replaced() -> None:
    """Its leg was answered, but the decode node is still silent: what it held may be lost."""
    driver = Driver("p0", "p1", "d0")
    driver.request("r1")
    driver.do(ev.PrefillAnswered("r1", 1, 200))
    effects = driver.do(ev.NodeDied("p0", "p0-1", "killed"))
    assert names(effects) == ["AnnounceDeath", "RetargetTransfer", "StartPrefill"]
    driver.do(ev.PrefillAnswered("r1", 2, 200))
    driver.do(ev.FirstDataArrived("r1", 1))
    driver.do(ev.DecodeEnded("r1", 1))
    assert driver.is_idle()


def test_a_retried_prefill_does_not_wait_for_a_slot() -> None:
    """Its pages are reserved already."""
    driver = Driver("p0", "p1", "d0", "d1", placement={"prefill_ahead_requests": 0})
    driver.request("r1")
    driver.request("r2")
    effects = driver.do(ev.PrefillFailed("r1", 1, "reset"))
    assert names(effects)[-1] == "StartPrefill"
    assert driver.node("p1").prefill_legs == 2


def test_a_prefill_leg_that_fails_after_the_first_token_is_nobodys_business() -> None:
    """Its slot is given back and nothing else happens."""
    driver = Driver("p0", "d0")
    driver.request("r1")
    driver.do(ev.FirstDataArrived("r1", 1))
    assert driver.do(ev.PrefillFailed("r1", 1, "reset")) == []
    assert names(driver.do(ev.DecodeEnded("r1", 1))) == ["EndRequest"]


def test_a_decode_leg_that_fails_early_is_tried_on_another_node() -> None:
    """The prefill leg goes on, and the new decode node gets its pages from it, as a new attempt of
    the same transfer; old news are ignored.
    """
    driver = Driver("p0", "d0", "d1")
    assert driver.request("r1") == [pair("r1", "p0", "d0")]
    effects = driver.do(ev.DecodeFailed("r1", 1, "reset"))
    p0, d1 = description("p0"), description("d1")
    assert effects == [CancelLeg("r1", 1, "decode"), StartDecode("r1", 2, "r1.1", p0, d1)]
    assert driver.do(ev.FirstDataArrived("r1", 1)) == []
    assert driver.do(ev.DecodeFailed("r1", 1, "again")) == []
    driver.do(ev.PrefillAnswered("r1", 1, 200))
    driver.do(ev.FirstDataArrived("r1", 2))
    assert ended(driver.do(ev.DecodeEnded("r1", 2))).attempts == 2
    assert driver.is_idle()


def test_a_prefill_node_that_has_answered_sends_again_what_it_holds() -> None:
    """Nothing is computed twice for a decode node that died before its first token."""
    driver = Driver("p0", "d0", "d1")
    driver.request("r1")
    driver.do(ev.PrefillAnswered("r1", 1, 200))
    effects = driver.do(ev.NodeDied("d0", "d0-1", "killed"))
    assert names(effects) == ["AnnounceDeath", "CancelLeg", "StartDecode"]
    driver.do(ev.FirstDataArrived("r1", 2))
    driver.do(ev.DecodeEnded("r1", 2))
    assert driver.is_idle()


def test_without_its_prefill_node_a_failed_decode_leg_begins_anew() -> None:
    """Both nodes of the pair are gone: a new pair, a new transfer."""
    driver = Driver("p0", "p1", "d0", "d1", max_attempts=2)
    driver.request("r1")
    driver.do(ev.PrefillAnswered("r1", 1, 200))
    driver.do(ev.NodeDisconnected("p1", "p1-1"))
    driver.do(ev.NodeDied("p0", "p0-1", "killed"))
    driver.join("p1")
    effects = driver.do(ev.DecodeFailed("r1", 1, "reset"))
    assert pair("r1", "p1", "d1", attempt=2) in effects
    driver.do(ev.PrefillAnswered("r1", 2, 200))
    driver.do(ev.FirstDataArrived("r1", 2))
    driver.do(ev.DecodeEnded("r1", 2))
    assert driver.is_idle()


def test_a_decode_leg_that_fails_with_no_other_node_is_an_error() -> None:
    """502 with the reason, the prefill leg cancelled."""
    driver = Driver("p0", "d0")
    driver.request("r1")
    effects = driver.do(ev.DecodeFailed("r1", 1, "connection refused"))
    assert names(effects) == [
        "CancelLeg",
        "FailTransfer",
        "CancelLeg",
        "AnswerError",
        "EndRequest",
    ]
    assert effects[3].status == 502  # type: ignore[union-attr]
    assert "connection refused" in effects[3].message  # type: ignore[union-attr]
    assert driver.is_idle()


def test_a_death_that_leaves_no_decode_node_is_a_503() -> None:
    """The client is told when to come again, as those that come meanwhile are."""
    driver = Driver("p0", "d0")
    driver.request("r1")
    effects = driver.do(ev.NodeDied("d0", "d0-1", "killed"))
    (answer,) = [e for e in effects if isinstance(e, AnswerError)]
    assert (answer.status, answer.retry_after_s) == (503, 1)


def test_a_retried_request_does_not_wait_for_a_node_that_cannot_come() -> None:
    """When the only node left has failed it already it ends, and those behind it are placed."""
    driver = Driver("d0", "d1")
    large = {"prompt_tokens": 900, "output_tokens": 100, "alone_because": "x"}
    driver.request("r1", **large)
    driver.request("r2", **large)
    driver.do(ev.DecodeFailed("r2", 1, "reset"))
    assert list(driver.core.queue) == ["r2"]
    effects = driver.do(ev.NodeDied("d0", "d0-1", "killed"))
    answers = {e.request_id: e.message for e in effects if isinstance(e, AnswerError)}
    assert answers["r2"] == "every decode node that is ready has failed this request"
    assert names(driver.request("r3", alone_because="x")) == ["StartAlone"]


@pytest.mark.parametrize("output_tokens", [-1, -(10**9)])
def test_a_negative_limit_takes_no_blocks_from_the_count(output_tokens: int) -> None:
    """The engine refuses it; until then the node has not more room than it has."""
    driver = Driver("d0")
    driver.request("r1", output_tokens=output_tokens, alone_because="max_tokens")
    assert driver.node("d0").committed_blocks == 2
    driver.report("d0")
    driver.do(ev.DecodeRefused("r1", 1, 400))
    assert driver.is_idle()
    assert driver.node("d0").free_blocks == 100


def test_attempts_are_bounded() -> None:
    """With ``max_attempts`` 2 the third decode node is not tried."""
    driver = Driver("p0", "d0", "d1", "d2", max_attempts=2)
    driver.request("r1")
    driver.do(ev.DecodeFailed("r1", 1, "x"))
    assert "AnswerError" in names(driver.do(ev.DecodeFailed("r1", 2, "x")))
    assert driver.is_idle()


def test_a_clients_mistake_is_passed_on_and_not_retried() -> None:
    """4xx of the decode engine: prefill leg cancelled, the answer handed on, no node suspected."""
    driver = Driver("p0", "d0", "d1")
    driver.request("r1")
    effects = driver.do(ev.DecodeRefused("r1", 1, 400))
    assert effects[:3] == [
        CancelLeg("r1", 1, "prefill"),
        FailTransfer("p0", "r1.1", "the decode node refused the request"),
        PassRefusal("r1", 1),
    ]
    assert (ended(effects).outcome, ended(effects).status) == ("refused", 400)
    assert driver.node("d0").decode_breaker.is_clean
    assert driver.is_idle()


def test_an_engines_5xx_is_retried_and_passed_on_by_the_last() -> None:
    """A 500 before any data goes to another decode node; the last answer reaches the client."""
    driver = Driver("d0", "d1")
    driver.request("r1")
    effects = driver.do(ev.DecodeRefused("r1", 1, 500))
    assert effects == [CancelLeg("r1", 1, "decode"), StartAlone("r1", 2, description("d1"))]
    assert PassRefusal("r1", 2) in driver.do(ev.DecodeRefused("r1", 2, 500))
    assert driver.is_idle()


def test_a_stream_that_breaks_is_never_retried() -> None:
    """After the first data the client gets an error."""
    driver = Driver("p0", "d0", "d1")
    driver.request("r1")
    driver.do(ev.PrefillAnswered("r1", 1, 200))
    driver.do(ev.FirstDataArrived("r1", 1))
    effects = driver.do(ev.DecodeFailed("r1", 1, "reset"))
    assert names(effects) == ["FailTransfer", "CancelLeg", "AnswerError", "EndRequest"]
    assert driver.is_idle()


@pytest.mark.parametrize("stage", range(5))
def test_a_client_that_leaves_cancels_both_legs(stage: int) -> None:
    """At any moment, legs that are out are cancelled and everything is given back; the prefill node
    is told when what it computed was not fetched yet.
    """
    driver = Driver("p0", "d0")
    if stage == 0:
        driver.report("d0", free_blocks=0, running=1)
    driver.request("r1")
    steps: list[ev.Event] = [ev.PrefillAnswered("r1", 1, 200), ev.FirstDataArrived("r1", 1)]
    order = {2: steps[:1], 3: steps, 4: steps[1:]}.get(stage, [])
    for event in order:
        driver.do(event)
    effects = driver.do(ev.ClientGone("r1"))
    legs = {0: [], 1: ["prefill", "decode"], 2: ["decode"], 3: ["decode"], 4: ["prefill", "decode"]}
    given_up = [e for e in effects if isinstance(e, FailTransfer)]
    assert [e.node for e in given_up] == (["p0"] if stage in (1, 2) else [])
    rest = [e for e in effects[:-1] if not isinstance(e, FailTransfer)]
    assert rest == [CancelLeg("r1", 1, leg) for leg in legs[stage]]  # type: ignore[arg-type]
    assert ended(effects).status == 499
    assert driver.is_idle()


def test_a_dead_prefill_node_leaves_its_requests_to_decode() -> None:
    """The death is announced, and the decode node of each transfer is told, even when P had
    answered already.
    """
    driver = Driver("p0", "d0")
    driver.request("r1")
    driver.do(ev.PrefillAnswered("r1", 1, 200))
    effects = driver.do(ev.NodeDied("p0", "p0-1", "killed"))
    assert effects[0] == AnnounceDeath("p0-1")
    assert names(effects[1:]) == ["FailTransfer"]
    assert driver.request("r2") == [StartAlone("r2", 1, description("d0"))]


@pytest.mark.parametrize("answers", [True, False])
def test_a_prefill_node_that_dies_late_does_not_disturb_streams(answers: bool) -> None:
    """Whether its leg was answered or had failed before: every stream goes on, each leg is given
    back once.
    """
    driver = Driver("p0", "d0", placement={"prefill_ahead_requests": 3})
    for request_id in ("r1", "r2"):
        driver.request(request_id)
        news = ev.PrefillAnswered(request_id, 1, 200)
        driver.do(news if answers else ev.PrefillFailed(request_id, 1, "reset"))
        driver.do(ev.FirstDataArrived(request_id, 1))
    assert names(driver.do(ev.NodeDied("p0", "p0-1", "killed"))) == ["AnnounceDeath"]
    for request_id in ("r1", "r2"):
        assert names(driver.do(ev.DecodeEnded(request_id, 1))) == ["EndRequest"]
    assert driver.is_idle()


def test_a_node_that_was_away_hears_of_the_dead() -> None:
    """Without it the pages that a dead engine was granted would stay in quarantine for ever."""
    driver = Driver("p0", "d0")
    driver.do(ev.NodeDisconnected("d0", "d0-1"))
    assert driver.do(ev.NodeDied("p0", "p0-1", "killed")) == [AnnounceDeath("p0-1")]
    assert driver.do(ev.NodeDied("p0", "p0-1", "killed")) == []
    assert driver.join("d0") == [AcceptNode("d0"), AnnounceDeath("p0-1", "d0")]


def test_a_dead_decode_node_moves_its_silent_requests_and_ends_its_streams() -> None:
    """Before the first data the request goes elsewhere; a stream gets an error."""
    driver = Driver("p0", "d0", "d1")
    assert driver.request("r1") == [pair("r1", "p0", "d0")]
    assert driver.request("r2") == [pair("r2", "p0", "d1")]
    driver.do(ev.PrefillAnswered("r2", 1, 200))
    assert driver.request("r3") == [pair("r3", "p0", "d0")]
    driver.do(ev.FirstDataArrived("r1", 1))
    effects = driver.do(ev.NodeDied("d0", "d0-1", "killed"))
    assert next(e for e in effects if isinstance(e, AnswerError)).request_id == "r1"
    assert StartDecode("r3", 2, "r3.1", description("p0"), description("d1")) in effects


def test_a_restarted_engine_is_another_node() -> None:
    """A hello with a new incarnation fails the legs of the old one; what the old one still says is
    ignored.
    """
    driver = Driver("p0", "d0")
    driver.request("r1")
    effects = driver.join("d0", incarnation="d0-2")
    assert "AnswerError" in names(effects)
    assert names(effects)[-1] == "AcceptNode"
    assert driver.do(ev.NodeDied("d0", "d0-1", "late")) == [AnnounceDeath("d0-1")]
    driver.report("d0")
    assert not driver.node("d0").is_usable
    driver.report("d0", incarnation="d0-2")
    assert names(driver.request("r2")) == ["StartPair"]


def test_without_a_decode_node_a_request_is_refused_at_once() -> None:
    """503 with Retry-After."""
    driver = Driver("p0")
    effects = driver.request("r1")
    assert effects[0] == AnswerError("r1", 503, "no decode node is ready", 5)
    assert driver.is_idle()


def test_waiting_requests_end_with_the_last_decode_node() -> None:
    """Nobody waits for a node that is gone, draining or disconnected."""
    ends: list[ev.Event] = [ev.NodeDied("d0", "d0-1", "x"), ev.NodeDisconnected("d0", "d0-1")]
    for end in ends:
        driver = Driver("p0", "d0", placement={"prefill_ahead_requests": 0})
        driver.request("r1")
        assert driver.request("r2") == []
        effects = driver.do(end)
        assert AnswerError("r2", 503, "no decode node is ready", 5) in effects


def test_a_disconnected_agent_does_not_end_its_engines_requests() -> None:
    """The node gets no new work, its legs go on, and a reconnect with the same incarnation heals
    it.
    """
    driver = Driver("p0", "d0")
    driver.request("r1")
    assert driver.do(ev.NodeDisconnected("d0", "d0-1")) == []
    assert names(driver.request("r2")) == ["AnswerError", "EndRequest"]
    assert names(driver.join("d0")) == ["AcceptNode"]
    assert names(driver.request("r3")) == ["StartPair"]
    driver.do(ev.FirstDataArrived("r1", 1))


def test_a_silent_node_gets_no_new_work_until_it_speaks() -> None:
    """After node_silence_limit_s without a report."""
    driver = Driver("p0", "d0", node_silence_limit_s=5)
    driver.pass_time(4)
    driver.report("p0")
    driver.keep_silent(2)
    assert names(driver.request("r1")) == ["AnswerError", "EndRequest"]
    driver.report("d0")
    assert names(driver.request("r2")) == ["StartPair"]


@pytest.mark.parametrize("phase", ["draining", "loading"])
def test_a_node_that_is_not_ready_gets_no_new_work(phase: str) -> None:
    """With the prefill node not ready, the decode node computes the prompt itself."""
    driver = Driver("p0", "d0")
    driver.report("p0", phase=phase)
    effects = driver.request("r1")
    assert effects == [StartAlone("r1", 1, description("d0"))]
    driver.do(ev.FirstDataArrived("r1", 1))
    assert ended(driver.do(ev.DecodeEnded("r1", 1))).decision == "alone_no_prefill_node"


def test_deadlines_end_every_wait() -> None:
    """First token: 504 and both legs cancelled; the whole request: the stream ends."""
    driver = Driver("p0", "d0", first_token_deadline_s=10, request_deadline_s=60)
    driver.request("r1")
    assert driver.core.next_deadline() == min(110.0, 105.0)
    effects = driver.pass_time(10)
    assert names(effects)[:4] == ["CancelLeg", "FailTransfer", "CancelLeg", "AnswerError"]
    assert effects[3].status == 504  # type: ignore[union-attr]
    driver.report("p0")
    driver.report("d0")
    driver.request("r2")
    driver.do(ev.FirstDataArrived("r2", 1))
    assert not [e for e in driver.pass_time(59) if isinstance(e, EndRequest)]
    assert ended(driver.pass_time(1)).status == 504
    assert driver.is_idle()


def test_an_unstreamed_answer_has_no_first_token_deadline() -> None:
    """Its first data is the whole answer, so only the whole request's deadline counts."""
    driver = Driver("p0", "d0", first_token_deadline_s=10, request_deadline_s=60)
    driver.request("r1", streaming=False)
    assert not [e for e in driver.pass_time(59) if isinstance(e, EndRequest)]
    assert ended(driver.pass_time(1)).status == 504


def test_a_prefill_leg_that_never_answers_is_cancelled_in_the_end() -> None:
    """The client is long served; the request's deadline gives the slot back."""
    driver = Driver("p0", "d0", request_deadline_s=60)
    driver.request("r1")
    driver.do(ev.FirstDataArrived("r1", 1))
    driver.do(ev.DecodeEnded("r1", 1))
    effects = driver.pass_time(60)
    assert names(effects) == ["CancelLeg", "EndRequest"]
    assert ended(effects).outcome == "ok"
    assert driver.is_idle()


def test_stopping_ends_everything() -> None:
    """Waiting and running requests end with 503, and no new one is admitted."""
    driver = Driver("p0", "d0", placement={"prefill_ahead_requests": 0})
    driver.request("r1")
    driver.request("r2")
    effects = driver.do(ev.RouterStopping())
    assert {e.request_id for e in effects if isinstance(e, AnswerError)} == {"r1", "r2"}
    assert names(driver.request("r3")) == ["AnswerError", "EndRequest"]
    assert driver.is_idle()
