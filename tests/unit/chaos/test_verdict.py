"""The judge of a chaos run is judged: planted stories get the verdict that they deserve."""

from __future__ import annotations

from typing import Any

import pytest
from chaos.faults import Fault
from chaos.load import Story
from chaos.verdict import Outcome, Touch, judge, outcome_of, touch_of

NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
ERROR = {"error": {"message": "m", "type": "BadGatewayError", "code": 502}}


def story(**changes: Any) -> Story:
    """A request that went well from 10 to 12, with its first data at 11."""
    fields: dict[str, Any] = {
        "id": "r",
        "endpoint": "completions",
        "streamed": True,
        "tokens": 3,
        "prompt_tokens": 9,
        "right": "abc",
        "started": 10.0,
        "first_data": 11.0,
        "ended": 12.0,
        "status": 200,
        "text": "abc",
        "said_done": True,
        "timeline": {"prefill_node": "prefill-0", "decode_node": "decode-0", "attempts": 1},
    }
    return Story(**(fields | changes))


def failed(status: int = 502, **changes: Any) -> Story:
    """One that got an error status."""
    error = {"error": {**ERROR["error"], "code": status}}
    fields = {"status": status, "error": error, "text": "", "first_data": None, "said_done": False}
    return story(**(fields | changes))


def fault(node: str, began: float, ended: float) -> Fault:
    """Something happened to a node."""
    return Fault("kill engine", node, began, ended=ended)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (story(), Outcome.OK),
        (story(text="abd"), Outcome.WRONG),
        (story(text="abcd"), Outcome.WRONG),
        (story(text="ab"), Outcome.WRONG),
        (story(text="ab", said_done=False), Outcome.UGLY),
        (story(text="ab", error=ERROR, said_done=False), Outcome.BROKEN),
        (story(text="b", error=ERROR), Outcome.WRONG),
        (story(text="ab", end="left"), Outcome.LEFT),
        (story(text="b", end="left"), Outcome.WRONG),
        (story(text="ab", end="reset"), Outcome.RESET),
        (story(end="deadline"), Outcome.HANG),
        (story(end="unreadable"), Outcome.UGLY),
        (failed(502), Outcome.ERROR),
        (failed(503, retry_after="5"), Outcome.REFUSED),
        (failed(503), Outcome.UGLY),
        (failed(429, retry_after="soon"), Outcome.UGLY),
        (failed(500, error={"error": "no"}), Outcome.UGLY),
        (failed(500, error={"error": {"message": "", "type": "t", "code": 500}}), Outcome.UGLY),
        (failed(500, error=ERROR), Outcome.UGLY),
    ],
)
def test_outcomes(made: Story, expected: Outcome) -> None:
    """What a client saw, from the right text to what is no OpenAI error."""
    assert outcome_of(made)[0] is expected


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([], Touch.NONE),
        ([fault("decode-0", 5, 9.9)], Touch.NONE),
        ([fault("decode-0", 12.1, 20)], Touch.NONE),
        ([fault("decode-1", 5, 20)], Touch.NONE),
        ([fault("decode-0", 5, 10.1)], Touch.EARLY_SPARED),
        ([fault("prefill-0", 10.5, 20)], Touch.EARLY_SPARED),
        ([fault("prefill-0", 10.5, 20), fault("decode-1", 10.5, 20)], Touch.EARLY_SPARED),
        ([fault("prefill-0", 10.5, 20), fault("prefill-1", 5, 10.1)], Touch.EARLY),
        ([fault("decode-0", 11.5, 20)], Touch.LATE),
        ([fault("prefill-0", 5, 20), fault("decode-0", 11.5, 20)], Touch.LATE),
        ([fault("router", 5, 10.1)], Touch.ROUTER),
    ],
)
def test_touches(faults: list[Fault], expected: Touch) -> None:
    """A fault counts when it lasted at some moment of the request's life, on one of its nodes."""
    assert touch_of(story(), faults, NODES)[0] is expected


def test_a_moved_request_was_touched_where_it_was_before() -> None:
    """The router remembers the last attempt's nodes only."""
    timeline = {"prefill_node": "prefill-1", "decode_node": "decode-0", "attempts": 2}
    faults = [fault("prefill-0", 10.2, 20)]
    assert touch_of(story(timeline=timeline), faults, NODES)[0] is Touch.EARLY_SPARED


def test_a_forgotten_request_may_have_been_anywhere() -> None:
    """A router that was restarted says nothing of it."""
    forgotten = failed(timeline={})
    assert touch_of(forgotten, [fault("decode-0", 5, 20)], NODES)[0] is Touch.EARLY_SPARED
    assert touch_of(forgotten, [fault("decode-0", 5, 9.9)], NODES)[0] is Touch.NONE


def test_a_request_without_a_place() -> None:
    """It is touched only when no node of one pool was whole."""
    nowhere = {"prefill_node": "", "decode_node": "", "attempts": 0}
    lost = failed(503, retry_after="1", timeline=nowhere)
    assert touch_of(lost, [fault("decode-0", 5, 20)], NODES)[0] is Touch.NONE
    both = [fault("decode-0", 5, 20), fault("decode-1", 5, 20)]
    assert touch_of(lost, both, NODES)[0] is Touch.EARLY


def test_the_bars() -> None:
    """Each violation is named; faults excuse what they may excuse and nothing more."""
    router = [fault("router", 5, 20)]
    assert judge([story(end="reset")], router, NODES).violations == []
    assert judge([story(end="reset")], [fault("decode-0", 5, 20)], NODES).violations
    assert (
        judge([failed()], [fault("decode-0", 11, 20), fault("decode-1", 5, 20)], NODES).violations
        == []
    )
    assert judge([failed()], [], NODES).violations
    assert judge([story(text="x")], router, NODES).violations
    assert judge([story(end="deadline")], router, NODES).violations
    assert judge([story()], [], NODES, ["decode-0 still holds 3 blocks"]).violations
    lost = Fault("kill engine", "decode-0", 1, ended=2, is_lost=True)
    assert judge([story()], [lost], NODES).violations


def test_the_share_of_saved_requests() -> None:
    """94 of 100 are too few, 95 are enough; those whose client left do not count."""
    hit = [fault("decode-0", 10.5, 20)]
    left = [story(end="left", text="")] * 50
    assert judge([story()] * 95 + [failed()] * 5 + left, hit, NODES).violations == []
    verdict = judge([story()] * 94 + [failed()] * 6, hit, NODES)
    assert verdict.early_success_share == pytest.approx(0.94)
    assert len(verdict.violations) == 1


def test_faults_of_the_cache_excuse_nothing() -> None:
    """A request that fails while the cache server, its disk or a store is down fails untouched."""
    faults = [fault(place, 9.0, 20.0) for place in ("cache", "redis", "disk")]
    verdict = judge([failed()], faults, NODES)
    assert verdict.judged[0].touch is Touch.NONE
    assert len(verdict.violations) == 1
    assert not judge([story()], faults, NODES).violations


def test_a_cache_that_does_not_come_back_is_a_violation() -> None:
    """As a node that does not."""
    lost = fault("cache", 9.0, 20.0)
    lost.is_lost = True
    assert judge([story()], [lost], NODES).violations == [
        "cache did not come back after: kill engine"
    ]
