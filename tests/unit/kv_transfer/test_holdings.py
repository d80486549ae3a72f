"""What an engine says it holds, and whose fence is overdue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer import holdings as subject
from splitserve.kv_transfer.holdings import (
    FENCING,
    LEASED,
    QUARANTINED,
    RECEIVES,
    SENDS,
    WAITS_FOR_BLOCKS,
    WAITS_FOR_GRANT,
    WAITS_FOR_PAGES,
    WAITS_FOR_WRITER,
    WRITING,
    Held,
    Holding,
    HoldingsTaker,
    QuarantineLimits,
    RankHoldings,
    joined,
)
from splitserve.kv_transfer.messages import Fenced, Grant
from splitserve.kv_transfer.orders import BeginReceive
from splitserve.kv_transfer.receive_book import Introduced, ReceiveBook
from splitserve.kv_transfer.send_book import SendBook
from splitserve.kv_transfer.session_send import Write

if TYPE_CHECKING:
    import pytest

TIMEOUT_S = 30.0
LIMITS = QuarantineLimits(fence_timeout_s=TIMEOUT_S, limit_bytes=1000, block_bytes=100)
ADDRESS = {"P": "tcp://p", "Q": "tcp://q"}


class Rank:
    """Both books, and what is said of them."""

    def __init__(self, limits: QuarantineLimits = LIMITS) -> None:
        self.sending = SendBook(layers=1, stream_min_bytes=1, write_limit_bytes=1000, lease_s=30)
        self.receiving = ReceiveBook(
            heads=frozenset({0}), layers=1, deadline_s=100.0, retarget_wait_s=2.0, first_tag=0
        )
        for incarnation, address in ADDRESS.items():
            self.receiving.welcomed(address, Introduced(incarnation, frozenset({0}), 1), 0.0)
        self._taker = HoldingsTaker(limits)

    def begin(self, transfer_id: str, now: float, *, blocks: int = 2, writer: str = "P") -> None:
        """Pages are reserved and granted."""
        order = BeginReceive(
            transfer_id=transfer_id,
            request_id=f"d-{transfer_id}",
            attempt=1,
            peer_incarnation=writer,
            peer_addresses=(ADDRESS[writer],),
            first_block=1,
            block_ids=tuple(range(5, 5 + blocks)),
            prompt_tokens=8,
            prompt_hash=b"h",
        )
        self.receiving.begin(order, now, is_callable=True)

    def leave(self, transfer_id: str, now: float) -> None:
        """The engine has aborted the request."""
        self.receiving.cancel(f"d-{transfer_id}", "the client is gone", now)

    def fence(self, transfer_id: str, now: float) -> None:
        """Its writer P gives its word."""
        fenced = Fenced(transfer_id=transfer_id, attempt=1, reason="cancelled")
        self.receiving.reported(ADDRESS["P"], "P", fenced, now)

    def take(self, now: float) -> RankHoldings:
        return self._taker.take(self.sending, self.receiving, now)

    def one(self, now: float) -> tuple[str, int, float]:
        """(state, blocks, since) of the one transfer."""
        (held,) = self.take(now).held
        return held.state, held.blocks, held.since


def test_the_states_of_a_receive() -> None:
    """Since when it is in each; in quarantine since the fence was asked for first."""
    rank = Rank()
    rank.begin("r1.1", 1.0)
    assert rank.one(2.0) == rank.one(3.0) == (WAITS_FOR_PAGES, 3, 2.0)
    (held,) = rank.take(3.0).held
    assert (held.transfer_id, held.request_id) == ("r1.1", "d-r1.1")
    assert (held.side, held.peer) == (RECEIVES, "P")
    rank.leave("r1.1", 4.0)
    rank.receiving.tick(7.0)
    assert rank.one(8.0) == (QUARANTINED, 3, 4.0)
    told = rank.take(8.0)
    assert (told.quarantined_transfers, told.quarantined_blocks) == (1, 2)
    rank.fence("r1.1", 9.0)
    assert rank.take(9.0) == RankHoldings()


def test_pages_that_wait_for_another_writer_are_not_in_quarantine() -> None:
    """Nobody can write to them."""
    rank = Rank()
    rank.begin("r1.1", 0.0)
    rank.receiving.incarnation_gone("P", 1.0)
    assert rank.one(1.5) == (WAITS_FOR_WRITER, 3, 1.5)
    assert rank.take(1.5).quarantined_transfers == 0


def test_the_states_of_a_send() -> None:
    """From its opening to its lease."""
    rank = Rank()
    book = rank.sending
    book.open("r1.1", "p-r1.1", prompt_tokens=8, prompt_hash=b"h", total_blocks=2)
    assert rank.one(1.0) == (WAITS_FOR_GRANT, 0, 1.0)
    book.blocks_known("r1.1", [3, 4])
    grant = Grant(
        transfer_id="r1.1",
        attempt=1,
        tag=1,
        first_block=0,
        block_ids=(5, 6),
        prompt_tokens=8,
        prompt_hash=b"h",
        grants_expected=1,
    )
    book.granted("D/0", grant, 100, 2.0)
    assert rank.one(2.0) == (WRITING, 2, 2.0)
    book.blocks_final("r1.1", 0, 2)
    (write,) = [e for e in book.due_writes(flush=True) if isinstance(e, Write)]
    book.write_posted(write, 7, 2)
    book.cancelled("D/0", "r1.1", 1, "the client is gone", keeps=True)
    assert rank.one(3.0) == (FENCING, 2, 3.0)
    book.write_ended("r1.1", "D/0", 7, None)
    book.close("p-r1.1", aborted=False, now=4.0)
    assert rank.one(5.0) == (LEASED, 2, 5.0)
    assert rank.take(6.0).held[0].side == SENDS


def test_a_writer_is_overdue_after_the_timeout() -> None:
    """Not before, and not any more once it has fenced."""
    rank = Rank()
    rank.begin("r1.1", 0.0)
    assert rank.take(TIMEOUT_S).overdue_writers == ()
    rank.leave("r1.1", 10.0)
    rank.receiving.tick(20.0)
    assert rank.take(10.0 + TIMEOUT_S - 0.1).overdue_writers == ()
    assert rank.take(10.0 + TIMEOUT_S).overdue_writers == ("P",)
    rank.fence("r1.1", 50.0)
    assert rank.take(50.0).overdue_writers == ()


def test_too_many_bytes_make_writers_overdue_sooner() -> None:
    """Those who owe longest, and no more than needed; never one that was asked just now."""
    rank = Rank()
    for number, (writer, blocks) in enumerate((("P", 6), ("Q", 6), ("Q", 2))):
        rank.begin(f"r{number}.1", 0.0, blocks=blocks, writer=writer)
        rank.leave(f"r{number}.1", float(number))
    assert rank.take(subject.PATIENCE_S).overdue_writers == ()
    assert rank.take(subject.PATIENCE_S + 2).overdue_writers == ("P",)
    small = Rank(QuarantineLimits(fence_timeout_s=TIMEOUT_S, limit_bytes=100, block_bytes=100))
    for number, writer in enumerate(("P", "Q")):
        small.begin(f"r{number}.1", 0.0, blocks=2, writer=writer)
        small.leave(f"r{number}.1", 0.0)
    assert small.take(subject.PATIENCE_S).overdue_writers == ("P", "Q")


def test_a_receiver_that_can_end_the_writer_has_no_quarantine() -> None:
    """The transport's word is as good as a fence."""
    rank = Rank()
    rank.begin("r1.1", 0.0)
    (session,) = rank.receiving.sessions()
    rank.leave("r1.1", 1.0)
    rank.receiving.revoked(session, ADDRESS["P"], 1.0)
    assert rank.take(1.0) == RankHoldings()


def test_holdings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in quarantine is named first, then what is oldest; the rest is counted."""
    monkeypatch.setattr(subject, "HOLDINGS_LIMIT_TRANSFERS", 2)
    rank = Rank()
    for number in range(4):
        rank.begin(f"r{number}.1", 0.0)
        rank.take(float(number))
    rank.leave("r3.1", 4.0)
    told = rank.take(5.0)
    assert [held.transfer_id for held in told.held] == ["r3.1", "r0.1"]
    assert told.left_out == 2
    unreserved = [Holding("r9.1", "d", RECEIVES, WAITS_FOR_BLOCKS, 0, 0.0)]
    holdings, totals = joined([told], 6.0, unreserved)
    assert [holding.transfer_id for holding in holdings] == ["r3.1", "r0.1"]
    assert totals.left_out == 3


def test_ranks_are_joined() -> None:
    """A transfer counts once, in quarantine when it is so on one rank; blocks are the engine's."""

    def rank(state: str, **figures: Any) -> RankHoldings:
        return RankHoldings(held=(Held("t", "r", RECEIVES, state, 3, 1.0, "P"),), **figures)

    waits = rank(WAITS_FOR_PAGES)
    owed = rank(QUARANTINED, quarantined_transfers=1, quarantined_blocks=3, overdue_writers=("P",))
    for ranks in ([waits, owed], [owed, waits]):
        holdings, totals = joined(ranks, 3.5)
        assert holdings == (Holding("t", "r", RECEIVES, QUARANTINED, 3, 2.5, "P"),)
        assert (totals.quarantined_transfers, totals.quarantined_blocks) == (1, 3)
        assert totals.overdue_writers == ("P",)
    assert joined([], 0.0) == ((), RankHoldings())
