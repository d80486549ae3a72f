"""The decode role of a transfer thread: carrying out what the ``ReceiveBook`` orders.

Owns one connection per prefill rank it has been told of, and watches the processes of those on this
host.
"""

from __future__ import annotations

import logging
import secrets
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from splitserve.kv_transfer import messages
from splitserve.kv_transfer.channel import mac
from splitserve.kv_transfer.layout import ranks_sharing_heads
from splitserve.kv_transfer.process_identity import DeathWatch
from splitserve.kv_transfer.receive_book import Introduced, ReceiveBook
from splitserve.kv_transfer.sending_side import HELLO_PURPOSE
from splitserve.kv_transfer.session_receive import (
    Expect,
    Finish,
    Greet,
    ReceiveEffect,
    Revoke,
    Tell,
    TellOnce,
)
from splitserve.kv_transfer.transfer_facts import LANDED, ReceiveFacts
from splitserve.kv_transfer.upstream import ConnectionLost, Upstream, UpstreamEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    import zmq

    from splitserve.kv_transfer.orders import StepOrders
    from splitserve.kv_transfer.session_receive import ReceiveSession
    from splitserve.kv_transfer.settings import TransferSettings
    from splitserve.kv_transfer.transfer_log import TransferLog
    from splitserve.kv_transfer.transports.base import Transport

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 2.0
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
        self.book = ReceiveBook(
            heads=self._layout.head_numbers,
            layers=self._layout.layers,
            deadline_s=settings.deadline_s,
            retarget_wait_s=settings.retarget_wait_s,
            first_tag=(secrets.randbits(31) << 32) + 1,
        )
        self.finished: list[tuple[str, bool]] = []
        """(request id, landed) to report as received; emptied by the thread."""
        self.facts: list[ReceiveFacts] = []
        """Of what has ended; emptied by the thread."""
        self.moved_at = monotonic()
        """When a peer last told of its writes to us."""
        self._upstreams: dict[str, Upstream] = {}
        self._watch = DeathWatch()
        """Keys are address and incarnation of a prefill rank on this host."""
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
            called = [self._upstream(address, now) for address in order.peer_addresses]
            self._apply(self.book.begin(order, now, is_callable=None not in called))
        for retarget in orders.retargets:
            for address in retarget.peer_addresses:
                self._upstream(address, now)
            self._apply(self.book.retarget(retarget, now))
        for request_id in orders.acknowledged:
            self._apply(self.book.acknowledge(request_id))
        for request_id, reason in orders.cancels:
            self._apply(self.book.cancel(request_id, reason, now))
        for transfer_id, reason in orders.given_up:
            self._apply(self.book.give_up(transfer_id, reason, now))
        for decline in orders.declines:
            self._apply(self.book.decline(decline))

    def _apply(self, effects: Sequence[ReceiveEffect]) -> None:
        for effect in effects:
            match effect:
                case Tell(address, message):
                    self._upstreams[address].send(message)
                case TellOnce(address, message):
                    self._tell_once(address, message)
                case Greet(address):
                    self._upstreams[address].say_hello()
                case Expect(tag, block_ids):
                    layers, blocks = np.arange(self._layout.layers), np.asarray(block_ids)
                    pages = self._layout.page_indices(layers, blocks.astype(np.int64))
                    self._transport.expect(tag, pages)
                case Revoke(session, address, tag):
                    if self._transport.revoke(tag):
                        self._apply(self.book.revoked(session, address, monotonic()))
                case Finish(session, landed):
                    self._report(session, landed=landed)

    def _tell_once(self, address: str, message: messages.Cancel) -> None:
        upstream = self._upstream(address, monotonic())
        if upstream is None:
            return
        if upstream.welcome is not None:
            upstream.send(message)
        else:
            upstream.declines.append(message)

    def _report(self, session: ReceiveSession, *, landed: bool) -> None:
        """The engine hears that the request is received, with its pages or without."""
        if not landed:
            logger.warning(
                "transfer %s for request %s ended without its pages: %s",
                session.transfer_id,
                session.request_id,
                session.failure,
            )
        now, outcome = monotonic(), LANDED if landed else session.failure
        self.finished.append((session.request_id, landed))
        self.facts.append(ReceiveFacts(
            transfer_id=session.transfer_id,
            attempt=session.attempt,
            rank=self._own.rank,
            ranks=self._own.tensor_parallel,
            outcome=outcome,
            ended=now,
            reserved=session.times.get("reserved"),
            granted=session.times.get("granted"),
            pages=session.pages,
            bytes=session.bytes,
            traceparent=session.traceparent,
        ))  # fmt: skip
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
            outcome=outcome,
            ended=now,
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
        now = monotonic()
        match event:
            case messages.Welcome():
                self._welcomed(upstream, event)
            case messages.TurnedAway():
                self._turned_away(upstream, event.reason)
            case ConnectionLost():
                self._lost(upstream, event.reason)
            case messages.Writing() | messages.Delivered() | messages.Fenced():
                effects = self.book.reported(upstream.address, upstream.incarnation, event, now)
                if effects is not None:
                    self.moved_at = now
                    self._apply(effects)

    def _welcomed(self, upstream: Upstream, welcome: messages.Welcome) -> None:
        upstream.welcome, upstream.incarnation = welcome, welcome.incarnation
        key = (upstream.address, welcome.incarnation)
        try:
            self._watch.add(key, welcome.process)
        except ProcessLookupError:
            upstream.welcome = None
            self._apply(self.book.process_gone(*key, monotonic()))
            return
        while upstream.declines:
            upstream.send(upstream.declines.popleft())
        introduced = Introduced(
            incarnation=welcome.incarnation,
            heads=self._layout.head_numbers & welcome.layout.head_numbers,
            grants_expected=ranks_sharing_heads(
                self._layout, self._own.tensor_parallel, welcome.layout
            ),
        )
        self._apply(self.book.welcomed(upstream.address, introduced, monotonic()))

    def _turned_away(self, upstream: Upstream, reason: str) -> None:
        """The answer to a hello, or the end of an introduction; what is granted waits for its
        fence.
        """
        logger.warning("prefill rank %s turned us away: %s", upstream.address, reason)
        if upstream.welcome is not None:
            upstream.hello_due = True
            self._lost(upstream, reason)
        else:
            self._apply(self.book.turned_away(upstream.address, reason, monotonic()))

    def _lost(self, upstream: Upstream, reason: str) -> None:
        upstream.welcome = None
        self._apply(self.book.lost(upstream.address, reason, monotonic()))

    def pidfds(self) -> list[int]:
        """Descriptors that become readable when a peer's process is gone."""
        return self._watch.pidfds

    def process_gone(self, pidfd: int) -> None:
        """The process behind a pidfd has ended: it writes nothing any more."""
        watched = self._watch.take(pidfd)
        if watched is not None:
            self._apply(self.book.process_gone(*watched, monotonic()))

    def incarnation_gone(self, incarnation: str) -> None:
        """An engine is proven dead: it writes nothing any more."""
        self._apply(self.book.incarnation_gone(incarnation, monotonic()))

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Carry out what time alone brings."""
        self._apply(self.book.tick(now))
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
        return address in self._settings.warm_addresses or self.book.waits_for(address)

    def _is_watched(self, key: tuple[str, str]) -> bool:
        """Whether the death of that prefill rank would mean something."""
        address, incarnation = key
        upstream = self._upstreams.get(address)
        is_current = upstream is not None and upstream.incarnation == incarnation
        return is_current or self.book.waits_for(address, incarnation)

    def close(self) -> None:
        """Close every connection and stop watching."""
        for upstream in self._upstreams.values():
            upstream.close()
        self._upstreams.clear()
        self._watch.keep(lambda _: False)
