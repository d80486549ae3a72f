"""A ``SendBook`` and the ``ReceiveSession``s of two decode ranks, against a model of memory.

Hypothesis chooses what happens: requests open, compute, are preempted, close; ranks grant, cancel
and come back with new attempts; messages arrive late, in any order, and twice; writes land or fail;
peers are lost. The model holds who owns each page and what every write reads, and fails when a byte
could land in a page that is not granted any more, or is not the one that it should be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from splitserve.kv_transfer.messages import Cancel, Delivered, Fenced, Grant, Landed, Writing
from splitserve.kv_transfer.send_book import SendBook
from splitserve.kv_transfer.session_receive import ReceiveSession, Source
from splitserve.kv_transfer.session_send import Release, Say, SendEffect, Write

LAYERS = 2
BLOCKS = 3
PEERS = ("d0", "d1")
NAMES = ("t", "u")
SELDOM = st.sampled_from([True, False, False, False, False])
"""What ends a transfer is drawn less often than what goes on with it."""
LEASE_S = 10.0
HASH = b"h"


@dataclass
class Request:
    """A prefill leg on P, as its engine sees it."""

    transfer_id: str
    request_id: str
    computed: int = 0
    """Blocks that are final in every layer."""
    layers_done: int = LAYERS
    """Layers of the current step that have run; all when none is running."""
    step_end: int = 0
    generation: int = 0
    """How often its blocks were taken away."""
    is_closed: bool = False


@dataclass
class Posted:
    """A write under way: where it reads and where it lands."""

    write: Write
    pages: list[tuple[int, int]]
    generation: int


@dataclass
class Receive:
    """A decode leg: the session, and what has landed in its pages."""

    session: ReceiveSession
    peer: str
    tag: int
    landed: dict[tuple[int, int], int] = field(default_factory=dict)
    is_settled: bool = False

    @property
    def expected(self) -> set[tuple[int, int]]:
        blocks = range(self.session.first_block, BLOCKS)
        return {(layer, block) for layer in range(LAYERS) for block in blocks}


class Transfers(RuleBasedStateMachine):
    """Everything that may happen to two transfers between one prefill and two decode ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.book = SendBook(
            layers=LAYERS, stream_min_bytes=200, write_limit_bytes=300, lease_s=LEASE_S
        )
        self.now = 0.0
        self.current = {name: f"{name}0" for name in NAMES}
        """The transfer of each name that is under way; the next one follows its end."""
        self.requests: dict[str, Request] = {}
        self.released: list[str] = []
        self.number = 0
        self.receives: dict[int, Receive] = {}
        self.open_writes: dict[int, Posted] = {}
        self.fenced_tags: set[int] = set()
        self.to_prefill: list[tuple[str, Any]] = []
        self.to_decode: list[tuple[str, Any]] = []

    @initialize(
        requests=st.sets(st.sampled_from(NAMES)),
        grants=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(PEERS)), unique=True),
    )
    def begin(self, requests: set[str], grants: list[tuple[str, str]]) -> None:
        for name in sorted(requests):
            self.open(name)
        for name, peer in grants:
            self.grant(name, peer, 0, 1, HASH)

    # -- effects -----------------------------------------------------------------------------------

    def perform(self, effects: list[SendEffect], *, unreachable: str = "") -> None:
        for effect in effects:
            match effect:
                case Say(peer, message):
                    self.check_said(peer, message)
                    if peer != unreachable:
                        self.to_decode.append((peer, message))
                case Write():
                    self.post(effect)
                case Release(request_id, transfer_id, _):
                    assert request_id not in self.released, "released twice"
                    request = self.requests.pop(transfer_id)
                    assert request.is_closed, "released while the engine uses it"
                    assert request_id == request.request_id
                    reading = [
                        p for p in self.open_writes.values() if p.write.transfer_id == transfer_id
                    ]
                    assert not reading, "released while it is read"
                    self.released.append(request_id)
                    name, number = transfer_id[0], int(transfer_id[1:])
                    self.current[name] = f"{name}{number + 1}"

    def check_said(self, peer: str, message: Any) -> None:
        if isinstance(message, Writing):
            return
        assert isinstance(message, Delivered | Fenced)
        for tag, receive in self.receives.items():
            session = receive.session
            key = (receive.peer, session.transfer_id, session.attempt)
            if key == (peer, message.transfer_id, message.attempt):
                self.fenced_tags.add(tag)
                assert all(p.write.tag != tag for p in self.open_writes.values()), (
                    "fenced while open"
                )
                if isinstance(message, Delivered):
                    assert set(receive.landed) == receive.expected, "delivered without all pages"
                    assert message.pages == len(receive.expected)

    def post(self, write: Write) -> None:
        request = self.requests[write.transfer_id]
        assert write.tag not in self.fenced_tags, "a write is due after its fence"
        assert self.receives[write.tag].peer == write.peer
        pages = [(layer, b) for layer, first, end in write.spans for b in range(first, end)]
        for layer, block in pages:
            final = request.computed
            if layer < request.layers_done and request.layers_done < LAYERS:
                final = max(final, request.step_end)
            assert block < final, "a block is read before it is final"
        self.number += 1
        self.open_writes[self.number] = Posted(write, pages, request.generation)
        self.book.write_posted(write, self.number, len(pages))

    def land(self, write_id: int, *, error: str | None = None, partly: bool = False) -> None:
        posted = self.open_writes.pop(write_id)
        receive = self.receives[posted.write.tag]
        pages = posted.pages if error is None else posted.pages[:partly]
        if pages:
            assert not receive.is_settled, "a byte lands in a page that was given back"
        if error is None:
            request = self.requests[posted.write.transfer_id]
            assert posted.generation == request.generation, "read from blocks that were taken away"
        for page in pages:
            assert page in receive.expected
            assert page not in receive.landed, "a page is written twice"
            receive.landed[page] = posted.generation
        write = posted.write
        self.perform(self.book.write_ended(write.transfer_id, write.peer, write_id, error))

    # -- the prefill engine ------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES))
    def open(self, name: str) -> None:
        transfer_id = self.current[name]
        if transfer_id in self.requests:
            return
        self.number += 1
        request = Request(transfer_id, f"r{self.number}")
        self.requests[transfer_id] = request
        self.perform(
            self.book.open(
                transfer_id,
                request.request_id,
                prompt_tokens=BLOCKS,
                prompt_hash=HASH,
                total_blocks=BLOCKS,
            )
        )

    @rule(
        name=st.sampled_from(NAMES),
        end=st.integers(1, BLOCKS),
        layers=st.integers(1, LAYERS),
        flush=st.booleans(),
    )
    def compute(self, name: str, end: int, layers: int, flush: bool) -> None:
        """Begin a step, or go on with the one that runs."""
        transfer_id = self.current[name]
        request = self.requests.get(transfer_id)
        if request is None or request.is_closed:
            return
        if request.layers_done == LAYERS:
            request.step_end, request.layers_done = max(end, request.computed), 0
            self.book.blocks_known(transfer_id, list(range(request.step_end)))
            for layer in range(LAYERS):
                self.book.blocks_final(transfer_id, layer, request.computed)
        for _ in range(layers):
            self.layer_done(request)
            self.perform(self.book.due_writes(flush=flush))

    def layer_done(self, request: Request) -> None:
        if request.layers_done < LAYERS:
            self.book.blocks_final(request.transfer_id, request.layers_done, request.step_end)
            request.layers_done += 1
        if request.layers_done == LAYERS:
            request.computed = request.step_end

    @rule(really=SELDOM, name=st.sampled_from(NAMES), fail=st.booleans())
    def preempt(self, name: str, fail: bool, really: bool) -> None:
        if not really:
            return
        transfer_id = self.current[name]
        request = self.requests.get(transfer_id)
        if request is None or request.is_closed or request.layers_done < LAYERS:
            return
        self.book.preempted(request.request_id)
        for write_id, posted in list(self.open_writes.items()):
            if posted.write.transfer_id == transfer_id:
                self.land(write_id, error="given up" if fail else None)
        if transfer_id in self.requests:
            request.generation += 1
            request.computed = request.step_end = 0

    @rule(name=st.sampled_from(NAMES), aborted=st.booleans())
    def close(self, name: str, aborted: bool) -> None:
        transfer_id = self.current[name]
        request = self.requests.get(transfer_id)
        if request is None or request.is_closed or request.layers_done < LAYERS:
            return
        request.is_closed = True
        self.perform(self.book.close(request.request_id, aborted=aborted, now=self.now))

    @rule(really=SELDOM, name=st.sampled_from(NAMES))
    def abandon(self, name: str, really: bool) -> None:
        if not really:
            return
        transfer_id = self.current[name]
        self.perform(self.book.abandon(transfer_id, "given up"))

    @rule(really=SELDOM, seconds=st.sampled_from([1.0, LEASE_S]))
    def wait(self, seconds: float, really: bool) -> None:
        if not really:
            return
        self.now += seconds
        self.perform(self.book.expire(self.now))

    # -- the decode ranks --------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(NAMES),
        peer=st.sampled_from(PEERS),
        first=st.integers(0, BLOCKS - 1),
        expected=st.integers(1, 2),
        hash_of=st.sampled_from([HASH, HASH, HASH, b"other"]),
    )
    def grant(self, name: str, peer: str, first: int, expected: int, hash_of: bytes) -> None:
        transfer_id = self.current[name]
        earlier = [
            r
            for r in self.receives.values()
            if (r.peer, r.session.transfer_id) == (peer, transfer_id)
        ]
        if any(r.session.cancel_reason is None and not r.is_settled for r in earlier):
            return
        self.number += 1
        tag, attempt = self.number, len(earlier) + 1
        session = ReceiveSession(
            transfer_id=transfer_id,
            request_id=f"q{tag}",
            attempt=attempt,
            peer_incarnation="P",
            first_block=first,
            block_ids=tuple(range(1, 1 + BLOCKS - first)),
            prompt_tokens=BLOCKS,
            prompt_hash=hash_of,
            heads=frozenset({0}),
            deadline=0.0,
            sources={"P": Source()},
        )
        receive = self.receives[tag] = Receive(session, peer, tag)
        session.granted("P", tag, len(receive.expected), frozenset({0}))
        message = Grant(
            transfer_id=transfer_id,
            attempt=attempt,
            tag=tag,
            first_block=first,
            block_ids=session.block_ids,
            prompt_tokens=BLOCKS,
            prompt_hash=hash_of,
            grants_expected=expected,
        )
        self.to_prefill.append((peer, message))

    @rule(data=st.data(), really=SELDOM)
    def cancel(self, data: st.DataObject, really: bool) -> None:
        if not really:
            return
        unsettled = [r for r in self.receives.values() if not r.is_settled]
        if unsettled:
            self.ask_fence(data.draw(st.sampled_from(unsettled)))

    def ask_fence(self, receive: Receive) -> None:
        session = receive.session
        session.cancel("enough")
        told = {"transfer_id": session.transfer_id, "attempt": session.attempt}
        self.to_prefill.append((receive.peer, Cancel(**told, reason="enough")))

    @rule(really=SELDOM, name=st.sampled_from(NAMES), peer=st.sampled_from(PEERS))
    def decline(self, name: str, peer: str, really: bool) -> None:
        if not really:
            return
        transfer_id = self.current[name]
        self.to_prefill.append((peer, Cancel(transfer_id=transfer_id, attempt=0, reason="no")))

    @rule(really=SELDOM, name=st.sampled_from(NAMES), peer=st.sampled_from(PEERS))
    def lie_about_landing(self, name: str, peer: str, really: bool) -> None:
        if not really:
            return
        transfer_id = self.current[name]
        self.to_prefill.append((peer, Landed(transfer_id=transfer_id, attempt=1)))

    def reported(self, peer: str, message: Delivered | Fenced) -> None:
        for receive in self.receives.values():
            session = receive.session
            if (receive.peer, session.transfer_id, session.attempt) != (
                peer,
                message.transfer_id,
                message.attempt,
            ):
                continue
            if isinstance(message, Delivered):
                session.delivered("P", message.pages, message.bytes)
            else:
                session.ended("P", message.reason)
            if session.outcome is not None and not receive.is_settled:
                receive.is_settled = True
                assert receive.tag in self.fenced_tags, "settled without a fence"
                if session.outcome == "landed":
                    assert set(receive.landed) == receive.expected, "landed without all pages"
                told = {"transfer_id": session.transfer_id, "attempt": session.attempt}
                if isinstance(message, Delivered):
                    self.to_prefill.append((peer, Landed(**told)))

    # -- messages, writes, losses ------------------------------------------------------------------

    @precondition(lambda self: self.to_prefill)
    @rule(data=st.data(), twice=st.booleans())
    def arrive_at_prefill(self, data: st.DataObject, twice: bool) -> None:
        at = data.draw(st.integers(0, len(self.to_prefill) - 1))
        peer, message = self.to_prefill[at] if twice else self.to_prefill.pop(at)
        self.take_at_prefill(peer, message)

    def take_at_prefill(self, peer: str, message: Any) -> None:
        """As the thread does it: what is due after a message is posted in the same turn."""
        match message:
            case Grant():
                self.perform(self.book.granted(peer, message, 100, self.now))
            case Cancel(transfer_id=transfer_id, attempt=attempt, reason=reason):
                self.perform(self.book.cancelled(peer, transfer_id, attempt, reason))
            case Landed(transfer_id=transfer_id, attempt=attempt):
                self.perform(self.book.landed(peer, transfer_id, attempt))
        self.perform(self.book.due_writes(flush=True))

    @precondition(lambda self: self.to_decode)
    @rule(data=st.data(), twice=st.booleans())
    def arrive_at_decode(self, data: st.DataObject, twice: bool) -> None:
        at = data.draw(st.integers(0, len(self.to_decode) - 1))
        peer, message = self.to_decode[at] if twice else self.to_decode.pop(at)
        if isinstance(message, Delivered | Fenced):
            self.reported(peer, message)

    @precondition(lambda self: self.open_writes)
    @rule(data=st.data(), error=st.sampled_from([None, None, "refused"]), partly=st.booleans())
    def write_ends(self, data: st.DataObject, error: str | None, partly: bool) -> None:
        write_id = data.draw(st.sampled_from(sorted(self.open_writes)))
        self.land(write_id, error=error, partly=partly)

    @rule(really=SELDOM, peer=st.sampled_from(PEERS), at_once=st.booleans())
    def lose(self, peer: str, at_once: bool, really: bool) -> None:
        """The connection breaks: what is on its way is lost, D asks for fences after it."""
        if not really:
            return
        self.perform(self.book.peer_lost(peer, "lost"), unreachable=peer)
        self.to_prefill = [(p, m) for p, m in self.to_prefill if p != peer]
        self.to_decode = [(p, m) for p, m in self.to_decode if p != peer]
        if at_once:
            for write_id, posted in list(self.open_writes.items()):
                if posted.write.peer == peer:
                    self.land(write_id, error="disconnected")
        for receive in self.receives.values():
            if receive.peer == peer and not receive.is_settled:
                self.ask_fence(receive)

    # -- always ------------------------------------------------------------------------------------

    @invariant()
    def pages_under_write_are_granted(self) -> None:
        for posted in self.open_writes.values():
            assert posted.write.tag not in self.fenced_tags
            assert not self.receives[posted.write.tag].is_settled

    def teardown(self) -> None:
        """Whatever has happened, everything ends: each request once, each receive once."""
        for request in self.requests.values():
            while request.layers_done < LAYERS:
                self.layer_done(request)
        for name in NAMES:
            self.close(name, aborted=False)
        for _ in range(4):
            for receive in self.receives.values():
                if not receive.is_settled:
                    self.ask_fence(receive)
            while self.to_prefill or self.to_decode or self.open_writes:
                if self.to_prefill:
                    self.take_at_prefill(*self.to_prefill.pop(0))
                elif self.open_writes:
                    self.land(min(self.open_writes))
                else:
                    peer, message = self.to_decode.pop(0)
                    if not isinstance(message, Writing):
                        self.reported(peer, message)
            self.wait(LEASE_S, really=True)
        assert not self.requests
        assert self.book.open_sessions == 0
        assert self.book.early_grants == 0
        assert all(receive.is_settled for receive in self.receives.values())


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
