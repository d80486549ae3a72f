"""The writing side of transfers, pure: which pages of which request are written where, and when that is over.

One ``SendBook`` per transfer thread. A *session* is one request that this engine prefills for somebody else; a *sink* is one
decode rank that granted pages for it. The engine says which blocks became final in which layer; the book says which writes are
due. Grants may come before the request (it waits in the engine's queue) or long after it (everything is sent at once).

Promises kept here:

* nothing is written before the grant's prompt hash was compared with the request's own;
* after ``Delivered`` or ``Fenced`` was sent for an attempt, no write of that attempt is due or open;
* a session ends: by delivery and acknowledgement, by a fence, or when ``lease_s`` has passed since the request finished.

What it does not know: sockets, memory, time (``now`` is an argument, in seconds of any monotonic clock).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from splitserve.kv_transfer.messages import Delivered, Fenced, FromPrefill, Grant, Writing

ENDED_LIMIT_TRANSFERS = 10_000
"""Ended transfers that are remembered, to answer a late grant at once."""


@dataclass(frozen=True)
class Write:
    """An order: copy these prompt blocks of these layers into the sink's pages."""

    transfer_id: str
    peer: str
    tag: int
    spans: tuple[tuple[int, int, int], ...]
    """(layer, first prompt block, end) per layer."""


@dataclass(frozen=True)
class Say:
    """An order: send a message to a peer."""

    peer: str
    message: FromPrefill


@dataclass(frozen=True)
class Release:
    """A fact for the engine: nothing reads this finished request's blocks any more."""

    request_id: str
    transfer_id: str
    outcome: str


SendEffect = Write | Say | Release


class SinkState(Enum):
    """Where one decode rank's grant stands."""

    WRITING = "writing"
    FENCING = "fencing"
    DELIVERED = "delivered"
    ENDED = "ended"


@dataclass
class Sink:
    """One grant being filled."""

    peer: str
    grant: Grant
    page_bytes: int
    posted: list[int]
    """Per layer, the first prompt block that no write covers yet."""
    state: SinkState = SinkState.WRITING
    open_writes: set[int] = field(default_factory=set)
    pages: int = 0
    fence_reason: str = ""
    announced: bool = False
    announced_last: bool = False


@dataclass
class SendSession:
    """One request prefilled here for a peer. Changed only by its ``SendBook``."""

    transfer_id: str
    request_id: str
    prompt_tokens: int
    prompt_hash: bytes
    total_blocks: int
    source_blocks: list[int]
    final: list[int]
    """Per layer, the first prompt block that is not final yet."""
    sinks: dict[str, Sink] = field(default_factory=dict)
    sinks_expected: int | None = None
    closed: str | None = None
    """``complete`` or ``aborted`` once the engine is done with the request."""
    closed_at: float | None = None
    abandoned: bool = False
    """The decode side does not want it: nothing to wait for."""

    @property
    def is_final(self) -> bool:
        """Every block of every layer is final."""
        return min(self.final) >= self.total_blocks


class SendBook:
    """All sends of one rank. Owned by one thread."""

    def __init__(
        self, *, layers: int, stream_min_bytes: int, write_limit_bytes: int, lease_s: float
    ) -> None:
        self._layers = layers
        self._stream_min_bytes = stream_min_bytes
        self._write_limit_bytes = write_limit_bytes
        self._lease_s = lease_s
        self._sessions: dict[str, SendSession] = {}
        self._by_request: dict[str, str] = {}
        self._early: dict[tuple[str, str], tuple[Grant, int, float]] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self.counters: dict[str, float] = {
            "sent_transfers": 0,
            "sent_pages": 0,
            "sent_bytes": 0,
            "refused_grants": 0,
            "fenced_sends": 0,
            "expired_leases": 0,
        }

    # -- what the engine says ------------------------------------------------------------------

    def open(
        self,
        transfer_id: str,
        request_id: str,
        *,
        prompt_tokens: int,
        prompt_hash: bytes,
        total_blocks: int,
    ) -> list[SendEffect]:
        """The engine starts a request that somebody waits for; grants that came early are taken up."""
        assert transfer_id not in self._sessions, f"transfer {transfer_id} opened twice"
        session = SendSession(
            transfer_id=transfer_id,
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            prompt_hash=prompt_hash,
            total_blocks=total_blocks,
            source_blocks=[],
            final=[0] * self._layers,
        )
        session.abandoned = self._ended.pop(transfer_id, None) is not None
        self._sessions[transfer_id] = session
        self._by_request[request_id] = transfer_id
        effects: list[SendEffect] = []
        for key in [key for key in self._early if key[0] == transfer_id]:
            grant, page_bytes, _ = self._early.pop(key)
            effects += self._accept(session, key[1], grant, page_bytes)
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

        What was written stays right in the peer's pages; the request will be computed again into other blocks.
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
        session.closed = "aborted" if aborted or not session.is_final else "complete"
        session.closed_at = now
        effects: list[SendEffect] = []
        if session.closed == "aborted":
            for sink in session.sinks.values():
                effects += self._fence(session, sink, "the prefill request was aborted")
        return effects + self._settle(session)

    def abandon(self, transfer_id: str, reason: str) -> list[SendEffect]:
        """Nobody wants this transfer any more (the decode leg was refused or is lost)."""
        session = self._sessions.get(transfer_id)
        if session is None:
            self._remember_end(transfer_id, reason)
            return []
        session.abandoned = True
        effects: list[SendEffect] = []
        for sink in session.sinks.values():
            effects += self._fence(session, sink, reason)
        return effects + self._settle(session)

    # -- what peers say ------------------------------------------------------------------------

    def granted(self, peer: str, grant: Grant, page_bytes: int, now: float) -> list[SendEffect]:
        """A decode rank gave pages."""
        session = self._sessions.get(grant.transfer_id)
        if session is not None:
            return self._accept(session, peer, grant, page_bytes)
        ended = self._ended.get(grant.transfer_id)
        if ended is not None:
            return [Say(peer, Fenced(transfer_id=grant.transfer_id, attempt=grant.attempt, reason=ended))]
        self._early[grant.transfer_id, peer] = (grant, page_bytes, now + self._lease_s)
        return []

    def cancelled(self, peer: str, transfer_id: str, attempt: int, reason: str) -> list[SendEffect]:
        """A decode rank wants its pages back: it gets a fence in any case."""
        fence = Say(peer, Fenced(transfer_id=transfer_id, attempt=attempt, reason=reason))
        session = self._sessions.get(transfer_id)
        if session is None:
            self._early.pop((transfer_id, peer), None)
            self._remember_end(transfer_id, reason)
            return [fence]
        sink = session.sinks.get(peer)
        if sink is None or sink.grant.attempt != attempt:
            session.abandoned = session.abandoned or sink is None
            return [fence, *self._settle(session)]
        if sink.state in (SinkState.DELIVERED, SinkState.ENDED):
            sink.state = SinkState.ENDED
            return [fence, *self._settle(session)]
        return [*self._fence(session, sink, reason), *self._settle(session)]

    def landed(self, peer: str, transfer_id: str, attempt: int) -> list[SendEffect]:
        """The decode rank has counted its pages."""
        session = self._sessions.get(transfer_id)
        sink = session.sinks.get(peer) if session else None
        if session is None or sink is None or sink.grant.attempt != attempt:
            return []
        assert sink.state is SinkState.DELIVERED, f"{transfer_id}: landed while {sink.state}"
        sink.state = SinkState.ENDED
        return self._settle(session)

    def peer_lost(self, peer: str, reason: str) -> list[SendEffect]:
        """The peer is gone: stop writing to it and owe it nothing."""
        effects: list[SendEffect] = []
        for key in [key for key in self._early if key[1] == peer]:
            del self._early[key]
            self._remember_end(key[0], reason)
        for session in list(self._sessions.values()):
            sink = session.sinks.get(peer)
            if sink is not None and sink.state is not SinkState.ENDED:
                effects += self._fence(session, sink, reason)
                effects += self._settle(session)
        return effects

    # -- what the transport says ---------------------------------------------------------------

    def write_posted(self, write: Write, write_id: int, pages: int) -> None:
        """The transport accepted an order."""
        sink = self._sessions[write.transfer_id].sinks[write.peer]
        sink.open_writes.add(write_id)
        sink.pages += pages

    def write_ended(self, transfer_id: str, peer: str, write_id: int, error: str | None) -> list[SendEffect]:
        """A write is over, well or not; it will not touch the peer's memory any more."""
        session = self._sessions.get(transfer_id)
        sink = session.sinks.get(peer) if session else None
        if session is None or sink is None:
            return []
        sink.open_writes.discard(write_id)
        effects: list[SendEffect] = []
        if error is not None and sink.state is SinkState.WRITING:
            effects += self._fence(session, sink, error)
        return effects + self._advance(session, sink) + self._settle(session)

    # -- what is due ---------------------------------------------------------------------------

    def due_writes(self, *, flush: bool) -> list[SendEffect]:
        """Orders for what became final since the last call.

        Without ``flush`` a sink waits until ``stream_min_bytes`` are ready; ``flush`` (the step's last layer is done, or
        nothing is running) sends the rest. A sink whose last page is written is told so.
        """
        effects: list[SendEffect] = []
        for session in self._sessions.values():
            if session.source_blocks or session.is_final:
                for sink in session.sinks.values():
                    if sink.state is SinkState.WRITING:
                        effects += self._due(session, sink, flush)
        return effects

    def expire(self, now: float) -> list[SendEffect]:
        """End what has waited too long: early grants and finished requests past their lease."""
        effects: list[SendEffect] = []
        for key in [key for key, (_, _, until) in self._early.items() if until <= now]:
            grant = self._early.pop(key)[0]
            reason = f"no prefill request for it came within {self._lease_s:g} s"
            self._remember_end(key[0], reason)
            effects.append(
                Say(key[1], Fenced(transfer_id=key[0], attempt=grant.attempt, reason=reason))
            )
        for session in list(self._sessions.values()):
            if session.closed_at is None or session.closed_at + self._lease_s > now:
                continue
            if not session.abandoned:
                session.abandoned = True
                self.counters["expired_leases"] += 1
            reason = f"the lease of {self._lease_s:g} s ended"
            for sink in session.sinks.values():
                if sink.state is SinkState.DELIVERED:
                    sink.state = SinkState.ENDED
                effects += self._fence(session, sink, reason)
            effects += self._settle(session)
        return effects

    @property
    def is_idle(self) -> bool:
        """No session and no early grant."""
        return not self._sessions and not self._early

    @property
    def open_sessions(self) -> int:
        """Requests that are being prefilled for, or held for, a peer."""
        return len(self._sessions)

    def session(self, transfer_id: str) -> SendSession | None:
        """An open session, for the records of the thread."""
        return self._sessions.get(transfer_id)

    # -- inside --------------------------------------------------------------------------------

    def _session_of(self, request_id: str) -> SendSession | None:
        transfer_id = self._by_request.get(request_id)
        return self._sessions.get(transfer_id) if transfer_id is not None else None

    def _accept(
        self, session: SendSession, peer: str, grant: Grant, page_bytes: int
    ) -> list[SendEffect]:
        known = session.sinks.get(peer)
        if known is not None and grant.attempt <= known.grant.attempt:
            return []
        assert known is None or known.state is SinkState.ENDED, (
            f"{session.transfer_id}: attempt {grant.attempt} granted while attempt "
            f"{known.grant.attempt} is {known.state.value}"
        )
        refusal = _refusal(session, grant)
        if refusal is not None:
            self.counters["refused_grants"] += 1
            session.abandoned = session.abandoned or not session.sinks
            fence = Fenced(
                transfer_id=session.transfer_id, attempt=grant.attempt, reason=refusal
            )
            return [Say(peer, fence), *self._settle(session)]
        session.sinks_expected = grant.grants_expected
        session.sinks[peer] = Sink(
            peer=peer, grant=grant, page_bytes=page_bytes, posted=[grant.first_block] * self._layers
        )
        return []

    def _due(self, session: SendSession, sink: Sink, flush: bool) -> list[SendEffect]:
        spans = [
            (layer, sink.posted[layer], final)
            for layer, final in enumerate(session.final)
            if final > sink.posted[layer]
        ]
        pages = sum(end - first for _, first, end in spans)
        if not pages:
            return []
        flush = flush or session.is_final
        if not flush and pages * sink.page_bytes < self._stream_min_bytes:
            return []
        last = session.is_final
        effects: list[SendEffect] = []
        if not sink.announced or (last and not sink.announced_last):
            sink.announced, sink.announced_last = True, last
            effects.append(Say(sink.peer, Writing(
                transfer_id=session.transfer_id, attempt=sink.grant.attempt, last=last
            )))  # fmt: skip
        limit_pages = max(1, self._write_limit_bytes // sink.page_bytes)
        effects += [
            Write(session.transfer_id, sink.peer, sink.grant.tag, part)
            for part in _split(spans, limit_pages)
        ]
        for layer, _, end in spans:
            sink.posted[layer] = end
        return effects

    def _advance(self, session: SendSession, sink: Sink) -> list[SendEffect]:
        """What follows when a sink has no open write."""
        if sink.open_writes:
            return []
        if sink.state is SinkState.FENCING:
            sink.state = SinkState.ENDED
            self.counters["fenced_sends"] += 1
            return [Say(sink.peer, Fenced(
                transfer_id=session.transfer_id, attempt=sink.grant.attempt, reason=sink.fence_reason
            ))]  # fmt: skip
        if sink.state is SinkState.WRITING and min(sink.posted) >= session.total_blocks:
            sink.state = SinkState.DELIVERED
            self.counters["sent_transfers"] += 1
            self.counters["sent_pages"] += sink.pages
            self.counters["sent_bytes"] += sink.pages * sink.page_bytes
            return [Say(sink.peer, Delivered(
                transfer_id=session.transfer_id,
                attempt=sink.grant.attempt,
                pages=sink.pages,
                bytes=sink.pages * sink.page_bytes,
            ))]  # fmt: skip
        return []

    def _fence(self, session: SendSession, sink: Sink, reason: str) -> list[SendEffect]:
        if sink.state not in (SinkState.WRITING, SinkState.FENCING):
            return []
        if sink.state is SinkState.WRITING:
            sink.state, sink.fence_reason = SinkState.FENCING, reason
        return self._advance(session, sink)

    def _settle(self, session: SendSession) -> list[SendEffect]:
        """Release the request when it is closed and nobody is owed anything."""
        if session.closed is None or session.transfer_id not in self._sessions:
            return []
        if any(sink.state is not SinkState.ENDED for sink in session.sinks.values()):
            return []
        waits_for_grants = session.sinks_expected is None or len(session.sinks) < session.sinks_expected
        if waits_for_grants and session.closed == "complete" and not session.abandoned:
            return []
        del self._sessions[session.transfer_id]
        del self._by_request[session.request_id]
        outcome = session.closed if not session.abandoned else "abandoned"
        self._remember_end(session.transfer_id, f"the prefill request has ended ({outcome})")
        return [Release(session.request_id, session.transfer_id, outcome)]

    def _remember_end(self, transfer_id: str, reason: str) -> None:
        self._ended[transfer_id] = reason
        while len(self._ended) > ENDED_LIMIT_TRANSFERS:
            self._ended.popitem(last=False)


def _refusal(session: SendSession, grant: Grant) -> str | None:
    """Why a grant cannot be filled from this request, None when it can."""
    if grant.prompt_tokens != session.prompt_tokens:
        return (
            f"the prompts differ: {session.prompt_tokens} tokens on the prefill node, "
            f"{grant.prompt_tokens} on the decode node"
        )
    if grant.prompt_hash != session.prompt_hash:
        return (
            "the prompts differ (same length, other tokens): both nodes need the same tokenizer and "
            "chat template"
        )
    if grant.first_block + len(grant.block_ids) != session.total_blocks:
        return (
            f"the grant ends at block {grant.first_block + len(grant.block_ids)}, the prompt at block "
            f"{session.total_blocks}"
        )
    if session.abandoned:
        return "the transfer was given up"
    if session.closed == "aborted":
        return "the prefill request was aborted"
    return None


def _split(
    spans: list[tuple[int, int, int]], limit_pages: int
) -> list[tuple[tuple[int, int, int], ...]]:
    """Cut spans into runs of at most ``limit_pages`` pages."""
    parts: list[tuple[tuple[int, int, int], ...]] = []
    part: list[tuple[int, int, int]] = []
    room = limit_pages
    for layer, first, end in spans:
        while first < end:
            take = min(room, end - first)
            part.append((layer, first, first + take))
            first += take
            room -= take
            if not room:
                parts.append(tuple(part))
                part, room = [], limit_pages
    if part:
        parts.append(tuple(part))
    return parts
