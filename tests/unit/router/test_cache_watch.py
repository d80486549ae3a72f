"""What the router hears of its host's cache, from a server that does as the test says."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest

from splitserve.kv_transfer.cache.messages import FromClient, Managed, Mark, Marks, Watch
from splitserve.orchestrator.core.events import CacheLost, CachePrefixesReported
from splitserve.orchestrator.router import cache_watch as subject
from splitserve.orchestrator.router.cache_watch import CacheWatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from splitserve.orchestrator.core.events import Event

LIMIT_S = 10.0
ONE, TWO = b"mark one", b"mark two"
LOST = CacheLost("here")

pytestmark = pytest.mark.filterwarnings("error")


class Server:
    """A cache server that has one watcher at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self._connection: socket.socket | None = None

    async def accept(self) -> None:
        """A watcher has come and said so."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(LIMIT_S):
            self._connection, _ = await loop.sock_accept(self._listener)
            packet = await loop.sock_recv(self._connection, 1_000)
        assert msgspec.msgpack.decode(packet, type=FromClient) == Watch()

    async def say(self, message: Marks | Managed | bytes) -> None:
        """One packet."""
        assert self._connection is not None
        packet = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        await asyncio.get_running_loop().sock_sendall(self._connection, packet)

    def drop(self) -> None:
        """The watcher's connection is closed."""
        if self._connection is not None:
            self._connection.close()

    def close(self) -> None:
        """The server is gone, and its socket's name with it."""
        self.drop()
        self._listener.close()
        self._path.unlink()


class Ear:
    """What the core was told, in order."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()

    async def next(self) -> Event:
        async with asyncio.timeout(LIMIT_S):
            return await self.events.get()


@asynccontextmanager
async def watching(path: Path) -> AsyncIterator[Ear]:
    """A watch that runs."""
    ear = Ear()
    task = asyncio.create_task(CacheWatch(path, "here", ear.events.put_nowait).run())
    try:
        yield ear
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the server will be; the watch tries often."""
    monkeypatch.setattr(subject, "RETRY_S", 0.005)
    return tmp_path / "cache.sock"


async def test_marks_that_come_and_go_are_passed_on(path: Path) -> None:
    """The first packet of a connection voids what was before, whether it says so or not."""
    server = Server(path)
    async with watching(path) as ear:
        await server.accept()
        await server.say(Marks(is_first=True, added=(Mark(ONE, 100), Mark(TWO, 200))))
        first = CachePrefixesReported("here", True, ((ONE, 100), (TWO, 200)), ())
        assert await ear.next() == first
        await server.say(Marks(removed=(ONE,)))
        assert await ear.next() == CachePrefixesReported("here", False, (), (ONE,))
    assert await ear.next() == LOST
    server.close()


async def test_a_server_that_comes_back_is_heard_from_the_beginning(path: Path) -> None:
    """The watch waits for the first server, survives its end, and finds the next one."""
    async with watching(path) as ear:
        server = Server(path)
        await server.accept()
        await server.say(Marks(is_first=True, added=(Mark(ONE, 1),)))
        await ear.next()
        server.close()
        assert await ear.next() == LOST
        server = Server(path)
        await server.accept()
        await server.say(Marks(added=(Mark(TWO, 2),)))
        assert await ear.next() == CachePrefixesReported("here", True, ((TWO, 2),), ())
        server.close()


@pytest.mark.parametrize(
    "wrong", [b"\xc1", Managed(request_id=1, result=b"{}"), Marks(added=(Mark(b"short", 1),))]
)
async def test_a_server_that_makes_no_sense_is_left(
    path: Path, wrong: Marks | Managed | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """What it said before is void, that is logged, and the watch tries again."""
    server = Server(path)
    async with watching(path) as ear:
        await server.accept()
        await server.say(Marks(is_first=True, added=(Mark(ONE, 1),)))
        await ear.next()
        await server.say(wrong)
        assert await ear.next() == LOST
        assert "the cache server sent" in caplog.text
        server.drop()
        await server.accept()
        await server.say(Marks(is_first=True))
        assert await ear.next() == CachePrefixesReported("here", True, (), ())
        server.close()
