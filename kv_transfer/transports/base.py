"""What moves pages between two processes: one small interface, capabilities as data.

A transport writes *pages* (one layer's bytes of one block, or a tensor-parallel rank's slice of
one) from this process's KV memory into the KV memory of a peer. It knows addresses and peers; it
knows no request. One thread owns a transport: every method is called from that thread only, except
the constructor.

A page is named by its index ``layer * num_blocks + block``. ``connect`` fixes, once per peer, the
address of every page on both sides and the number of bytes that one write moves; after that a write
is two index arrays.

What the interface does not know: which pages a peer may write. The receiving side says so with
``expect`` and ends it with ``revoke``; only a transport whose bytes are placed by the receiver
itself (``tcp``) can enforce it. For all others the protocol above relies on the writer's fence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

PageIndices = npt.NDArray[np.int64]
"""1-D array of page indices (``layer * num_blocks + block``)."""

WriterEnd = Literal["receiver_revokes", "process_death", "deregistration"]
"""What ends a writer that no longer answers (besides its own fence).

``receiver_revokes``: the receiver places the bytes and can stop at once; ``process_death``: only
the writer's own end, since a stopped process can still write after it continues;
``deregistration``: the receiver destroys the registration or queue pair.
"""


class TransportError(Exception):
    """A transport cannot be used here, or a peer cannot be reached; the message says why and what
    to do.
    """


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do; the layers above branch on this and never on a name."""

    name: str
    same_host_only: bool
    """Peers must share a kernel (the copy goes from process to process)."""
    target_must_progress: bool
    """The receiver has to call ``poll`` often while a transfer is open, or bytes stop moving."""
    synchronous: bool
    """``write`` returns after the bytes are in the peer's memory."""
    writer_ends_by: WriterEnd


@dataclass(frozen=True)
class Region:
    """One contiguous range of this process's memory, in bytes."""

    address: int
    length: int
    device: int | None = None
    """Number of the CUDA device that it lies on, None for host memory."""


@dataclass(frozen=True)
class PagePairing:
    """Where every page lies on this side and on the peer's, and how much of it one write moves.

    ``local_addresses`` and ``remote_addresses`` are 1-D int64 arrays over page indices of the own
    and of the peer's layout (they may differ in length: the two sides may have different numbers of
    blocks). Heads that only one side holds are already accounted for: the addresses point at the
    first byte of the slice. ``page_bytes`` is equal for all pages.
    """

    local_addresses: npt.NDArray[np.int64]
    remote_addresses: npt.NDArray[np.int64]
    page_bytes: int


@dataclass(frozen=True)
class WriteDone:
    """Every byte of the write with this id is in the peer's memory."""

    write_id: int


@dataclass(frozen=True)
class WriteFailed:
    """The write will not complete and will not touch the peer's memory any more."""

    write_id: int
    reason: str


@dataclass(frozen=True)
class PeerLost:
    """The connection to a peer ended; writes to it that were open have been reported as failed."""

    peer: str
    reason: str


TransportEvent = WriteDone | WriteFailed | PeerLost


class Transport(Protocol):
    """Moves pages to peers. Owned by one thread."""

    @property
    def capabilities(self) -> Capabilities: ...

    def register(self, regions: Sequence[Region]) -> None:
        """Make this process's KV memory usable as source and as target. Called once, before
        anything else.

        The caller keeps the memory mapped until ``close`` has returned.
        """

    def describe(self) -> bytes:
        """What a peer's ``connect`` needs to write into this process (opaque; it travels over the
        encrypted control channel).
        """

    def connect(self, peer: str, description: bytes, pairing: PagePairing) -> None:
        """Get ready to write to ``peer`` (an incarnation id, never reused).

        Raises ``TransportError`` when the peer cannot be written to, with the reason and the
        remedy.
        """

    def write(self, peer: str, tag: int, local: PageIndices, remote: PageIndices) -> int:
        """Start copying pages ``local[i]`` to ``remote[i]``; returns an id that one later event
        names.

        ``tag`` is the receiver's name for the grant under which the pages are written (64 bit).
        Never blocks on the network. A failure is an event too, never an exception, so that one path
        handles both.
        """

    def poll(self) -> list[TransportEvent]:
        """Make progress and return what has happened since the last call. Never blocks."""

    def filenos(self) -> list[int]:
        """File descriptors whose readability means that ``poll`` has work (may change after
        connect).
        """

    def expect(self, tag: int, pages: PageIndices) -> None:
        """Receiver: these own pages may be written under ``tag`` from now on."""

    def revoke(self, tag: int) -> bool:
        """Receiver: end ``tag``. True when from now on no byte can land under it, False when only
        the writer can promise that.
        """

    def disconnect(self, peer: str) -> None:
        """Forget a peer (either direction); its open writes are reported as failed. Unknown peers
        are ignored.
        """

    def close(self) -> None:
        """Release everything; afterwards no registered memory is touched."""
