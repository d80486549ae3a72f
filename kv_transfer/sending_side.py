"""The prefill role of a transfer thread: who may write to whom, and carrying out what the
``SendBook`` orders.

Owns the listening control socket and, per decode rank that introduced itself, a connection of the
transport.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import zmq

from splitserve.kv_transfer import messages
from splitserve.kv_transfer.channel import is_mac, listen
from splitserve.kv_transfer.fingerprint import differences
from splitserve.kv_transfer.layout import LayoutMismatchError, check_compatible, pair, shares_heads
from splitserve.kv_transfer.process_identity import watch
from splitserve.kv_transfer.send_book import SendBook
from splitserve.kv_transfer.send_records import SendRecords
from splitserve.kv_transfer.session_send import Release, Say, SendEffect, Write
from splitserve.kv_transfer.transfer_facts import LayerWrite
from splitserve.kv_transfer.transports.base import (
    PeerLost,
    Transport,
    TransportError,
    TransportEvent,
    WriteDone,
)

if TYPE_CHECKING:
    from splitserve.kv_transfer.orders import StepOrders
    from splitserve.kv_transfer.settings import TransferSettings
    from splitserve.kv_transfer.transfer_log import TransferLog

logger = logging.getLogger(__name__)

HELLO_PURPOSE = "transfer hello"
PEER_LIMIT_RANKS = 1_024
"""Decode ranks that may be written to; further ones are turned away."""
MESSAGES_PER_TURN = 1_000
"""Control messages read before the thread looks at everything else again."""
PREEMPTION_NAP_S = 50e-6
"""Between polls while a preempted request's open writes end."""
TAG_LIMIT = 1 << 64
"""Transports carry a tag in 64 bits."""


@dataclass
class Downstream:
    """A decode rank that may be written to."""

    peer: str
    identity: bytes
    """Routing id of its current connection."""
    page_bytes: int
    """What one page write to it moves; 0 when no head is shared."""
    blocks: int
    """Blocks of its KV memory."""
    pidfd: int | None
    last_heard: float
    last_progress: float = 0.0
    """When a write to it last ended, or the first of its open writes was posted."""
    open_writes: int = 0
    needs_help: bool = True
    """Its last writes were not over at the first look, so that it has to make them progress."""
    is_ending: bool = False


class OpenWrite(NamedTuple):
    """A write that the transport works on."""

    transfer_id: str
    attempt: int
    downstream: Downstream
    first_layer: int
    last_layer: int
    pages: int


class SendingSide:
    """Prefill role of one rank. Every method runs in the transfer thread."""

    def __init__(
        self,
        context: zmq.Context[Any],
        settings: TransferSettings,
        introduction: messages.Introduction,
        transport: Transport,
        log: TransferLog,
    ) -> None:
        self._settings = settings
        self._own = introduction
        self._layout = introduction.layout
        self._transport = transport
        self.records = SendRecords(introduction.rank, log)
        self.socket = listen(context, settings.control_address, settings.secret)
        self.book = SendBook(
            layers=self._layout.layers,
            stream_min_bytes=settings.stream_min_bytes,
            write_limit_bytes=settings.write_limit_bytes,
            lease_s=settings.lease_s,
        )
        self.released: list[str] = []
        """Request ids to report as sent; emptied by the thread."""
        self.moved_at = monotonic()
        """When a write was last posted or has ended."""
        self._peers: dict[str, Downstream] = {}
        self._peer_of_identity: dict[bytes, str] = {}
        self._just_posted: list[Downstream] = []
        self._writes: dict[int, OpenWrite] = {}
        self._step: StepOrders | None = None
        self._is_past_last_layer = False
        """In the present step."""

    # -- the engine's steps --------------------------------------------------------------------

    def begin_step(self, orders: StepOrders, now: float, began: float) -> None:
        """Take up what the step, which the engine ``began`` then, opens, closes and will
        compute.
        """
        until = now + self._settings.preemption_fence_s
        for request_id in orders.preempted:
            self._stop_reading(request_id, until)
        for opened in orders.opens:
            self.records.opened(opened.transfer_id, opened.traceparent, now)
            self._apply(self.book.open(
                opened.transfer_id,
                opened.request_id,
                prompt_tokens=opened.prompt_tokens,
                prompt_hash=opened.prompt_hash,
                total_blocks=opened.total_blocks,
            ))  # fmt: skip
        for item in orders.progress:
            self.records.note(item.transfer_id, "started", began, is_first=True)
            self.book.blocks_known(item.transfer_id, list(item.source_blocks))
            for layer in range(self._layout.layers):
                self.book.blocks_final(item.transfer_id, layer, item.final_before)
        self._step = orders if orders.progress else None
        self._is_past_last_layer = False
        for transfer_id, reason in orders.given_up:
            self._apply(self.book.abandon(transfer_id, reason))
        for closed in orders.closes:
            self._apply(self.book.close(closed.request_id, aborted=closed.aborted, now=now))

    def layer_done(self, layer: int, at: float) -> None:
        """The step's forward pass has left ``layer``, and its pages are written."""
        for item in self._step.progress if self._step else ():
            self.book.blocks_final(item.transfer_id, layer, item.final_after)
            if layer == self._layout.layers - 1:
                self._is_past_last_layer = True
                self.records.note(item.transfer_id, "last_layer", at)

    def end_step(self, at: float) -> None:
        """The forward pass is over: layers whose hook did not fire are final too."""
        for item in self._step.progress if self._step else ():
            if not self._is_past_last_layer:
                self.records.note(item.transfer_id, "last_layer", at)
            for layer in range(self._layout.layers):
                self.book.blocks_final(item.transfer_id, layer, item.final_after)
        self._step = None

    def post_due(self) -> None:
        """Hand what is due to the transport."""
        self._apply(self.book.due_writes(flush=self._step is None))

    def look_after_posting(self) -> None:
        """Take up what the transport reports, and learn which peers have to help it.

        A peer into whose memory this process copies by itself is over at the first look, and is
        left in peace from then on: polling takes time from the engine beside it.
        """
        self.transport_events(self._transport.poll())
        posted, self._just_posted = self._just_posted, []
        for downstream in posted:
            downstream.needs_help = downstream.open_writes > 0
            if downstream.needs_help:
                self._ask_for_help(downstream)

    def _ask_for_help(self, downstream: Downstream) -> None:
        """Its engine is told of every write that is under way, if it was not."""
        writes = self._writes.values()
        for transfer_id in {w.transfer_id for w in writes if w.downstream is downstream}:
            session = self.book.session(transfer_id)
            sink = session.sinks.get(downstream.peer) if session is not None else None
            if session is None or sink is None or sink.announced:
                continue
            sink.announced = True
            writing = messages.Writing(
                transfer_id=transfer_id, attempt=sink.grant.attempt, last=session.is_final
            )
            self._send(downstream.identity, writing)

    # -- peers ---------------------------------------------------------------------------------

    def receive(self) -> None:
        """Read the messages that have arrived, up to a bound."""
        for _ in range(MESSAGES_PER_TURN):
            try:
                identity, payload = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                logger.warning("dropped a control message that is not one frame")
                continue
            self._receive_one(identity, payload)

    def _receive_one(self, identity: bytes, payload: bytes) -> None:
        try:
            message = messages.decode_from_decode(payload)
        except msgspec.DecodeError as error:
            logger.warning("dropped a control message that cannot be read: %s", error)
            return
        now = monotonic()
        if isinstance(message, messages.Hello):
            self._greet(identity, message, now)
            return
        peer = self._peer_of_identity.get(identity)
        if peer is None:
            logger.info("dropped %s from a connection without a hello", type(message).__name__)
            return
        downstream = self._peers[peer]
        downstream.last_heard = now
        match message:
            case messages.Grant():
                if not _fits(message, downstream):
                    logger.warning("refused a grant of %s that names pages it has not got", peer)
                    refusal = messages.Fenced(
                        transfer_id=message.transfer_id,
                        attempt=message.attempt,
                        reason="the grant names pages that this peer has not got",
                        refused=True,
                    )
                    self._say(peer, refusal)
                    return
                self._apply(self.book.granted(peer, message, downstream.page_bytes, now))
                self.records.note(message.transfer_id, "granted", now, is_first=True)
            case messages.Cancel():
                self._apply(
                    self.book.cancelled(
                        peer,
                        message.transfer_id,
                        message.attempt,
                        message.reason,
                        keeps=message.keeps,
                    )
                )
            case messages.Landed():
                self._apply(self.book.landed(peer, message.transfer_id, message.attempt))
            case messages.Ping():
                self._say(peer, messages.Pong())

    def _greet(self, identity: bytes, hello: messages.Hello, now: float) -> None:
        peer = f"{hello.incarnation}/{hello.rank}"
        if not is_mac(hello.mac, self._settings.secret, HELLO_PURPOSE, peer.encode()):
            logger.warning("dropped a hello whose MAC was not made with this cluster's secret")
            return
        try:
            downstream = self._peers.get(peer) or self._connect(peer, hello, now)
        except (TransportError, LayoutMismatchError, ProcessLookupError) as error:
            logger.warning("turned away %s: %s", peer, error)
            self._send(identity, messages.TurnedAway(reason=str(error)))
            return
        self._peer_of_identity.pop(downstream.identity, None)
        downstream.identity, downstream.last_heard = identity, now
        self._peers[peer] = downstream
        self._peer_of_identity[identity] = peer
        fields = {name: getattr(self._own, name) for name in self._own.__struct_fields__}
        self._say(peer, messages.Welcome(**fields))

    def _connect(self, peer: str, hello: messages.Hello, now: float) -> Downstream:
        """Raises when the peer cannot be written to; nothing is left of the attempt then."""
        found = differences(self._own.fingerprint, hello.fingerprint)
        if found:
            raise LayoutMismatchError("the engines differ: " + "; ".join(found))
        if hello.transport != self._own.transport:
            raise LayoutMismatchError(
                f"transport: {self._own.transport} here, {hello.transport} at the peer"
            )
        check_compatible(self._layout, hello.layout)
        if len(self._peers) >= PEER_LIMIT_RANKS:
            raise TransportError(f"{PEER_LIMIT_RANKS} decode ranks are connected already")
        pidfd = watch(hello.process)
        page_bytes = 0
        try:
            if shares_heads(self._layout, hello.layout):
                pairing = pair(self._layout, hello.layout)
                self._transport.connect(peer, hello.description, pairing)
                page_bytes = pairing.page_bytes
        except BaseException:
            if pidfd is not None:
                os.close(pidfd)
            raise
        logger.info("decode rank %s can be written to by %s", peer, self._own.transport)
        return Downstream(peer, b"", page_bytes, hello.layout.num_blocks, pidfd, now)

    def pidfds(self) -> list[int]:
        """Descriptors that become readable when a peer's process is gone."""
        return [peer.pidfd for peer in self._peers.values() if peer.pidfd is not None]

    def process_gone(self, pidfd: int) -> None:
        """The process behind a pidfd has ended."""
        for peer in [p for p in self._peers.values() if p.pidfd == pidfd]:
            self._lose(peer.peer, "the decode engine's process is gone")

    def incarnation_gone(self, incarnation: str) -> None:
        """An engine is proven dead."""
        for name in [p for p in self._peers if p.rsplit("/", 1)[0] == incarnation]:
            self._lose(name, "the decode engine is gone")

    def _lose(self, peer: str, reason: str) -> None:
        """Nothing is written to the peer any more, and it is told so if it can be reached."""
        downstream = self._peers.get(peer)
        if downstream is None or downstream.is_ending:
            return
        downstream.is_ending = True
        logger.info("lost decode rank %s: %s", peer, reason)
        self._apply(self.book.peer_lost(peer, reason))
        self._transport.disconnect(peer)
        self.transport_events(self._transport.poll())
        self._send(downstream.identity, messages.TurnedAway(reason=f"given up: {reason}"))
        del self._peers[peer]
        self._peer_of_identity.pop(downstream.identity, None)
        if downstream.pidfd is not None:
            os.close(downstream.pidfd)

    # -- the transport -------------------------------------------------------------------------

    def transport_events(self, events: list[TransportEvent]) -> None:
        """Take up what the transport reported."""
        for event in events:
            if isinstance(event, PeerLost):
                self._lose(event.peer, event.reason)
                continue
            write = self._writes.pop(event.write_id)
            transfer_id, downstream = write.transfer_id, write.downstream
            downstream.open_writes -= 1
            downstream.last_progress = self.moved_at = monotonic()
            peer = downstream.peer
            error = None if isinstance(event, WriteDone) else event.reason
            if error is None:
                size_bytes = write.pages * downstream.page_bytes
                layers = LayerWrite(
                    write.first_layer, write.last_layer, self.moved_at, write.pages, size_bytes
                )
                self.records.written(transfer_id, peer, write.attempt, layers)
            else:
                logger.warning("transfer %s: a write to %s failed: %s", transfer_id, peer, error)
            self._apply(self.book.write_ended(transfer_id, peer, event.write_id, error))

    @property
    def has_open_writes(self) -> bool:
        """Whether the transport still works on a write."""
        return bool(self._writes)

    def tick(self, now: float) -> None:
        """Carry out what time alone brings."""
        self._apply(self.book.expire(now))
        limit_s = self._settings.peer_silence_s
        for peer in list(self._peers.values()):
            if peer.last_heard < now - limit_s:
                self._lose(peer.peer, f"silent for {limit_s:g} s")
            elif peer.open_writes and peer.last_progress < now - limit_s:
                self._lose(peer.peer, f"no write to it has ended for {limit_s:g} s")

    def close(self) -> None:
        """Close the socket and the pidfds; the transport is closed by its owner."""
        for downstream in self._peers.values():
            if downstream.pidfd is not None:
                os.close(downstream.pidfd)
        self._peers.clear()
        self.socket.close(0)

    # -- inside --------------------------------------------------------------------------------

    def _stop_reading(self, request_id: str, until: float) -> None:
        """After this, no open write of a transfer that may still succeed reads the request's
        blocks.

        A write that does not end in time is given up with its peer; what it may still read is never
        delivered.
        """
        session = self.book.preempted(request_id)
        if session is None:
            return
        while any(sink.open_writes for sink in session.sinks.values()):
            self.transport_events(self._transport.poll())
            if monotonic() > until:
                for peer in [p for p, sink in session.sinks.items() if sink.open_writes]:
                    self._lose(peer, "a write did not end when its source was preempted")
                return
            sleep(PREEMPTION_NAP_S)

    def _apply(self, effects: list[SendEffect]) -> None:
        for effect in effects:
            match effect:
                case Say():
                    self._say(effect.peer, effect.message)
                case Write():
                    self._post(effect)
                case Release():
                    self.released.append(effect.request_id)
                    self.records.released(effect.transfer_id)

    def _post(self, write: Write) -> None:
        session = self.book.session(write.transfer_id)
        assert session is not None, f"a write is due for the ended transfer {write.transfer_id}"
        sink = session.sinks[write.peer]
        skipped = sink.grant.first_block
        downstream = self._peers[write.peer]
        local = np.concatenate([
            np.asarray(session.source_blocks[first:end], dtype=np.int64)
            + layer * self._layout.num_blocks
            for layer, first, end in write.spans
        ])  # fmt: skip
        remote = np.concatenate([
            np.asarray(sink.grant.block_ids[first - skipped : end - skipped], dtype=np.int64)
            + layer * downstream.blocks
            for layer, first, end in write.spans
        ])  # fmt: skip
        attempt = sink.grant.attempt
        self.records.posted(write.transfer_id, write.peer, attempt, monotonic())
        write_id = self._transport.write(write.peer, write.tag, local, remote)
        self._writes[write_id] = OpenWrite(
            write.transfer_id,
            attempt,
            downstream,
            write.spans[0][0],
            write.spans[-1][0],
            len(local),
        )
        self.moved_at = monotonic()
        if not downstream.open_writes:
            downstream.last_progress = self.moved_at
        downstream.open_writes += 1
        self._just_posted.append(downstream)
        self.book.write_posted(write, write_id, len(local))

    def _say(self, peer: str, message: messages.FromPrefill) -> None:
        downstream = self._peers.get(peer)
        if downstream is None:
            return
        if isinstance(message, messages.Writing) and not downstream.needs_help:
            self.book.not_announced(peer, message.transfer_id)
            return
        if isinstance(message, messages.Delivered | messages.Fenced):
            session = self.book.session(message.transfer_id)
            self.records.ended(peer, message, session, monotonic())
        self._send(downstream.identity, message)

    def _send(self, identity: bytes, message: messages.FromPrefill) -> None:
        try:
            self.socket.send_multipart([identity, messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The connection is gone or full; the peer asks again, or its loss is noticed.
            logger.info("could not send %s: %s", type(message).__name__, error)


def _fits(grant: messages.Grant, downstream: Downstream) -> bool:
    """Whether a grant names pages that the peer has (block 0 is the engine's null block)."""
    return (
        downstream.page_bytes > 0
        and 0 <= grant.tag < TAG_LIMIT
        and grant.first_block >= 0
        and len(grant.block_ids) < downstream.blocks
        and all(0 < block < downstream.blocks for block in grant.block_ids)
    )
