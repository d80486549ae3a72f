"""What the connector must know of one rank's KV memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.geometry import ChunkGeometry
    from splitserve.kv_transfer.layout import PageLayout
    from splitserve.kv_transfer.transfer_thread import WhenReady
    from splitserve.kv_transfer.transports.base import Region


class RankMemory(Protocol):
    """One rank's pages, for as long as the engine runs."""

    @property
    def layout(self) -> PageLayout:
        """Where the pages lie."""

    @property
    def region(self) -> Region:
        """The memory that all of them lie in, for the transport to register."""

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers and in the heads of all ranks."""

    def geometry(self, chunk_tokens: int) -> ChunkGeometry:
        """The chunks that this engine writes. Raises ``ValueError`` when blocks do not divide
        them.
        """

    def computed_so_far(self) -> WhenReady | None:
        """A wait for what the device was given so far; None where that is done already."""
