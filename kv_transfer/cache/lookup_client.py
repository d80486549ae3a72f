"""The scheduler's end of the cache: asks how much of a prompt the host has, without waiting.

A server that is gone or silent costs nothing: after some unanswered questions none is asked for a
while, and a question that is not answered in time counts as nothing found. Used by one thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from splitserve.kv_transfer.cache import packets
from splitserve.kv_transfer.cache.messages import (
    KEYS_LIMIT,
    PROTOCOL_VERSION,
    Arena,
    Found,
    FromServer,
    Hello,
    Lookup,
    TierSpeed,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from splitserve.kv_transfer.cache.geometry import ChunkGeometry

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two attempts to connect, when the first one failed."""
SILENCE_LIMIT = 3
"""Unanswered look-ups in a row, after which the server is left alone."""
REST_S = 5.0
"""For so long."""
ANSWERS_PER_TURN = 1_000


@dataclass(frozen=True)
class Hits:
    """What a look-up has found."""

    tiers: bytes
    """One byte per leading chunk that is there: the number of its tier, 0 for the arena."""
    speeds: tuple[TierSpeed, ...] = ()


NOTHING = Hits(b"")


class LookupClient:
    """Open look-ups by number."""

    def __init__(
        self, path: str, engine: str, ranks: int, model: bytes, geometry: ChunkGeometry,
        *, limit_s: float,
    ) -> None:  # fmt: skip
        self._path = path
        self._hello = Hello(
            version=PROTOCOL_VERSION, engine=engine, rank=-1, ranks=ranks, model=model,
            geometry=geometry,
        )  # fmt: skip
        self._limit_s = limit_s
        self._connection: socket.socket | None = None
        self._receiver: packets.Receiver[FromServer] | None = None
        self._decoder: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
        self._next_try = 0.0
        self._rests_until = 0.0
        self._silences = 0
        self._count = 0
        self._open: dict[int, float] = {}
        """Look-up to its deadline."""
        self._found: dict[int, Hits] = {}
        self.is_refused = False
        self.timeouts = 0

    def ask(self, keys: Sequence[bytes]) -> int | None:
        """The number of a new look-up; None when there is nobody to ask now."""
        now = monotonic()
        if not keys or now < self._rests_until:
            return None
        self._count += 1
        message = Lookup(
            lookup_id=self._count, keys=b"".join(keys[:KEYS_LIMIT]), limit_s=self._limit_s / 2
        )
        # A server that was started again since the last question is found by the second try.
        if not (
            self._sent(message, now) or (self._connection is None and self._sent(message, now))
        ):
            return None
        self._open[self._count] = now + self._limit_s
        return self._count

    def answer(self, lookup_id: int, wait_s: float = 0.0) -> Hits | None:
        """What a look-up has found; None: not known yet. Waits for at most ``wait_s``. An answer
        is given once.
        """
        until = monotonic() + wait_s
        while lookup_id in self._open:
            left_s = until - monotonic()
            self._receive(max(0.0, left_s))
            if left_s <= 0:
                break
        found = self._found.pop(lookup_id, None)
        if found is not None:
            return found
        deadline = self._open.get(lookup_id)
        if deadline is None:
            return NOTHING
        if monotonic() < deadline:
            return None
        self.forget(lookup_id)
        self._was_silent()
        return NOTHING

    def forget(self, lookup_id: int) -> None:
        """Nobody wants this answer any more."""
        self._open.pop(lookup_id, None)
        self._found.pop(lookup_id, None)

    def close(self) -> None:
        """The connection is closed."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _sent(self, message: Lookup, now: float) -> bool:
        """Whether the server has been told; afterwards there is no connection to a dead one."""
        if not self._connect(now):
            return False
        assert self._connection is not None
        try:
            return packets.send(self._connection, message)
        except packets.PeerGoneError as error:
            self._lost(error)
            return False

    def _connect(self, now: float) -> bool:
        if self._connection is not None:
            return True
        if now < self._next_try or self.is_refused:
            return False
        try:
            self._connection = packets.connect(self._path)
            packets.send(self._connection, self._hello)
        except packets.PeerGoneError:
            self._next_try = now + RETRY_S
            self.close()
            return False
        self._receiver = packets.Receiver(self._connection, self._decoder)
        return True

    def _receive(self, wait_s: float) -> None:
        if self._connection is None or self._receiver is None:
            return
        if wait_s:
            packets.wait([self._connection.fileno()], wait_s)
        try:
            for message in self._receiver.messages(ANSWERS_PER_TURN):
                self._take_up(message)
        except (packets.PeerGoneError, packets.BadPacketError) as error:
            self._lost(error)

    def _take_up(self, message: object) -> None:
        if isinstance(message, Arena):
            self.is_refused = bool(message.refusal)
            if message.refusal:
                logger.warning("this engine does not use the cache: %s", message.refusal)
                self._lost(packets.PeerGoneError(message.refusal))
        elif isinstance(message, Found) and self._open.pop(message.lookup_id, None) is not None:
            self._silences = 0
            self._found[message.lookup_id] = Hits(message.tiers, message.speeds)

    def _was_silent(self) -> None:
        self.timeouts += 1
        self._silences += 1
        if self._silences >= SILENCE_LIMIT:
            self._silences = 0
            self._rests_until = monotonic() + REST_S
            logger.warning("the cache server is silent: not asked for %g s", REST_S)

    def _lost(self, error: Exception) -> None:
        logger.info("%s", error)
        self.close()
        for lookup_id in self._open:
            self._found[lookup_id] = NOTHING
        self._open.clear()
