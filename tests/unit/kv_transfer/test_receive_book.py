"""What a decode rank does with its pages when a prefill node fails and another one is named."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.kv_transfer.messages import Cancel, Delivered, Fenced, Grant, Landed
from splitserve.kv_transfer.orders import BeginReceive, Retarget
from splitserve.kv_transfer.receive_book import Introduced, ReceiveBook
from splitserve.kv_transfer.session_receive import (
    Expect,
    Finish,
    Greet,
    ReceiveEffect,
    Revoke,
    Tell,
    TellOnce,
)

WAIT_S = 2.0
FIRST, SECOND = "tcp://p", "tcp://q"
ORDER = BeginReceive("t", "r", 1, "P", (FIRST,), 0, (5, 6), 8, b"h")
RETARGET = Retarget("t", 2, "Q", (SECOND,), "P is gone")
PAGES = {"pages": 4, "bytes": 400}


def introduced(incarnation: str) -> Introduced:
    """A rank that holds the one head."""
    return Introduced(incarnation, frozenset({0}), 1)


def make_book(*known: tuple[str, str], wait_s: float = WAIT_S) -> ReceiveBook:
    """A book that knows these (address, incarnation)."""
    book = ReceiveBook(
        heads=frozenset({0}), layers=2, deadline_s=100.0, retarget_wait_s=wait_s, first_tag=0
    )
    for address, incarnation in known:
        book.welcomed(address, introduced(incarnation), 0.0)
    return book


def granted_to(effects: list[ReceiveEffect]) -> list[tuple[str, int, tuple[int, ...]]]:
    """(address, attempt, blocks) of the grants."""
    return [
        (e.address, e.message.attempt, e.message.block_ids)
        for e in effects
        if isinstance(e, Tell) and isinstance(e.message, Grant)
    ]


def finished(effects: list[ReceiveEffect]) -> list[bool]:
    """Whether each request that is reported has landed."""
    return [effect.landed for effect in effects if isinstance(effect, Finish)]


def say(book: ReceiveBook, kind: Any, attempt: int, now: float, **more: Any) -> Any:
    """The rank that has the attempt speaks."""
    address, incarnation = ((FIRST, "P"), (SECOND, "Q"))[attempt - 1]
    message = kind(transfer_id="t", attempt=attempt, **more)
    return book.reported(address, incarnation, message, now)


def test_pages_of_a_dead_writer_are_granted_to_the_next() -> None:
    """The same pages, as a new attempt; the request is reported once, as landed."""
    book = make_book((FIRST, "P"), (SECOND, "Q"))
    book.begin(ORDER, 0.0, is_callable=True)
    assert finished(book.process_gone(FIRST, "P", 1.0)) == []
    effects = book.retarget(RETARGET, 1.5)
    assert granted_to(effects) == [(SECOND, 2, (5, 6))]
    assert finished(effects) == []
    assert book.counters["retargeted_receives"] == 1
    effects = say(book, Delivered, 2, 2.0, **PAGES)
    assert finished(effects) == [True]
    assert book.open_sessions == 0
    landed = Landed(transfer_id="t", attempt=2)
    assert book.acknowledge("r") == [Tell(SECOND, landed)]
    assert book.acknowledge("r") == []


def test_a_writer_that_lives_is_fenced_before_the_next_is_granted() -> None:
    """Never two writers for one page."""
    book = make_book((FIRST, "P"), (SECOND, "Q"))
    book.begin(ORDER, 0.0, is_callable=True)
    effects = book.retarget(RETARGET, 1.0)
    assert granted_to(effects) == []
    assert Tell(FIRST, Cancel(transfer_id="t", attempt=1, reason="P is gone")) in effects
    assert say(book, Delivered, 2, 1.1, **PAGES) is None
    effects = say(book, Fenced, 1, 1.2, reason="cancelled")
    assert granted_to(effects) == [(SECOND, 2, (5, 6))]
    assert finished(say(book, Delivered, 1, 1.3, **PAGES) or []) == []
    assert finished(say(book, Delivered, 2, 1.4, **PAGES)) == [True]


def test_a_receiver_that_can_end_the_writer_does_not_wait() -> None:
    """The transport's word is as good as a fence."""
    book = make_book((FIRST, "P"), (SECOND, "Q"))
    book.begin(ORDER, 0.0, is_callable=True)
    (revoke,) = [e for e in book.retarget(RETARGET, 1.0) if isinstance(e, Revoke)]
    effects = book.revoked(revoke.session, revoke.address, 1.0)
    assert granted_to(effects) == [(SECOND, 2, (5, 6))]
    assert [e.block_ids for e in effects if isinstance(e, Expect)] == [(5, 6)]


def test_without_news_the_engine_computes_the_prompt() -> None:
    """After the wait, once."""
    book = make_book((FIRST, "P"))
    book.begin(ORDER, 0.0, is_callable=True)
    book.incarnation_gone("P", 1.0)
    assert finished(book.tick(1.0 + WAIT_S - 0.1)) == []
    assert finished(book.tick(1.0 + WAIT_S)) == [False]
    assert finished(book.tick(100.0)) == []


@pytest.mark.parametrize("wait_s", [0.0, WAIT_S])
def test_what_ends_the_wait_at_once(wait_s: float) -> None:
    """The router gives the transfer up, or the engine has no more use for it."""
    for end in ("give up", "cancel"):
        book = make_book((FIRST, "P"), wait_s=wait_s)
        book.begin(ORDER, 0.0, is_callable=True)
        effects = book.process_gone(FIRST, "P", 1.0)
        if wait_s:
            assert finished(effects) == []
            if end == "give up":
                effects = book.give_up("t", "no other prefill node", 1.1)
            else:
                effects = book.cancel("r", "the client is gone", 1.1)
        assert finished(effects) == [False]


def test_a_prompt_that_differs_is_nobody_elses_either() -> None:
    """A refusal is final: another prefill node renders the same prompt."""
    book = make_book((FIRST, "P"))
    book.begin(ORDER, 0.0, is_callable=True)
    assert finished(say(book, Fenced, 1, 1.0, reason="other tokens", refused=True)) == [False]


def test_a_prefill_node_that_nobody_waits_for_is_declined() -> None:
    """After the request was reported, and for an attempt that is not newer."""
    book = make_book((FIRST, "P"), (SECOND, "Q"))
    cancel = Cancel(transfer_id="t", attempt=2, reason="the decode node computes the prompt itself")
    assert book.retarget(RETARGET, 0.0) == [TellOnce(SECOND, cancel)]
    book.begin(ORDER, 0.0, is_callable=True)
    same = Retarget("t", 1, "Q", (SECOND,), "again")
    assert [type(effect) for effect in book.retarget(same, 0.0)] == [TellOnce]
    assert book.sessions()[0].cancel_reason is None


def test_the_next_writer_may_have_to_be_introduced_first() -> None:
    """Another engine is known at its address: it is greeted, and granted once it has answered."""
    book = make_book((FIRST, "P"), (SECOND, "old"))
    book.begin(ORDER, 0.0, is_callable=True)
    book.process_gone(FIRST, "P", 1.0)
    effects = book.retarget(RETARGET, 1.0)
    assert Greet(SECOND) in effects
    assert granted_to(effects) == []
    assert granted_to(book.welcomed(SECOND, introduced("Q"), 1.5)) == [(SECOND, 2, (5, 6))]


def test_the_deadline_counts_over_all_attempts() -> None:
    """A chain of failing prefill nodes ends when the first one's time does."""
    book = make_book((FIRST, "P"), (SECOND, "Q"))
    book.begin(ORDER, 0.0, is_callable=True)
    book.process_gone(FIRST, "P", 99.0)
    book.retarget(RETARGET, 99.5)
    book.tick(100.0)
    assert finished(say(book, Fenced, 2, 100.1, reason="cancelled")) == [False]


def test_an_abort_after_landing_keeps_what_the_writer_has() -> None:
    """Nothing was computed with the pages: another decode rank may want them from the same one."""
    book = make_book((FIRST, "P"))
    book.begin(ORDER, 0.0, is_callable=True)
    say(book, Delivered, 1, 1.0, **PAGES)
    cancel = Cancel(transfer_id="t", attempt=1, reason="aborted", keeps=True)
    assert book.cancel("r", "aborted", 2.0) == [Tell(FIRST, cancel)]
    assert book.acknowledge("r") == []


def test_an_abort_while_waiting_keeps_it_too() -> None:
    """Unlike a deadline: then this engine computes the prompt, and nobody else comes."""
    for keeps in (True, False):
        book = make_book((FIRST, "P"))
        book.begin(ORDER, 0.0, is_callable=True)
        effects = book.cancel("r", "aborted", 1.0) if keeps else book.tick(100.0)
        (cancel,) = [e.message for e in effects if isinstance(e, Tell)]
        assert isinstance(cancel, Cancel)
        assert cancel.keeps is keeps
