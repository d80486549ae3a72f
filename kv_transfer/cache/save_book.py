"""Room in the arena that engines write into. Pure.

All ranks of an engine ask for the same chunks and get the same slots; a chunk is published when
every rank has written its heads. A slot that was given to a rank is not used for anything else
before that rank has committed or abandoned it, or its connection has closed: a process that was
stopped in the middle of a copy goes on with it when it continues.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.chunk import Chunk
from splitserve.kv_transfer.cache.keys import KEY_BYTES, split_keys

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.arena_book import ArenaBook, ArenaEntry
    from splitserve.kv_transfer.cache.geometry import ChunkGeometry
    from splitserve.kv_transfer.cache.messages import Commit, Mark, Reserve

IS_THERE = -1
NO_ROOM = -2
WORD_BYTES = 8
PATIENCE_S = 2.0
"""How long a reservation waits for ranks that have not asked for it yet."""


@dataclass(frozen=True)
class Writer:
    """One connection of one rank."""

    client: int
    engine: str
    rank: int
    ranks: int
    geometry: ChunkGeometry
    model: bytes


@dataclass(eq=False)
class Reservation:
    """One chunk that an engine writes."""

    entry: ArenaEntry
    """Reserved; its value says where, and how the engine's bytes are ordered."""
    engine: str
    ranks: int
    since: float
    holders: set[int] = field(default_factory=set)
    """Clients that may write to the slot now."""
    checksums: dict[int, bytes] = field(default_factory=dict)
    """By rank that has written all of its part."""
    is_void: bool = False
    """Some rank will not write its part."""


class SaveBook:
    """All reservations."""

    def __init__(self, arena: ArenaBook) -> None:
        self._arena = arena
        self._open: dict[bytes, Reservation] = {}
        self._saves: dict[tuple[int, int], list[Reservation | None]] = {}
        """(client, save id) to what its indices mean."""
        self.counters: Counter[str] = Counter()

    @property
    def open_reservations(self) -> int:
        """Slots that are being written by engines."""
        return len(self._open)

    def reserve(self, writer: Writer, message: Reserve, now: float) -> tuple[int, ...]:
        """An offset per chunk, or why not. Raises ``ValueError`` for a save id that is in use."""
        if (writer.client, message.save_id) in self._saves:
            raise ValueError(f"save {message.save_id} is open already")
        if len(message.parent) not in (0, KEY_BYTES):
            raise ValueError(f"a parent has no or {KEY_BYTES} bytes")
        keys = split_keys(message.keys)
        marks: dict[int, list[Mark]] = {}
        for index, mark in message.marks:
            marks.setdefault(index, []).append(mark)
        offsets: list[int] = []
        meaning: list[Reservation | None] = []
        parent = message.parent
        for index, key in enumerate(keys):
            found = self._room(writer, key, parent, tuple(marks.get(index, ())), now)
            meaning.append(found if isinstance(found, Reservation) else None)
            offsets.append(found if isinstance(found, int) else found.entry.value.offset)
            parent = key
        if any(meaning):
            self._saves[writer.client, message.save_id] = meaning
        return tuple(offsets)

    def commit(self, client: int, rank: int, message: Commit, now: float) -> list[ArenaEntry]:
        """Chunks that are whole now. Raises ``ValueError`` for what this client did not reserve."""
        meaning = self._saves.get((client, message.save_id))
        if meaning is None:
            raise ValueError("a commit of a save that was not asked for")
        touched: list[Reservation] = []
        for index, checksums in message.written:
            reservation = self._mine(meaning, index, client)
            if len(checksums) != WORD_BYTES * reservation.entry.value.geometry.layers:
                raise ValueError("a commit without one checksum per layer")
            reservation.checksums[rank] = checksums
            touched.append(reservation)
        for index in message.abandoned:
            reservation = self._mine(meaning, index, client)
            reservation.is_void = True
            touched.append(reservation)
        for reservation in touched:
            reservation.holders.discard(client)
        if not any(r is not None and client in r.holders for r in meaning):
            del self._saves[client, message.save_id]
        return [e for r in touched if (e := self._settled(r, now)) is not None]

    def client_gone(self, client: int, now: float) -> None:
        """Nobody of this connection writes any more."""
        for save in [save for save in self._saves if save[0] == client]:
            for reservation in self._saves.pop(save):
                if reservation is not None and client in reservation.holders:
                    reservation.holders.discard(client)
                    reservation.is_void = True
                    self._settled(reservation, now)

    def expire(self, now: float) -> None:
        """Reservations whose other ranks do not come are given up."""
        for reservation in list(self._open.values()):
            if not reservation.holders and now - reservation.since > PATIENCE_S:
                reservation.is_void = True
                self._settled(reservation, now)

    def _room(
        self, writer: Writer, key: bytes, parent: bytes, marks: tuple[Mark, ...], now: float
    ) -> Reservation | int:
        reservation = self._open.get(key)
        if reservation is not None:
            same = reservation.engine == writer.engine and not reservation.is_void
            if not same or writer.rank in reservation.checksums:
                return IS_THERE
            if writer.client in reservation.holders:
                return IS_THERE  # Two of its requests compute the same chunk: one writes it.
            reservation.holders.add(writer.client)
            return reservation
        if self._arena.index.get(key) is not None:
            return IS_THERE
        if self._arena.index.is_reserved(key):
            return IS_THERE  # It is on its way from a lower tier.
        blank = Chunk(0, writer.geometry, writer.ranks, b"", marks, writer.model)
        entry = self._arena.reserve(key, parent, blank)
        if entry is None:
            self.counters["no_room"] += 1
            return NO_ROOM
        reservation = Reservation(entry, writer.engine, writer.ranks, now)
        reservation.holders.add(writer.client)
        self._open[key] = reservation
        return reservation

    def _mine(self, meaning: list[Reservation | None], index: int, client: int) -> Reservation:
        reservation = meaning[index] if 0 <= index < len(meaning) else None
        if reservation is None or client not in reservation.holders:
            raise ValueError("a commit of a chunk that was not reserved")
        return reservation

    def _settled(self, reservation: Reservation, now: float) -> ArenaEntry | None:
        """Publish or give up a reservation that nobody writes to any more."""
        entry = reservation.entry
        if reservation.holders or self._open.get(entry.key) is not reservation:
            return None
        if not reservation.is_void and len(reservation.checksums) < reservation.ranks:
            return None
        del self._open[entry.key]
        if reservation.is_void:
            self.counters["abandoned"] += 1
            self._arena.withdraw(entry)
            return None
        self.counters["saved"] += 1
        self._arena.publish(entry, replace(entry.value, checksums=_interleaved(reservation)), now)
        return entry


def _interleaved(reservation: Reservation) -> bytes:
    """``[layers, ranks]`` from one ``[layers]`` per rank."""
    parts = [reservation.checksums[rank] for rank in range(reservation.ranks)]
    if len(parts) == 1:
        return parts[0]
    layers = range(0, len(parts[0]), WORD_BYTES)
    return b"".join(part[at : at + WORD_BYTES] for at in layers for part in parts)
