"""HTTP/1.1 towards clients: one asyncio protocol per connection, requests as whole messages,
answers as calls.

A request is handed to its route when its body is complete; the route answers through the
connection's methods, at once or later, and is called back when the client leaves. Between the
engine's socket and the client's there is neither a task nor a future, which is why this is not
aiohttp's server: that took about a third of the router's CPU time per request (docs/decisions.md).
The parser is llhttp (through httptools), which is strict about message framing. WebSocket
connections are handed to aiohttp.

Bounds: head, trailer and body bytes, bytes of all bodies together, requests that wait in one
connection behind the one being answered, connections, and the time that a connection may be idle,
stuck in the middle of a request, or without taking what is sent to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Protocol

import httptools

from splitserve.orchestrator.router.dead_links import notice_dead_link
from splitserve.orchestrator.router.errors import ApiError
from splitserve.orchestrator.router.headers import request_id_of
from splitserve.orchestrator.router.http_request import HttpRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.config.tls import ServerTls
    from splitserve.orchestrator.router.engine_client import RawHeaders

_log = logging.getLogger(__name__)
HEAD_LIMIT_BYTES = 64 * 1024
PIPELINE_LIMIT_REQUESTS = 64
"""Requests that may wait in one connection; what comes after them is not answered."""
BODIES_LIMIT_BYTES = 2**30
"""Bytes of bodies that are being received, or wait for their turn, over all connections."""
CONNECTIONS_LIMIT = 10_000
IDLE_LIMIT_S = 75.0
"""Time that a connection may wait for its next request."""
STALL_LIMIT_S = 60.0
"""Time without a byte in the middle of a request, or of an answer that is not taken."""
SWEEP_INTERVAL_S = 5.0
UNSENT_HIGH_BYTES = 256 * 1024
"""Bytes waiting for a slow client above which ``ClientListener.pause`` is called."""
UNSENT_LOW_BYTES = 64 * 1024
LINGER_S = 2.0
"""Time for which the rest of a refused request is read and dropped."""

_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


class ClientListener(Protocol):
    """Who answers a request, and hears of its client."""

    def client_gone(self) -> None:
        """The connection ended before the answer did."""

    def pause(self) -> None:
        """The client is too slow."""

    def resume(self) -> None:
        """It has caught up."""


@dataclass(eq=False)
class HttpServer:
    """Listens, and holds the open connections. ``route`` is called for each request, ``admit``
    before its body is read.
    """

    route: Callable[[HttpRequest, HttpConnection], None]
    max_body_bytes: int
    admit: Callable[[str, RawHeaders], None] | None = None
    websocket: Callable[[], asyncio.Protocol] | None = None
    websocket_path: str = ""
    connections: set[HttpConnection] = field(default_factory=set)
    held_body_bytes: int = 0
    _listener: asyncio.Server | None = None
    _tls: ServerTls | None = None
    _drained: asyncio.Event | None = None
    _sweep: asyncio.TimerHandle | None = None
    _date: bytes = b""
    _date_at: int = -1

    async def listen(self, host: str, port: int, tls: ServerTls | None = None) -> int:
        """The port that is listened on. Raises ``OSError`` when it is taken."""
        loop = asyncio.get_running_loop()
        self._tls, secured = tls, tls.listening if tls else {}
        self._listener = await loop.create_server(
            partial(HttpConnection, self), host, port, **secured
        )
        self._sweep = loop.call_later(SWEEP_INTERVAL_S, self._close_stuck)
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self, timeout_s: float) -> None:
        """Accept nothing more; answers that are complete get ``timeout_s`` to leave."""
        if self._listener is not None:
            self._listener.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self.connections):
            connection.close_when_sent()
        if self.connections:
            self._drained = asyncio.Event()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._drained.wait()
            except TimeoutError:
                _log.warning("%d clients do not read their answers", len(self.connections))
        for connection in list(self.connections):
            connection.abort()

    def forget(self, connection: HttpConnection) -> None:
        """The connection is closed."""
        self.connections.discard(connection)
        if self._drained is not None and not self.connections:
            self._drained.set()

    def date(self) -> bytes:
        """The value of a ``Date`` header."""
        now = int(time.time())
        if now != self._date_at:
            self._date_at = now
            self._date = formatdate(now, usegmt=True).encode()
        return self._date

    def _close_stuck(self) -> None:
        if self._tls:
            self._tls.refresh()
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self.connections):
            connection.close_if_stuck(now)
        self._sweep = loop.call_later(SWEEP_INTERVAL_S, self._close_stuck)


class HttpConnection(asyncio.Protocol):
    """One client's connection: reads requests, and sends the answer to the oldest one."""

    __slots__ = (
        "_active_at",
        "_body",
        "_body_bytes",
        "_current",
        "_head",
        "_head_bytes",
        "_headers",
        "_held_body_bytes",
        "_is_chunked",
        "_is_closing",
        "_is_discarding",
        "_is_head_complete",
        "_is_unsent_high",
        "_loop",
        "_parser",
        "_path",
        "_query",
        "_server",
        "_taken_at",
        "_taken_bytes",
        "_transport",
        "_url",
        "_waiting",
        "_written_bytes",
        "listener",
    )

    def __init__(self, server: HttpServer) -> None:
        self.listener: ClientListener | None = None
        """Set by a route that answers later."""
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[HttpRequest] = deque()
        self._current: HttpRequest | None = None
        self._head: bytes = b""
        self._is_chunked = False
        self._active_at = self._loop.time()
        self._is_closing = False
        self._is_discarding = False
        self._head_bytes = 0
        """Of the head that is being read, then of the trailers."""
        self._is_head_complete = False
        self._held_body_bytes = 0
        self._written_bytes = 0
        self._taken_bytes = 0
        self._taken_at = self._active_at
        """When the client was last seen to have taken bytes."""
        self._is_unsent_high = False
        self._begin_request()

    def _begin_request(self) -> None:
        self._url = b""
        self._path = self._query = ""
        self._headers: RawHeaders = []
        self._body: list[bytes] = []
        self._body_bytes = 0

    # The answer

    def send_head(self, status: int, headers: RawHeaders, body_bytes: int | None) -> None:
        """Status line and headers, kept until the first bytes of the body.

        ``body_bytes`` None is for a body whose length is not known.
        """
        request = self._current
        assert request is not None
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines.append(b"date: %b\r\n" % self._server.date())
        if body_bytes is not None:
            lines.append(b"content-length: %d\r\n" % body_bytes)
        elif request.allows_chunks:
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            request.keep_alive = False
        lines.append(b"\r\n" if request.keep_alive else b"connection: close\r\n\r\n")
        self._head = b"".join(lines)

    def send_body(self, data: bytes, is_last: bool = False) -> None:
        """The next bytes of the body; ``is_last`` with the last ones, before ``finish``."""
        if self._is_chunked:
            parts = [self._head]
            if data:
                parts += (b"%x\r\n" % len(data), data, b"\r\n")
            if is_last:
                parts.append(b"0\r\n\r\n")
                self._is_chunked = False
            data = b"".join(parts)
        elif self._head:
            data = self._head + data
        self._head = b""
        if data and self._transport is not None:
            self._written_bytes += len(data)
            self._transport.write(data)

    def finish(self) -> None:
        """The answer is complete; the next request of this connection is looked at soon."""
        request = self._current
        assert request is not None
        if self._head or self._is_chunked:
            self.send_body(b"", is_last=True)
        self._current = self.listener = None
        self._active_at = self._loop.time()
        if not request.keep_alive or self._is_closing:
            self._close()
        elif self._waiting:
            self._loop.call_soon(self._answer_next)

    def abort(self) -> None:
        """Reset the connection, so that nobody takes a part for the whole."""
        if self._transport is not None:
            self._transport.abort()

    def answer(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """A complete answer."""
        self.send_head(status, headers, len(body))
        self.send_body(
            b"" if self._current and self._current.method == "HEAD" else body, is_last=True
        )
        self.finish()

    def close_when_sent(self) -> None:
        """No request after the current one."""
        self._is_closing = True
        if self._current is None:
            self._close()

    def close_if_stuck(self, now: float) -> None:
        """Idle too long between requests, silent too long in one, or not reading its answer."""
        transport = self._transport
        if transport is None:
            return
        unsent = transport.get_write_buffer_size()
        taken = self._written_bytes - unsent
        if taken > self._taken_bytes or not unsent:
            self._taken_bytes, self._taken_at = taken, now
        if now - self._taken_at > STALL_LIMIT_S:
            self.abort()
        elif self._current is None and not transport.is_closing():
            is_reading = self._head_bytes > 0 or self._is_head_complete
            if now - self._active_at > (STALL_LIMIT_S if is_reading else IDLE_LIMIT_S):
                self._close()

    def _close(self) -> None:
        """Close, but not under a client that is still sending: it would lose its answer."""
        if self._transport is None:
            return
        if self._is_discarding and not self._transport.is_closing():
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._loop.call_later(LINGER_S, self.abort)
        else:
            self._transport.close()

    def _answer_next(self) -> None:
        """The oldest waiting request has its turn, unless the client must first take what is
        sent.
        """
        transport = self._transport
        if self._current is not None or not self._waiting or self._is_unsent_high:
            return
        if transport is not None and not transport.is_closing():
            request = self._current = self._waiting.popleft()
            self._hold(-len(request.body))
            self._server.route(request, self)

    def _hold(self, body_bytes: int) -> None:
        self._held_body_bytes += body_bytes
        self._server.held_body_bytes += body_bytes

    def _refuse(self, error: ApiError) -> None:
        """Read nothing more; answer the error, or only the complete requests before it."""
        self._is_discarding = True
        self._hold(-self._body_bytes)
        given = next((value for name, value in self._headers if name == b"x-request-id"), None)
        self._begin_request()
        last = self._waiting[-1] if self._waiting else self._current
        if last is not None:
            last.keep_alive = False
            return
        self._current = HttpRequest("", "", [], b"", keep_alive=False, allows_chunks=True)
        self.answer(error.status, error.headers(request_id_of(given, "")), error.body())

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        assert self._transport is not None
        if len(self._server.connections) >= CONNECTIONS_LIMIT:
            self._transport.abort()
            return
        self._server.connections.add(self)
        self._transport.set_write_buffer_limits(UNSENT_HIGH_BYTES, UNSENT_LOW_BYTES)
        notice_dead_link(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._server.forget(self)
        self._waiting.clear()
        self._hold(-self._held_body_bytes)
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.client_gone()

    def pause_writing(self) -> None:
        self._is_unsent_high = True
        if self.listener is not None:
            self.listener.pause()

    def resume_writing(self) -> None:
        self._is_unsent_high = False
        self._loop.call_soon(self._answer_next)
        if self.listener is not None:
            self.listener.resume()

    def data_received(self, data: bytes) -> None:
        if self._is_discarding:
            return
        self._active_at = self._loop.time()
        if not self._is_head_complete:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            refusal = error.__context__
            if not isinstance(refusal, ApiError):
                raise
            self._refuse(refusal)
        except httptools.HttpParserError as error:
            self._refuse(ApiError(400, f"this is not HTTP/1.1: {error}"))
        else:
            if not self._is_head_complete and self._head_bytes > HEAD_LIMIT_BYTES:
                self._refuse(ApiError(431, f"the head is larger than {HEAD_LIMIT_BYTES} bytes"))
        self._answer_next()

    def _upgrade(self, rest: bytes) -> None:
        """A WebSocket of the one path that takes them goes on under aiohttp, request included."""
        transport, server = self._transport, self._server
        request = self._waiting[-1]
        if request.path != server.websocket_path or len(self._waiting) > 1 or self._current:
            request.keep_alive = False
            return
        assert server.websocket is not None
        assert transport is not None
        self._waiting.clear()
        lines = [f"{request.method} {request.path} HTTP/1.1".encode()]
        lines += [name + b": " + value for name, value in request.headers]
        protocol = server.websocket()
        server.forget(self)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    # httptools

    def on_message_begin(self) -> None:
        self._begin_request()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_head_complete:
            self._headers.append((name.lower(), value))
            return
        # A trailer: nobody asked for it, and as a header it would get past who checked the headers
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_LIMIT_BYTES:
            raise ApiError(431, f"the trailers are larger than {HEAD_LIMIT_BYTES} bytes")

    def on_headers_complete(self) -> None:
        self._is_head_complete = True
        self._head_bytes = 0
        if self._parser.get_http_version() not in ("1.1", "1.0"):
            raise ApiError(400, "only HTTP/1.1 and HTTP/1.0 are spoken here")
        if len(self._waiting) >= PIPELINE_LIMIT_REQUESTS:
            message = f"{PIPELINE_LIMIT_REQUESTS} requests wait in this connection"
            raise ApiError(429, message, retry_after_s=1)
        path, _, query = self._url.partition(b"?")
        self._path, self._query = path.decode("latin-1"), query.decode("latin-1")
        if self._server.admit is not None:
            self._server.admit(self._path, self._headers)
        limit = self._server.max_body_bytes
        is_waiting_for_us = False
        for name, value in self._headers:
            if name == b"content-length" and int(value) > limit:
                raise self._body_too_large(limit)
            if name == b"expect" and value.lower() == b"100-continue":
                is_waiting_for_us = True
        if is_waiting_for_us and self._current is None and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        server, size = self._server, len(data)
        self._body_bytes += size
        self._held_body_bytes += size
        server.held_body_bytes += size
        if server.held_body_bytes > BODIES_LIMIT_BYTES:
            raise ApiError(503, "too many requests are being received", retry_after_s=5)
        if self._body_bytes > server.max_body_bytes:
            raise self._body_too_large(server.max_body_bytes)
        self._body.append(data)

    @staticmethod
    def _body_too_large(limit: int) -> ApiError:
        return ApiError(
            413, f"the request body is larger than {limit} bytes (router.max_body_bytes)"
        )

    def on_message_complete(self) -> None:
        parser, body = self._parser, self._body
        request = HttpRequest(
            parser.get_method().decode(),
            self._path,
            self._headers,
            body[0] if len(body) == 1 else b"".join(body),
            parser.should_keep_alive(),
            parser.get_http_version() == "1.1",
            self._query,
        )
        self._body, self._body_bytes = [], 0
        self._head_bytes = 0
        self._is_head_complete = False
        self._waiting.append(request)
