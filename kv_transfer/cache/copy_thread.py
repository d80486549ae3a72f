"""The thread of a worker that copies KV between its pages and the host's arena.

The engine's thread only enqueues (``begin_step``, ``layer_done``, ``end_step``) and collects
(``take_news``); none of these waits. A server that is gone or silent ends every load as failed and
every save as done, in bounded time, and the thread connects again by itself.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.kv_transfer.cache import packets
from splitserve.kv_transfer.cache.arena import TOUCH_STEP_BYTES, Mapping
from splitserve.kv_transfer.cache.messages import (
    PROTOCOL_VERSION,
    Arena,
    FromServer,
    Hello,
    Ready,
    Reserved,
)
from splitserve.kv_transfer.cache.orders import CacheNews, CacheOrders, Loaded
from splitserve.kv_transfer.cache.page_copier import PageCopier
from splitserve.kv_transfer.cache.worker_loads import WorkerLoads
from splitserve.kv_transfer.cache.worker_saves import WorkerSaves

if TYPE_CHECKING:
    import socket

    from splitserve.kv_transfer.cache.geometry import ChunkGeometry
    from splitserve.kv_transfer.cache.settings import CacheClientConfig
    from splitserve.kv_transfer.layout import PageLayout

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""Between two attempts to connect."""
GREETING_S = 5.0
"""How long the server may take to answer a hello; nothing else waits for it."""
PACKETS_PER_TURN = 64
IDLE_WAIT_S = 0.5
STOP_DEADLINE_S = 5.0


class CacheThread:
    """One rank's end of the cache."""

    def __init__(
        self,
        config: CacheClientConfig,
        *,
        engine: str,
        rank: int,
        ranks: int,
        model: bytes,
        layout: PageLayout,
        geometry: ChunkGeometry,
    ) -> None:
        self._config = config
        self._hello = Hello(
            version=PROTOCOL_VERSION, engine=engine, rank=rank, ranks=ranks, model=model,
            geometry=geometry,
        )  # fmt: skip
        copier = PageCopier(layout, geometry)
        self._loads = WorkerLoads(copier)
        self._saves = WorkerSaves(copier)
        self._connection: socket.socket | None = None
        self._greeting: socket.socket | None = None
        """A connection whose hello has not been answered."""
        self._receiver: packets.Receiver[FromServer] | None = None
        self._decoder: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
        self._arena: Mapping | None = None
        self._mapped_bytes = 0
        """Of the arena, from its beginning on."""
        self._greet_until = 0.0
        self._next_try = 0.0
        self._is_refused = False
        self._commands: deque[tuple[str, Any]] = deque()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._loaded: list[Loaded] = []
        self._saved: list[int] = []
        self._counters: dict[str, float] = {}
        self._step = 0
        self._step_saves = False
        self._stopping = False
        self._open_loads = 0
        """As the engine's thread knows them."""
        self._load_ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"splitserve-cache-{rank}", daemon=True
        )

    # -- the engine's thread -------------------------------------------------------------------

    def start(self) -> None:
        """The thread runs and looks for the server at once, which need not be there yet."""
        self._wake()
        self._thread.start()

    def begin_step(self, orders: CacheOrders) -> None:
        """Tell the thread what this step is about, before its forward pass."""
        self._step = orders.step
        self._open_loads += len(orders.loads)
        self._step_saves = any(not save.is_final for save in orders.saves)
        if not orders.is_empty:
            self._command("orders", orders)

    def layer_done(self, layer: int) -> None:
        """The forward pass has left ``layer``; cheap enough to be called from the layer hook."""
        if self._step_saves:
            self._command("layer", layer)

    def end_step(self) -> None:
        """The forward pass is over: every layer is final."""
        if self._step_saves:
            self._step_saves = False
            self._command("end", None)

    def take_news(self, wait_s: float = 0.0) -> CacheNews:
        """What has ended since the last call. Raises when the thread has died.

        Waits for the end of a load if one is open, for at most ``wait_s``: an engine that has
        nothing else to do leaves the processor to the copy.
        """
        if wait_s and self._open_loads:
            self._load_ended.wait(wait_s)
        if self._failure is not None:
            raise RuntimeError(f"the cache thread has died: {self._failure}") from self._failure
        with self._lock:
            news = CacheNews(tuple(self._loaded), tuple(self._saved), self._step)
            self._loaded.clear()
            self._saved.clear()
            self._load_ended.clear()
        self._open_loads -= len(news.loaded)
        self._step = 0
        return news

    def counters(self) -> dict[str, float]:
        """Monotonic counters."""
        with self._lock:
            return dict(self._counters)

    def stop(self) -> None:
        """End the thread; afterwards neither pages nor arena are touched. May be called twice."""
        self._stopping = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join(STOP_DEADLINE_S)
            if self._thread.is_alive():
                raise RuntimeError(f"the cache thread did not stop in {STOP_DEADLINE_S:g} s")

    def _command(self, name: str, argument: Any) -> None:
        self._commands.append((name, argument))
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # The counter is full: it is awake.
            os.eventfd_write(self._wakeup, 1)

    # -- the cache thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wait()
                self._turn(monotonic())
        except BaseException as error:
            logger.exception("the cache thread died")
            self._failure = error
            self._load_ended.set()
        finally:
            self._disconnect("the engine stops")

    def _wait(self) -> None:
        if self._commands or self._map_more():
            return
        connections = (c for c in (self._connection, self._greeting) if c is not None)
        until = min(
            self._loads.next_deadline(), self._saves.next_deadline(), monotonic() + IDLE_WAIT_S
        )
        packets.wait([self._wakeup, *(c.fileno() for c in connections)], until - monotonic())

    def _map_more(self) -> bool:
        """Whether a step of mapping the arena was made: the first look at a page takes several
        times as long as copying it, and no request should wait for that.
        """
        if self._arena is None or self._mapped_bytes >= self._arena.size_bytes:
            return False
        end = min(self._mapped_bytes + TOUCH_STEP_BYTES, self._arena.size_bytes)
        try:
            self._arena.touch(self._mapped_bytes, end, writes=False)
        except OSError as error:
            logger.warning("the cache's arena is mapped as it is used: %s", error)
            end = self._arena.size_bytes
        self._mapped_bytes = end
        return True

    def _turn(self, now: float) -> None:
        with suppress(BlockingIOError):  # Woken by something else.
            os.eventfd_read(self._wakeup)
        if self._greeting is not None:
            self._hear_greeting(self._greeting, now)
        elif self._connection is None and now >= self._next_try and not self._is_refused:
            self._connect(now)
        try:
            self._carry_out(now)
            self._receive()
            self._advance(monotonic())
        except (packets.PeerGoneError, packets.BadPacketError) as error:
            self._disconnect(str(error))
        self._publish()

    def _carry_out(self, now: float) -> None:
        while self._commands:
            name, argument = self._commands.popleft()
            if name == "orders":
                is_there = self._connection is not None
                # All begin before anything is sent: a server that is gone must end each of them.
                questions: list[object | None] = [
                    *(self._loads.begin(load, now, is_there=is_there) for load in argument.loads),
                    *(self._saves.begin(save, now, is_there=is_there) for save in argument.saves),
                ]
                for question in questions:
                    self._send(question)
            elif name == "layer":
                self._saves.layer_final(argument)
            else:
                self._saves.all_final()

    def _receive(self) -> None:
        if self._receiver is None:
            return
        for message in self._receiver.messages(PACKETS_PER_TURN):
            if isinstance(message, Ready):
                assert self._arena is not None
                for answer in self._loads.ready(message, self._arena, monotonic()):
                    self._send(answer)
            elif isinstance(message, Reserved):
                self._send(self._saves.reserved(message))

    def _advance(self, now: float) -> None:
        """Copy what is due to be saved, and give up what is late."""
        if self._arena is not None:
            for message in self._saves.copy_due(self._arena):
                self._send(message)
        self._saves.expire(now)
        for answer in self._loads.expire(now):
            self._send(answer)

    def _send(self, message: object | None) -> None:
        """Raises ``PeerGoneError``, also for a server that does not read what it is told."""
        if message is None or self._connection is None:
            return
        if not packets.send(self._connection, message):
            raise packets.PeerGoneError("the cache server does not read")

    def _connect(self, now: float) -> None:
        self._next_try = now + RETRY_S
        try:
            connection = packets.connect(self._config.socket_path)
        except packets.PeerGoneError:
            return
        self._greeting, self._greet_until = connection, now + GREETING_S
        try:
            packets.send(connection, self._hello)
        except packets.PeerGoneError as error:
            self._not_greeted(error)

    def _hear_greeting(self, connection: socket.socket, now: float) -> None:
        try:
            found = packets.receive_with_descriptor(connection)
        except packets.PeerGoneError as error:
            self._not_greeted(error)
            return
        if found is None:
            if now >= self._greet_until:
                self._not_greeted(f"no answer to a hello within {GREETING_S:g} s")
            return
        packet, descriptor = found
        try:
            greeting = self._decoder.decode(packet)
        except msgspec.DecodeError as error:
            if descriptor is not None:
                os.close(descriptor)
            self._not_greeted(error)
            return
        self._greeting = None
        self._greeted(connection, greeting, descriptor)

    def _not_greeted(self, reason: object) -> None:
        logger.warning("the cache server at %s: %s", self._config.socket_path, reason)
        if self._greeting is not None:
            self._greeting.close()
            self._greeting = None

    def _greeted(self, connection: socket.socket, greeting: object, descriptor: int | None) -> None:
        if not isinstance(greeting, Arena) or descriptor is None or greeting.refusal:
            reason = greeting.refusal if isinstance(greeting, Arena) else "no greeting"
            logger.warning("this engine does not use the cache: %s", reason)
            self._is_refused = isinstance(greeting, Arena)
            connection.close()
            if descriptor is not None:
                os.close(descriptor)
            return
        try:
            self._arena, self._mapped_bytes = Mapping(descriptor, greeting.size_bytes), 0
        except OSError as error:
            logger.warning("the cache's arena cannot be mapped: %s", error)
            connection.close()
            return
        finally:
            os.close(descriptor)
        self._connection = connection
        self._receiver = packets.Receiver(connection, self._decoder)
        self._loads.counters["connections"] += 1
        if greeting.is_coded:
            self._loads.expect_coded()
        logger.info("the cache of this host has an arena of %d bytes", greeting.size_bytes)

    def _disconnect(self, reason: str) -> None:
        """No copy is under way: the thread that copies is this one."""
        if self._connection is not None:
            if not self._stopping:
                logger.warning("without the cache for now: %s", reason)
            self._connection.close()
        if self._greeting is not None:
            self._greeting.close()
        self._connection = self._receiver = self._greeting = None
        self._loads.lost(monotonic())
        self._saves.lost()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _publish(self) -> None:
        loaded, saved = self._loads.take_ended(), self._saves.take_ended()
        counters = {**self._loads.counters, **self._saves.counters}
        with self._lock:
            self._loaded += loaded
            self._saved += saved
            if loaded:
                self._load_ended.set()
            self._counters = {f"cache_{name}": float(value) for name, value in counters.items()}
            self._counters["cache_connected"] = float(self._connection is not None)
