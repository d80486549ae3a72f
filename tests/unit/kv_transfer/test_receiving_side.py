"""What a decode rank makes of prefill ranks that misbehave or disappear.

The transport is ``local``, whose writers cannot be stopped from here: pages come back only with a
fence of the engine that they were granted to, or with its death.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.kv_peers import FakePrefill, Sleeper
from support.kv_rank import KvRank, until

from splitserve.kv_transfer import messages, receive_book, receiving_side
from splitserve.kv_transfer.orders import Decline, StepOrders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROMPT = list(range(8))
BLOCKS = [5, 6]
PAGES = 8


class Prefill(FakePrefill):
    """A prefill rank driven by hand."""

    def __init__(self, rank: KvRank) -> None:
        self.rank = rank
        super().__init__(rank.address)

    def meet(self, **changes: Any) -> None:
        """Answer the next hello."""
        self.expect(messages.Hello)
        self.welcome(self.rank, transport="local", **changes)

    def fence(self, grant: messages.Grant) -> None:
        self.say(messages.Fenced(transfer_id=grant.transfer_id, attempt=grant.attempt, reason="no"))

    def deliver(self, grant: messages.Grant, pages: int = PAGES) -> None:
        told = {"transfer_id": grant.transfer_id, "attempt": grant.attempt}
        self.say(messages.Delivered(**told, pages=pages, bytes=pages * 512))


@pytest.fixture
def d(
    free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[KvRank]:
    """A decode rank that asks for fences often; a parameter is how long it bears silence, in s."""
    monkeypatch.setattr(receiving_side, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(receive_book, "FENCE_INTERVAL_S", 0.05)
    silence_s = getattr(request, "param", 60.0)
    rank = KvRank("D", free_port(), transport="local", peer_silence_s=silence_s, deadline_s=1000.0)
    rank.thread.start()
    yield rank
    rank.thread.stop()


@pytest.fixture
def p(free_port: Callable[[], int]) -> Iterator[Prefill]:
    """A prefill rank that has not answered yet."""
    prefill = Prefill(KvRank("P", free_port()))
    yield prefill
    prefill.close()


def cancel(d: KvRank, request: str) -> None:
    """The client is gone."""
    d.thread.begin_step(StepOrders(cancels=((request, "the client is gone"),)))


def assert_open(d: KvRank, request: str) -> None:
    """The request is not settled, also after everything that has arrived was looked at."""
    assert not d.has_received(request)
    assert d.thread.counters()["open_receives"] == 1


def test_delivered_and_counted(d: KvRank, p: Prefill) -> None:
    """A delivery of all pages is reported, and acknowledged when a token was computed from them."""
    request = d.receive("t", PROMPT, BLOCKS, p.rank)
    p.meet()
    grant = p.expect(messages.Grant)
    assert (grant.block_ids, grant.grants_expected, grant.first_block) == ((5, 6), 1, 0)
    p.say(messages.Writing(transfer_id="t", attempt=1, last=True))
    p.deliver(grant)
    until(lambda: d.has_received(request), "landed")
    assert not d.failed
    d.thread.begin_step(StepOrders(acknowledged=(request, "unknown")))
    assert p.expect(messages.Landed).transfer_id == "t"


@pytest.mark.parametrize("pages", [0, PAGES - 1, PAGES + 1])
def test_another_number_of_pages_is_no_delivery(d: KvRank, p: Prefill, pages: int) -> None:
    """Pages that were not counted fail the request."""
    request = d.receive("t", PROMPT, BLOCKS, p.rank)
    p.meet()
    p.deliver(p.expect(messages.Grant), pages)
    until(lambda: d.has_received(request), "settled")
    assert d.failed == {request}


def test_malformed_and_unknown_messages_are_dropped(d: KvRank, p: Prefill) -> None:
    """Bytes that are no message, and messages about nothing known, change nothing."""
    request = d.receive("t", PROMPT, BLOCKS, p.rank)
    p.meet()
    grant = p.expect(messages.Grant)
    for payload in (b"", b"\xc1", b"x" * 10_000, messages.encode(messages.Ping())):
        p.send_frames(payload)
    p.send_frames(b"two", b"frames")
    p.deliver(messages.Grant(**{**_fields(grant), "attempt": 2}))
    p.fence(messages.Grant(**{**_fields(grant), "transfer_id": "u"}))
    p.welcome(p.rank, transport="local")
    p.deliver(grant)
    p.deliver(grant)
    p.fence(grant)
    until(lambda: d.has_received(request), "landed")
    assert not d.failed


def test_a_cancelled_request_waits_for_its_fence(d: KvRank, p: Prefill) -> None:
    """The pages stay away from the engine until the writer has fenced; it is asked again."""
    request = d.receive("t", PROMPT, BLOCKS, p.rank)
    p.meet()
    grant = p.expect(messages.Grant)
    cancel(d, request)
    for _ in range(3):
        assert p.expect(messages.Cancel).reason == "the client is gone"
    assert_open(d, request)
    p.fence(grant)
    until(lambda: d.has_received(request), "settled")
    assert d.failed == {request}


def test_a_late_delivery_after_a_cancel_is_a_fence(d: KvRank, p: Prefill) -> None:
    """Delivered and cancel cross each other: settled, as failed, and P is released."""
    request = d.receive("t", PROMPT, BLOCKS, p.rank)
    p.meet()
    grant = p.expect(messages.Grant)
    cancel(d, request)
    p.expect(messages.Cancel)
    p.deliver(grant)
    p.expect(messages.Landed)
    until(lambda: d.has_received(request), "settled")
    assert d.failed == {request}


def test_the_deadline_asks_for_the_fence(free_port: Callable[[], int], p: Prefill) -> None:
    """When the deadline ends D cancels, and still waits for the fence."""
    d = KvRank("D", free_port(), transport="local", deadline_s=0.1)
    d.thread.start()
    request = d.receive("t", PROMPT, BLOCKS, p.rank)
    p.meet()
    grant = p.expect(messages.Grant)
    assert "not delivered within 0.1 s" in p.expect(messages.Cancel).reason
    assert_open(d, request)
    p.fence(grant)
    until(lambda: d.has_received(request), "settled")
    d.thread.stop()


def test_a_lost_connection_is_no_fence(d: KvRank, p: Prefill) -> None:
    """After a reconnect the same engine is asked for the fence, and only then it is over."""
    request = d.receive("t", PROMPT, BLOCKS, p.rank)
    p.meet()
    grant = p.expect(messages.Grant)
    p.close()
    again = Prefill(p.rank)
    again.expect(messages.Hello)
    assert_open(d, request)
    again.welcome(p.rank, transport="local")
    assert "connection" in again.expect(messages.Cancel).reason
    assert_open(d, request)
    again.fence(grant)
    until(lambda: d.has_received(request), "settled")
    assert d.failed == {request}
    again.close()


def test_another_engines_fence_is_no_fence(d: KvRank, p: Prefill) -> None:
    """A restarted engine cannot promise for the one before it; the report of its death can."""
    request = d.receive("t", PROMPT, BLOCKS, p.rank)
    p.meet()
    grant = p.expect(messages.Grant)
    p.close()
    new = Prefill(KvRank("Q", int(p.rank.address.rsplit(":", 1)[1])))
    new.meet()
    new.fence(grant)
    new.deliver(grant)
    second = d.receive("u", PROMPT, [9, 10], new.rank)
    new.deliver(new.expect(messages.Grant))
    until(lambda: d.has_received(second), "the new engine's transfer landed")
    assert_open(d, request)
    d.thread.begin_step(StepOrders(dead_peers=("P",)))
    until(lambda: d.has_received(request), "settled")
    assert d.failed == {request}
    new.close()


@pytest.mark.parametrize("d", [1.0], indirect=True)
def test_turned_away_is_no_fence(d: KvRank, p: Prefill) -> None:
    """A peer that ends the introduction is greeted again and asked for the fence."""
    request = d.receive("t", PROMPT, BLOCKS, p.rank)
    p.meet()
    grant = p.expect(messages.Grant)
    p.say(messages.TurnedAway(reason="given up: silent"))
    p.expect(messages.Hello)
    p.say(messages.TurnedAway(reason="out of order"))
    p.expect(messages.Hello)
    assert_open(d, request)
    p.welcome(p.rank, transport="local")
    assert "given up" in p.expect(messages.Cancel).reason
    p.fence(grant)
    until(lambda: d.has_received(request), "settled")
    assert d.failed == {request}


def test_the_death_of_the_writers_process_is_a_fence(d: KvRank, p: Prefill) -> None:
    """A killed prefill engine gives the pages back at once, though its socket may linger."""
    sleeper = Sleeper()
    request = d.receive("t", PROMPT, BLOCKS, p.rank)
    p.meet(process=sleeper.identity)
    p.expect(messages.Grant)
    sleeper.kill()
    until(lambda: d.has_received(request), "settled")
    late = d.receive("u", PROMPT, [9], p.rank)
    until(lambda: d.has_received(late), "a dead engine is not asked")
    assert d.failed == {request, late}


def test_the_old_process_is_watched_after_a_restart(d: KvRank, p: Prefill) -> None:
    """The death of the engine that still owes a fence counts, also when a new one has come."""
    old, new = Sleeper(), Sleeper()
    request = d.receive("t", PROMPT, BLOCKS, p.rank)
    p.meet(process=old.identity)
    p.expect(messages.Grant)
    p.close()
    successor = Prefill(KvRank("Q", int(p.rank.address.rsplit(":", 1)[1])))
    successor.meet(process=new.identity)
    successor.expect(messages.Ping)
    assert_open(d, request)
    old.kill()
    until(lambda: d.has_received(request), "settled")
    new.kill()
    successor.close()


@pytest.mark.parametrize("d", [1.0], indirect=True)
def test_a_silent_prefill_rank_is_called_anew(d: KvRank, p: Prefill) -> None:
    """A peer that is connected and says nothing ends the wait before the deadline does."""
    request = d.receive("t", PROMPT, BLOCKS, p.rank)
    p.meet()
    grant = p.expect(messages.Grant)
    p.expect(messages.Hello)
    assert_open(d, request)
    p.welcome(p.rank, transport="local")
    assert "silent for 1 s" in p.expect(messages.Cancel).reason
    p.fence(grant)
    until(lambda: d.has_received(request), "settled")
    assert d.failed == {request}


def test_a_decline_waits_for_the_introduction(d: KvRank, p: Prefill) -> None:
    """A declined transfer is told once the peer is there."""
    d.thread.begin_step(StepOrders(declines=(Decline("t", 3, (p.rank.address,), "cached"),)))
    p.meet()
    told = p.expect(messages.Cancel)
    assert (told.transfer_id, told.attempt, told.reason) == ("t", 3, "cached")


@pytest.mark.parametrize("d", [1.0], indirect=True)
def test_connections_are_bounded_and_unwanted_ones_hung_up(
    d: KvRank, p: Prefill, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more prefill ranks than the limit are called; one that never answers makes room again."""
    monkeypatch.setattr(receiving_side, "UPSTREAM_LIMIT_RANKS", 1)
    absent = KvRank("Q", free_port())
    d.thread.begin_step(StepOrders(declines=(Decline("t", 1, (absent.address,), "cached"),)))
    refused = d.receive("t", PROMPT, BLOCKS, p.rank)
    until(lambda: d.has_received(refused), "refused")
    attempts = iter(range(2, 1_000_000))

    def is_called() -> bool:
        d.receive("t", PROMPT, BLOCKS, p.rank, attempt=next(attempts))
        d.collect()
        return d.thread.counters()["open_receives"] >= 1

    until(is_called, "room")
    p.meet()
    p.expect(messages.Grant)


def _fields(grant: messages.Grant) -> dict[str, Any]:
    return {name: getattr(grant, name) for name in grant.__struct_fields__}
