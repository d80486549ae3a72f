"""A chunk in the index of one tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass(slots=True, eq=False)
class Entry(Generic[V]):
    """One chunk of one tier. The index changes it, others read it."""

    key: bytes
    parent_key: bytes
    """Of the chunk before it in the prompt; empty for a prompt's first one."""
    size_bytes: int
    tenant: str
    value: V
    """Where the chunk lies; the index does not look at it."""
    marks: tuple[object, ...] = ()
    """Whatever goes with the chunk; the index does not look at it."""
    added: float = 0.0
    """When it was published; its time to live begins here."""
    uses: int = 0
    """Leases that counted as one, so far."""
    leases: int = 0
    """Readers that hold it now."""
    is_pinned: bool = False
    is_present: bool = False
    """In the index and visible: published, and not removed since."""

    # The following belong to the index and its eviction order.
    children: int = 0
    """Chunks in this tier, published or reserved, that follow it."""
    last_use: int = 0
    """Tick when it came, of the last look-up that ended here, or the same of a child that is gone,
    whichever is later; a chunk with children is at least as fresh as they are.
    """
    hits: int = 0
    """Look-ups that ended here, or in a child that is gone."""
    own_hits: int = 0
    """Those of ``hits`` that its parent has yet to learn of."""

    @property
    def is_held(self) -> bool:
        """Whether a reader or an operator holds it in place."""
        return self.leases > 0 or self.is_pinned

    @property
    def is_evictable(self) -> bool:
        """Whether it may go now: visible, not held, and no chunk of this tier needs it."""
        return self.is_present and not (self.children or self.leases or self.is_pinned)

    @property
    def is_free(self) -> bool:
        """Whether it is gone and nobody reads it: the place that it took may be used again."""
        return not self.is_present and not self.leases
