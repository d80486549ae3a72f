"""The ``SendBook``: lists of effects for what the engine, the peers and the transport say."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.kv_transfer import send_book
from splitserve.kv_transfer.messages import Delivered, Fenced, Grant, Writing
from splitserve.kv_transfer.send_book import SendBook
from splitserve.kv_transfer.session_send import Release, Say, SendEffect, Write, split

HASH = b"h" * 16
LEASE_S = 30.0


def make_book(**changes: Any) -> SendBook:
    """A book of two layers that streams everything at once."""
    settings: dict[str, Any] = {
        "layers": 2,
        "stream_min_bytes": 1,
        "write_limit_bytes": 1 << 20,
        "lease_s": LEASE_S,
    }
    return SendBook(**{**settings, **changes})


def grant(**changes: Any) -> Grant:
    """A grant for all of a prompt of three blocks."""
    fields: dict[str, Any] = {
        "transfer_id": "t",
        "attempt": 1,
        "tag": 7,
        "first_block": 0,
        "block_ids": (11, 12, 13),
        "prompt_tokens": 10,
        "prompt_hash": HASH,
        "grants_expected": 1,
    }
    return Grant(**{**fields, **changes})


def open_send(book: SendBook, transfer_id: str = "t") -> list[SendEffect]:
    """A request of three blocks starts."""
    return book.open(
        transfer_id, f"r-{transfer_id}", prompt_tokens=10, prompt_hash=HASH, total_blocks=3
    )


def make_final(book: SendBook, end: int = 3, layers: int = 2, transfer_id: str = "t") -> None:
    """Blocks before ``end`` are final in the first ``layers`` layers."""
    book.blocks_known(transfer_id, [1, 2, 3])
    for layer in range(layers):
        book.blocks_final(transfer_id, layer, end)


def post(book: SendBook, effects: list[SendEffect], first_id: int = 1) -> list[int]:
    """The transport accepts the writes among ``effects``; returns their ids."""
    ids = []
    for effect in effects:
        if isinstance(effect, Write):
            ids.append(first_id + len(ids))
            pages = sum(end - first for _, first, end in effect.spans)
            book.write_posted(effect, ids[-1], pages)
    return ids


def fenced(reason: str, attempt: int = 1, peer: str = "d") -> Say:
    """A fence for the transfer ``t``."""
    return Say(peer, Fenced(transfer_id="t", attempt=attempt, reason=reason))


def writing(*, last: bool) -> Say:
    """The announcement of writes."""
    return Say("d", Writing(transfer_id="t", attempt=1, last=last))


DELIVERED = Say("d", Delivered(transfer_id="t", attempt=1, pages=6, bytes=600))


def test_a_transfer_from_grant_to_release() -> None:
    """Layer by layer, announced twice, delivered after the last write, released when landed."""
    book = make_book()
    assert open_send(book) == []
    assert book.granted("d", grant(), 100, 0.0) == []
    assert book.due_writes(flush=True) == []
    make_final(book, layers=1)
    first = book.due_writes(flush=False)
    assert first == [writing(last=False), Write("t", "d", 7, ((0, 0, 3),))]
    assert book.due_writes(flush=True) == []
    make_final(book)
    second = book.due_writes(flush=False)
    assert second == [writing(last=True), Write("t", "d", 7, ((1, 0, 3),))]
    post(book, [*first, *second])
    assert book.write_ended("t", "d", 2, None) == []
    assert book.write_ended("t", "d", 1, None) == [DELIVERED]
    assert book.close("r-t", aborted=False, now=1.0) == []
    assert book.landed("d", "t", 1) == [Release("r-t", "t", "complete")]
    assert book.open_sessions == 0
    assert book.counters["sent_pages"] == 6


def test_small_pieces_wait_for_each_other() -> None:
    """Below ``stream_min_bytes`` nothing is written before the step ends or all is final."""
    book = make_book(stream_min_bytes=500)
    open_send(book)
    book.granted("d", grant(), 100, 0.0)
    make_final(book, end=2)
    assert book.due_writes(flush=False) == []
    assert len(book.due_writes(flush=True)) == 2
    make_final(book, end=3)
    assert book.due_writes(flush=False) == [
        writing(last=True),
        Write("t", "d", 7, ((0, 2, 3), (1, 2, 3))),
    ]


def test_large_writes_are_cut() -> None:
    """No write is larger than ``write_limit_bytes``, unless one page is."""
    book = make_book(write_limit_bytes=250)
    open_send(book)
    book.granted("d", grant(), 100, 0.0)
    make_final(book)
    assert book.due_writes(flush=True)[1:] == [
        Write("t", "d", 7, ((0, 0, 2),)),
        Write("t", "d", 7, ((0, 2, 3), (1, 0, 1))),
        Write("t", "d", 7, ((1, 1, 3),)),
    ]
    assert split(((0, 0, 2),), 1) == [((0, 0, 1),), ((0, 1, 2),)]
    assert split((), 4) == []


def test_a_prefix_that_the_peer_has_is_not_sent() -> None:
    """Blocks before ``first_block`` are left out."""
    book = make_book()
    open_send(book)
    book.granted("d", grant(first_block=2, block_ids=(13,)), 100, 0.0)
    make_final(book)
    assert book.due_writes(flush=True)[1:] == [Write("t", "d", 7, ((0, 2, 3), (1, 2, 3)))]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_tokens": 11}, "10 tokens on the prefill node, 11 on the decode node"),
        ({"prompt_hash": b"other"}, "same length, other tokens"),
        ({"block_ids": (11, 12)}, "blocks 0 to 2, the prompt ends at block 3"),
        ({"first_block": 3, "block_ids": ()}, "blocks 3 to 3, the prompt ends at block 3"),
        ({"first_block": 3}, "blocks 3 to 6, the prompt ends at block 3"),
    ],
)
def test_a_grant_that_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    """A refusal names both values, is counted, and does not hold the prefill's blocks."""
    book = make_book()
    open_send(book)
    make_final(book)
    (said,) = book.granted("d", grant(**change), 100, 0.0)
    assert isinstance(said, Say)
    assert isinstance(said.message, Fenced)
    assert words in said.message.reason
    assert book.counters["refused_grants"] == 1
    assert book.due_writes(flush=True) == []
    assert book.close("r-t", aborted=False, now=0.0) == [Release("r-t", "t", "abandoned")]


def test_a_cancel_waits_for_open_writes() -> None:
    """The fence is said when the last open write has ended, and nothing is written meanwhile."""
    book = make_book()
    open_send(book)
    book.granted("d", grant(), 100, 0.0)
    make_final(book, end=1)
    post(book, book.due_writes(flush=True))
    assert book.cancelled("d", "t", 1, "enough") == []
    make_final(book)
    assert book.due_writes(flush=True) == []
    assert book.cancelled("d", "t", 1, "enough, again") == []
    assert book.granted("d", grant(), 100, 0.0) == []
    assert book.write_ended("t", "d", 1, None) == [fenced("enough")]
    assert book.cancelled("d", "t", 1, "once more") == [fenced("once more")]
    assert book.close("r-t", aborted=True, now=0.0) == [Release("r-t", "t", "aborted")]


def test_a_cancel_is_always_answered() -> None:
    """For what is unknown, delivered, or released: a fence at once."""
    book = make_book()
    assert book.cancelled("d", "t", 1, "unknown") == [fenced("unknown")]
    assert book.granted("d", grant(), 100, 0.0) == [fenced("unknown")]
    open_send(book)
    assert book.close("r-t", aborted=False, now=0.0)[-1] == Release("r-t", "t", "abandoned")
    assert book.cancelled("d", "t", 1, "late") == [fenced("late")]


def test_an_older_cancel_does_not_take_a_newer_grant() -> None:
    """A cancel concerns its attempt, also while the grant still waits for its request."""
    book = make_book()
    book.granted("d", grant(attempt=2), 100, 0.0)
    assert book.cancelled("d", "t", 1, "old") == [fenced("old")]
    assert open_send(book) == []
    make_final(book)
    assert len(book.due_writes(flush=True)) == 2
    assert book.cancelled("d", "t", 1, "old") == [fenced("old")]
    assert book.cancelled("d", "t", 3, "newer") == [fenced("newer", attempt=3)]
    late = book.granted("d", grant(attempt=3), 100, 0.0)
    assert late[-1] == fenced("this attempt has ended", attempt=3)


def test_early_grants() -> None:
    """The newest attempt of a peer is kept; older ones and repetitions do not replace it."""
    book = make_book()
    assert book.granted("d", grant(attempt=2), 100, 0.0) == []
    assert book.granted("d", grant(attempt=2), 100, 0.0) == []
    assert book.granted("d", grant(attempt=1), 100, 0.0) == [fenced("a newer attempt was granted")]
    assert book.granted("d", grant(attempt=3), 100, 0.0) == [
        fenced("a newer attempt was granted", attempt=2)
    ]
    assert book.early_grants == 1
    assert open_send(book) == []
    assert book.early_grants == 0


def test_early_grants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit a grant is refused; one that replaces another is not."""
    monkeypatch.setattr(send_book, "EARLY_LIMIT_GRANTS", 1)
    book = make_book()
    book.granted("d", grant(), 100, 0.0)
    assert book.granted("e", grant(), 100, 0.0) == [
        fenced("too many grants wait for their request", peer="e")
    ]
    assert len(book.granted("d", grant(attempt=2), 100, 0.0)) == 1
    assert book.early_grants == 1


def test_an_early_grant_expires() -> None:
    """A prefill leg that never comes gives the pages back after the lease."""
    book = make_book()
    book.granted("d", grant(), 100, 0.0)
    assert book.expire(LEASE_S - 1) == []
    assert book.expire(LEASE_S) == [fenced("no prefill request for it came within 30 s")]
    assert book.granted("d", grant(), 100, 40.0) == [
        fenced("no prefill request for it came within 30 s")
    ]


def test_giving_up_fences_an_early_grant() -> None:
    """When the prefill leg will not come, pages that were granted for it come back at once."""
    book = make_book()
    book.granted("d", grant(), 100, 0.0)
    assert book.abandon("t", "refused by the engine") == [fenced("refused by the engine")]
    assert book.early_grants == 0


def test_a_newer_attempt_waits_for_the_fence_of_the_older() -> None:
    """Attempt 2 is filled from the start once attempt 1 has no open write."""
    book = make_book()
    open_send(book)
    book.granted("d", grant(), 100, 0.0)
    make_final(book)
    post(book, book.due_writes(flush=True))
    newer = grant(attempt=2, tag=8, block_ids=(21, 22, 23))
    assert book.granted("d", newer, 100, 0.0) == []
    assert book.due_writes(flush=True) == []
    assert book.write_ended("t", "d", 1, None) == [fenced("a newer attempt was granted")]
    assert book.due_writes(flush=True)[1:] == [Write("t", "d", 8, ((0, 0, 3), (1, 0, 3)))]
    assert book.granted("d", grant(), 100, 0.0) == [fenced("this attempt has ended")]
    assert book.granted("d", newer, 100, 0.0) == []


def test_a_new_node_may_be_granted_after_a_delivery() -> None:
    """The same peer may ask again for what it was given, with a newer attempt."""
    book = make_book()
    open_send(book)
    book.granted("d", grant(), 100, 0.0)
    make_final(book)
    post(book, book.due_writes(flush=True))
    assert book.write_ended("t", "d", 1, None) == [DELIVERED]
    assert book.granted("d", grant(attempt=2, tag=8), 100, 0.0) == []
    assert book.due_writes(flush=True)[1:] == [Write("t", "d", 8, ((0, 0, 3), (1, 0, 3)))]


def test_landed_counts_only_after_delivered() -> None:
    """A peer that acknowledges too early does not get its transfer ended."""
    book = make_book()
    open_send(book)
    book.granted("d", grant(), 100, 0.0)
    assert book.landed("d", "t", 1) == []
    make_final(book)
    post(book, book.due_writes(flush=True))
    assert book.landed("d", "t", 1) == []
    assert book.write_ended("t", "d", 1, None) == [DELIVERED]
    assert book.landed("d", "t", 2) == []
    assert book.landed("e", "t", 1) == []
    assert book.landed("d", "t", 1) == []
    assert book.close("r-t", aborted=False, now=0.0) == [Release("r-t", "t", "complete")]


def test_a_failed_write_fences() -> None:
    """Other writes that are open are waited for; nothing more is written."""
    book = make_book(write_limit_bytes=300)
    open_send(book)
    book.granted("d", grant(), 100, 0.0)
    make_final(book)
    post(book, book.due_writes(flush=True))
    assert book.write_ended("t", "d", 1, "refused") == []
    assert book.write_ended("t", "d", 2, None) == [fenced("refused")]
    assert book.counters["fenced_sends"] == 1


def test_a_lost_peer_is_owed_nothing() -> None:
    """Its early grants, open transfers and unacknowledged deliveries end; what was computed is held
    for another peer until it is given up.
    """
    book = make_book()
    for name in ("t", "u", "v"):
        book.granted("d", grant(transfer_id=name), 100, 0.0)
    for name in ("t", "u"):
        open_send(book, name)
        make_final(book, transfer_id=name)
        book.close(f"r-{name}", aborted=False, now=0.0)
    ids = post(book, book.due_writes(flush=True))
    assert len(ids) == 2
    delivered = book.write_ended("t", "d", 1, None)
    assert delivered == [DELIVERED]
    effects = book.peer_lost("d", "gone")
    assert not [e for e in effects if isinstance(e, Release)]
    assert book.early_grants == 0
    assert not [e for e in book.write_ended("u", "d", 2, "gone") if isinstance(e, Release)]
    assert book.abandon("t", "nobody") == [Release("r-t", "t", "abandoned")]
    assert book.abandon("u", "nobody") == [Release("r-u", "u", "abandoned")]
    assert book.open_sessions == 0
    open_send(book, "v")
    assert book.close("r-v", aborted=True, now=0.0) == [Release("r-v", "v", "aborted")]


@pytest.mark.parametrize("end", ["lost", "cancelled"])
@pytest.mark.parametrize("when", ["before", "half", "delivered"])
def test_another_decode_rank_gets_everything_again(end: str, when: str) -> None:
    """Whatever the first one had when its engine died or its request was aborted: the second one
    is written every page, and only its acknowledgement releases the request.
    """
    book = make_book()
    open_send(book)
    if when != "before":
        book.granted("d", grant(), 100, 0.0)
    make_final(book)
    book.close("r-t", aborted=False, now=0.0)
    ids = post(book, book.due_writes(flush=True)) if when != "before" else []
    if when == "delivered":
        assert book.write_ended("t", "d", ids[0], None) == [DELIVERED]
    if end == "lost":
        effects = book.peer_lost("d", "gone")
    else:
        effects = book.cancelled("d", "t", 1, "aborted", keeps=True)
    assert not [e for e in effects if isinstance(e, Release)]
    book.granted("e", grant(attempt=2), 100, 1.0)
    effects = book.due_writes(flush=True)
    (write,) = [e for e in effects if isinstance(e, Write)]
    assert write.peer == "e"
    assert all(first == 0 for _, first, _ in write.spans)
    book.write_posted(write, 99, 6)
    if when == "half":
        assert not [e for e in book.write_ended("t", "d", ids[0], "x") if isinstance(e, Release)]
    book.write_ended("t", "e", 99, None)
    assert book.landed("e", "t", 2)[-1] == Release("r-t", "t", "complete")


def test_the_lease_ends_a_wait() -> None:
    """A finished prefill that nobody asks for, or acknowledges, is released with its lease."""
    book = make_book()
    open_send(book)
    make_final(book)
    assert book.close("r-t", aborted=False, now=5.0) == []
    assert book.expire(5.0 + LEASE_S - 0.1) == []
    assert book.expire(5.0 + LEASE_S) == [Release("r-t", "t", "abandoned")]
    assert book.counters["expired_leases"] == 1
    open_send(book, "u")
    book.granted("d", grant(transfer_id="u"), 100, 0.0)
    make_final(book, transfer_id="u")
    post(book, book.due_writes(flush=True))
    book.write_ended("u", "d", 1, None)
    book.close("r-u", aborted=False, now=50.0)
    assert book.expire(50.0 + LEASE_S) == [Release("r-u", "u", "abandoned")]


def test_two_decode_ranks_of_one_transfer() -> None:
    """The request is released when both have landed."""
    book = make_book()
    open_send(book)
    make_final(book)
    assert book.close("r-t", aborted=False, now=0.0) == []
    for peer in ("d/0", "d/1"):
        book.granted(peer, grant(grants_expected=2), 50, 0.0)
        post(book, book.due_writes(flush=True))
        assert len(book.write_ended("t", peer, 1, None)) == 1
        effects = book.landed(peer, "t", 1)
    assert effects == [Release("r-t", "t", "complete")]


def test_a_preempted_request_is_written_from_its_new_blocks() -> None:
    """What was written is not written again; the rest waits until it is computed again."""
    book = make_book()
    open_send(book)
    book.granted("d", grant(), 100, 0.0)
    make_final(book, end=2)
    post(book, book.due_writes(flush=True))
    session = book.preempted("r-t")
    assert session is not None
    assert session.source_blocks == []
    assert book.due_writes(flush=True) == []
    book.write_ended("t", "d", 1, None)
    make_final(book, end=1)
    assert book.due_writes(flush=True) == []
    make_final(book, end=3)
    assert book.due_writes(flush=True)[-1] == Write("t", "d", 7, ((0, 2, 3), (1, 2, 3)))
    assert book.preempted("unknown") is None


def test_an_unfinished_request_is_an_aborted_one() -> None:
    """An engine that ends a request before its prompt is computed has nothing to deliver."""
    book = make_book()
    open_send(book)
    book.granted("d", grant(), 100, 0.0)
    make_final(book, end=2)
    assert book.close("r-t", aborted=False, now=0.0) == [
        fenced("the prefill request was aborted"),
        Release("r-t", "t", "aborted"),
    ]
    assert book.close("r-t", aborted=False, now=0.0) == []


def test_ended_transfers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest end is forgotten first."""
    monkeypatch.setattr(send_book, "ENDED_LIMIT_TRANSFERS", 2)
    book = make_book()
    for name in ("t", "u", "t", "v"):
        book.abandon(name, "no")
    assert book.granted("d", grant(transfer_id="u"), 100, 0.0) == []
    assert len(book.granted("d", grant(), 100, 0.0)) == 1
