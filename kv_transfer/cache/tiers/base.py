"""What keeps chunks below the arena: one small interface, capabilities as data.

A tier keeps whole chunks by key: a header of ``HEADER_BYTES`` and the body, as long as its reader
says, or shorter where the reader allows it. It knows sizes and nothing of what is inside; whoever
reads decodes the header and verifies the body (``chunk_format.py``). Bytes go straight between the
store and the caller's buffers, which are slots of the arena.

Calls are synchronous, and several threads may call at once. None waits longer than its tier's
timeouts for the peer of each operation. What a call cannot do because of the store is a
``TierError``; what is wrong with one chunk is an outcome.
"""

from __future__ import annotations

import enum
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HEADER_BYTES = 16 * 1024
"""Before the body of each stored chunk."""
CONNECT_TIMEOUT_S = 2.0
OPERATION_TIMEOUT_S = 5.0
"""Of one chunk, or of one question about many; defaults of tiers with a network."""


class TierError(Exception):
    """A tier cannot do what it was asked to: says what, where, and what to do."""


class TierConfigError(TierError):
    """It cannot work as configured: trying again will not help."""


class TierUnavailableError(TierError):
    """The store did not answer, or answered with a fault: later it may work."""


class ReadOutcome(enum.Enum):
    """What became of one chunk of a read."""

    HIT = "hit"
    """Header and body are complete in the buffers."""
    ABSENT = "absent"
    BROKEN = "broken"
    """It had the wrong size or could not be read to its end; it has been removed."""


class WriteOutcome(enum.Enum):
    """What became of one chunk of a write."""

    WRITTEN = "written"
    """Every reader sees all of it."""
    FULL = "full"
    """The store has no room, or takes no writes; nothing of it is there."""


@dataclass(slots=True, eq=False)
class ChunkBuffers:
    """Where one chunk is read to or written from.

    Contiguous bytes. Page-aligned ones (slots of the arena, a ``HeaderRoom``, ``new_header``) are
    the fast ones.
    What a read leaves in them is undefined unless it is a hit.
    """

    key: bytes
    header: memoryview
    """``HEADER_BYTES``."""
    body: memoryview
    may_be_shorter: bool = False
    """Whether a read takes bodies of at least one byte that do not fill ``body``: the rest of it
    is undefined then.
    """
    body_bytes: int = 0
    """After a hit: how long the stored body is."""

    def hold(self, size_bytes: int) -> bool:
        """Whether a stored chunk of that size, header and all, may be read here; ``body_bytes``
        says so then.
        """
        found = size_bytes - HEADER_BYTES
        self.body_bytes = found
        return found == len(self.body) or (self.may_be_shorter and 0 < found <= len(self.body))

    @property
    def found_body(self) -> memoryview:
        """The part of ``body`` that ``hold`` has accepted."""
        return self.body[: self.body_bytes]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk that a tier already has when its owner starts."""

    key: bytes
    size_bytes: int
    """Header and body."""
    header: bytes
    """As stored, not verified."""


@dataclass(frozen=True)
class TierCapabilities:
    """What a tier is; the layers above branch on this and never on a name."""

    name: str
    is_exclusive: bool
    """This process alone writes to it: what it wrote and did not remove is there."""
    is_remote: bool
    """Reached over a network."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory that a process beside this one can map too: the arena, and room for headers."""

    descriptor: int
    """Stays the owner's, and open until the tier is closed."""
    address: int
    """In this process."""
    size_bytes: int


class Tier(Protocol):
    """A store of chunks. Everything but ``use_memory`` and ``close`` may be called from several
    threads at once.
    """

    @property
    def capabilities(self) -> TierCapabilities:
        """Fixed over the life of the tier."""

    def use_memory(self, memory: SharedMemory) -> None:
        """Headers and bodies lie in this memory as a rule: a tier may map or register it, others
        are read and written all the same. Called for each such memory, before the first chunk that
        lies in it, by one thread at a time.
        """

    def check(self) -> None:
        """The store is reachable, takes the credentials, can be written to (unless it is only
        read), and has the configured capacity.

        Raises ``TierError``. Called once before use.
        """

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each chunk is there now. Raises ``TierError``."""

    def read(self, chunks: Sequence[ChunkBuffers]) -> Iterator[tuple[int, ReadOutcome]]:
        """(index, outcome) of each chunk as soon as it is known, in any order.

        Raises ``TierError``: chunks without an outcome are not read then. After the
        iterator has ended, in whichever way, no buffer is written to any more.
        """

    def write(self, chunks: Sequence[ChunkBuffers]) -> list[WriteOutcome]:
        """Store each chunk, all of it or nothing; one that is there already is replaced.

        Raises ``TierError``: then any of them may have been stored.
        """

    def remove(self, keys: Sequence[bytes]) -> int:
        """None of these is there; returns how many were. Raises ``TierError``."""

    def stored(self) -> Iterator[StoredChunk]:
        """What an exclusive tier has, oldest first; nothing for any other tier."""

    def listed(self, prefix: bytes) -> Iterator[bytes]:
        """Keys that begin so, those of other writers too, in any order, some perhaps twice. What is
        stored or removed meanwhile may be among them or not. They may be removed between two.

        Raises ``TierError`` while it goes on.
        """

    def free_bytes(self) -> int | None:
        """Room in the store for any user of it; None when it does not say."""

    def clock_unix_s(self) -> float | None:
        """The time by the store's own clock, to the second at worst; None when it does not say, or
        has none but this host's.
        """

    def close(self) -> None:
        """Give everything back. No call is in progress or follows; may be repeated."""


def new_header() -> memoryview:
    """A page-aligned buffer for a header, writable."""
    return memoryview(mmap.mmap(-1, HEADER_BYTES))
