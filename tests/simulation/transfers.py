"""A transfer thread in virtual time: the real ``SendBook`` and ``ReceiveBook`` behind modelled
connections, and a transport whose bytes land one page at a time.

The rules for introductions, silence and death are those of ``SendingSide``, ``ReceivingSide`` and
``Upstream``, which own sockets and are tested with real ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulation.memory import LAYERS
from splitserve.kv_transfer.holdings import HoldingsTaker, QuarantineLimits, RankHoldings
from splitserve.kv_transfer.messages import (
    Cancel,
    Delivered,
    Fenced,
    Grant,
    Landed,
    Ping,
    Pong,
    TurnedAway,
    Writing,
)
from splitserve.kv_transfer.orders import TransferResults
from splitserve.kv_transfer.receive_book import Introduced, ReceiveBook
from splitserve.kv_transfer.send_book import SendBook
from splitserve.kv_transfer.session_receive import (
    Expect,
    Finish,
    Greet,
    ReceiveEffect,
    Revoke,
    Tell,
    TellOnce,
)
from splitserve.kv_transfer.session_send import Release, Say, SendEffect, Write

if TYPE_CHECKING:
    from simulation.engine import Engine
    from splitserve.kv_transfer.orders import StepOrders
    from splitserve.kv_transfer.session_receive import ReceiveSession

TICK_S = 0.5
SILENCE_S = 3.0
LEASE_S = 5.0
DEADLINE_S = 6.0
RETARGET_WAIT_S = 1.0
PAGE_BYTES = 100
QUARANTINE_LIMIT_BYTES = 8 * LAYERS * PAGE_BYTES
BROKEN_WRITE_S = 1.0
"""After this long a write to a host that is cut off fails."""


@dataclass(frozen=True)
class Hello:
    """A decode rank introduces itself on a new connection."""


@dataclass(frozen=True)
class Welcome:
    """A prefill rank answers."""

    incarnation: str


@dataclass
class Upstream:
    """One connection to a prefill rank."""

    number: int
    last_heard: float
    welcome: str | None = None
    incarnation: str = ""
    hello_due: bool = False
    declines: deque[Cancel] = field(default_factory=deque)


@dataclass
class Downstream:
    """A decode rank that has introduced itself."""

    engine: Engine
    number: int
    """Of its current connection."""
    last_heard: float


@dataclass
class Copy:
    """A write under way."""

    write: Write
    target: Engine
    pages_left: int
    moved_at: float
    """When a page of it landed, or it was posted."""
    is_over: bool = False


class Transfers:
    """Both roles of one engine's transfer thread (tensor parallel 1)."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine = engine
        self.world = engine.world
        self.sending = SendBook(
            layers=LAYERS,
            stream_min_bytes=2 * PAGE_BYTES,
            write_limit_bytes=3 * PAGE_BYTES,
            lease_s=LEASE_S,
        )
        self.receiving = ReceiveBook(
            heads=frozenset({0}),
            layers=LAYERS,
            deadline_s=DEADLINE_S,
            retarget_wait_s=RETARGET_WAIT_S,
            first_tag=number << 32,
        )
        self.copies: dict[int, Copy] = {}
        self._taker = HoldingsTaker(QuarantineLimits(
            fence_timeout_s=engine.cluster.fence_timeout_s,
            limit_bytes=QUARANTINE_LIMIT_BYTES,
            block_bytes=LAYERS * PAGE_BYTES,
        ))  # fmt: skip
        self._upstreams: dict[str, Upstream] = {}
        self._peers: dict[str, Downstream] = {}
        self._step: StepOrders | None = None
        self._connections = 0
        self._finished_sending: set[str] = set()
        self._finished_receiving: set[str] = set()
        self._failed_receiving: set[str] = set()
        self._expected: set[int] = set()
        engine.process.at(TICK_S, self._tick)

    # -- the engine ----------------------------------------------------------------------------

    def begin_step(self, orders: StepOrders) -> None:
        """As the thread takes up a step; a preemption waits for open writes in the engine."""
        now = self.world.now
        for incarnation in orders.dead_peers:
            self.lose(incarnation, "the decode engine is gone")
        for request_id in orders.preempted:
            session = self.sending.preempted(request_id)
            for number, copy in list(self.copies.items()):
                if session is not None and copy.write.transfer_id == session.transfer_id:
                    self._finish_at_once(number, copy)
        for opened in orders.opens:
            self._send(self.sending.open(
                opened.transfer_id,
                opened.request_id,
                prompt_tokens=opened.prompt_tokens,
                prompt_hash=opened.prompt_hash,
                total_blocks=opened.total_blocks,
            ))  # fmt: skip
        for item in orders.progress:
            self.sending.blocks_known(item.transfer_id, list(item.source_blocks))
            for layer in range(LAYERS):
                self.sending.blocks_final(item.transfer_id, layer, item.final_before)
        self._step = orders if orders.progress else None
        for transfer_id, reason in orders.given_up:
            self._send(self.sending.abandon(transfer_id, reason))
        for closed in orders.closes:
            self._send(self.sending.close(closed.request_id, aborted=closed.aborted, now=now))
        for incarnation in orders.dead_peers:
            self._receive(self.receiving.incarnation_gone(incarnation, now))
        for order in orders.receives:
            for address in order.peer_addresses:
                self._dial(address)
            self._receive(self.receiving.begin(order, now, is_callable=True))
        for retarget in orders.retargets:
            for address in retarget.peer_addresses:
                self._dial(address)
            self._receive(self.receiving.retarget(retarget, now))
        for request_id in orders.acknowledged:
            self._receive(self.receiving.acknowledge(request_id))
        for request_id, reason in orders.cancels:
            self._receive(self.receiving.cancel(request_id, reason, now))
        for transfer_id, reason in orders.given_up:
            self._receive(self.receiving.give_up(transfer_id, reason, now))
        for decline in orders.declines:
            self._receive(self.receiving.decline(decline))
        self._post_due()

    def layer_done(self, layer: int) -> None:
        """The forward pass has left a layer."""
        for item in self._step.progress if self._step else ():
            self.sending.blocks_final(item.transfer_id, layer, item.final_after)
        self._post_due()

    def end_step(self) -> None:
        """The forward pass is over."""
        self._step = None
        self._post_due()

    def take_results(self) -> TransferResults:
        """What has finished since the last call."""
        taken = TransferResults(
            frozenset(self._finished_sending),
            frozenset(self._finished_receiving),
            frozenset(self._failed_receiving),
        )
        self._finished_sending.clear()
        self._finished_receiving.clear()
        self._failed_receiving.clear()
        return taken

    def counters(self) -> dict[str, float]:
        """What the engine counts of them in its reports."""
        sends, receives = self.sending.open_sessions, self.receiving.open_sessions
        return {"open_sends": sends, "open_receives": receives}

    def holdings(self) -> RankHoldings:
        """What is held for whom."""
        return self._taker.take(self.sending, self.receiving, self.world.now)

    @property
    def is_idle(self) -> bool:
        """Nothing is open in either role."""
        return not (self.sending.open_sessions or self.receiving.open_sessions or self.copies)

    def peer_process_gone(self, incarnation: str, address: str) -> None:
        """A process on this host has ended; the kernel says so."""
        self.lose(incarnation, "the decode engine's process is gone")
        self._receive(self.receiving.process_gone(address, incarnation, self.world.now))

    # -- sending -------------------------------------------------------------------------------

    def _post_due(self) -> None:
        self._send(self.sending.due_writes(flush=self._step is None))

    def _send(self, effects: list[SendEffect]) -> None:
        for effect in effects:
            match effect:
                case Say(peer, message):
                    self._say(peer, message)
                case Write():
                    self._post(effect)
                case Release(request_id):
                    self._finished_sending.add(request_id)
                    self.engine.transfers_changed()

    def _say(self, peer: str, message: Any) -> None:
        downstream = self._peers.get(peer)
        if downstream is not None and not isinstance(message, Writing):
            self._answer(downstream.engine, downstream.number, message)

    def _answer(self, target: Engine, number: int, message: Any) -> None:
        if not isinstance(message, Pong):
            self.world.note("{} to {}: {}", self.engine.incarnation, target.incarnation, message)
        self.engine.network.send_control(
            self.engine.host,
            target.host,
            target.process.at,
            0.0,
            target.transfers.take_from_prefill,
            self.engine.address,
            number,
            message,
        )

    def _post(self, write: Write) -> None:
        session = self.sending.session(write.transfer_id)
        assert session is not None
        grant = session.sinks[write.peer].grant
        target = self._peers[write.peer].engine
        number = self._connections = self._connections + 1
        pages = [(layer, b) for layer, first, end in write.spans for b in range(first, end)]
        copy = self.copies[number] = Copy(write, target, len(pages), self.world.now)
        self.sending.write_posted(write, number, len(pages))
        self.world.note("{} writes {} under tag {}", self.engine.incarnation, pages, write.tag)
        owner = session.request_id
        for layer, block in pages:
            source = session.source_blocks[block]
            place = grant.block_ids[block - grant.first_block]
            delay = self.world.random.random() * self.engine.cluster.write_s
            arguments = (number, copy, owner, layer, source, place)
            self.engine.process.work(delay, self._copy_page, *arguments)

    def _copy_page(
        self, number: int, copy: Copy, owner: str, layer: int, source: int, place: int
    ) -> None:
        if copy.is_over:
            return
        tag, target = copy.write.tag, copy.target
        if self.engine.network.is_cut(self.engine.host, target.host):
            copy.is_over = True
            self.engine.process.at(BROKEN_WRITE_S, self._end_copy, number, "the host is cut off")
            return
        if not target.process.is_alive:
            copy.is_over = True
            self._end_copy(number, "the peer's process is gone")
            return
        if target.can_revoke and not target.transfers.expects(tag):
            copy.is_over = True
            self._end_copy(number, "nothing is expected under this tag")
            return
        content = self.engine.memory.read_for_peer(owner, layer, source)
        target.memory.write_from_peer(tag, layer, place, content)
        copy.pages_left -= 1
        copy.moved_at = self.world.now
        if not copy.pages_left:
            copy.is_over = True
            self._end_copy(number, None)

    def _finish_at_once(self, number: int, copy: Copy) -> None:
        """The engine waits for the end of this write: here it fails now."""
        copy.is_over = True
        self._end_copy(number, "its source is taken away")

    def _end_copy(self, number: int, error: str | None) -> None:
        copy = self.copies.pop(number, None)
        if copy is not None:
            write = copy.write
            self._send(self.sending.write_ended(write.transfer_id, write.peer, number, error))
            self._post_due()

    def expects(self, tag: int) -> bool:
        """Whether bytes under the tag may land, where the receiver places them."""
        return tag in self._expected

    def take_from_decode(self, source: Engine, number: int, message: Any) -> None:
        """A message of a decode rank, on one of its connections."""
        peer, now = f"{source.incarnation}/0", self.world.now
        if isinstance(message, Hello):
            if source.incarnation in self.engine.known_dead:
                return
            self._peers[peer] = Downstream(source, number, now)
            self._answer(source, number, Welcome(self.engine.incarnation))
            return
        downstream = self._peers.get(peer)
        if downstream is None or downstream.number != number:
            return
        downstream.last_heard = now
        match message:
            case Grant():
                self._send(self.sending.granted(peer, message, PAGE_BYTES, now))
            case Cancel(transfer_id=transfer_id, attempt=attempt, reason=reason, keeps=keeps):
                self._send(self.sending.cancelled(peer, transfer_id, attempt, reason, keeps=keeps))
            case Landed(transfer_id=transfer_id, attempt=attempt):
                self._send(self.sending.landed(peer, transfer_id, attempt))
            case Ping():
                self._answer(source, number, Pong())
        self._post_due()

    def lose(self, incarnation: str, reason: str) -> None:
        """Nothing is written to that engine any more."""
        peer = f"{incarnation}/0"
        downstream = self._peers.pop(peer, None)
        if downstream is None:
            return
        self._send(self.sending.peer_lost(peer, reason))
        for number, copy in list(self.copies.items()):
            if copy.write.peer == peer:
                copy.is_over = True
                self._end_copy(number, reason)
        self._answer(downstream.engine, downstream.number, TurnedAway(reason=f"given up: {reason}"))

    # -- receiving -----------------------------------------------------------------------------

    def _receive(self, effects: list[ReceiveEffect]) -> None:
        for effect in effects:
            match effect:
                case Tell(address, message):
                    self._tell(address, message)
                case TellOnce(address, message):
                    upstream = self._dial(address)
                    if upstream.welcome is not None:
                        self._tell(address, message)
                    else:
                        upstream.declines.append(message)
                case Greet(address):
                    self._tell(address, Hello())
                case Expect(tag, block_ids):
                    self._expected.add(tag)
                    session = self._session_of(tag)
                    self.engine.memory.grant(tag, session.request_id, block_ids)
                case Revoke(session, address, tag):
                    self._expected.discard(tag)
                    if self.engine.can_revoke:
                        self._receive(self.receiving.revoked(session, address, self.world.now))
                case Finish(session, landed):
                    self._finish(session, landed=landed)

    def _session_of(self, tag: int) -> ReceiveSession:
        return next(
            session
            for session in self.receiving.sessions()
            if any(source.tag == tag for source in session.sources.values())
        )

    def _finish(self, session: ReceiveSession, *, landed: bool) -> None:
        why = "landed" if landed else session.failure
        self.world.note("{}: {} {}", self.engine.incarnation, session.request_id, why)
        self._finished_receiving.add(session.request_id)
        if not landed:
            self._failed_receiving.add(session.request_id)
        self.engine.transfers_changed()

    def _dial(self, address: str) -> Upstream:
        upstream = self._upstreams.get(address)
        if upstream is None:
            upstream = self._upstreams[address] = Upstream(0, self.world.now)
            self._redial(address)
        return upstream

    def _redial(self, address: str) -> None:
        upstream = self._upstreams[address]
        self._connections += 1
        upstream.number, upstream.last_heard = self._connections, self.world.now
        upstream.welcome = None
        self._tell(address, Hello())

    def _tell(self, address: str, message: Any) -> None:
        if not isinstance(message, Ping):
            self.world.note("{} to {}: {}", self.engine.incarnation, address, message)
        self.engine.network.send_control(
            self.engine.host,
            self.engine.cluster.host_of(address),
            self.engine.cluster.deliver_control,
            address,
            self.engine,
            self._upstreams[address].number,
            message,
        )

    def take_from_prefill(self, address: str, number: int, message: Any) -> None:
        """A message of a prefill rank, on one of our connections."""
        upstream, now = self._upstreams.get(address), self.world.now
        if upstream is None or upstream.number != number:
            return
        upstream.last_heard = now
        match message:
            case Welcome(incarnation):
                upstream.welcome = upstream.incarnation = incarnation
                if incarnation in self.engine.known_dead:
                    upstream.welcome = None
                    self._receive(self.receiving.process_gone(address, incarnation, now))
                    return
                while upstream.declines:
                    self._tell(address, upstream.declines.popleft())
                introduced = Introduced(incarnation, frozenset({0}), 1)
                self._receive(self.receiving.welcomed(address, introduced, now))
            case TurnedAway(reason=reason):
                upstream.hello_due = True
                self._lose_upstream(address, reason)
            case Writing() | Delivered() | Fenced():
                effects = self.receiving.reported(address, upstream.incarnation, message, now)
                self._receive(effects or [])

    def connection_lost(self, address: str) -> None:
        """The kernel says that a connection is broken."""
        if address in self._upstreams:
            self._redial(address)
            self._lose_upstream(address, "the connection to the prefill engine was lost")

    def _lose_upstream(self, address: str, reason: str) -> None:
        self._upstreams[address].welcome = None
        self._receive(self.receiving.lost(address, reason, self.world.now))

    # -- time ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self.world.now
        self._send(self.sending.expire(now))
        for peer, downstream in list(self._peers.items()):
            if downstream.last_heard < now - SILENCE_S:
                self.lose(peer.removesuffix("/0"), f"silent for {SILENCE_S:g} s")
        for copy in list(self.copies.values()):
            if not copy.is_over and copy.moved_at < now - SILENCE_S:
                incarnation = copy.target.incarnation
                self.lose(incarnation, f"no write to it has ended for {SILENCE_S:g} s")
        self._receive(self.receiving.tick(now))
        for session in self.receiving.sessions():
            if session.cancel_reason is None and session.deadline <= now:
                self.world.fail(f"{session.request_id} waits for pages beyond its deadline")
        for address in list(self._upstreams):
            self._keep_alive(address)
        self._post_due()
        self.engine.transfers_changed()
        self.engine.process.at(TICK_S, self._tick)

    def _keep_alive(self, address: str) -> None:
        upstream = self._upstreams[address]
        is_silent = self.world.now - upstream.last_heard > SILENCE_S
        if upstream.welcome is not None and not is_silent:
            self._tell(address, Ping())
        elif upstream.welcome is not None:
            self._redial(address)
            self._lose_upstream(address, f"the prefill engine was silent for {SILENCE_S:g} s")
        elif is_silent and not self.receiving.waits_for(address):
            del self._upstreams[address]
        elif is_silent:
            self._redial(address)
        elif upstream.hello_due:
            upstream.hello_due = False
            self._tell(address, Hello())
