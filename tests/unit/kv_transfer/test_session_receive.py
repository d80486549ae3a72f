"""One receive: when it is over, and whether its pages are there."""

from __future__ import annotations

import pytest

from splitserve.kv_transfer.session_receive import ReceiveSession, Source
from splitserve.kv_transfer.transfer_lifecycle import SourceState
from splitserve.kv_transfer.transfer_story import IllegalTransferError


def make_session(*addresses: str, heads: int = 2) -> ReceiveSession:
    """A session that waits for the ranks at these addresses."""
    return ReceiveSession(
        transfer_id="t",
        request_id="r",
        attempt=1,
        peer_incarnation="P",
        first_block=0,
        block_ids=(1, 2),
        prompt_tokens=8,
        prompt_hash=b"h",
        heads=frozenset(range(heads)),
        deadline=0.0,
        sources={address: Source() for address in addresses},
    )


def test_landed_when_every_source_has_delivered_all_pages() -> None:
    """Not before the last one has."""
    session = make_session("a", "b")
    session.granted("a", 1, 4, frozenset({0}))
    session.granted("b", 2, 4, frozenset({1}))
    session.delivered("a", 4, 400)
    assert session.outcome is None
    session.delivered("a", 4, 400)
    assert session.unfenced == ["b"]
    session.delivered("b", 4, 400)
    assert (session.outcome, session.pages, session.bytes) == ("landed", 8, 800)
    assert session.failure == ""


def test_a_rank_without_our_heads_is_not_waited_for() -> None:
    """It is absent, and the others hold everything."""
    session = make_session("a", "b")
    session.granted("a", 1, 4, frozenset({0, 1}))
    session.absent("b")
    session.delivered("a", 4, 400)
    assert session.outcome == "landed"


@pytest.mark.parametrize("order", ["absent first", "delivered first"])
def test_heads_that_nobody_holds_fail(order: str) -> None:
    """Half of the heads is no success; the failure names the other half."""
    session = make_session("a", "b")
    session.granted("a", 1, 4, frozenset({0}))
    if order == "absent first":
        session.absent("b")
    session.delivered("a", 4, 400)
    if order == "delivered first":
        assert session.outcome is None
        assert session.failure == ""
        session.absent("b")
    assert session.outcome == "failed"
    assert "KV heads [1]" in session.failure


def test_no_source_at_all_fails() -> None:
    """A leg that names no prefill rank is computed here."""
    assert make_session().outcome == "failed"


@pytest.mark.parametrize("pages", [3, 5])
def test_another_number_of_pages_fails(pages: int) -> None:
    """Both numbers are named."""
    session = make_session("a")
    session.granted("a", 1, 4, frozenset({0, 1}))
    session.delivered("a", pages, 1)
    assert session.outcome == "failed"
    assert session.failure == f"{pages} pages were sent, 4 were expected"


def test_a_cancelled_session_waits_for_its_fences() -> None:
    """Sources without a grant settle at once, the others when they fence or deliver."""
    session = make_session("a", "b", "c")
    session.granted("a", 1, 4, frozenset({0}))
    session.granted("b", 2, 4, frozenset({1}))
    session.cancel("enough")
    assert session.sources["c"].state is SourceState.ENDED
    assert session.unfenced == ["a", "b"]
    session.ended("a", "fenced")
    assert session.outcome is None
    session.delivered("b", 4, 400)
    assert (session.outcome, session.failure) == ("failed", "enough")


def test_one_end_cancels_the_rest() -> None:
    """When one rank cannot deliver the others are not wanted any more."""
    session = make_session("a", "b")
    session.granted("a", 1, 4, frozenset({0}))
    session.ended("a", "dead")
    assert session.unasked == []
    assert (session.outcome, session.failure) == ("failed", "dead")
    session.ended("a", "again")
    session.ended("unknown", "again")
    session.delivered("unknown", 4, 1)
    assert session.failure == "dead"


def test_granting_is_checked() -> None:
    """A grant after a cancel, or twice, is our own mistake; the error tells the story."""
    session = make_session("a", "b")
    session.granted("a", 1, 4, frozenset({0}))
    with pytest.raises(IllegalTransferError, match="'granted' cannot become 'granted'"):
        session.granted("a", 2, 4, frozenset({0}))
    session.moment.now = 0.25
    session.cancel("enough")
    with pytest.raises(IllegalTransferError) as caught:
        session.granted("b", 2, 4, frozenset({0}))
    text = str(caught.value)
    for part in (
        "transfer t, attempt 1 (b) in state 'ended'",
        "+      0.0 ms  a: unknown -> granted, granted",
        "+    250.0 ms  transfer: awaited -> fencing, engine abort (enough)",
        "+    250.0 ms  a: granted -> quarantined, engine abort (enough)",
    ):
        assert part in text
