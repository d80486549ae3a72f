"""The authenticated loopback endpoint through which the agent talks to an engine's connector.

Server: a thread beside the engine's scheduler. It answers questions from facts that the scheduler
thread publishes and queues orders that the scheduler takes into its next step. Client: asyncio,
used by the agent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from splitserve.kv_transfer.channel import dial, listen
from splitserve.kv_transfer.held_prefixes import NOTHING_HELD, PrefixReport
from splitserve.kv_transfer.holdings import Holding
from splitserve.kv_transfer.orders import Retarget
from splitserve.kv_transfer.transfer_facts import UNTAKEN_LIMIT_TRANSFERS, TransferFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

ORDER_LIMIT = 10_000
"""Orders that may wait for a step; a further one is refused."""
ANSWER_DEADLINE_S = 5.0
START_DEADLINE_S = 10.0
POLL_MS = 200
HELD_ANSWER_S = 3.0
"""How long the question for ended transfers is held while there are none."""
REPORT_LIMIT_TRANSFERS = 64
"""Ended transfers in one answer."""


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True, tag="description"):
    """What does not change while the engine lives."""

    incarnation: str
    fingerprint: dict[str, str]
    control_addresses: tuple[str, ...]
    block_tokens: int
    total_blocks: int
    max_model_len: int
    tensor_parallel: int
    transport: str
    reports_prefixes: bool = False
    """Its own prefix cache is on, and ``AskPrefixes`` says what is in it."""
    reports_transfers: bool = False
    """``AskTransfers`` says when what happened to its transfers."""
    uses_cache: bool = False
    """It loads what the host's cache has."""
    step_limit_tokens: int = 0
    """Tokens that a step computes at most; 0 in this and what follows: not known."""
    running_limit_requests: int = 0
    kv_bytes_per_token: int = 0
    """Of all layers, heads and ranks."""
    vocabulary_tokens: int = 0
    engine: str = ""
    """Name and version."""
    hardware: str = ""
    """What it computes on, for people."""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """What the scheduler last published."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    open_transfers: int = 0
    leased_blocks: int = 0
    quarantined_transfers: int = 0
    quarantined_blocks: int = 0
    """Blocks of cancelled receives whose writer has neither fenced nor died."""
    holdings: tuple[Holding, ...] = ()
    """Open transfers, up to a bound."""
    holdings_left_out: int = 0
    """Open transfers beyond the bound."""
    overdue_writers: tuple[str, ...] = ()
    """Incarnations that have to end so that quarantined blocks come back."""
    counters: dict[str, float] = {}

    @property
    def owes_nothing(self) -> bool:
        """Whether nobody waits for the engine: no client, and no peer that still fetches pages."""
        return not (self.running or self.waiting or self.open_transfers or self.leased_blocks)


class AskDescription(msgspec.Struct, frozen=True, tag="ask_description"):
    """Answered with ``EngineDescription``."""


class AskStatus(msgspec.Struct, frozen=True, tag="ask_status"):
    """Answered with ``EngineStatus``."""


class AskPrefixes(msgspec.Struct, frozen=True, tag="ask_prefixes"):
    """Which beginnings of prompts the engine's own prefix cache has; answered with
    ``PrefixReport``.
    """

    from_start: bool
    """All of them; else what has changed since the last answer."""


class AskTransfers(msgspec.Struct, frozen=True, tag="ask_transfers"):
    """Which transfers have ended, and when what happened to them; answered with ``TransferReport``
    as soon as there are some, or after ``HELD_ANSWER_S``. A later question takes the place of one
    that is held.
    """


class TransferReport(msgspec.Struct, frozen=True, tag="transfers"):
    """Transfers that have ended since the last report, of either role and every rank."""

    ended: tuple[TransferFacts, ...] = ()


class GiveUpTransfer(msgspec.Struct, frozen=True, tag="give_up_transfer"):
    """The other leg of this transfer will not come; answered with ``Accepted``."""

    transfer_id: str
    reason: str


class PeerIsDead(msgspec.Struct, frozen=True, tag="peer_is_dead"):
    """The processes of this incarnation are proven gone; answered with ``Accepted``."""

    incarnation: str


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The order is queued for the next step."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The order is not taken."""

    reason: str


Order = GiveUpTransfer | PeerIsDead | Retarget
"""What waits for the engine's next step; answered with ``Accepted`` or ``Refused``."""
Question = AskDescription | AskStatus | AskPrefixes | AskTransfers | Order
Answer = EngineDescription | EngineStatus | PrefixReport | TransferReport | Accepted | Refused

_encode = msgspec.msgpack.Encoder().encode
_decode_question = msgspec.msgpack.Decoder(Question).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


class EngineEndpoint:
    """Server side. ``status`` and ``prefixes`` are called in the endpoint's thread and must only
    read what is safe to read there.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        description: EngineDescription,
        status: Callable[[], EngineStatus],
        prefixes: Callable[[bool], PrefixReport] = lambda from_start: NOTHING_HELD,
    ) -> None:
        self._address = address
        self._secret = secret
        self._description = description
        self._status = status
        self._prefixes = prefixes
        self._orders: deque[Order] = deque()
        self._ended: deque[TransferFacts] = deque(maxlen=UNTAKEN_LIMIT_TRANSFERS)
        """From the scheduler's thread to the endpoint's."""
        self._held: tuple[bytes, bytes, float] | None = None
        """(identity, number, until) of the question for ended transfers."""
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._started = threading.Event()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="splitserve-endpoint", daemon=True)

    def start(self) -> None:
        """Listen. Raises ``OSError`` when the address is taken."""
        self._thread.start()
        if not self._started.wait(START_DEADLINE_S):
            raise OSError(f"the engine endpoint did not start in {START_DEADLINE_S:g} s")
        if self._failure is not None:
            raise self._failure

    @property
    def has_orders(self) -> bool:
        """Whether the engine should take a step to carry out an order."""
        return bool(self._orders)

    def take_orders(
        self,
    ) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...], tuple[Retarget, ...]]:
        """((transfer id, reason) given up, incarnations proven dead, transfers with another prefill
        node) since the last call.
        """
        given_up: list[tuple[str, str]] = []
        dead: list[str] = []
        retargets: list[Retarget] = []
        while self._orders:
            order = self._orders.popleft()
            match order:
                case GiveUpTransfer(transfer_id, reason):
                    given_up.append((transfer_id, reason))
                case PeerIsDead(incarnation):
                    dead.append(incarnation)
                case Retarget():
                    retargets.append(order)
        return tuple(given_up), tuple(dead), tuple(retargets)

    def order(self, order: Order) -> Accepted | Refused:
        """Keep an order for the engine's next step, up to a bound."""
        if len(self._orders) >= ORDER_LIMIT:
            return Refused(f"{ORDER_LIMIT:,} orders wait for the engine's next step already")
        self._orders.append(order)
        return Accepted()

    def transfers_ended(self, ended: Iterable[TransferFacts]) -> None:
        """Whoever asks for them is told at once."""
        self._ended.extend(ended)
        if self._ended:
            with suppress(BlockingIOError):  # The counter is full: the thread is awake.
                os.eventfd_write(self._news, 1)

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(2 * POLL_MS / 1000 + 1)

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        try:
            try:
                router = listen(context, self._address, self._secret)
            except OSError as error:
                self._failure = error
                return
            finally:
                self._started.set()
            poller = zmq.Poller()
            poller.register(router, zmq.POLLIN)
            poller.register(self._news, zmq.POLLIN)
            while not self._stopping.is_set():
                poller.poll(POLL_MS)
                with suppress(BlockingIOError):  # Woken by a question, or by nothing.
                    os.eventfd_read(self._news)
                if router.poll(0):
                    self._answer(router)
                self._answer_held(router)
        finally:
            context.destroy(0)

    def _answer(self, router: zmq.Socket[Any]) -> None:
        frames = router.recv_multipart()
        try:
            identity, number, payload = frames
            question = _decode_question(payload)
        except (ValueError, msgspec.DecodeError) as error:
            logger.warning("dropped a question that cannot be read: %s", error)
            return
        if isinstance(question, AskTransfers):
            self._hold(router, identity, number)
            return
        answer: Answer
        match question:
            case AskDescription():
                answer = self._description
            case AskStatus():
                answer = self._status()
            case AskPrefixes(from_start):
                answer = self._prefixes(from_start)
            case _:
                answer = self.order(question)
        _send(router, identity, number, answer)

    def _hold(self, router: zmq.Socket[Any], identity: bytes, number: bytes) -> None:
        """Answered as soon as there is something to tell."""
        if self._held is not None:
            _send(router, *self._held[:2], TransferReport())
        self._held = (identity, number, monotonic() + HELD_ANSWER_S)

    def _answer_held(self, router: zmq.Socket[Any]) -> None:
        if self._held is None:
            return
        identity, number, until = self._held
        if not self._ended and monotonic() < until:
            return
        ended = [
            self._ended.popleft() for _ in range(min(len(self._ended), REPORT_LIMIT_TRANSFERS))
        ]
        self._held = None
        _send(router, identity, number, TransferReport(tuple(ended)))


def _send(router: zmq.Socket[Any], identity: bytes, number: bytes, answer: Answer) -> None:
    try:
        router.send_multipart([identity, number, _encode(answer)], zmq.NOBLOCK)
    except zmq.ZMQError as error:
        logger.info("could not answer the agent: %s", error)


class EngineEndpointClient:
    """Asyncio client of one engine's endpoint. Every call raises ``TimeoutError`` after
    ``ANSWER_DEADLINE_S``, and ``OSError`` when the engine refuses it.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._context = zmq.asyncio.Context()
        self._line = _Line(self._context, address, secret)
        self._transfers = _Line(self._context, address, secret)
        """Of its own, because its question is held."""

    async def describe(self) -> EngineDescription:
        """What the engine is."""
        answer = await self._line.ask(AskDescription())
        assert isinstance(answer, EngineDescription)
        return answer

    async def status(self) -> EngineStatus:
        """How the engine is."""
        answer = await self._line.ask(AskStatus())
        assert isinstance(answer, EngineStatus)
        return answer

    async def prefixes(self, *, from_start: bool) -> PrefixReport:
        """What the engine's own prefix cache has, or what has changed there."""
        answer = await self._line.ask(AskPrefixes(from_start))
        assert isinstance(answer, PrefixReport)
        return answer

    async def ended_transfers(self) -> tuple[TransferFacts, ...]:
        """The facts of transfers that have ended since the last call; waits for some for
        ``HELD_ANSWER_S``.
        """
        answer = await self._transfers.ask(AskTransfers())
        assert isinstance(answer, TransferReport)
        return answer.ended

    async def fail_transfer(self, transfer_id: str, reason: str) -> None:
        """Tell either side of a transfer that the other leg will not come."""
        await self._line.ask(GiveUpTransfer(transfer_id, reason))

    async def retarget(self, order: Retarget) -> None:
        """Tell a decode engine that another prefill node computes a transfer's prompt."""
        await self._line.ask(order)

    async def peer_died(self, incarnation: str) -> None:
        """Tell the engine that a peer's processes are proven gone."""
        await self._line.ask(PeerIsDead(incarnation))

    def close(self) -> None:
        """Close the connection."""
        self._context.destroy(0)


class _Line:
    """One connection to the endpoint: a question after the other."""

    def __init__(self, context: zmq.asyncio.Context, address: str, secret: bytes) -> None:
        self._socket: zmq.asyncio.Socket = dial(context, address, secret)  # type: ignore[assignment]
        self._lock = asyncio.Lock()
        self._number = 0

    async def ask(self, question: Question) -> Answer:
        """The answer. Raises ``TimeoutError`` when there is none, ``OSError`` for a refusal."""
        async with asyncio.timeout(ANSWER_DEADLINE_S), self._lock:
            self._number += 1
            number = self._number.to_bytes(8, "little")
            await self._socket.send_multipart([number, _encode(question)])
            while True:
                answered, payload = await self._socket.recv_multipart()
                if answered == number:
                    answer = _decode_answer(payload)
                    if isinstance(answer, Refused):
                        raise OSError(answer.reason)
                    return answer
