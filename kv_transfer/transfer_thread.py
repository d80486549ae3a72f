"""The one thread of a worker that moves KV: it owns the transport, the control sockets and every
transfer of its rank.

The engine's own threads only enqueue (``begin_step``, ``layer_done``, ``end_step``) and collect
(``take_results``); none of these waits, except ``begin_step`` of a step that preempts a request
whose pages are being read.

When it polls: with nothing open it sleeps until a socket, the engine or a deadline wakes it. While
a peer writes to us and the transport needs our help, or while own writes are open, it polls in
short naps; it never spins, because on a small host the core that it would take is the one that
computes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import zmq

from splitserve.kv_transfer.holdings import HoldingsTaker, QuarantineLimits, RankHoldings
from splitserve.kv_transfer.messages import Introduction
from splitserve.kv_transfer.orders import StepOrders, TransferResults
from splitserve.kv_transfer.process_identity import own_identity
from splitserve.kv_transfer.receiving_side import ReceivingSide
from splitserve.kv_transfer.sending_side import SendingSide
from splitserve.kv_transfer.transfer_facts import UNTAKEN_LIMIT_TRANSFERS, TransferFacts
from splitserve.kv_transfer.transfer_log import TransferLog
from splitserve.kv_transfer.transports.registry import create
from splitserve.kv_transfer.transports.settings import TransportSettings

if TYPE_CHECKING:
    from splitserve.kv_transfer.layout import PageLayout
    from splitserve.kv_transfer.settings import TransferSettings
    from splitserve.kv_transfer.transports.base import Region, Transport

logger = logging.getLogger(__name__)

IDLE_WAIT_MS = 500
NAP_S = 50e-6
"""Between polls while bytes move."""
WAITING_NAP_MS = 1
"""Between polls while a peer has begun to write and is still computing, or bytes should move but do
not.
"""
QUIET_S = 1.0
"""After this long without a sign of progress the naps become longer."""
HOLDINGS_INTERVAL_S = 0.25
"""Between two looks at what is held for whom; whoever asks does so twice a second."""
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 5.0
PREEMPTION_DEADLINE_S = 30.0
DEATH_CHECK_S = 0.5
"""How soon a caller that waits for the thread notices its death."""

WhenReady = Callable[[], None]
"""Returns once a layer's bytes are in memory (on CUDA: waits for an event)."""


class TransferThreadError(RuntimeError):
    """The transfer thread could not start or has died; the cause is chained."""


class TransferThread:
    """Moves one rank's KV in both roles."""

    def __init__(
        self,
        settings: TransferSettings,
        *,
        layout: PageLayout,
        regions: Sequence[Region],
        fingerprint: dict[str, str],
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._regions = regions
        self._fingerprint = fingerprint
        self._commands: deque[tuple[str, Any]] = deque()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._finished_sending: set[str] = set()
        self._finished_receiving: set[str] = set()
        self._failed_receiving: set[str] = set()
        self._ended: deque[TransferFacts] = deque(maxlen=UNTAKEN_LIMIT_TRANSFERS)
        self._counters: dict[str, float] = {}
        self._open: tuple[int, int] = (0, 0)
        self._holdings = RankHoldings()
        self._holdings_at = 0.0
        self._taker = HoldingsTaker(QuarantineLimits(
            fence_timeout_s=settings.fence_timeout_s,
            limit_bytes=settings.quarantine_limit_bytes,
            block_bytes=layout.layers * layout.page_bytes,
        ))  # fmt: skip
        self._stopping = False
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._step_bytes_per_layer = 0
        self._unannounced_bytes = 0
        self._layers_left = 0
        self._has_progress = False
        self._thread = threading.Thread(
            target=self._run, name=f"splitserve-transfer-{settings.rank}", daemon=True
        )

    # -- the engine's threads ------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and wait until peers can reach it.

        Raises ``TransferThreadError`` when the transport or the control address cannot be had.
        """
        self._thread.start()
        if not self._started.wait(START_DEADLINE_S):
            raise TransferThreadError(
                f"the transfer thread did not start in {START_DEADLINE_S:g} s"
            )
        self._check()

    def begin_step(self, orders: StepOrders, when_ready: WhenReady | None = None) -> None:
        """Tell the thread what this step is about, before its forward pass.

        ``when_ready`` waits for what earlier steps computed: blocks that are final before this step
        are read only after it.
        """
        self._check()
        blocks = sum(p.final_after - p.final_before for p in orders.progress)
        self._step_bytes_per_layer = blocks * self._layout.page_bytes
        self._unannounced_bytes = 0
        self._layers_left = self._layout.layers
        self._has_progress = bool(orders.progress)
        if orders.is_empty:
            return
        done = threading.Event() if orders.preempted else None
        self._command("begin", (orders, done, when_ready, monotonic()))
        until = monotonic() + PREEMPTION_DEADLINE_S
        while done is not None and not done.wait(DEATH_CHECK_S):
            self._check()
            if monotonic() > until:
                raise TransferThreadError("the transfer thread did not let go of preempted blocks")

    def layer_done(self, layer: int, when_ready: WhenReady | None = None) -> None:
        """The forward pass has left ``layer``; cheap enough to be called from the layer hook."""
        if not self._step_bytes_per_layer:
            return
        self._commands.append(("layer", (layer, when_ready, monotonic())))
        self._unannounced_bytes += self._step_bytes_per_layer
        self._layers_left -= 1
        if self._unannounced_bytes >= self._settings.stream_min_bytes or not self._layers_left:
            self._unannounced_bytes = 0
            self._wake()

    def end_step(self, when_ready: WhenReady | None = None) -> None:
        """The forward pass is over; layers whose hook did not fire are swept up."""
        if self._has_progress:
            self._has_progress = False
            self._step_bytes_per_layer = 0
            self._command("end", (when_ready, monotonic()))

    def take_results(self) -> TransferResults:
        """What has finished since the last call."""
        self._check()
        with self._lock:
            results = TransferResults(
                frozenset(self._finished_sending),
                frozenset(self._finished_receiving),
                frozenset(self._failed_receiving),
            )
            self._finished_sending.clear()
            self._finished_receiving.clear()
            self._failed_receiving.clear()
        return results

    def take_ended(self) -> tuple[TransferFacts, ...]:
        """The facts of the transfers that have ended since the last call, in either role."""
        if not self._ended:
            return ()
        with self._lock:
            ended = tuple(self._ended)
            self._ended.clear()
        return ended

    def counters(self) -> dict[str, float]:
        """Monotonic counters of both roles, and ``open_sends``/``open_receives``."""
        with self._lock:
            counters = dict(self._counters)
            counters["open_sends"], counters["open_receives"] = self._open
        return counters

    def holdings(self) -> RankHoldings:
        """What this rank holds for whom, as of less than a second ago."""
        with self._lock:
            return self._holdings

    def stop(self) -> None:
        """End the thread; afterwards the registered memory is not touched any more. May be called
        twice.
        """
        self._stopping = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join(STOP_DEADLINE_S)
            if self._thread.is_alive():
                raise TransferThreadError(
                    f"the transfer thread did not stop in {STOP_DEADLINE_S:g} s"
                )

    def _check(self) -> None:
        if self._failure is not None:
            raise TransferThreadError(
                f"the transfer thread has died: {self._failure}"
            ) from self._failure

    def _command(self, name: str, argument: Any) -> None:
        self._commands.append((name, argument))
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # The counter is full: it is awake.
            os.eventfd_write(self._wakeup, 1)

    # -- the transfer thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            logger.exception("the transfer thread died")
            self._failure = error
        finally:
            self._started.set()

    def _serve(self) -> None:
        settings = self._settings
        transport = create(settings.transport, TransportSettings(
            incarnation=f"{settings.incarnation}/{settings.rank}", **settings.transport_settings
        ))  # fmt: skip
        context: zmq.Context[Any] = zmq.Context()
        log = TransferLog()
        try:
            transport.register(self._regions)
            introduction = Introduction(
                incarnation=settings.incarnation,
                rank=settings.rank,
                tensor_parallel=settings.tensor_parallel,
                fingerprint=self._fingerprint,
                layout=self._layout,
                transport=settings.transport,
                description=transport.describe(),
                process=own_identity(),
            )
            sending = SendingSide(context, settings, introduction, transport, log)
            receiving = ReceivingSide(context, settings, introduction, transport, log)
            self._started.set()
            try:
                while not self._stopping:
                    self._wait(transport, sending, receiving)
                    self._turn(transport, sending, receiving)
            finally:
                receiving.close()
                sending.close()
        finally:
            transport.close()
            context.destroy(0)
            log.close()

    def _wait(self, transport: Transport, sending: SendingSide, receiving: ReceivingSide) -> None:
        """Sleep until there may be something to do."""
        if self._commands:
            return
        must_help = transport.capabilities.target_must_progress and receiving.book.is_writing
        is_moving = sending.has_open_writes or (must_help and receiving.book.expects_last_bytes)
        if is_moving and monotonic() - max(sending.moved_at, receiving.moved_at) < QUIET_S:
            sleep(NAP_S)
            return
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        poller.register(sending.socket, zmq.POLLIN)
        for source in receiving.sockets:
            poller.register(source, zmq.POLLIN)
        for descriptor in (*transport.filenos(), *sending.pidfds(), *receiving.pidfds()):
            poller.register(descriptor, zmq.POLLIN)
        poller.poll(WAITING_NAP_MS if is_moving or must_help else IDLE_WAIT_MS)

    def _turn(self, transport: Transport, sending: SendingSide, receiving: ReceivingSide) -> None:
        with suppress(BlockingIOError):  # Woken by something else.
            os.eventfd_read(self._wakeup)
        now = monotonic()
        self._carry_out(sending, receiving)
        sending.receive()
        receiving.receive()
        for pidfd in _readable([*sending.pidfds(), *receiving.pidfds()]):
            sending.process_gone(pidfd)
            receiving.process_gone(pidfd)
        sending.post_due()
        sending.look_after_posting()
        sending.tick(now)
        receiving.tick(now)
        sending.post_due()  # A fence may have made room for a newer grant.
        self._publish(sending, receiving)

    def _carry_out(self, sending: SendingSide, receiving: ReceivingSide) -> None:
        while self._commands:
            name, argument = self._commands.popleft()
            if name == "layer":
                layer, when_ready, at = argument
                if when_ready is not None:
                    when_ready()
                    at = monotonic()
                sending.layer_done(layer, at)
            elif name == "end":
                when_ready, at = argument
                if when_ready is not None:
                    when_ready()
                    at = monotonic()
                sending.end_step(at)
            else:
                orders, done, when_ready, began = argument
                if when_ready is not None and orders.progress:
                    when_ready()
                now = monotonic()
                for incarnation in orders.dead_peers:
                    sending.incarnation_gone(incarnation)
                sending.begin_step(orders, now, began)
                receiving.begin_step(orders, now)
                if done is not None:
                    done.set()

    def _publish(self, sending: SendingSide, receiving: ReceivingSide) -> None:
        with self._lock:
            self._finished_sending.update(sending.released)
            for request_id, landed in receiving.finished:
                self._finished_receiving.add(request_id)
                if not landed:
                    self._failed_receiving.add(request_id)
            self._ended.extend(sending.records.facts)
            self._ended.extend(receiving.facts)
            self._counters = {**sending.book.counters, **receiving.book.counters}
            self._open = (sending.book.open_sessions, receiving.book.open_sessions)
        sending.records.facts.clear()
        receiving.facts.clear()
        sending.released.clear()
        receiving.finished.clear()
        self._publish_holdings(sending, receiving)

    def _publish_holdings(self, sending: SendingSide, receiving: ReceivingSide) -> None:
        """A few times a second, and at once when nothing is held any more."""
        now = monotonic()
        is_empty = self._open == (0, 0)
        if is_empty and not self._holdings.held:
            return
        if is_empty or now - self._holdings_at >= HOLDINGS_INTERVAL_S:
            self._holdings_at = now
            holdings = self._taker.take(sending.book, receiving.book, now)
            with self._lock:
                self._holdings = holdings


def _readable(descriptors: list[int]) -> list[int]:
    """Those of ``descriptors`` that are readable now."""
    if not descriptors:
        return []
    poller = zmq.Poller()
    for descriptor in descriptors:
        poller.register(descriptor, zmq.POLLIN)
    return [descriptor for descriptor, _ in poller.poll(0) if isinstance(descriptor, int)]
