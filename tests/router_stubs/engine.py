"""An HTTP server that plays an engine: answers as it is told, remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SSE = [b'data: {"choices":[{"text":"%d"}]}\n\n' % number for number in range(4)]
DONE = b"data: [DONE]\n\n"


@dataclass
class Asked:
    """One request as it reached the engine."""

    path: str
    headers: dict[str, str]
    raw: bytes
    client_left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> Any:
        """The request's JSON."""
        return json.loads(self.raw)


class StubEngine:
    """Listens on a loopback port; ``answer`` writes each answer, ``asked`` lists the requests."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.connections = 0
        self.answer: Callable[[Asked, asyncio.StreamWriter], Awaitable[None]] = plain_answer
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> None:
        """Listen; a second start after ``stop`` may take the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=2**26)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the listener and reset every connection, as a killed process does."""
        assert self._server is not None
        self._server.close()
        self.drop_connections()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop_connections(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        first, *lines = head.decode("latin-1").strip().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        raw = await reader.readexactly(int(headers["content-length"]))
        asked = Asked(first.split()[1], headers, raw)
        self.asked.append(asked)
        answering = asyncio.ensure_future(self.answer(asked, writer))
        leaving = asyncio.ensure_future(self._left(reader))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                asked.client_left.set()
                return False
            await answering
            return not writer.is_closing()
        finally:
            for future in (answering, leaving):
                future.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    @staticmethod
    async def _left(reader: asyncio.StreamReader) -> None:
        """Until the other side has closed the connection; takes nothing of a next request."""
        while True:
            if reader.at_eof() or reader.exception() is not None:
                return
            await asyncio.sleep(0.005)


async def plain_answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """Four events when a stream was asked for, else a small JSON answer."""
    if asked.body.get("stream"):
        await stream(writer, b"".join(SSE) + DONE)
    else:
        await send(writer, 200, b'{"choices":[{"text":"0123"}]}')


async def send(
    writer: asyncio.StreamWriter, status: int, body: bytes, content_type: str = "application/json"
) -> None:
    """An answer with a length."""
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"server: stub\r\nx-engine: kept\r\n\r\n" + body)
    await writer.drain()


async def start_stream(writer: asyncio.StreamWriter) -> None:
    """The head of a chunked event stream."""
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\nx-engine: kept\r\n\r\n"
    )
    await writer.drain()


async def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """One chunk; the empty one ends the answer."""
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()


async def stream(writer: asyncio.StreamWriter, data: bytes, piece_bytes: int = 0) -> None:
    """A whole stream, in chunks of ``piece_bytes``, each written by itself (0: one chunk)."""
    await start_stream(writer)
    step = piece_bytes or len(data)
    for start in range(0, len(data), step):
        await chunk(writer, data[start : start + step])
        await asyncio.sleep(0)
    await chunk(writer, b"")
