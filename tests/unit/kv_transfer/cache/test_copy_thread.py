"""A worker's cache thread and servers that misbehave: every load and save ends, in time."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.cache_rig import CHUNK_BYTES, CHUNK_TOKENS, DEADLINE_S, SHAPE, until

from splitserve.kv_transfer.cache import copy_thread, packets, worker_saves
from splitserve.kv_transfer.cache.copy_thread import CacheThread
from splitserve.kv_transfer.cache.messages import (
    Arena,
    Commit,
    FromClient,
    Hello,
    OpenChunks,
    Reserve,
    Reserved,
)
from splitserve.kv_transfer.cache.orders import CacheOrders, LoadOrder, SaveOrder
from splitserve.kv_transfer.cache.settings import CacheClientConfig
from splitserve.orchestrator.engines.mock.model import KvMemory, chunk_geometry

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

    from splitserve.kv_transfer.cache.orders import Loaded

ARENA_BYTES = 8 * CHUNK_BYTES
BLOCKS = CHUNK_TOKENS // SHAPE.block_tokens


class Server:
    """Answers what the test wants."""

    def __init__(self, path: str) -> None:
        self.listener = packets.listen(path)
        self.listener.settimeout(DEADLINE_S)
        self.connection: socket.socket | None = None
        self._decoder: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
        self.descriptor = os.memfd_create("arena")
        os.ftruncate(self.descriptor, ARENA_BYTES)

    def accept(self) -> Hello:
        """A worker has connected; its hello."""
        self.hang_up()
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(DEADLINE_S)
        hello = self.hear()
        assert isinstance(hello, Hello)
        return hello

    def hear(self) -> object:
        assert self.connection is not None
        packet = self.connection.recv(packets.BUFFER_BYTES)
        return self._decoder.decode(packet) if packet else None

    def greet(self, refusal: str = "") -> None:
        assert self.connection is not None
        answer = Arena(server="s", size_bytes=ARENA_BYTES, tiers=("cpu",), refusal=refusal)
        assert packets.send(self.connection, answer, self.descriptor)

    def say(self, message: object) -> None:
        assert self.connection is not None
        assert packets.send(self.connection, message)

    def hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def close(self) -> None:
        self.hang_up()
        self.listener.close()
        os.close(self.descriptor)


class Worker:
    """The thread, and what it has said."""

    def __init__(self, path: str) -> None:
        memory = KvMemory(SHAPE, rank=0, tensor_parallel=1, blocks=64)
        self._memory = memory
        self.thread = CacheThread(
            CacheClientConfig(socket_path=path, chunk_tokens=CHUNK_TOKENS),
            engine="e", rank=0, ranks=1, model=bytes(32), layout=memory.layout,
            geometry=chunk_geometry(CHUNK_TOKENS, SHAPE),
        )  # fmt: skip
        self.loaded: dict[int, Loaded] = {}
        self.saved: list[int] = []

    def collect(self) -> None:
        news = self.thread.take_news()
        self.loaded |= {loaded.load_id: loaded for loaded in news.loaded}
        self.saved += news.saved

    def until_ended(self, loads: set[int], saves: set[int]) -> None:
        def ended() -> bool:
            self.collect()
            return set(self.loaded) == loads and set(self.saved) == saves

        until(ended, f"{loads} to be loaded and {saves} to be saved")
        assert len(self.saved) == len(saves), "a save has ended twice"

    @property
    def is_connected(self) -> bool:
        return bool(self.thread.counters().get("cache_connected"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(str(tmp_path / "cache.sock"))
    yield made
    made.close()


@pytest.fixture
def worker(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """Connecting to the server, and soon again when that fails."""
    monkeypatch.setattr(copy_thread, "RETRY_S", 0.01)
    monkeypatch.setattr(copy_thread, "IDLE_WAIT_S", 0.02)
    made = Worker(str(tmp_path / "cache.sock"))
    made.thread.start()
    yield made
    made.thread.stop()


def connected(worker: Worker, server: Server) -> None:
    server.accept()
    server.greet()
    until(lambda: worker.is_connected, "the worker to connect")


def load(number: int, limit_s: float = 30.0) -> LoadOrder:
    return LoadOrder(number, f"r{number}", bytes([number] * 32), 0, tuple(range(BLOCKS)), limit_s)


def save(number: int, *, is_final: bool = True) -> SaveOrder:
    return SaveOrder(number, b"", bytes([number] * 32), tuple(range(BLOCKS)), is_final)


def orders(*, loads: int = 0, saves: int = 0) -> CacheOrders:
    return CacheOrders(
        tuple(load(n) for n in range(loads)), tuple(save(n) for n in range(loads, loads + saves))
    )


def test_a_server_that_dies_as_orders_go_out(worker: Worker, server: Server) -> None:
    """Each of the step's loads has failed and each of its saves has ended, whichever of them the
    server has heard of.
    """
    for _ in range(20):
        connected(worker, server)
        server.hang_up()
        worker.thread.begin_step(orders(loads=5, saves=5))
        worker.until_ended(set(range(5)), set(range(5, 10)))
        assert {loaded.chunks for loaded in worker.loaded.values()} == {0}
        worker.loaded.clear()
        worker.saved.clear()


def test_a_server_that_dies_in_the_middle(worker: Worker, server: Server) -> None:
    """What it was asked for has failed; the worker connects to the next one and goes on."""
    connected(worker, server)
    worker.thread.begin_step(orders(loads=2, saves=2))
    heard = [server.hear() for _ in range(4)]
    assert [type(message) for message in heard] == [OpenChunks, OpenChunks, Reserve, Reserve]
    server.hang_up()
    worker.until_ended({0, 1}, {2, 3})
    connected(worker, server)
    assert worker.thread.counters()["cache_connections"] == 2


@pytest.mark.parametrize("packet", [b"\xc1", b"nonsense", bytes(1000)], ids=len)
def test_a_server_that_talks_nonsense(worker: Worker, server: Server, packet: bytes) -> None:
    """It is left, and tried again; nothing waits for it."""
    connected(worker, server)
    worker.thread.begin_step(orders(loads=1, saves=1))
    assert server.connection is not None
    server.connection.send(packet)
    worker.until_ended({0}, {1})
    connected(worker, server)


def test_a_server_that_does_not_greet(
    worker: Worker, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders end at once meanwhile; after a while another attempt is made."""
    server.accept()
    worker.thread.begin_step(orders(loads=3, saves=3))
    worker.until_ended({0, 1, 2}, {3, 4, 5})
    monkeypatch.setattr(copy_thread, "GREETING_S", 0.0)
    worker.thread._greet_until = 0.0
    connected(worker, server)


def test_a_server_that_refuses(worker: Worker, server: Server) -> None:
    """It is not asked again, and orders end at once."""
    server.accept()
    server.greet(refusal="another model")
    assert server.hear() is None
    worker.thread.begin_step(orders(loads=1, saves=1))
    worker.until_ended({0}, {1})


def test_a_silent_server(worker: Worker, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load fails a little after its limit, blocks are let go after a moment; room that comes
    late is given back.
    """
    monkeypatch.setattr(worker_saves, "ANSWER_LIMIT_S", 0.05)
    monkeypatch.setattr("splitserve.kv_transfer.cache.worker_loads.GRACE_S", 0.05)
    connected(worker, server)
    worker.thread.begin_step(CacheOrders((load(1, limit_s=0.05),), (save(2),)))
    assert isinstance(server.hear(), OpenChunks)
    assert isinstance(server.hear(), Reserve)
    worker.until_ended({1}, {2})
    server.say(Reserved(save_id=2, offsets=(0,)))
    while not isinstance(heard := server.hear(), Commit):
        assert heard is not None
    assert heard == Commit(save_id=2, written=(), abandoned=(0,))


def test_a_server_that_does_not_read(worker: Worker, server: Server) -> None:
    """When its buffer is full the worker leaves it, and everything has ended."""
    connected(worker, server)
    count = 4_000
    for number in range(count):
        worker.thread.begin_step(CacheOrders((load(number % 250),)))
        if not worker.is_connected:
            break
    until(lambda: not worker.is_connected, "the worker to leave")
    worker.collect()
    assert worker.loaded
    assert all(loaded.chunks == 0 for loaded in worker.loaded.values())


def test_a_fault_of_the_thread_reaches_the_engine(
    worker: Worker, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose cache thread is dead does not wait for it for ever."""
    connected(worker, server)

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(worker.thread._loads, "begin", fail)
    worker.thread.begin_step(orders(loads=1))
    until(lambda: worker.thread._failure is not None, "the thread to die")
    with pytest.raises(RuntimeError, match="cache thread has died"):
        worker.thread.take_news()
    assert server.hear() is None


def test_stopping_closes_the_connection(worker: Worker, server: Server) -> None:
    """So that the server knows that nobody touches the arena; stopping again is harmless."""
    connected(worker, server)
    worker.thread.stop()
    assert server.hear() is None
    worker.thread.stop()


def test_a_step_that_computes_nothing_waits_for_a_load(worker: Worker, server: Server) -> None:
    """Its news has the load that ends meanwhile; without an open load there is nothing to wait for,
    and what waits is bounded by its time.
    """
    began = time.monotonic()
    assert worker.thread.take_news(DEADLINE_S).is_empty
    connected(worker, server)
    worker.thread.begin_step(orders(loads=1))
    assert worker.thread.take_news(0.001).is_empty  # The server has not answered.
    assert isinstance(server.hear(), OpenChunks)
    server.hang_up()
    (loaded,) = worker.thread.take_news(DEADLINE_S).loaded
    assert loaded.chunks == 0
    assert worker.thread.take_news(DEADLINE_S).is_empty
    assert time.monotonic() - began < DEADLINE_S
