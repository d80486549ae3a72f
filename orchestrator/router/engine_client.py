"""Requests to engines over HTTP/1.1: one asyncio protocol per connection, a pool of idle ones per
engine.

A leg is told of its answer by calls, as the bytes come in: no task and no future stands between the
engine's socket and the client's. The parser is llhttp (through httptools).

- An idle connection is used for ``idle_limit_s`` at most, which is below the keep-alive of the
engines' server (uvicorn's 5 s), so that it is rarely closed just when it is used. When that happens
all the same (a reused connection is closed before any byte of an answer), the request is sent once
more on a new connection. - ``pause`` stops reading from the socket until ``resume``: a slow client
slows the engine, not the router's memory. - ``cancel`` closes the connection, on which vLLM aborts
the request. - Failures reach the listener later, never inside the call that started the leg.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import httptools

from splitserve.orchestrator.config.nodes import bracketed
from splitserve.orchestrator.config.tls import SHUTDOWN_LIMIT_S, tls_reason
from splitserve.orchestrator.router.dead_links import notice_dead_link

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger(__name__)

TOLD_LIMIT = 1024
"""Different TLS failures that the log tells."""
HEAD_LIMIT_BYTES = 64 * 1024
"""Status line and headers of one answer."""

RawHeaders = list[tuple[bytes, bytes]]


class LegListener(Protocol):
    """Who hears of one answer. ``ended`` or ``failed`` comes last, and nothing after ``cancel``."""

    def head_received(self, status: int, headers: RawHeaders) -> None: ...

    def body_received(self, data: bytes, is_last: bool) -> None:
        """``is_last``: ``ended`` follows at once."""

    def ended(self) -> None: ...

    def failed(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine's HTTP server listens."""

    host: str
    port: int
    is_tls: bool = False

    @property
    def shown(self) -> str:
        """For people."""
        return f"{bracketed(self.host)}:{self.port}"

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(url: str) -> EngineAddress:
        """From ``http://host:port`` or ``https://host:port``; raises ``ValueError`` for anything
        else.
        """
        scheme, _, rest = url.partition("://")
        host, _, port = rest.rpartition(":")
        if scheme not in ("http", "https") or not host or not port.isdigit():
            raise ValueError(f"engine_url must look like http://host:port, not {url!r}")
        return EngineAddress(host.strip("[]"), int(port), scheme == "https")


@dataclass(eq=False, slots=True)
class Leg:
    """One request to an engine and its answer, from ``EngineClient.send``."""

    client: EngineClient
    address: EngineAddress
    payload: Sequence[bytes | memoryview]
    listener: LegListener
    connection: _Connection | None = None
    connecting: asyncio.Task[None] | None = None
    is_over: bool = False
    was_resent: bool = False

    def cancel(self) -> None:
        """Close the connection; the listener hears nothing any more."""
        if self.is_over:
            return
        self.is_over = True
        if self.connecting is not None:
            self.connecting.cancel()
        if self.connection is not None:
            self.connection.drop()

    def pause(self) -> None:
        """Read nothing from the engine until ``resume``."""
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """Go on reading."""
        if self.connection is not None:
            self.connection.resume()

    def fail(self, reason: str) -> None:
        """Tell the listener, once."""
        if not self.is_over:
            self.is_over = True
            self.listener.failed(reason)


@dataclass(eq=False)
class EngineClient:
    """Connections to all engines. Used from one event loop; ``close`` ends it."""

    connect_timeout_s: float = 5.0
    tls: ssl.SSLContext | None = None
    """How ``https`` engines are verified."""
    idle_limit_s: float = 3.0
    idle_limit_connections: int = 256
    """Idle connections kept per engine."""
    _idle: dict[EngineAddress, list[_Connection]] = field(default_factory=dict)
    _busy: set[_Connection] = field(default_factory=set)
    _sweep: asyncio.TimerHandle | None = None
    _told: set[str] = field(default_factory=set)
    is_closed: bool = False

    def send(
        self, address: EngineAddress, payload: Sequence[bytes | memoryview], listener: LegListener
    ) -> Leg:
        """Send a request (head, then body) and report its answer to ``listener``."""
        assert not self.is_closed
        leg = Leg(self, address, payload, listener)
        connection = self._take_idle(address)
        if connection is not None:
            connection.carry(leg)
        else:
            self.send_on_new_connection(leg)
        return leg

    def send_on_new_connection(self, leg: Leg) -> None:
        """Open a connection for the leg; it fails when that takes longer than
        ``connect_timeout_s``.
        """
        leg.connecting = asyncio.get_running_loop().create_task(self._connect(leg))

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection whose answer is complete."""
        self._busy.discard(connection)
        idle = self._idle.setdefault(connection.address, [])
        if self.is_closed or len(idle) >= self.idle_limit_connections:
            connection.drop()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self.idle_limit_s, self._close_old)

    def forget(self, connection: _Connection) -> None:
        """The connection is closed."""
        self._busy.discard(connection)
        idle = self._idle.get(connection.address)
        if idle and connection in idle:
            idle.remove(connection)

    def close(self) -> None:
        """Close every connection; legs that are out hear nothing more."""
        self.is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in [*self._busy, *(c for idle in self._idle.values() for c in idle)]:
            if connection.leg is not None:
                connection.leg.is_over = True
            connection.drop()

    def _take_idle(self, address: EngineAddress) -> _Connection | None:
        idle = self._idle.get(address)
        if not idle:
            return None
        newest_allowed = asyncio.get_running_loop().time() - self.idle_limit_s
        while idle:
            connection = idle.pop()
            if connection.idle_since >= newest_allowed and connection.is_open:
                self._busy.add(connection)
                return connection
            connection.drop()
        return None

    def _close_old(self) -> None:
        """Close connections that were idle too long, and look again later while there are any."""
        loop = asyncio.get_running_loop()
        self._sweep = None
        oldest_allowed = loop.time() - self.idle_limit_s
        for idle in self._idle.values():
            for connection in [c for c in idle if c.idle_since < oldest_allowed]:
                idle.remove(connection)
                connection.drop()
        if any(self._idle.values()):
            self._sweep = loop.call_later(self.idle_limit_s, self._close_old)

    async def _connect(self, leg: Leg) -> None:
        address = leg.address
        connection = _Connection(self, address)
        secured: dict[str, Any] = {}
        if address.is_tls:
            secured = {
                "ssl": self.tls,
                "server_hostname": address.host,
                "ssl_handshake_timeout": self.connect_timeout_s,
                "ssl_shutdown_timeout": SHUTDOWN_LIMIT_S,
            }
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, address.host, address.port, **secured
                )
        except TimeoutError:
            limit = f"{self.connect_timeout_s:g} s"
            leg.fail(f"no connection to {address.shown} within {limit}")
        except OSError as error:
            reason = f"no connection to {address.shown}: {tls_reason(error)}"
            if isinstance(error, ssl.SSLError):
                self._tell_once(reason)
            leg.fail(reason)
        else:
            leg.connecting = None
            if leg.is_over:
                connection.drop()
            else:
                self._busy.add(connection)
                connection.carry(leg)

    def _tell_once(self, reason: str) -> None:
        """It stays so until a person does something; each leg would say it again."""
        if reason not in self._told and len(self._told) < TOLD_LIMIT:
            self._told.add(reason)
            _log.error("%s", reason)


class _Connection(asyncio.Protocol):
    """One TCP connection to an engine; carries one leg at a time."""

    def __init__(self, client: EngineClient, address: EngineAddress) -> None:
        self.client = client
        self.address = address
        self.leg: Leg | None = None
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._legs_carried = 0
        self._parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        """Ready for the next answer."""
        self._bytes_seen = 0
        self._headers: RawHeaders = []
        self._status = 0
        self._is_head_complete = False
        self._is_head_told = False
        self._is_complete = False
        self._is_reusable = False
        self._ends_with_connection = False
        self._body: list[bytes] = []
        self._is_paused = False

    @property
    def is_open(self) -> bool:
        """Whether a request can be written."""
        return self._transport is not None and not self._transport.is_closing()

    def carry(self, leg: Leg) -> None:
        """Write the leg's request; from now on what arrives is its answer."""
        assert self.leg is None
        assert self._transport is not None
        self.leg = leg
        leg.connection = self
        self._legs_carried += 1
        if len(leg.payload) == 1:
            self._transport.write(leg.payload[0])
        else:
            self._transport.writelines(leg.payload)

    def drop(self) -> None:
        """Close at once."""
        self.leg = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if self._transport is not None and not self._is_paused and self.is_open:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._is_paused:
            self._is_paused = False
            if self.is_open:
                self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "writelines")
        self._transport = transport  # type: ignore[assignment]
        notice_dead_link(transport)

    def data_received(self, data: bytes) -> None:
        leg = self.leg
        if leg is None:
            self.drop()
            return
        self._bytes_seen += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(leg, f"malformed answer: {error}")
            return
        if not self._is_head_complete:
            if self._bytes_seen > HEAD_LIMIT_BYTES:
                self._break(leg, f"the answer's head is larger than {HEAD_LIMIT_BYTES} bytes")
            return
        if not self._is_head_told:
            self._is_head_told = True
            leg.listener.head_received(self._status, self._headers)
        if self._body and not leg.is_over:
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body = []
            leg.listener.body_received(body, self._is_complete)
        if self._is_complete and not leg.is_over:
            self._finish(leg)

    def connection_lost(self, error: Exception | None) -> None:
        leg, self.leg = self.leg, None
        self.client.forget(self)
        if leg is None or leg.is_over:
            return
        leg.connection = None
        if self._ends_with_connection and self._is_head_told and error is None:
            leg.is_over = True
            leg.listener.ended()
        elif not self._bytes_seen and self._legs_carried > 1 and not leg.was_resent:
            leg.was_resent = True
            self.client.send_on_new_connection(leg)
        else:
            where = self.address.shown
            stage = "in the middle of its answer" if self._bytes_seen else "before its answer"
            leg.fail(f"{where} closed the connection {stage}" + (f": {error}" if error else ""))

    def _finish(self, leg: Leg) -> None:
        is_reusable = self._is_reusable and self.is_open
        if self._is_paused:
            self.resume()
        self.leg, leg.connection = None, None
        leg.is_over = True
        if is_reusable:
            self._reset()
            self.client.give_back(self)
        else:
            self.drop()
        leg.listener.ended()

    def _break(self, leg: Leg, reason: str) -> None:
        self.drop()
        leg.connection = None
        leg.fail(reason)

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status >= 200:
            self._is_head_complete = True
            self._is_reusable = self._parser.should_keep_alive()
            names = {name for name, _ in self._headers}
            self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._is_head_complete:
            self._is_complete = True
        else:
            self._headers = []
