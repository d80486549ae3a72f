"""A cache server process with two disks and a Redis, an engine that saves and loads through its
memory, and an operator on its socket.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pytest
from support.store_servers import StoreServer, redis_server
from support.up_process import wait_for

from splitserve.kv_transfer.cache import packets
from splitserve.kv_transfer.cache.arena import Mapping
from splitserve.kv_transfer.cache.chunk_format import body_checksums
from splitserve.kv_transfer.cache.control_messages import (
    ChunksWish,
    ClearWish,
    Done,
    LookedUp,
    LookupWish,
    Quotas,
    QuotaWish,
    Stat,
    StatWish,
)
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.keys import chunk_keys, root_key
from splitserve.kv_transfer.cache.messages import (
    PROTOCOL_VERSION,
    Arena,
    CloseChunks,
    Commit,
    FromServer,
    Hello,
    OpenChunks,
    Ready,
    Reserve,
    Reserved,
)
from splitserve.kv_transfer.cache.settings import CacheSettings, TierSettings
from splitserve.orchestrator.router.cache_control import (
    CacheControl,
    CacheRefusalError,
    CacheSilentError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

START_S, ANSWER_S = 60.0, 30.0
GEOMETRY = ChunkGeometry(
    layers=4,
    chunk_tokens=32,
    block_tokens=16,
    heads=2,
    key_bytes=64,
    value_bytes=64,
    item_bytes=2,
    order="rows",
)
CHUNK_BYTES = GEOMETRY.chunk_bytes
MODEL = bytes(range(32))
ALICE, BOB = b"A" * 8, b"B" * 8
CHUNKS = 12
ARENA_BYTES = 12 << 20
"""Much more than all chunks: of what is saved at once, none waits too long to be written."""

R = TypeVar("R")


def keys_of(tenant: bytes) -> list[bytes]:
    """The chunks of one prompt."""
    return chunk_keys(root_key(MODEL, tenant, "salt", ""), [*range(CHUNKS * 32)], 32)


class ServerProcess:
    """``python -m splitserve.kv_transfer.cache``; its folder and disks outlive it."""

    def __init__(self, folder: Path, redis_port: int) -> None:
        self.socket_path = str(folder / "cache.sock")
        room = 100 * 2 * CHUNK_BYTES
        self.settings = CacheSettings(
            socket_path=self.socket_path,
            chunk_tokens=32,
            tiers=(
                TierSettings(type="cpu", capacity_bytes=ARENA_BYTES, eviction="lru"),
                TierSettings(type="disk", capacity_bytes=room, url=str(folder / "one")),
                TierSettings(
                    type="disk", capacity_bytes=room, url=str(folder / "two"), admission="never"
                ),
                TierSettings(type="redis", url=f"redis://127.0.0.1:{redis_port}"),
            ),
        )
        self._file = folder / "settings.json"
        self._file.write_bytes(msgspec.json.encode(self.settings))
        self._log = folder / "cache.log"
        self.start()

    def start(self) -> None:
        """It serves."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "splitserve.kv_transfer.cache", str(self._file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(self._answers, START_S, "the cache server", self._log.read_text)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit status."""
        self._process.send_signal(number)
        return self._process.wait(ANSWER_S)

    def ask(self, verb: str, wish: msgspec.Struct, answer: type[R]) -> R:
        """As the router does."""
        return asyncio.run(CacheControl(self.socket_path).ask(verb, wish, answer, ANSWER_S))

    def chunks(self, verb: str, keys: list[bytes], tier: str = "") -> Done:
        return self.ask(verb, ChunksWish(keys=b"".join(keys), tier=tier, limit_s=20.0), Done)

    def by_tier(self, keys: list[bytes]) -> dict[str, int]:
        found = self.ask("lookup", LookupWish(keys=b"".join(keys), limit_s=20.0), LookedUp)
        assert found.silent == ()
        return found.by_tier

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            return self.ask("stat", StatWish(), Stat).chunk_tokens == GEOMETRY.chunk_tokens
        except CacheSilentError:
            return False


class Engine:
    """A worker: writes chunks into the arena and reads them from there."""

    def __init__(self, server: ServerProcess) -> None:
        self._connection = packets.connect(server.socket_path)
        self._connection.settimeout(ANSWER_S)
        hello = Hello(
            version=PROTOCOL_VERSION, engine="prefill-0", rank=0, ranks=1, model=MODEL,
            geometry=GEOMETRY,
        )  # fmt: skip
        packets.send(self._connection, hello)
        packet, descriptor = packets.receive_with_descriptor(self._connection)
        assert descriptor is not None
        greeting: Any = msgspec.msgpack.decode(packet, type=FromServer)
        assert isinstance(greeting, Arena)
        assert greeting.tiers == ("cpu", "disk", "disk-2", "redis")
        self._arena = Mapping(descriptor, greeting.size_bytes)
        os.close(descriptor)
        self._numbers = iter(range(1, 1000))

    def save(self, keys: list[bytes]) -> None:
        """Each chunk has the bytes of ``content``."""
        number = next(self._numbers)
        reserve = Reserve(save_id=number, parent=b"", keys=b"".join(keys))
        reserved = self._exchange(reserve)
        assert isinstance(reserved, Reserved)
        assert min(reserved.offsets) >= 0
        written = []
        for index, (key, offset) in enumerate(zip(keys, reserved.offsets, strict=True)):
            body = self._arena.view[offset : offset + CHUNK_BYTES]
            body[:] = content(key)
            written.append((index, body_checksums(body, GEOMETRY, 1)))
        packets.send(self._connection, Commit(save_id=number, written=tuple(written)))

    def loads_all(self, keys: list[bytes]) -> bool:
        """Whether all come, with the right bytes."""
        number = next(self._numbers)
        packets.send(
            self._connection, OpenChunks(load_id=number, keys=b"".join(keys), limit_s=20.0)
        )
        left = set(range(len(keys)))
        missing: set[int] = set()
        while left - missing:
            ready = self._receive()
            assert isinstance(ready, Ready)
            missing.update(ready.missing)
            for chunk in ready.chunks:
                body = self._arena.view[chunk.offset : chunk.offset + CHUNK_BYTES]
                assert body == content(keys[chunk.index])
                assert body_checksums(body, GEOMETRY, 1) == chunk.checksums
                left.discard(chunk.index)
        packets.send(self._connection, CloseChunks(load_id=number))
        return not missing

    def close(self) -> None:
        self._connection.close()

    def _exchange(self, message: object) -> Any:
        packets.send(self._connection, message)
        return self._receive()

    def _receive(self) -> Any:
        return msgspec.msgpack.decode(self._connection.recv(200_000), type=FromServer)


def content(key: bytes) -> bytes:
    """What a chunk is made of."""
    return random.Random(key).randbytes(CHUNK_BYTES)


@pytest.fixture
def redis_process(free_port: Callable[[], int], tmp_path: Path) -> Iterator[StoreServer]:
    server = redis_server(free_port(), tmp_path)
    yield server
    server.kill()


@pytest.fixture
def server(tmp_path: Path, redis_process: StoreServer) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path, redis_process.port)
    yield process
    assert process.end() == 0


def saved(server: ServerProcess, engine: Engine, keys: list[bytes]) -> None:
    """All of these are in the arena, on the first disk and in the store."""
    engine.save(keys)
    want = {"cpu": CHUNKS, "disk": CHUNKS, "disk-2": 0, "redis": CHUNKS}
    wait_for(lambda: server.by_tier(keys) == want, ANSWER_S, "writes to the lower tiers")


def test_an_operator_moves_chunks_and_engines_find_them(server: ServerProcess) -> None:
    """Down to the second disk, up again, to the store by way of the arena: the same bytes each
    time, and the state tells what has happened.
    """
    engine, keys = Engine(server), keys_of(ALICE)
    saved(server, engine, keys)
    all_done = Done(chunks=CHUNKS, bytes=CHUNKS * CHUNK_BYTES)
    assert server.chunks("move", keys, "disk-2") == all_done
    assert server.by_tier(keys) == {"cpu": 0, "disk": 0, "disk-2": CHUNKS, "redis": CHUNKS}
    assert server.chunks("prefetch", keys) == all_done
    assert server.by_tier(keys)["cpu"] == CHUNKS
    assert engine.loads_all(keys)
    assert (
        server.ask("clear", ClearWish(tenant=None, tier="redis", limit_s=20.0), Done).chunks == 12
    )
    assert server.chunks("move", keys, "redis") == all_done
    assert server.by_tier(keys) == {"cpu": 0, "disk": 0, "disk-2": 0, "redis": CHUNKS}
    assert engine.loads_all(keys)
    stat = server.ask("stat", StatWish(), Stat)
    cpu, _, second, redis = stat.tiers
    assert (second.writes, second.reads, second.chunks) == (CHUNKS, CHUNKS, 0)
    assert (redis.writes, redis.reads) == (2 * CHUNKS, CHUNKS)
    assert cpu.reads == 2 * CHUNKS
    assert stat.arena.leased == 0
    assert [found.engine for found in stat.engines] == ["prefill-0"]
    engine.close()


def test_a_tenant_is_cleared_from_every_tier(server: ServerProcess) -> None:
    """The other one's chunks stay; a quota of nothing keeps the tenant away."""
    engine = Engine(server)
    alice, bob = keys_of(ALICE), keys_of(BOB)[:4]
    saved(server, engine, alice)
    engine.save(bob)
    everywhere = {"cpu": 4, "disk": 4, "disk-2": 0, "redis": 4}
    wait_for(lambda: server.by_tier(bob) == everywhere, ANSWER_S, "writes to the lower tiers")
    cleared = server.ask("clear", ClearWish(tenant=ALICE.hex(), limit_s=20.0), Done)
    assert (cleared.chunks, cleared.missing) == (3 * CHUNKS, 0)
    assert set(server.by_tier(alice).values()) == {0}
    assert server.by_tier(bob) == everywhere
    wish = QuotaWish(tenant=BOB.hex(), tier="disk", limit_bytes=0, changes=True)
    [now] = server.ask("quota", wish, Quotas).tenants
    assert (now.used_bytes, now.quota_bytes) == ({}, {"disk": 0})
    assert server.by_tier(bob) == everywhere | {"disk": 0}
    assert engine.loads_all(bob)
    assert not engine.loads_all(alice)
    engine.close()


def test_a_server_that_was_killed_answers_again(
    server: ServerProcess, redis_process: StoreServer
) -> None:
    """Its memory is empty, its disk is not: before any engine has come operators find and pin what
    is there, and are refused what needs to be read. A dead store costs an operator nothing.
    """
    engine, keys = Engine(server), keys_of(ALICE)
    saved(server, engine, keys)
    engine.close()
    server.end(signal.SIGKILL)
    server.start()
    assert server.by_tier(keys) == {"cpu": 0, "disk": CHUNKS, "disk-2": 0, "redis": CHUNKS}
    assert server.chunks("pin", keys).chunks == CHUNKS
    with pytest.raises(CacheRefusalError, match="no engine"):
        server.chunks("prefetch", keys)
    redis_process.kill()
    wish = LookupWish(keys=b"".join(keys), limit_s=20.0)
    for _ in range(4):
        found = server.ask("lookup", wish, LookedUp)
        assert (found.silent, found.chunks, found.pinned) == (("redis",), CHUNKS, CHUNKS)
    redis = server.ask("stat", StatWish(), Stat).tiers[-1]
    assert redis.state == "breaker open"
    engine = Engine(server)
    assert server.chunks("prefetch", keys).chunks == CHUNKS
    assert engine.loads_all(keys)
    engine.close()
