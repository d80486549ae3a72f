"""The router's ear at the cache server of its host: which beginnings of prompts that cache has.

The server tells all of its marks on each connection and what comes and goes after that, so a
connection that breaks costs what was known until the next one stands. Nothing waits for the cache:
while there is none, the index has nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

import msgspec

from splitserve.kv_transfer.cache.messages import (
    MESSAGE_LIMIT_BYTES,
    FromServer,
    Marks,
    Watch,
)
from splitserve.kv_transfer.cache.socket_path import short_address
from splitserve.kv_transfer.prefix_marks import MARK_BYTES
from splitserve.orchestrator.core.events import CacheLost, CachePrefixesReported

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from splitserve.orchestrator.core.events import Event

_log = logging.getLogger(__name__)

RETRY_S = 0.25
RETRY_LIMIT_S = 5.0
CONNECT_LIMIT_S = 5.0
"""To connect and to send the first packet; a server that is there takes both at once."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromServer).decode


class CacheWatch:
    """One host's cache, heard by one router."""

    def __init__(self, socket_path: Path, host: str, tell: Callable[[Event], None]) -> None:
        self._path = socket_path
        self._host = host
        self._tell = tell
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen from now on, in a task of its own."""
        self._task = asyncio.get_running_loop().create_task(self.run())
        self._task.add_done_callback(_ended)

    def stop(self) -> None:
        """Listen no more."""
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Listen for ever, on one connection after another; ends by cancellation."""
        delay = RETRY_S
        while True:
            try:
                heard = await self._listen()
            except (OSError, TimeoutError) as error:
                _log.debug("no connection to the cache server at %s: %r", self._path, error)
                heard = False
            if heard:
                delay = RETRY_S
            await asyncio.sleep(delay)
            delay = min(2 * delay, RETRY_LIMIT_S)

    async def _listen(self) -> bool:
        """Until the connection ends; whether the server has told anything on it."""
        loop = asyncio.get_running_loop()
        heard = False
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setblocking(False)
            async with asyncio.timeout(CONNECT_LIMIT_S):
                with short_address(self._path) as address:
                    await loop.sock_connect(connection, address)
                await loop.sock_sendall(connection, _encode(Watch()))
            try:
                while packet := await loop.sock_recv(connection, MESSAGE_LIMIT_BYTES):
                    if not self._take(packet, heard):
                        break
                    heard = True
            finally:
                if heard:
                    self._tell(CacheLost(self._host))
        return heard

    def _take(self, packet: bytes, heard: bool) -> bool:
        """Pass on what the server says. False when it makes no sense: the connection is of no use
        then.
        """
        try:
            message = _decode(packet)
        except msgspec.DecodeError as error:
            _log.warning("the cache server sent what cannot be read: %s", error)
            return False
        if not isinstance(message, Marks):
            _log.warning("the cache server sent a %s to a watcher", type(message).__name__)
            return False
        if any(len(mark.digest) != MARK_BYTES for mark in message.added):
            _log.warning("the cache server sent marks of another length")
            return False
        self._tell(
            CachePrefixesReported(
                self._host,
                message.is_first or not heard,
                tuple((mark.digest, mark.tokens) for mark in message.added),
                message.removed,
            )
        )
        return True


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        _log.error("the watch of the cache server failed", exc_info=task.exception())
