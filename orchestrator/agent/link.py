"""The agent's end of the WebSocket to the router: reconnects for ever with back-off, never blocks
the agent, loses no report of a death.

What is sent after a connection is made: the hello of the engine that runs (if one is ready), the
reports of deaths that no router has taken yet, then states as they come. States and loading
progress are only worth sending when fresh: they are dropped while there is no connection. So are
the facts of ended transfers, whose requests the next router does not know, and reports of prefixes,
whose sender begins again when a router has welcomed the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from typing import TYPE_CHECKING

import aiohttp
import msgspec
from msgspec import structs

from splitserve.orchestrator.agent.auth import HOST_HEADER, agent_token
from splitserve.orchestrator.agent.messages import (
    AgentHello,
    EngineDied,
    FromAgent,
    LoadingProgress,
    NodePrefixes,
    NodeState,
    NodeTransfers,
    OtherRouters,
    Role,
    ToAgent,
)
from splitserve.orchestrator.config.tls import certificate_error, client_context, tls_reason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from splitserve.orchestrator.config import TlsConfig

_log = logging.getLogger(__name__)

PATH = "/internal/agents"
UNAUTHORIZED = 401
_RETRY_S = 0.25
_RETRY_LIMIT_S = 1.0
"""While the router is away; until its nodes are back a restarted router refuses requests."""
_HEARTBEAT_S = 5.0
_CONNECT_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 5.0
_MESSAGE_LIMIT_BYTES = 2**20
_DEATHS_LIMIT = 64
_TRANSFERS_LIMIT_FRAMES = 16
"""Frames of ended transfers that may wait to be sent; the oldest are dropped."""
_PREFIXES_LIMIT = 4
"""Reports of prefixes that may wait to be sent; no other is asked of the engine meanwhile."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ToAgent).decode


class RouterLink:
    """One agent's connection to the router. ``on_message`` is awaited for each frame, in order."""

    def __init__(
        self,
        router_url: str,
        secret: bytes,
        on_message: Callable[[ToAgent], Awaitable[None]],
        *,
        tls: TlsConfig | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """``tls`` is how an ``https`` router is verified; ``on_lost`` is called when a connection
        has ended. Raises ``ConfigError`` for files that cannot be used.
        """
        self._on_lost = on_lost
        self._tls = client_context(tls)
        self._said = ""
        """What the log told last of a connection that could not be had."""
        self._connection_lost = asyncio.Event()
        self._connection_lost.set()
        self._url = router_url + PATH
        self._headers = agent_headers(secret)
        self._on_message = on_message
        self._hello: AgentHello | None = None
        self._hello_sent = False
        self._deaths: deque[EngineDied] = deque(maxlen=_DEATHS_LIMIT)
        """To be told on this connection."""
        self._told: deque[EngineDied] = deque(maxlen=_DEATHS_LIMIT)
        """Told already; the next connection may lead to a router that does not know them."""
        self._fresh: NodeState | LoadingProgress | None = None
        self._others: OtherRouters | None = None
        self._prefixes: deque[NodePrefixes] = deque()
        self._transfers: deque[NodeTransfers] = deque(maxlen=_TRANSFERS_LIMIT_FRAMES)
        self._wake = asyncio.Event()
        self._deaths_sent = asyncio.Event()
        self._deaths_sent.set()

    @property
    def connected(self) -> bool:
        """Whether there is a router at the other end."""
        return not self._connection_lost.is_set()

    async def lost(self) -> None:
        """Returns when there is none."""
        await self._connection_lost.wait()

    def hello(self, hello: AgentHello | None) -> None:
        """The engine that runs now, None when there is none; sent now and after each reconnect."""
        self._hello = hello
        self._hello_sent = False
        self._wake.set()

    def set_role(self, role: Role, epoch: int) -> None:
        """Hellos on later connections say so; this one's router hears it with the next state."""
        if self._hello is not None:
            self._hello = structs.replace(self._hello, role=role, role_epoch=epoch)

    def died(self, report: EngineDied) -> None:
        """An engine's processes are proven gone; told now and after each reconnect."""
        self._deaths.append(report)
        self._deaths_sent.clear()
        self._wake.set()

    def fresh(self, frame: NodeState | LoadingProgress) -> None:
        """The newest state; replaces one that has not been sent."""
        self._fresh = frame
        self._wake.set()

    def others(self, frame: OtherRouters) -> None:
        """What the other routers have placed; replaces what has not been sent."""
        self._others = frame
        self._wake.set()

    @property
    def can_take_prefixes(self) -> bool:
        """Whether a report of prefixes would go out on this connection."""
        return self.connected and len(self._prefixes) < _PREFIXES_LIMIT

    def prefixes(self, frame: NodePrefixes) -> None:
        """Sent after all that are on their way, unless the connection breaks."""
        self._prefixes.append(frame)
        self._wake.set()

    def transfers(self, frame: NodeTransfers) -> None:
        """Sent if there is a connection, and lost if there is none."""
        if self.connected:
            self._transfers.append(frame)
            self._wake.set()

    async def flush(self, timeout_s: float) -> None:
        """Wait until every report of a death was sent, at most ``timeout_s`` and only while there
        is a connection.
        """
        if not self.connected:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._deaths_sent.wait()

    async def run(self) -> None:
        """Keep the connection for ever; ends by cancellation."""
        delay = _RETRY_S
        timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                try:
                    async with session.ws_connect(
                        self._url,
                        headers=self._headers,
                        heartbeat=_HEARTBEAT_S,
                        max_msg_size=_MESSAGE_LIMIT_BYTES,
                        ssl=self._tls if self._tls is not None else True,
                    ) as socket:
                        delay = _RETRY_S
                        self._said = ""
                        await self._serve(socket)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    self._tell_once(error)
                finally:
                    if self.connected:
                        self._connection_lost.set()
                        self._on_lost()
                await asyncio.sleep(delay)
                delay = min(delay * 2, _RETRY_LIMIT_S)

    def _tell_once(self, error: Exception) -> None:
        """What a person has to change is told until it is something else; a router that is away
        comes back by itself.
        """
        obstacle = obstacle_of(error)
        if not obstacle:
            _log.debug("no connection to the router: %r", error)
        elif obstacle != self._said:
            self._said = obstacle
            _log.error("no connection to the router on %s: %s", self._url, obstacle)

    async def _serve(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Speak until the connection ends."""
        self._connection_lost.clear()
        self._hello_sent = False
        self._fresh = self._others = None
        self._prefixes.clear()
        self._transfers.clear()
        self._deaths.extendleft(reversed(self._told))
        self._told.clear()
        self._wake.set()
        sender = asyncio.create_task(self._send_all(socket))
        try:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    await self._receive(message.data)
        finally:
            sender.cancel()
            with contextlib.suppress(
                asyncio.CancelledError, aiohttp.ClientError, OSError, TimeoutError
            ):
                await sender

    async def _receive(self, text: str) -> None:
        try:
            message = _decode(text)
        except msgspec.DecodeError as error:
            _log.warning("the router sent a frame that cannot be read: %s", error)
            return
        await self._on_message(message)

    async def _send_all(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._deaths:
                    await self._send(socket, self._deaths[0])
                    self._told.append(self._deaths.popleft())
                self._deaths_sent.set()
                if self._hello is not None and not self._hello_sent:
                    self._hello_sent = True
                    await self._send(socket, structs.replace(self._hello, unix_s=time.time()))
                if self._fresh is not None:
                    frame, self._fresh = self._fresh, None
                    await self._send(socket, frame)
                if self._others is not None:
                    others, self._others = self._others, None
                    await self._send(socket, others)
                while self._transfers:
                    await self._send(socket, self._transfers.popleft())
                while self._prefixes:
                    await self._send(socket, self._prefixes[0])
                    self._prefixes.popleft()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            _log.debug("the connection to the router broke while sending: %r", error)
            await socket.close()

    async def _send(self, socket: aiohttp.ClientWebSocketResponse, frame: FromAgent) -> None:
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            await socket.send_str(_encode(frame).decode())


def agent_headers(secret: bytes) -> dict[str, str]:
    """What an agent proves, and where it is, for the router's log."""
    return {
        "Authorization": f"Bearer {agent_token(secret)}",
        HOST_HEADER: socket.gethostname()[:64],
    }


def obstacle_of(error: Exception) -> str:
    """What a person has to change before the router can be had; empty when trying again may
    help.
    """
    if isinstance(error, aiohttp.WSServerHandshakeError):
        if error.status == UNAUTHORIZED:
            return (
                f"it has another cluster secret than {socket.gethostname()}; give both the same "
                "one (security.secret_file, SPLITSERVE_SECRET or SPLITSERVE_SECRET_FILE)"
            )
        return f"it answers with status {error.status}: {error.message}; is it a splitserve router?"
    failure = certificate_error(error)
    if failure is not None:
        return tls_reason(failure)
    if isinstance(error, aiohttp.InvalidURL):
        return "this is no URL; write one such as http://10.0.0.1:8000"
    return ""
