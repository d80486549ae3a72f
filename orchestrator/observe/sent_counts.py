"""What became of traces that were to be sent."""

from __future__ import annotations

import msgspec


class SentCounts(msgspec.Struct, frozen=True):
    """Traced requests of a router, or transfers of an agent, since its start."""

    exported: int = 0
    failed: int = 0
    """The collector did not take them."""
    dropped: int = 0
    """They came faster than they could be sent."""

    def __add__(self, other: SentCounts) -> SentCounts:
        return SentCounts(
            self.exported + other.exported,
            self.failed + other.failed,
            self.dropped + other.dropped,
        )
