"""The decode role of a transfer thread: granting reserved pages, counting what arrives, getting the
pages back.

Owns one connection per prefill rank it has been told of, and the ``ReceiveSession`` of every
waiting request.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from splitserve.kv_transfer import messages
from splitserve.kv_transfer.channel import mac
from splitserve.kv_transfer.layout import ranks_sharing_heads
from splitserve.kv_transfer.process_identity import DeathWatch
from splitserve.kv_transfer.sending_side import HELLO_PURPOSE
from splitserve.kv_transfer.session_receive import ReceiveSession, Source, SourceState
from splitserve.kv_transfer.upstream import ConnectionLost, Upstream, UpstreamEvent

if TYPE_CHECKING:
    import zmq

    from splitserve.kv_transfer.orders import BeginReceive, Decline, StepOrders
    from splitserve.kv_transfer.settings import TransferSettings
    from splitserve.kv_transfer.transfer_log import TransferLog
    from splitserve.kv_transfer.transports.base import Transport

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 2.0
FENCE_INTERVAL_S = 2.0
"""Between repeated requests for a fence."""
GIVEN_UP_LIMIT_TRANSFERS = 10_000
DEAD_LIMIT_INCARNATIONS = 1_000
UPSTREAM_LIMIT_RANKS = 1_024
"""Prefill ranks that are connected, or being called, at one time."""


class ReceivingSide:
    """Decode role of one rank. Every method runs in the transfer thread."""

    def __init__(
        self,
        context: zmq.Context[Any],
        settings: TransferSettings,
        introduction: messages.Introduction,
        transport: Transport,
        log: TransferLog,
    ) -> None:
        self._context = context
        self._settings = settings
        self._own = introduction
        self._layout = introduction.layout
        self._transport = transport
        self._log = log
        self.finished: list[tuple[str, bool]] = []
        """(request id, landed) to report as received; emptied by the thread."""
        self.counters: dict[str, float] = {
            "received_transfers": 0,
            "received_pages": 0,
            "received_bytes": 0,
            "failed_receives": 0,
            "declined_transfers": 0,
            "expired_receives": 0,
        }
        self.moved_at = monotonic()
        """When a peer last told of its writes to us."""
        self._upstreams: dict[str, Upstream] = {}
        self._sessions: dict[tuple[str, int], ReceiveSession] = {}
        """By transfer id and attempt: an old attempt may still wait for its fence."""
        self._by_request: dict[str, tuple[str, int]] = {}
        self._watch = DeathWatch()
        """Keys are address and incarnation of a prefill rank on this host."""
        self._dead: OrderedDict[str, None] = OrderedDict()
        self._given_up: OrderedDict[str, str] = OrderedDict()
        self._tags = (secrets.randbits(31) << 32) + 1
        self._last_ping = monotonic()
        peer = f"{introduction.incarnation}/{introduction.rank}"
        self._hello = messages.Hello(
            **{name: getattr(introduction, name) for name in introduction.__struct_fields__},
            mac=mac(settings.secret, HELLO_PURPOSE, peer.encode()),
        )
        for address in settings.warm_addresses:
            self._upstreams[address] = self._dial(address)

    # -- the engine's steps --------------------------------------------------------------------

    def begin_step(self, orders: StepOrders, now: float) -> None:
        """Take up what the step reserves, cancels and gives up."""
        for incarnation in orders.dead_peers:
            self.incarnation_gone(incarnation)
        for order in orders.receives:
            self._begin(order, now)
        for request_id, reason in orders.cancels:
            key = self._by_request.get(request_id)
            if key is not None:
                self._cancel(self._sessions[key], reason)
        for transfer_id, reason in orders.given_up:
            sessions = self._sessions_where(transfer_id=transfer_id)
            if not sessions:
                self._remember(self._given_up, transfer_id, reason, GIVEN_UP_LIMIT_TRANSFERS)
            for session in sessions:
                self._cancel(session, reason)
        for decline in orders.declines:
            self._decline(decline)

    def _begin(self, order: BeginReceive, now: float) -> None:
        key = (order.transfer_id, order.attempt)
        session = ReceiveSession(
            transfer_id=order.transfer_id,
            request_id=order.request_id,
            attempt=order.attempt,
            peer_incarnation=order.peer_incarnation,
            first_block=order.first_block,
            block_ids=order.block_ids,
            prompt_tokens=order.prompt_tokens,
            prompt_hash=order.prompt_hash,
            heads=self._layout.head_numbers,
            deadline=now + self._settings.deadline_s,
            sources={address: Source() for address in order.peer_addresses},
            times={"reserved": now},
        )
        if key in self._sessions:
            session.cancel("this attempt of the transfer is open here already")
            self._end(session)
            return
        self._sessions[key] = session
        self._by_request[order.request_id] = key
        why_not = self._given_up.pop(order.transfer_id, None)
        if order.peer_incarnation in self._dead:
            why_not = "the prefill engine is gone"
        elif any(self._upstream(address, now) is None for address in order.peer_addresses):
            why_not = "a prefill rank cannot be called"
        if why_not is not None:
            self._cancel(session, why_not)
            return
        for address in order.peer_addresses:
            upstream = self._upstreams[address]
            if upstream.is_introduced_as(order.peer_incarnation):
                self._grant(session, upstream)
            elif upstream.welcome is not None or upstream.refusal:
                upstream.say_hello()
        self._go_on(session)

    def _decline(self, decline: Decline) -> None:
        self.counters["declined_transfers"] += 1
        for address in decline.peer_addresses:
            self._say_cancel(address, messages.Cancel(
                transfer_id=decline.transfer_id, attempt=decline.attempt, reason=decline.reason
            ))  # fmt: skip

    def _say_cancel(self, address: str, cancel: messages.Cancel) -> None:
        """For a transfer that was not granted there: said once, now or after the introduction."""
        upstream = self._upstream(address, monotonic())
        if upstream is None:
            return
        if upstream.welcome is not None:
            upstream.send(cancel)
        else:
            upstream.declines.append(cancel)

    # -- granting ------------------------------------------------------------------------------

    def _grant(self, session: ReceiveSession, upstream: Upstream) -> None:
        """The source is introduced: give it the pages of the heads that it holds."""
        welcome = upstream.welcome
        assert welcome is not None
        source = session.sources[upstream.address]
        if source.state is not SourceState.UNKNOWN or session.cancel_reason is not None:
            return
        if welcome.incarnation != session.peer_incarnation:
            session.ended(upstream.address, "the prefill engine was restarted meanwhile")
            return
        shared = self._layout.head_numbers & welcome.layout.head_numbers
        if not shared:
            session.absent(upstream.address)
            return
        self._tags += 1
        pages = self._layout.page_indices(
            np.arange(self._layout.layers), np.asarray(session.block_ids, dtype=np.int64)
        )
        self._transport.expect(self._tags, pages)
        session.granted(upstream.address, self._tags, len(pages), shared)
        session.times.setdefault("granted", monotonic())
        upstream.send(messages.Grant(
            transfer_id=session.transfer_id,
            attempt=session.attempt,
            tag=self._tags,
            first_block=session.first_block,
            block_ids=session.block_ids,
            prompt_tokens=session.prompt_tokens,
            prompt_hash=session.prompt_hash,
            grants_expected=ranks_sharing_heads(
 self._layout, self._own.tensor_parallel, welcome.layout),
        ))  # fmt: skip

    def _go_on(self, session: ReceiveSession) -> None:
        """After something has happened to a session."""
        if session.cancel_reason is not None:
            self._cancel(session, session.cancel_reason)
        else:
            self._settle(session)

    def _cancel(self, session: ReceiveSession, reason: str) -> None:
        """Take the pages back: at once where the transport can, else when the writer has fenced."""
        cancel = messages.Cancel(
            transfer_id=session.transfer_id, attempt=session.attempt, reason=reason
        )
        for address in session.unasked:
            self._say_cancel(address, cancel)
        session.cancel(reason)
        session.fence_asked_at = monotonic()
        for address in session.unfenced:
            upstream = self._upstreams[address]
            if upstream.is_introduced_as(session.peer_incarnation):
                upstream.send(cancel)
            if self._transport.revoke(session.sources[address].tag):
                session.ended(address, reason)
        self._settle(session)

    def _settle(self, session: ReceiveSession) -> None:
        """End the session if nobody may write to its pages any more."""
        key = (session.transfer_id, session.attempt)
        if session.outcome is None or self._sessions.get(key) is not session:
            return
        del self._sessions[key]
        del self._by_request[session.request_id]
        for address, source in session.sources.items():
            if source.tag:
                self._transport.revoke(source.tag)
            upstream = self._upstreams.get(address)
            if source.state is SourceState.DELIVERED and upstream is not None:
                self._say_landed(session, upstream)
        self._end(session)

    def _say_landed(self, session: ReceiveSession, upstream: Upstream) -> None:
        if upstream.is_introduced_as(session.peer_incarnation):
            upstream.send(messages.Landed(transfer_id=session.transfer_id, attempt=session.attempt))

    def _end(self, session: ReceiveSession) -> None:
        """Report the request as received, with its pages or without."""
        landed = session.outcome == "landed"
        if landed:
            self.counters["received_transfers"] += 1
            self.counters["received_pages"] += session.pages
            self.counters["received_bytes"] += session.bytes
        else:
            self.counters["failed_receives"] += 1
            logger.warning(
                "transfer %s for request %s ended without its pages: %s",
                session.transfer_id,
                session.request_id,
                session.failure,
            )
        self.finished.append((session.request_id, landed))
        self._log.record(
            "receive",
            transfer_id=session.transfer_id,
            attempt=session.attempt,
            request_id=session.request_id,
            prompt_tokens=session.prompt_tokens,
            first_block=session.first_block,
            blocks=len(session.block_ids),
            pages=session.pages,
            bytes=session.bytes,
            outcome="landed" if landed else session.failure,
            ended=monotonic(),
            **session.times,
        )

    # -- peers ---------------------------------------------------------------------------------

    def _dial(self, address: str) -> Upstream:
        return Upstream(self._context, address, self._settings.secret, self._hello, monotonic())

    def _upstream(self, address: str, now: float) -> Upstream | None:
        """The connection to that address, called now if need be; None when it cannot be."""
        upstream = self._upstreams.get(address)
        if upstream is not None:
            return upstream
        if len(self._upstreams) >= UPSTREAM_LIMIT_RANKS:
            logger.warning("%s not called: %d others are", address, len(self._upstreams))
            return None
        try:
            upstream = self._dial(address)
        except OSError as error:
            logger.warning("%s not called: %s", address, error)
            return None
        self._upstreams[address] = upstream
        return upstream

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """Everything that may become readable."""
        return [source for upstream in self._upstreams.values() for source in upstream.sockets]

    def receive(self) -> None:
        """Read the messages and connection events that have arrived."""
        for upstream in list(self._upstreams.values()):
            for event in upstream.receive(monotonic()):
                self._take(upstream, event)

    def _take(self, upstream: Upstream, event: UpstreamEvent) -> None:
        match event:
            case messages.Welcome():
                self._welcomed(upstream, event)
            case messages.TurnedAway():
                self._turned_away(upstream, event.reason)
            case ConnectionLost():
                self._lost(upstream, event.reason)
            case messages.Writing() | messages.Delivered() | messages.Fenced():
                session = self._sessions.get((event.transfer_id, event.attempt))
                if session is not None and session.peer_incarnation == upstream.incarnation:
                    self._reported(session, upstream.address, event)

    def _reported(
        self,
        session: ReceiveSession,
        address: str,
        message: messages.Writing | messages.Delivered | messages.Fenced,
    ) -> None:
        """A message of the engine that the session was granted to."""
        self.moved_at = monotonic()
        if isinstance(message, messages.Writing):
            session.times.setdefault("writing", monotonic())
            session.is_last_posted = session.is_last_posted or message.last
            return
        if isinstance(message, messages.Delivered):
            session.times["delivered"] = monotonic()
            session.delivered(address, message.pages, message.bytes)
        else:
            session.ended(address, message.reason)
        self._go_on(session)

    def _welcomed(self, upstream: Upstream, welcome: messages.Welcome) -> None:
        upstream.welcome, upstream.incarnation = welcome, welcome.incarnation
        key = (upstream.address, welcome.incarnation)
        try:
            self._watch.add(key, welcome.process)
        except ProcessLookupError:
            upstream.welcome = None
            self._source_dead(*key)
            return
        while upstream.declines:
            upstream.send(upstream.declines.popleft())
        for session in self._sessions_where(address=upstream.address):
            state = session.sources[upstream.address].state
            if state is SourceState.UNKNOWN:
                self._grant(session, upstream)
            elif session.peer_incarnation != welcome.incarnation:
                session.cancel("the prefill engine was restarted")
            self._go_on(session)

    def _turned_away(self, upstream: Upstream, reason: str) -> None:
        """The answer to a hello, or the end of an introduction; what is granted waits for its
        fence.
        """
        logger.warning("prefill rank %s turned us away: %s", upstream.address, reason)
        if upstream.welcome is not None:
            upstream.hello_due = True
            self._lost(upstream, reason)
            return
        upstream.refusal = reason
        for session in self._sessions_where(address=upstream.address):
            if upstream.address in session.unasked:
                self._cancel(session, reason)

    def _lost(self, upstream: Upstream, reason: str) -> None:
        """The introduction holds no more; sources that were not granted anything wait on."""
        upstream.welcome = None
        for session in self._sessions_where(address=upstream.address):
            if upstream.address in session.unfenced:
                self._cancel(session, reason)

    def pidfds(self) -> list[int]:
        """Descriptors that become readable when a peer's process is gone."""
        return self._watch.pidfds

    def process_gone(self, pidfd: int) -> None:
        """The process behind a pidfd has ended: it writes nothing any more."""
        watched = self._watch.take(pidfd)
        if watched is not None:
            self._source_dead(*watched)

    def incarnation_gone(self, incarnation: str) -> None:
        """An engine is proven dead: it writes nothing any more."""
        for session in self._sessions_where(incarnation=incarnation):
            for address in session.sources:
                session.ended(address, "the prefill engine is gone")
        self._bury(incarnation)

    def _source_dead(self, address: str, incarnation: str) -> None:
        for session in self._sessions_where(incarnation=incarnation, address=address):
            session.ended(address, "the prefill engine's process is gone")
        self._bury(incarnation)

    def _bury(self, incarnation: str) -> None:
        """An engine of which a process is gone grants nothing any more."""
        self._remember(self._dead, incarnation, None, DEAD_LIMIT_INCARNATIONS)
        for session in self._sessions_where(incarnation=incarnation):
            self._cancel(session, "the prefill engine is gone")

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Carry out what time alone brings."""
        for session in list(self._sessions.values()):
            if session.cancel_reason is None and session.deadline <= now:
                self.counters["expired_receives"] += 1
                self._cancel(session, f"not delivered within {self._settings.deadline_s:g} s")
            elif session.cancel_reason and now - session.fence_asked_at >= FENCE_INTERVAL_S:
                self._cancel(session, session.cancel_reason)
        if now - self._last_ping >= PING_INTERVAL_S:
            self._last_ping = now
            for upstream in list(self._upstreams.values()):
                self._keep_alive(upstream, now)
            self._watch.keep(self._is_watched)

    def _keep_alive(self, upstream: Upstream, now: float) -> None:
        """Ping, introduce ourselves again, call anew, or hang up."""
        silence_s = self._settings.peer_silence_s
        is_silent = now - upstream.last_heard > silence_s
        if upstream.welcome is not None and not is_silent:
            upstream.send(messages.Ping())
        elif upstream.welcome is not None:
            upstream.redial(now)
            self._lost(upstream, f"the prefill engine was silent for {silence_s:g} s")
        elif is_silent and not self._is_wanted(upstream.address):
            upstream.close()
            del self._upstreams[upstream.address]
        elif is_silent:
            upstream.redial(now)
        elif upstream.hello_due:
            upstream.say_hello()

    def _is_wanted(self, address: str) -> bool:
        return address in self._settings.warm_addresses or bool(
            self._sessions_where(address=address)
        )

    def _is_watched(self, key: tuple[str, str]) -> bool:
        """Whether the death of that prefill rank would mean something."""
        address, incarnation = key
        upstream = self._upstreams.get(address)
        is_current = upstream is not None and upstream.incarnation == incarnation
        return is_current or bool(self._sessions_where(incarnation=incarnation, address=address))

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
        """A peer has posted its last write to us: poll as often as possible."""
        return any(session.is_last_posted for session in self._sessions.values())

    def close(self) -> None:
        """Close every connection and stop watching."""
        for upstream in self._upstreams.values():
            upstream.close()
        self._upstreams.clear()
        self._watch.keep(lambda _: False)

    # -- inside --------------------------------------------------------------------------------

    def _sessions_where(
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

    @staticmethod
    def _remember(known: OrderedDict[str, Any], key: str, value: Any, limit: int) -> None:
        known[key] = value
        while len(known) > limit:
            known.popitem(last=False)
