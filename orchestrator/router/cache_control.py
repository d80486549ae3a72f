"""The router's way to the cache server of its host: one wish of an operator at a time.

Each wish has a connection of its own, which ends with it: operators ask seldom, and a server that
was started again is no special case.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, TypeVar

import msgspec

from splitserve.kv_transfer.cache.control_messages import Refused, Result
from splitserve.kv_transfer.cache.messages import (
    MESSAGE_LIMIT_BYTES,
    FromClient,
    FromServer,
    Manage,
    Managed,
)
from splitserve.kv_transfer.cache.socket_path import short_address

if TYPE_CHECKING:
    from pathlib import Path

REQUEST_ID = 1

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
_results: msgspec.msgpack.Decoder[Result] = msgspec.msgpack.Decoder(Result)

R = TypeVar("R")


class CacheSilentError(Exception):
    """The cache server cannot be reached, or does not answer as this version does."""


class CacheRefusalError(Exception):
    """The cache server will not do it; the message says why and what to do."""


class CacheControl:
    """Asks the cache server that listens on ``socket_path``."""

    def __init__(self, socket_path: str | Path) -> None:
        self._socket_path = socket_path

    async def ask(
        self, verb: str, arguments: msgspec.Struct, answer: type[R], timeout_s: float
    ) -> R:
        """The server's ``answer``. Raises ``CacheSilentError`` (after ``timeout_s`` at the latest)
        or ``CacheRefusalError``.
        """
        wish: FromClient = Manage(
            request_id=REQUEST_ID, verb=verb, arguments=_encoder.encode(arguments)
        )
        try:
            async with asyncio.timeout(timeout_s):
                packet = await self._exchange(_encoder.encode(wish))
        except TimeoutError:
            raise CacheSilentError(
                f"the cache server has not answered within {timeout_s:g} s"
            ) from None
        except OSError as error:
            raise CacheSilentError(f"the cache server cannot be reached: {error}") from error
        result = _result_of(packet)
        if isinstance(result, Refused):
            raise CacheRefusalError(result.error)
        if not isinstance(result, answer):
            raise CacheSilentError(f"the cache server answers {verb} with {type(result).__name__}")
        return result

    async def _exchange(self, packet: bytes) -> bytes:
        """One packet there and one back. Raises ``OSError``."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setblocking(False)
            # Connecting to a Unix socket does not wait: the server is there, busy, or not there
            with short_address(self._socket_path) as address:
                connection.connect(address)
            await loop.sock_sendall(connection, packet)
            return await loop.sock_recv(connection, MESSAGE_LIMIT_BYTES + 1)


def _result_of(packet: bytes) -> Result:
    if not packet:
        raise CacheSilentError("the cache server has closed the connection without an answer")
    try:
        message = _decoder.decode(packet)
        if not isinstance(message, Managed) or message.request_id != REQUEST_ID:
            raise CacheSilentError(f"the cache server says {type(message).__name__} instead")
        return _results.decode(message.result)
    except msgspec.DecodeError as error:
        raise CacheSilentError(f"the cache server's answer cannot be read: {error}") from error
