"""The receiving side of transfers, pure: who gets which pages, what is said to whom, and when pages
are ours again.

One ``ReceiveBook`` per transfer thread holds the sessions of all requests whose prompt is computed
elsewhere. The engine says which blocks it reserves; introductions and messages say who may write to
them; the book answers with effects, to be performed in their order.

Promises kept here:

* pages are granted only to the very engine that the leg names, and only once per attempt;
* a request is reported exactly once, and only when nobody may write to its pages any more: every
  writer has delivered, fenced, is proven dead, or was ended by the transport;
* pages whose writer has failed are kept for another one for ``retarget_wait_s``, and granted to it
  as a new attempt;
* a request that was cancelled, or whose deadline ended, asks for its fences until they have come.

What it does not know: sockets, memory, time (``now`` is an argument, in seconds of any monotonic
clock). What peers say may come in any order and any number of times; a peer speaks only for its own
incarnation.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.messages import Cancel, Delivered, Fenced, Landed, Writing
from splitserve.kv_transfer.session_receive import (
    Expect,
    Finish,
    Greet,
    ReceiveEffect,
    ReceiveSession,
    Revoke,
    Tell,
    TellOnce,
)
from splitserve.kv_transfer.transfer_lifecycle import ReceiveState, SourceState
from splitserve.kv_transfer.transfer_lifecycle import ReceiveTrigger as Trigger
from splitserve.kv_transfer.transfer_story import Moment

if TYPE_CHECKING:
    from splitserve.kv_transfer.orders import BeginReceive, Decline, Retarget

FENCE_INTERVAL_S = 2.0
"""Between repeated requests for a fence."""
GIVEN_UP_LIMIT_TRANSFERS = 10_000
UNACKNOWLEDGED_LIMIT_REQUESTS = 10_000
"""Landed requests whose writers have not been told; those of older ones wait for their lease."""
DEAD_LIMIT_INCARNATIONS = 1_000


@dataclass(frozen=True)
class Introduced:
    """What is known of a prefill rank that may write to us."""

    incarnation: str
    heads: frozenset[int]
    """Global numbers of its KV heads that are ours too."""
    grants_expected: int
    """How many decode ranks grant pages for one transfer to it."""


class ReceiveBook:
    """All receives of one rank. Owned by one thread."""

    def __init__(
        self,
        *,
        heads: frozenset[int],
        layers: int,
        deadline_s: float,
        retarget_wait_s: float,
        first_tag: int,
    ) -> None:
        self._heads = heads
        self._layers = layers
        self._deadline_s = deadline_s
        self._retarget_wait_s = retarget_wait_s
        self._tags = first_tag
        self._moment = Moment()
        self._sessions: dict[tuple[str, int], ReceiveSession] = {}
        """By transfer id and attempt: an old attempt may still wait for its fence."""
        self._by_request: dict[str, tuple[str, int]] = {}
        self._introduced: dict[str, Introduced] = {}
        self._refused: set[str] = set()
        """Addresses that have turned us away since the last hello."""
        self._unacknowledged: OrderedDict[str, ReceiveSession] = OrderedDict()
        """By request: it has landed, but nothing was computed with its pages yet."""
        self._dead: OrderedDict[str, None] = OrderedDict()
        self._given_up: OrderedDict[str, str] = OrderedDict()
        self.counters: dict[str, float] = {
            "received_transfers": 0,
            "received_pages": 0,
            "received_bytes": 0,
            "failed_receives": 0,
            "declined_transfers": 0,
            "expired_receives": 0,
            "retargeted_receives": 0,
        }

    # -- what the engine says ------------------------------------------------------------------

    def begin(self, order: BeginReceive, now: float, *, is_callable: bool) -> list[ReceiveEffect]:
        """Blocks are reserved; they are granted to whom the order names, now or once introduced.

        ``is_callable`` is False when a rank that it names cannot even be called.
        """
        self._moment.now = now
        key = (order.transfer_id, order.attempt)
        session = ReceiveSession.reserved(
            order,
            heads=self._heads,
            deadline=now + self._deadline_s,
            is_retargetable=self._retarget_wait_s > 0,
            moment=self._moment,
        )
        if key in self._sessions:
            session.cancel("this attempt of the transfer is open here already", Trigger.GIVEN_UP)
            return self._finish(session)
        self._add(session)
        why_not = self._given_up.pop(order.transfer_id, None)
        if why_not is not None:
            return self._abandon(session, why_not, now, Trigger.GIVEN_UP)
        if not is_callable:
            reason = "a prefill rank cannot be called"
            return self._abandon(session, reason, now, Trigger.CONNECTION_LOST)
        return self._start(session, now)

    def _add(self, session: ReceiveSession) -> None:
        key = (session.transfer_id, session.attempt)
        self._sessions[key] = session
        self._by_request[session.request_id] = key

    def _start(self, session: ReceiveSession, now: float) -> list[ReceiveEffect]:
        """Grant the session's pages to who is introduced."""
        if session.peer_incarnation in self._dead:
            reason = "the prefill engine is gone"
            return self._cancel(session, reason, now, Trigger.WRITER_DEAD)
        effects: list[ReceiveEffect] = []
        for address in session.sources:
            introduced = self._introduced.get(address)
            if introduced is not None and introduced.incarnation == session.peer_incarnation:
                effects += self._grant(session, address, now)
            elif introduced is not None or address in self._refused:
                self._refused.discard(address)
                effects.append(Greet(address))
        return [*effects, *self._go_on(session, now)]

    def retarget(self, order: Retarget, now: float) -> list[ReceiveEffect]:
        """Another prefill node computes the prompt: it is granted the pages once the one before
        may not write any more. Declined where nobody waits for them.
        """
        self._moment.now = now
        waiting = [s for s in self._where(transfer_id=order.transfer_id) if s.is_retargetable]
        if not waiting or waiting[-1].attempt >= order.attempt:
            reason = "the decode node computes the prompt itself"
            cancel = Cancel(transfer_id=order.transfer_id, attempt=order.attempt, reason=reason)
            return [TellOnce(address, cancel) for address in order.peer_addresses]
        session = waiting[-1]
        session.successor = order
        return self._cancel(session, order.reason, now, Trigger.RETARGETED)

    def _succeed(self, session: ReceiveSession, order: Retarget, now: float) -> list[ReceiveEffect]:
        """The pages of an ended attempt are granted to the next writer."""
        self.counters["retargeted_receives"] += 1
        following = session.handed_on(order)
        self._add(following)
        return self._start(following, now)

    def cancel(self, request_id: str, reason: str, now: float) -> list[ReceiveEffect]:
        """The engine has aborted the request."""
        self._moment.now = now
        key = self._by_request.get(request_id)
        if key is not None:
            self._sessions[key].keeps = True
            return self._abandon(self._sessions[key], reason, now, Trigger.CANCELLED)
        landed = self._unacknowledged.pop(request_id, None)
        if landed is None:
            return []
        cancel = Cancel(
            transfer_id=landed.transfer_id, attempt=landed.attempt, reason=reason, keeps=True
        )
        return [Tell(address, cancel) for address in self._reachable(landed)]

    def acknowledge(self, request_id: str) -> list[ReceiveEffect]:
        """The engine has computed with the request's pages: its writers may let go of theirs."""
        landed = self._unacknowledged.pop(request_id, None)
        if landed is None:
            return []
        message = Landed(transfer_id=landed.transfer_id, attempt=landed.attempt)
        return [Tell(address, message) for address in self._reachable(landed)]

    def give_up(self, transfer_id: str, reason: str, now: float) -> list[ReceiveEffect]:
        """The prefill leg will not come; also when that is known before the decode leg is here."""
        self._moment.now = now
        sessions = self._where(transfer_id=transfer_id)
        if not sessions:
            _remember(self._given_up, transfer_id, reason, GIVEN_UP_LIMIT_TRANSFERS)
        effects: list[ReceiveEffect] = []
        for session in sessions:
            effects += self._abandon(session, reason, now, Trigger.GIVEN_UP)
        return effects

    def decline(self, decline: Decline) -> list[ReceiveEffect]:
        """This engine computes a prompt itself: whoever prefills it need not keep it."""
        self.counters["declined_transfers"] += 1
        cancel = Cancel(
            transfer_id=decline.transfer_id,
            attempt=decline.attempt,
            reason=decline.reason,
            keeps=decline.keeps,
        )
        return [TellOnce(address, cancel) for address in decline.peer_addresses]

    # -- what is known of peers ----------------------------------------------------------------

    def welcomed(self, address: str, introduced: Introduced, now: float) -> list[ReceiveEffect]:
        """The rank at that address may write to us from now on, if it is given pages."""
        self._moment.now = now
        self._introduced[address] = introduced
        self._refused.discard(address)
        effects: list[ReceiveEffect] = []
        for session in self._where(address=address):
            state = session.sources[address].state
            if state is SourceState.UNKNOWN:
                effects += self._grant(session, address, now)
            elif session.peer_incarnation != introduced.incarnation:
                session.cancel("the prefill engine was restarted", Trigger.WRITER_RESTARTED)
            effects += self._go_on(session, now)
        return effects

    def turned_away(self, address: str, reason: str, now: float) -> list[ReceiveEffect]:
        """The rank answered our hello with a refusal: nobody waits for its introduction."""
        self._moment.now = now
        self._refused.add(address)
        effects: list[ReceiveEffect] = []
        for session in self._where(address=address):
            if address in session.unasked:
                effects += self._cancel(session, reason, now, Trigger.TURNED_AWAY)
        return effects

    def lost(self, address: str, reason: str, now: float) -> list[ReceiveEffect]:
        """The introduction holds no more; ranks that were not granted anything are waited for."""
        self._moment.now = now
        self._introduced.pop(address, None)
        effects: list[ReceiveEffect] = []
        for session in self._where(address=address):
            if address in session.unfenced:
                effects += self._cancel(session, reason, now, Trigger.CONNECTION_LOST)
        return effects

    def process_gone(self, address: str, incarnation: str, now: float) -> list[ReceiveEffect]:
        """That rank's process has ended; its engine grants nothing any more."""
        self._moment.now = now
        for session in self._where(incarnation=incarnation, address=address):
            session.ended(address, "the prefill engine's process is gone", Trigger.WRITER_DEAD)
        return self._bury(incarnation, now)

    def incarnation_gone(self, incarnation: str, now: float) -> list[ReceiveEffect]:
        """Every process of an engine is proven dead: it writes nothing any more."""
        self._moment.now = now
        for session in self._where(incarnation=incarnation):
            for address in session.sources:
                session.ended(address, "the prefill engine is gone", Trigger.WRITER_DEAD)
        return self._bury(incarnation, now)

    # -- what peers say ------------------------------------------------------------------------

    def reported(
        self,
        address: str,
        incarnation: str,
        message: Writing | Delivered | Fenced,
        now: float,
    ) -> list[ReceiveEffect] | None:
        """A rank speaks of a transfer. None when it is not the engine that was given the pages."""
        self._moment.now = now
        session = self._sessions.get((message.transfer_id, message.attempt))
        if session is None or session.peer_incarnation != incarnation:
            return None
        if isinstance(message, Writing):
            session.times.setdefault("writing", now)
            session.is_last_posted = session.is_last_posted or message.last
            return []
        if isinstance(message, Delivered):
            session.times["delivered"] = now
            session.delivered(address, message.pages, message.bytes)
        else:
            session.is_retargetable = session.is_retargetable and not message.refused
            trigger = Trigger.REFUSED if message.refused else Trigger.FENCED
            session.ended(address, message.reason, trigger)
        return self._go_on(session, now)

    def revoked(self, session: ReceiveSession, address: str, now: float) -> list[ReceiveEffect]:
        """The transport promises that nothing lands under the revoked tag any more."""
        self._moment.now = now
        reason = session.cancel_reason or "the transport ended the writer"
        session.ended(address, reason, Trigger.REVOKED)
        return self._settle(session, now)

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> list[ReceiveEffect]:
        """What time alone brings."""
        self._moment.now = now
        effects: list[ReceiveEffect] = []
        for session in list(self._sessions.values()):
            if session.cancel_reason is None and session.deadline <= now:
                self.counters["expired_receives"] += 1
                reason = f"not delivered within {self._deadline_s:g} s"
                effects += self._abandon(session, reason, now, Trigger.DEADLINE)
            elif session.held_until is not None:
                effects += self._settle(session, now)
            elif session.cancel_reason and now - session.fence_asked_at >= FENCE_INTERVAL_S:
                effects += self._cancel(session, session.cancel_reason, now)
        return effects

    def sessions(self) -> list[ReceiveSession]:
        """The open sessions, for audits."""
        return list(self._sessions.values())

    @property
    def open_sessions(self) -> int:
        """Requests that wait for pages, or whose pages cannot be given back yet."""
        return len(self._sessions)

    @property
    def is_writing(self) -> bool:
        """A peer has begun to write to us."""
        return any("writing" in session.times for session in self._sessions.values())

    @property
    def expects_last_bytes(self) -> bool:
        """A peer has posted its last write to us."""
        return any(session.is_last_posted for session in self._sessions.values())

    def waits_for(self, address: str, incarnation: str | None = None) -> bool:
        """Whether a session needs the rank at that address (of that engine)."""
        return bool(self._where(address=address, incarnation=incarnation))

    # -- inside --------------------------------------------------------------------------------

    def _grant(self, session: ReceiveSession, address: str, now: float) -> list[ReceiveEffect]:
        """The source is introduced: give it the pages of the heads that it holds."""
        introduced = self._introduced[address]
        if (
            session.sources[address].state is not SourceState.UNKNOWN
            or session.cancel_reason is not None
        ):
            return []
        if introduced.incarnation != session.peer_incarnation:
            reason = "the prefill engine was restarted meanwhile"
            session.ended(address, reason, Trigger.WRITER_RESTARTED)
            return []
        if not introduced.heads:
            session.absent(address)
            return []
        self._tags += 1
        pages = self._layers * len(session.block_ids)
        session.granted(address, self._tags, pages, introduced.heads)
        session.times.setdefault("granted", now)
        grant = session.grant_for(address, introduced.grants_expected)
        return [Expect(self._tags, session.block_ids), Tell(address, grant)]

    def _go_on(self, session: ReceiveSession, now: float) -> list[ReceiveEffect]:
        """After something has happened to a session."""
        if session.cancel_reason is not None:
            return self._cancel(session, session.cancel_reason, now)
        return self._settle(session, now)

    def _abandon(
        self, session: ReceiveSession, reason: str, now: float, trigger: Trigger
    ) -> list[ReceiveEffect]:
        """Nobody waits for the pages any more."""
        session.is_retargetable, session.successor = False, None
        return self._cancel(session, reason, now, trigger)

    def _cancel(
        self,
        session: ReceiveSession,
        reason: str,
        now: float,
        trigger: Trigger = Trigger.FENCE_ASKED,
    ) -> list[ReceiveEffect]:
        """Take the pages back: at once where the transport can, else when the writer has fenced."""
        cancel = Cancel(
            transfer_id=session.transfer_id,
            attempt=session.attempt,
            reason=reason,
            keeps=session.keeps,
        )
        effects: list[ReceiveEffect] = [TellOnce(address, cancel) for address in session.unasked]
        session.cancel(reason, trigger)
        session.fence_asked_at = now
        if session.quarantined_since is None and session.is_quarantined:
            session.quarantined_since = now
        for address in session.unfenced:
            introduced = self._introduced.get(address)
            if introduced is not None and introduced.incarnation == session.peer_incarnation:
                effects.append(Tell(address, cancel))
            effects.append(Revoke(session, address, session.sources[address].tag))
        return [*effects, *self._settle(session, now)]

    def _settle(self, session: ReceiveSession, now: float) -> list[ReceiveEffect]:
        """End the session if nobody may write to its pages any more, or keep them for another
        writer.
        """
        key = (session.transfer_id, session.attempt)
        if session.outcome is None or self._sessions.get(key) is not session:
            return []
        successor = session.successor if session.outcome == "failed" else None
        if session.outcome == "failed" and session.is_retargetable and successor is None:
            if session.held_until is None:
                session.held_until = now + self._retarget_wait_s
                session.move(Trigger.SETTLED, ReceiveState.HELD, session.failure)
            if now < session.held_until:
                return []
        del self._sessions[key]
        del self._by_request[session.request_id]
        effects: list[ReceiveEffect] = [
            Revoke(session, address, source.tag)
            for address, source in session.sources.items()
            if source.tag
        ]
        if session.outcome == "landed":
            _remember(
                self._unacknowledged, session.request_id, session, UNACKNOWLEDGED_LIMIT_REQUESTS
            )
        else:
            over = Landed(transfer_id=session.transfer_id, attempt=session.attempt)
            effects += [Tell(address, over) for address in self._reachable(session)]
        if successor is not None:
            return [*effects, *self._succeed(session, successor, now)]
        return [*effects, *self._finish(session)]

    def _reachable(self, session: ReceiveSession) -> list[str]:
        """Addresses of the session's writers that have delivered and are still introduced."""
        found = []
        for address, source in session.sources.items():
            introduced = self._introduced.get(address)
            is_same = introduced and introduced.incarnation == session.peer_incarnation
            if source.state is SourceState.DELIVERED and is_same:
                found.append(address)
        return found

    def _finish(self, session: ReceiveSession) -> list[ReceiveEffect]:
        landed = session.outcome == "landed"
        to = ReceiveState.LANDED if landed else ReceiveState.FAILED
        session.move(Trigger.SETTLED, to, session.failure)
        if landed:
            self.counters["received_transfers"] += 1
            self.counters["received_pages"] += session.pages
            self.counters["received_bytes"] += session.bytes
        else:
            self.counters["failed_receives"] += 1
        return [Finish(session, landed)]

    def _bury(self, incarnation: str, now: float) -> list[ReceiveEffect]:
        """An engine of which a process is gone grants nothing any more."""
        _remember(self._dead, incarnation, None, DEAD_LIMIT_INCARNATIONS)
        effects: list[ReceiveEffect] = []
        for session in self._where(incarnation=incarnation):
            reason = "the prefill engine is gone"
            effects += self._cancel(session, reason, now, Trigger.OTHER_RANK_ENDED)
        return effects

    def _where(
        self,
        *,
        transfer_id: str | None = None,
        address: str | None = None,
        incarnation: str | None = None,
    ) -> list[ReceiveSession]:
        """Open sessions of which all that is given is true."""
        return [
            session
            for session in self._sessions.values()
            if transfer_id in (None, session.transfer_id)
            and incarnation in (None, session.peer_incarnation)
            and (address is None or address in session.sources)
        ]


def _remember(known: OrderedDict[str, Any], key: str, value: Any, limit: int) -> None:
    known[key] = value
    while len(known) > limit:
        known.popitem(last=False)
