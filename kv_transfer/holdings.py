"""What an engine holds for its peers, as its agent reports it, and which writers owe it a fence for
too long. Pure.

A transfer thread makes a ``RankHoldings`` of its two books a few times a second; the scheduler's
half joins those of all ranks. Times are in the monotonic clock of the host, which all processes of
an engine share; what leaves the engine carries ages.

*Quarantined* is a receive that nobody wants any more while its writer may still write: it was
cancelled, and a rank that was granted pages has neither delivered nor fenced. A writer is *overdue*
when it has been asked for its fence for ``fence_timeout_s``, or when all quarantined pages together
are more than ``quarantine_limit_bytes``. What follows from that is decided elsewhere.
"""

from __future__ import annotations

from heapq import nsmallest
from typing import TYPE_CHECKING

import msgspec

from splitserve.kv_transfer.transfer_lifecycle import SendState, SinkState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from splitserve.kv_transfer.receive_book import ReceiveBook
    from splitserve.kv_transfer.send_book import SendBook
    from splitserve.kv_transfer.session_receive import ReceiveSession
    from splitserve.kv_transfer.session_send import SendSession

HOLDINGS_LIMIT_TRANSFERS = 256
"""Transfers that one report names; the others are counted."""
PATIENCE_S = 4.0
"""A fence that is out for less does not count against ``quarantine_limit_bytes``: it is asked for
every two seconds, and a writer that runs answers the first or the second time.
"""

SENDS = "sends"
RECEIVES = "receives"

WAITS_FOR_GRANT = "waits for a grant"
WRITING = "writing"
FENCING = "fencing"
DELIVERED = "delivered"
LEASED = "leased"
"""The request is finished; its blocks are held until the peer has what it wants, or for
``lease_s``.
"""
WAITS_FOR_BLOCKS = "waits for blocks"
WAITS_FOR_PAGES = "waits for pages"
WAITS_FOR_WRITER = "waits for another writer"
QUARANTINED = "quarantined"


class Held(msgspec.Struct, frozen=True):
    """One open transfer of one rank."""

    transfer_id: str
    request_id: str
    """In the engine."""
    side: str
    """``sends`` or ``receives``."""
    state: str
    blocks: int
    since: float
    """When it came into this state."""
    peer: str = ""
    """Incarnation that writes to it, for a receive."""


class RankHoldings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one rank holds."""

    held: tuple[Held, ...] = ()
    left_out: int = 0
    """Transfers that are not in ``held``, because there are too many."""
    quarantined_transfers: int = 0
    quarantined_blocks: int = 0
    overdue_writers: tuple[str, ...] = ()
    """Incarnations."""


class Holding(msgspec.Struct, frozen=True):
    """One open transfer of an engine, as it is reported."""

    transfer_id: str
    request_id: str
    side: str
    state: str
    blocks: int
    age_s: float
    """How long it has been in this state."""
    peer: str = ""


class QuarantineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long, and how much of the KV memory, an engine bears to be kept from it."""

    fence_timeout_s: float
    limit_bytes: int
    block_bytes: int
    """Of one block in all layers of this rank."""


class HoldingsTaker:
    """Makes the ``RankHoldings`` of one rank's books. Owned by the thread that owns them."""

    def __init__(self, limits: QuarantineLimits) -> None:
        self._limits = limits
        self._since: dict[tuple[str, str, str], float] = {}
        """Per transfer, side and state: when it was first seen so."""

    def take(self, sending: SendBook, receiving: ReceiveBook, now: float) -> RankHoldings:
        """What is held now."""
        receives = receiving.sessions()
        quarantined = [session for session in receives if session.is_quarantined]
        found = [self._sent(session, now) for session in sending.sessions()]
        found += [self._received(session, now) for session in receives]
        self._since = {(held.transfer_id, held.side, held.state): held.since for held in found}
        shown = _first(found)
        return RankHoldings(
            held=tuple(shown),
            left_out=len(found) - len(shown),
            quarantined_transfers=len(quarantined),
            quarantined_blocks=sum(len(session.block_ids) for session in quarantined),
            overdue_writers=overdue_writers(quarantined, self._limits, now),
        )

    def _sent(self, session: SendSession, now: float) -> Held:
        state = _state_of_send(session)
        since = self._since.get((session.transfer_id, SENDS, state), now)
        blocks = len(session.source_blocks)
        return Held(session.transfer_id, session.request_id, SENDS, state, blocks, since)

    def _received(self, session: ReceiveSession, now: float) -> Held:
        state = WAITS_FOR_PAGES if session.held_until is None else WAITS_FOR_WRITER
        since = self._since.get((session.transfer_id, RECEIVES, state), now)
        if session.is_quarantined and session.quarantined_since is not None:
            state, since = QUARANTINED, session.quarantined_since
        return Held(
            session.transfer_id,
            session.request_id,
            RECEIVES,
            state,
            session.first_block + len(session.block_ids),
            since,
            session.peer_incarnation,
        )


def overdue_writers(
    quarantined: Iterable[ReceiveSession], limits: QuarantineLimits, now: float
) -> tuple[str, ...]:
    """Incarnations that have to end so that the pages come back, those who owe longest first.

    Of writers that are overdue by bytes only, as few as bring the quarantine below its limit.
    """
    waits = sorted(
        (session.quarantined_since, len(session.block_ids), session.peer_incarnation)
        for session in quarantined
        if session.quarantined_since is not None
    )
    late = [peer for since, _, peer in waits if now - since >= limits.fence_timeout_s]
    overdue = dict.fromkeys(late)
    patient = [(blocks, peer) for since, blocks, peer in waits if now - since >= PATIENCE_S]
    for _, peer in patient:
        left = sum(blocks for blocks, other in patient if other not in overdue)
        if left * limits.block_bytes <= limits.limit_bytes:
            break
        overdue.setdefault(peer)
    return tuple(overdue)


def joined(
    ranks: Sequence[RankHoldings], now: float, unreserved: Iterable[Holding] = ()
) -> tuple[tuple[Holding, ...], RankHoldings]:
    """What the engine holds, and the figures of all its ranks together.

    Every rank holds the same transfers; the state of one that is quarantined on any rank is that.
    ``unreserved`` are those that no rank has been told of yet.
    """
    by_key: dict[tuple[str, str, str], Held] = {}
    for rank in ranks:
        for held in rank.held:
            key = (held.transfer_id, held.side, held.request_id)
            known = by_key.get(key)
            if known is None or _urgency(held) < _urgency(known):
                by_key[key] = held
    found = [
        Holding(
            held.transfer_id,
            held.request_id,
            held.side,
            held.state,
            held.blocks,
            round(max(0.0, now - held.since), 1),
            held.peer,
        )
        for held in _first(list(by_key.values()))
    ]
    waiting = list(unreserved)
    room = HOLDINGS_LIMIT_TRANSFERS - len(found)
    left_out = max((rank.left_out for rank in ranks), default=0) + max(0, len(waiting) - room)
    totals = RankHoldings(
        left_out=left_out + max(0, len(by_key) - len(found)),
        quarantined_transfers=max((rank.quarantined_transfers for rank in ranks), default=0),
        quarantined_blocks=max((rank.quarantined_blocks for rank in ranks), default=0),
        overdue_writers=tuple(dict.fromkeys(w for rank in ranks for w in rank.overdue_writers)),
    )
    return (*found, *waiting[:room]), totals


def _state_of_send(session: SendSession) -> str:
    states = {sink.state for sink in session.sinks.values()}
    if SinkState.FENCING in states:
        return FENCING
    if SinkState.WRITING in states:
        return WRITING
    if session.state is not SendState.OPEN:
        return LEASED
    return DELIVERED if states else WAITS_FOR_GRANT


def _first(found: list[Held]) -> list[Held]:
    """Those to name: quarantined ones, then the oldest."""
    if len(found) <= HOLDINGS_LIMIT_TRANSFERS:
        return found
    return nsmallest(HOLDINGS_LIMIT_TRANSFERS, found, key=_urgency)


def _urgency(held: Held) -> tuple[bool, float]:
    return held.state != QUARANTINED, held.since
