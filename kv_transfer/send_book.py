"""The writing side of transfers, pure: which pages go where, and when that is over.

One ``SendBook`` per transfer thread holds the sessions of all requests that are prefilled for a
peer. The engine says which blocks became final in which layer; the book says which writes are due.
Grants may come before the request (it waits in the engine's queue) or long after it (everything is
sent at once).

Promises kept here:

* nothing is written before the grant's prompt hash was compared with the request's own;
* after ``Delivered`` or ``Fenced`` was sent for an attempt, no write of that attempt is due or
  open;
* every grant is answered with one of the two, and every cancel with ``Fenced``;
* a session ends: by delivery and acknowledgement, by a fence, or when ``lease_s`` has passed since
  the request finished and its open writes have ended.

What it does not know: sockets, memory, time (``now`` is an argument, in seconds of any monotonic
clock). What peers say may come in any order and any number of times; only the engine and the
transport are taken at their word.
"""

from __future__ import annotations

from collections import OrderedDict

from splitserve.kv_transfer.messages import Delivered, Fenced, Grant, Writing
from splitserve.kv_transfer.session_send import (
    Offer,
    Release,
    Say,
    SendEffect,
    SendSession,
    Sink,
    Write,
    split,
)
from splitserve.kv_transfer.transfer_lifecycle import SendState, SinkState
from splitserve.kv_transfer.transfer_lifecycle import SendTrigger as Trigger
from splitserve.kv_transfer.transfer_story import Moment, Story

ENDED_LIMIT_TRANSFERS = 10_000
"""Ended transfers that are remembered, to answer a late grant at once."""
EARLY_LIMIT_GRANTS = 10_000
"""Grants that may wait for their request; further ones are refused."""


class SendBook:
    """All sends of one rank. Owned by one thread."""

    def __init__(
        self, *, layers: int, stream_min_bytes: int, write_limit_bytes: int, lease_s: float
    ) -> None:
        self._layers = layers
        self._stream_min_bytes = stream_min_bytes
        self._write_limit_bytes = write_limit_bytes
        self._lease_s = lease_s
        self._moment = Moment()
        self._sessions: dict[str, SendSession] = {}
        self._by_request: dict[str, str] = {}
        self._early: dict[tuple[str, str], Offer] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self.counters: dict[str, float] = {
            "sent_transfers": 0,
            "sent_pages": 0,
            "sent_bytes": 0,
            "refused_grants": 0,
            "fenced_sends": 0,
            "expired_leases": 0,
        }

    # -- what the engine says ----------------------------------------------------------------------

    def open(
        self,
        transfer_id: str,
        request_id: str,
        *,
        prompt_tokens: int,
        prompt_hash: bytes,
        total_blocks: int,
    ) -> list[SendEffect]:
        """The engine starts a request that somebody waits for; early grants are taken up."""
        assert transfer_id not in self._sessions, f"transfer {transfer_id} opened twice"
        session = SendSession(
            transfer_id=transfer_id,
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            prompt_hash=prompt_hash,
            total_blocks=total_blocks,
            source_blocks=[],
            final=[0] * self._layers,
            moment=self._moment,
        )
        session.abandoned = self._ended.pop(transfer_id, None) is not None
        self._sessions[transfer_id] = session
        self._by_request[request_id] = transfer_id
        effects: list[SendEffect] = []
        for key in self._early_keys(transfer_id):
            effects += self._accept(session, self._early.pop(key))
        return effects

    def blocks_known(self, transfer_id: str, source_blocks: list[int]) -> None:
        """The request's block table, from prompt block 0, as it stands in this step."""
        session = self._sessions.get(transfer_id)
        if session is not None:
            session.source_blocks = source_blocks[: session.total_blocks]

    def blocks_final(self, transfer_id: str, layer: int, end: int) -> None:
        """In ``layer``, every prompt block before ``end`` holds its final bytes."""
        session = self._sessions.get(transfer_id)
        if session is not None:
            session.final[layer] = max(session.final[layer], min(end, session.total_blocks))

    def preempted(self, request_id: str) -> SendSession | None:
        """The engine took the request's blocks away: nothing may be read from them any more.

        What was written stays right in the peer's pages; the request will be computed again into
        other blocks.
        """
        session = self._session_of(request_id)
        if session is not None:
            session.final = [0] * self._layers
            session.source_blocks = []
        return session

    def close(self, request_id: str, *, aborted: bool, now: float) -> list[SendEffect]:
        """The engine is done with the request; its blocks stay until ``Release``."""
        session = self._session_of(request_id)
        if session is None:
            return []
        self._moment.now = session.closed_at = now
        if session.is_final and not aborted:
            session.move(Trigger.COMPUTED, SendState.LEASED)
            return self._settle(session)
        reason = "the prefill request was aborted"
        session.move(Trigger.ABORTED, SendState.ABORTED)
        return [*self._fence_all(session, Trigger.ABORTED, reason), *self._settle(session)]

    def abandon(self, transfer_id: str, reason: str) -> list[SendEffect]:
        """Nobody wants this transfer any more (the decode leg was refused or is lost)."""
        session = self._sessions.get(transfer_id)
        if session is None:
            self._remember_end(transfer_id, reason)
            return [
                self._end_offer(key, Trigger.GIVEN_UP, reason)
                for key in self._early_keys(transfer_id)
            ]
        session.abandoned = True
        fences = self._fence_all(session, Trigger.GIVEN_UP, reason)
        return [*fences, *self._settle(session)]

    # -- what peers say ----------------------------------------------------------------------------

    def granted(self, peer: str, grant: Grant, page_bytes: int, now: float) -> list[SendEffect]:
        """A decode rank gave pages."""
        self._moment.now = now
        story = Story(grant.transfer_id, grant.attempt, self._moment)
        offer = Offer(peer, grant, page_bytes, now + self._lease_s, story)
        session = self._sessions.get(grant.transfer_id)
        if session is not None:
            return self._accept(session, offer)
        ended = self._ended.get(grant.transfer_id)
        if ended is not None:
            return [_fenced(peer, grant, ended)]
        return self._keep(offer)

    def cancelled(
        self, peer: str, transfer_id: str, attempt: int, reason: str, *, keeps: bool = False
    ) -> list[SendEffect]:
        """A decode rank wants its pages back: it gets a fence in any case. With ``keeps`` another
        rank may still ask for what was computed.
        """
        fence = Say(peer, Fenced(transfer_id=transfer_id, attempt=attempt, reason=reason))
        offer = self._early.get((transfer_id, peer))
        if offer is not None and offer.grant.attempt <= attempt:
            self._end_offer((transfer_id, peer), Trigger.CANCELLED, reason)
            offer = None
        session = self._sessions.get(transfer_id)
        if session is None:
            if offer is None and not keeps:
                self._remember_end(transfer_id, reason)
            return [fence]
        session.cancelled[peer] = max(attempt, session.cancelled.get(peer, attempt))
        sink = session.sinks.get(peer)
        if sink is None or sink.grant.attempt != attempt:
            session.abandoned = session.abandoned or (sink is None and not keeps)
            return [fence, *self._settle(session)]
        sink.is_dropped = keeps
        if sink.state in (SinkState.DELIVERED, SinkState.ENDED):
            sink.move(Trigger.CANCELLED, SinkState.ENDED, reason)
            return [fence, *self._settle(session)]
        return [*self._fence(session, sink, Trigger.CANCELLED, reason), *self._settle(session)]

    def landed(self, peer: str, transfer_id: str, attempt: int) -> list[SendEffect]:
        """The decode rank has counted its pages and computed with them."""
        session = self._sessions.get(transfer_id)
        sink = session.sinks.get(peer) if session else None
        if session is None or sink is None or sink.grant.attempt != attempt:
            return []
        if sink.state is SinkState.DELIVERED:
            sink.move(Trigger.LANDED, SinkState.ENDED)
        return self._settle(session)

    def peer_lost(self, peer: str, reason: str) -> list[SendEffect]:
        """The peer is gone: stop writing to it and owe it nothing. What it was sent is held until
        the lease ends, since its place may be taken.
        """
        effects: list[SendEffect] = []
        for key in [key for key in self._early if key[1] == peer]:
            effects.append(self._end_offer(key, Trigger.PEER_LOST, reason))
        for session in list(self._sessions.values()):
            sink = session.sinks.get(peer)
            if sink is not None and sink.state is not SinkState.ENDED:
                sink.is_dropped = True
                effects += self._fence(session, sink, Trigger.PEER_LOST, reason)
                if sink.state is SinkState.DELIVERED:
                    sink.move(Trigger.PEER_LOST, SinkState.ENDED, reason)
                effects += self._settle(session)
        return effects

    # -- what the transport says -------------------------------------------------------------------

    def write_posted(self, write: Write, write_id: int, pages: int) -> None:
        """The transport accepted an order."""
        sink = self._sessions[write.transfer_id].sinks[write.peer]
        assert sink.state is SinkState.WRITING, f"{write}: posted while {sink.state.value}"
        sink.open_writes.add(write_id)
        sink.pages += pages

    def not_announced(self, peer: str, transfer_id: str) -> None:
        """A ``Writing`` was not worth saying: the sink may still have to be told."""
        session = self._sessions.get(transfer_id)
        sink = session.sinks.get(peer) if session is not None else None
        if sink is not None:
            sink.announced = sink.announced_last = False

    def write_ended(
        self, transfer_id: str, peer: str, write_id: int, error: str | None
    ) -> list[SendEffect]:
        """A write is over, well or not; it will not touch the peer's memory any more."""
        session = self._sessions.get(transfer_id)
        sink = session.sinks.get(peer) if session else None
        if session is None or sink is None:
            return []
        sink.open_writes.discard(write_id)
        effects: list[SendEffect] = []
        if error is not None and sink.state is SinkState.WRITING:
            effects += self._fence(session, sink, Trigger.WRITE_FAILED, error)
        return effects + self._advance(session, sink) + self._settle(session)

    # -- what is due -------------------------------------------------------------------------------

    def due_writes(self, *, flush: bool) -> list[SendEffect]:
        """Orders for what became final since the last call.

        Without ``flush`` a sink waits until ``stream_min_bytes`` are ready; ``flush`` (the step's
        last layer is done, or nothing is running) sends the rest. A sink whose last page is written
        is told so.
        """
        effects: list[SendEffect] = []
        for session in self._sessions.values():
            for sink in session.sinks.values():
                if sink.state is SinkState.WRITING:
                    effects += self._due(session, sink, flush)
        return effects

    def expire(self, now: float) -> list[SendEffect]:
        """End what has waited too long: early grants and finished requests past their lease."""
        self._moment.now = now
        effects: list[SendEffect] = []
        for key in [key for key, offer in self._early.items() if offer.until <= now]:
            reason = f"no prefill request for it came within {self._lease_s:g} s"
            if key[0] not in self._sessions:
                self._remember_end(key[0], reason)
            effects.append(self._end_offer(key, Trigger.LEASE_OVER, reason))
        for session in list(self._sessions.values()):
            if session.closed_at is None or session.closed_at + self._lease_s > now:
                continue
            if not session.abandoned:
                session.abandoned = True
                self.counters["expired_leases"] += 1
            for sink in session.sinks.values():
                if sink.state is SinkState.DELIVERED:
                    sink.move(Trigger.LEASE_OVER, SinkState.ENDED)
            reason = f"the lease of {self._lease_s:g} s ended"
            effects += self._fence_all(session, Trigger.LEASE_OVER, reason)
            effects += self._settle(session)
        return effects

    def sessions(self) -> list[SendSession]:
        """The open sessions, for audits."""
        return list(self._sessions.values())

    @property
    def open_sessions(self) -> int:
        """Requests that are being prefilled for, or held for, a peer."""
        return len(self._sessions)

    @property
    def early_grants(self) -> int:
        """Grants that wait for their request."""
        return len(self._early)

    def session(self, transfer_id: str) -> SendSession | None:
        """An open session, for the records of the thread."""
        return self._sessions.get(transfer_id)

    # -- inside ------------------------------------------------------------------------------------

    def _session_of(self, request_id: str) -> SendSession | None:
        transfer_id = self._by_request.get(request_id)
        return self._sessions.get(transfer_id) if transfer_id is not None else None

    def _early_keys(self, transfer_id: str) -> list[tuple[str, str]]:
        return [key for key in self._early if key[0] == transfer_id]

    def _keep(self, offer: Offer) -> list[SendEffect]:
        """Hold a grant until it can be taken up; a newer attempt of the same peer replaces it."""
        peer = offer.peer
        key = (offer.grant.transfer_id, peer)
        known = self._early.get(key)
        if known is not None and known.grant.attempt == offer.grant.attempt:
            return []
        if known is not None and known.grant.attempt > offer.grant.attempt:
            return [_fenced(peer, offer.grant, "a newer attempt was granted")]
        if known is None and len(self._early) >= EARLY_LIMIT_GRANTS:
            self.counters["refused_grants"] += 1
            return [_fenced(peer, offer.grant, "too many grants wait for their request")]
        effects: list[SendEffect] = []
        if known is not None:
            effects.append(self._end_offer(key, Trigger.SUPERSEDED, "a newer attempt was granted"))
        self._early[key] = offer
        return effects

    def _end_offer(self, key: tuple[str, str], trigger: Trigger, reason: str) -> Say:
        """A grant that was kept will not be filled; its peer is told so."""
        offer = self._early.pop(key)
        offer.move(trigger, SinkState.ENDED, reason)
        return _fenced(offer.peer, offer.grant, reason)

    def _accept(self, session: SendSession, offer: Offer) -> list[SendEffect]:
        """Fill a grant from now on, or once the attempt before it is fenced, or refuse it."""
        peer, grant = offer.peer, offer.grant
        known = session.sinks.get(peer)
        effects: list[SendEffect] = []
        if known is not None and grant.attempt == known.grant.attempt:
            is_over = known.state is SinkState.ENDED
            return [_fenced(peer, grant, "this attempt has ended")] if is_over else []
        cancelled = session.cancelled.get(peer)
        is_cancelled = cancelled is not None and grant.attempt <= cancelled
        if is_cancelled or (known is not None and grant.attempt < known.grant.attempt):
            return [_fenced(peer, grant, "this attempt has ended")]
        if known is not None:
            reason = "a newer attempt was granted"
            effects += self._fence(session, known, Trigger.SUPERSEDED, reason)
            if known.state is SinkState.FENCING:
                return [*effects, *self._keep(offer)]
        refusal = session.refusal(grant)
        if refusal is not None:
            self.counters["refused_grants"] += 1
            offer.move(Trigger.MISFIT, SinkState.ENDED, refusal)
            is_misfit = not session.abandoned and session.state is not SendState.ABORTED
            session.abandoned = session.abandoned or not session.sinks
            fenced = _fenced(peer, grant, refusal, refused=is_misfit)
            return [*effects, fenced, *self._settle(session)]
        if known is not None:
            known.move(Trigger.SUPERSEDED, SinkState.ENDED)
        session.take_up(offer)
        return effects

    def _due(self, session: SendSession, sink: Sink, flush: bool) -> list[SendEffect]:
        spans = session.unposted(sink)
        pages = sum(end - first for _, first, end in spans)
        last = session.is_final
        if not pages:
            return []
        if not (flush or last) and pages * sink.page_bytes < self._stream_min_bytes:
            return []
        effects: list[SendEffect] = []
        if not sink.announced or (last and not sink.announced_last):
            sink.announced, sink.announced_last = True, last
            writing = Writing(
                transfer_id=session.transfer_id, attempt=sink.grant.attempt, last=last
            )
            effects.append(Say(sink.peer, writing))
        limit_pages = max(1, self._write_limit_bytes // sink.page_bytes)
        effects += [
            Write(session.transfer_id, sink.peer, sink.grant.tag, part)
            for part in split(spans, limit_pages)
        ]
        for layer, _, end in spans:
            sink.posted[layer] = end
        return effects

    def _advance(self, session: SendSession, sink: Sink) -> list[SendEffect]:
        """What follows when a sink has no open write."""
        if sink.open_writes:
            return []
        if sink.state is SinkState.FENCING:
            sink.move(Trigger.WRITES_ENDED, SinkState.ENDED)
            self.counters["fenced_sends"] += 1
            effects: list[SendEffect] = [_fenced(sink.peer, sink.grant, sink.fence_reason)]
            offer = self._early.pop((session.transfer_id, sink.peer), None)
            if offer is not None:
                effects += self._accept(session, offer)
            return effects
        if sink.state is SinkState.WRITING and min(sink.posted) >= session.total_blocks:
            sink.move(Trigger.ALL_WRITTEN, SinkState.DELIVERED)
            self.counters["sent_transfers"] += 1
            self.counters["sent_pages"] += sink.pages
            self.counters["sent_bytes"] += sink.pages * sink.page_bytes
            delivered = Delivered(
                transfer_id=session.transfer_id,
                attempt=sink.grant.attempt,
                pages=sink.pages,
                bytes=sink.pages * sink.page_bytes,
            )
            return [Say(sink.peer, delivered)]
        return []

    def _fence_all(self, session: SendSession, trigger: Trigger, reason: str) -> list[SendEffect]:
        effects: list[SendEffect] = []
        for sink in list(session.sinks.values()):
            effects += self._fence(session, sink, trigger, reason)
        return effects

    def _fence(
        self, session: SendSession, sink: Sink, trigger: Trigger, reason: str
    ) -> list[SendEffect]:
        if sink.state not in (SinkState.WRITING, SinkState.FENCING):
            return []
        if sink.move(trigger, SinkState.FENCING, reason):
            sink.fence_reason = reason
        return self._advance(session, sink)

    def _settle(self, session: SendSession) -> list[SendEffect]:
        """Release the request when it is closed and nobody is owed anything."""
        for peer, sink in list(session.sinks.items()):
            if sink.is_dropped and sink.state is SinkState.ENDED:
                del session.sinks[peer]
        if session.state is SendState.OPEN or session.transfer_id not in self._sessions:
            return []
        if any(sink.state is not SinkState.ENDED for sink in session.sinks.values()):
            return []
        waits_for_grants = (
            session.sinks_expected is None or len(session.sinks) < session.sinks_expected
        )
        if waits_for_grants and session.state is SendState.LEASED and not session.abandoned:
            return []
        del self._sessions[session.transfer_id]
        del self._by_request[session.request_id]
        outcome = "complete" if session.state is SendState.LEASED else "aborted"
        if session.abandoned:
            outcome = "abandoned"
        session.move(Trigger.SETTLED, SendState.RELEASED, outcome)
        self._remember_end(session.transfer_id, f"the prefill request has ended ({outcome})")
        return [Release(session.request_id, session.transfer_id, outcome)]

    def _remember_end(self, transfer_id: str, reason: str) -> None:
        self._ended[transfer_id] = reason
        self._ended.move_to_end(transfer_id)
        while len(self._ended) > ENDED_LIMIT_TRANSFERS:
            self._ended.popitem(last=False)


def _fenced(peer: str, grant: Grant, reason: str, *, refused: bool = False) -> Say:
    fenced = Fenced(
        transfer_id=grant.transfer_id, attempt=grant.attempt, reason=reason, refused=refused
    )
    return Say(peer, fenced)
