"""The decode role of a transfer thread: granting reserved pages, counting what arrives, getting the pages back.

Owns one connection per prefill rank it has been told of, and the ``ReceiveSession`` of every waiting request.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from splitserve.kv_transfer import messages
from splitserve.kv_transfer.channel import dial, mac
from splitserve.kv_transfer.layout import PageLayout, shares_heads
from splitserve.kv_transfer.process_identity import watch
from splitserve.kv_transfer.sending_side import HELLO_PURPOSE
from splitserve.kv_transfer.session_receive import ReceiveSession, Source, SourceState

if TYPE_CHECKING:
    from splitserve.kv_transfer.orders import BeginReceive, Decline, StepOrders
    from splitserve.kv_transfer.settings import TransferSettings
    from splitserve.kv_transfer.transfer_log import TransferLog
    from splitserve.kv_transfer.transports.base import Transport

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 2.0
GIVEN_UP_LIMIT_TRANSFERS = 10_000


@dataclass
class Upstream:
    """A prefill rank that may write to us."""

    address: str
    socket: zmq.Socket[Any]
    monitor: zmq.Socket[Any]
    welcome: messages.Welcome | None = None
    """Its introduction on the current connection."""
    pidfd: int | None = None
    refusal: str = ""
    is_connected: bool = False
    declines: list[messages.Cancel] = field(default_factory=list)
    """To be said once it is introduced."""


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
        self.expects_last_bytes = False
        """A peer has posted its last write to us: poll as often as possible."""
        self._upstreams: dict[str, Upstream] = {}
        self._sessions: dict[str, ReceiveSession] = {}
        self._by_request: dict[str, str] = {}
        self._given_up: OrderedDict[str, str] = OrderedDict()
        self._tags = (secrets.randbits(31) << 32) + 1
        self._last_ping = monotonic()
        for address in settings.warm_addresses:
            self._upstream(address)

    # -- the engine's steps --------------------------------------------------------------------

    def begin_step(self, orders: StepOrders, now: float) -> None:
        """Take up what the step reserves, cancels and gives up."""
        for incarnation in orders.dead_peers:
            self.incarnation_gone(incarnation)
        for order in orders.receives:
            self._begin(order, now)
        for request_id, reason in orders.cancels:
            session = self._sessions.get(self._by_request.get(request_id, ""))
            if session is not None:
                self._cancel(session, reason)
        for transfer_id, reason in orders.given_up:
            session = self._sessions.get(transfer_id)
            if session is not None:
                self._cancel(session, reason)
            else:
                self._given_up[transfer_id] = reason
                while len(self._given_up) > GIVEN_UP_LIMIT_TRANSFERS:
                    self._given_up.popitem(last=False)
        for decline in orders.declines:
            self._decline(decline)

    def _begin(self, order: BeginReceive, now: float) -> None:
        assert order.transfer_id not in self._sessions, f"{order.transfer_id} received twice"
        session = ReceiveSession(
            transfer_id=order.transfer_id,
            request_id=order.request_id,
            attempt=order.attempt,
            peer_incarnation=order.peer_incarnation,
            first_block=order.first_block,
            block_ids=order.block_ids,
            prompt_tokens=order.prompt_tokens,
            prompt_hash=order.prompt_hash,
            deadline=now + self._settings.deadline_s,
            sources={address: Source() for address in order.peer_addresses},
            times={"reserved": now},
        )
        self._sessions[order.transfer_id] = session
        self._by_request[order.request_id] = order.transfer_id
        given_up = self._given_up.pop(order.transfer_id, None)
        if given_up is not None or not session.sources:
            self._cancel(session, given_up or "the request names no prefill node")
            return
        for address in order.peer_addresses:
            upstream = self._upstream(address)
            if upstream.welcome is not None:
                self._grant(session, upstream)
            elif upstream.refusal:
                self._hello(upstream)
        self._settle(session)

    def _decline(self, decline: Decline) -> None:
        self.counters["declined_transfers"] += 1
        cancel = messages.Cancel(
            transfer_id=decline.transfer_id, attempt=decline.attempt, reason=decline.reason
        )
        for address in decline.peer_addresses:
            upstream = self._upstream(address)
            if upstream.welcome is not None:
                self._send(upstream, cancel)
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
        if not shares_heads(self._layout, welcome.layout):
            session.absent(upstream.address)
            return
        self._tags += 1
        pages = self._layout.page_indices(
            np.arange(self._layout.layers), np.asarray(session.block_ids, dtype=np.int64)
        )
        self._transport.expect(self._tags, pages)
        session.granted(upstream.address, self._tags, len(pages))
        session.times.setdefault("granted", monotonic())
        self._send(upstream, messages.Grant(
            transfer_id=session.transfer_id,
            attempt=session.attempt,
            tag=self._tags,
            first_block=session.first_block,
            block_ids=session.block_ids,
            prompt_tokens=session.prompt_tokens,
            prompt_hash=session.prompt_hash,
            grants_expected=_ranks_sharing_heads(self._layout, self._own.tensor_parallel, welcome.layout),
        ))  # fmt: skip

    def _cancel(self, session: ReceiveSession, reason: str) -> None:
        """Take the pages back: at once where the transport can, else when the writer has fenced."""
        session.cancel(reason)
        for address in session.unfenced:
            upstream = self._upstreams[address]
            if upstream.welcome is not None:
                self._send(upstream, messages.Cancel(
                    transfer_id=session.transfer_id, attempt=session.attempt, reason=reason
                ))  # fmt: skip
            if self._transport.revoke(session.sources[address].tag):
                session.ended(address, reason)
        self._settle(session)

    def _settle(self, session: ReceiveSession) -> None:
        outcome = session.outcome
        if outcome is None:
            return
        del self._sessions[session.transfer_id]
        del self._by_request[session.request_id]
        landed = outcome == "landed"
        for address, source in session.sources.items():
            if source.tag:
                self._transport.revoke(source.tag)
            if source.state is SourceState.DELIVERED:
                self._send(self._upstreams[address], messages.Landed(
                    transfer_id=session.transfer_id, attempt=session.attempt
                ))  # fmt: skip
        if landed:
            self.counters["received_transfers"] += 1
            self.counters["received_pages"] += session.pages
            self.counters["received_bytes"] += session.bytes
        else:
            self.counters["failed_receives"] += 1
            logger.warning(
                "transfer %s for request %s ended without its pages: %s",
                session.transfer_id, session.request_id, session.cancel_reason,
            )  # fmt: skip
        self.finished.append((session.request_id, landed))
        self.expects_last_bytes = self.expects_last_bytes and bool(self._sessions)
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
            outcome=outcome if landed else session.cancel_reason,
            ended=monotonic(),
            **session.times,
        )

    # -- peers ---------------------------------------------------------------------------------

    def _upstream(self, address: str) -> Upstream:
        upstream = self._upstreams.get(address)
        if upstream is None:
            dealer = dial(self._context, address, self._settings.secret)
            monitor = dealer.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            upstream = self._upstreams[address] = Upstream(address, dealer, monitor)
            self._hello(upstream)
        return upstream

    def _hello(self, upstream: Upstream) -> None:
        upstream.refusal = ""
        fields = {name: getattr(self._own, name) for name in self._own.__struct_fields__}
        peer = f"{self._own.incarnation}/{self._own.rank}"
        proof = mac(self._settings.secret, HELLO_PURPOSE, peer.encode())
        self._send(upstream, messages.Hello(**fields, mac=proof))

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """Everything that may become readable."""
        return [s for u in self._upstreams.values() for s in (u.socket, u.monitor)]

    def receive(self) -> None:
        """Read every message and connection event that has arrived."""
        for upstream in list(self._upstreams.values()):
            self._read_monitor(upstream)
            while True:
                try:
                    payload = upstream.socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                try:
                    message = messages.decode_from_prefill(payload)
                except msgspec.DecodeError as error:
                    logger.warning("dropped a control message that cannot be read: %s", error)
                    continue
                self._receive_one(upstream, message)

    def _read_monitor(self, upstream: Upstream) -> None:
        while upstream.monitor.poll(0):
            event = recv_monitor_message(upstream.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                upstream.is_connected = True
            elif upstream.is_connected:
                # The next connection starts with a new hello; what is unfenced stays so until then.
                upstream.is_connected, upstream.welcome = False, None
                for session in list(self._sessions.values()):
                    if upstream.address in session.sources:
                        self._cancel(session, "the connection to the prefill engine was lost")
                self._hello(upstream)

    def _receive_one(self, upstream: Upstream, message: messages.FromPrefill) -> None:
        match message:
            case messages.Welcome():
                self._welcomed(upstream, message)
            case messages.TurnedAway():
                upstream.refusal = message.reason
                logger.warning("prefill rank %s turned us away: %s", upstream.address, message.reason)
                for session in list(self._sessions.values()):
                    if upstream.address in session.sources:
                        session.ended(upstream.address, message.reason)
                        self._cancel(session, message.reason)
            case messages.Writing():
                session = self._sessions.get(message.transfer_id)
                if session is not None and message.attempt == session.attempt:
                    session.times.setdefault("writing", monotonic())
                    self.expects_last_bytes = self.expects_last_bytes or message.last
            case messages.Delivered() | messages.Fenced():
                session = self._sessions.get(message.transfer_id)
                if session is None or message.attempt != session.attempt:
                    return
                if isinstance(message, messages.Delivered):
                    session.times["delivered"] = monotonic()
                    session.delivered(upstream.address, message.pages, message.bytes)
                else:
                    session.ended(upstream.address, message.reason)
                if session.cancel_reason is not None:
                    self._cancel(session, session.cancel_reason)
                else:
                    self._settle(session)

    def _welcomed(self, upstream: Upstream, welcome: messages.Welcome) -> None:
        upstream.welcome, upstream.refusal = welcome, ""
        if upstream.pidfd is not None:
            os.close(upstream.pidfd)
            upstream.pidfd = None
        try:
            upstream.pidfd = watch(welcome.process)
        except ProcessLookupError:
            self.incarnation_gone(welcome.incarnation)
            return
        for cancel in upstream.declines:
            self._send(upstream, cancel)
        upstream.declines.clear()
        for session in list(self._sessions.values()):
            source = session.sources.get(upstream.address)
            if source is None:
                continue
            if source.state is SourceState.UNKNOWN:
                self._grant(session, upstream)
            if session.cancel_reason is not None:
                self._cancel(session, session.cancel_reason)
            else:
                self._settle(session)

    def pidfds(self) -> list[int]:
        """Descriptors that become readable when a peer's process is gone."""
        return [u.pidfd for u in self._upstreams.values() if u.pidfd is not None]

    def process_gone(self, pidfd: int) -> None:
        """The process behind a pidfd has ended: it writes nothing any more."""
        for upstream in self._upstreams.values():
            if upstream.pidfd == pidfd:
                os.close(pidfd)
                upstream.pidfd = None
                self._source_dead(upstream.address, "the prefill engine's process is gone")

    def incarnation_gone(self, incarnation: str) -> None:
        """An engine is proven dead: it writes nothing any more."""
        for session in list(self._sessions.values()):
            if session.peer_incarnation == incarnation:
                for address in list(session.sources):
                    session.ended(address, "the prefill engine is gone")
                self._cancel(session, "the prefill engine is gone")

    def _source_dead(self, address: str, reason: str) -> None:
        for session in list(self._sessions.values()):
            if address in session.sources:
                session.ended(address, reason)
                if session.cancel_reason is not None:
                    self._cancel(session, reason)

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Carry out what time alone brings."""
        for session in list(self._sessions.values()):
            if session.deadline <= now and session.cancel_reason is None:
                self.counters["expired_receives"] += 1
                self._cancel(session, f"not delivered within {self._settings.deadline_s:g} s")
        if now - self._last_ping >= PING_INTERVAL_S:
            self._last_ping = now
            for upstream in self._upstreams.values():
                if upstream.welcome is not None:
                    self._send(upstream, messages.Ping())

    @property
    def open_sessions(self) -> int:
        """Requests that wait for pages, or whose pages cannot be given back yet."""
        return len(self._sessions)

    @property
    def is_writing(self) -> bool:
        """A peer has begun to write to us."""
        return any("writing" in session.times for session in self._sessions.values())

    def close(self) -> None:
        """Close every connection."""
        for upstream in self._upstreams.values():
            upstream.socket.disable_monitor()
            upstream.monitor.close(0)
            upstream.socket.close(0)
            if upstream.pidfd is not None:
                os.close(upstream.pidfd)
        self._upstreams.clear()

    def _send(self, upstream: Upstream, message: messages.FromDecode) -> None:
        try:
            upstream.socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("the queue to %s is full: dropped %s", upstream.address, type(message).__name__)


def _ranks_sharing_heads(own: PageLayout, tensor_parallel: int, peer: PageLayout) -> int:
    """How many ranks of this engine hold a head that the peer's rank holds too."""
    return sum(
        shares_heads(
            msgspec.structs.replace(own, first_head=rank * own.heads), peer
        )
        for rank in range(tensor_parallel)
    )
