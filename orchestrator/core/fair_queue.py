"""The waiting queue: tenants take turns, and within a tenant first come is first served.

Turns are weighted by cost (start-time fair queueing, Goyal, Vin and Cheng 1996). Each tenant that
waits has a *start tag*: the cost that it was served so far, divided by its weight, on a clock that
all tenants share. The tenant with the smallest tag is next, and what it is served moves its tag on.
A tenant that comes back begins where the others are now, so nobody saves up turns while away. When
nobody waits, all tags are forgotten: what was served without waiting cost nobody a turn.

With one tenant (no API keys) this is a plain queue. The queue knows nothing of time, nodes or of
what a cost is.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

T = TypeVar("T")

DEFAULT_WEIGHT = 1.0


@dataclass(eq=False, slots=True)
class _Line(Generic[T]):
    """One tenant's items, the next one first; not empty."""

    tenant: str
    weight: float
    start: float
    turn: int
    """Between equal start tags, the line that had its turn longest ago is next."""
    items: OrderedDict[str, T] = field(default_factory=OrderedDict)
    passing: OrderedDict[str, T] = field(default_factory=OrderedDict)
    """Those that may pass others."""
    returned: set[str] = field(default_factory=set)
    """Keys of those that had a place before and came back: they are never refused."""


class FairQueue(Generic[T]):
    """Items by key, in lines by tenant. A choice costs as many comparisons as tenants wait."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.size = 0
        """Items that wait; read only."""
        self.passing = 0
        """How many of them may pass others; read only."""
        self._weights = dict(weights or {})
        self._lines: dict[str, _Line[T]] = {}
        self._tags: dict[str, float] = {}
        """Start tags of tenants that were served since the queue was last empty and do not wait."""
        self._clock = 0.0
        """The start tag of the turn that was taken last: where a line begins."""
        self._turns = 0
        self._next: _Line[T] | None = None

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[str]:
        for line in self._lines.values():
            yield from line.items

    def values(self) -> Iterator[T]:
        """All items, tenant by tenant."""
        for line in self._lines.values():
            yield from line.items.values()

    def waiting(self) -> dict[str, int]:
        """How many items each tenant has here."""
        return {tenant: len(line.items) for tenant, line in self._lines.items()}

    # In

    def add(
        self, key: str, item: T, tenant: str, *, may_pass: bool = False, is_first: bool = False
    ) -> None:
        """The item waits behind the others of its tenant, or, ``is_first``, before them, as one
        that comes back. ``may_pass``: see ``first_that_may_pass``.
        """
        line = self._lines.get(tenant) or self._open(tenant)
        assert key not in line.items, f"{key} waits already"
        self.size += 1
        line.items[key] = item
        if is_first:
            line.items.move_to_end(key, last=False)
            line.returned.add(key)
        if may_pass:
            self.passing += 1
            line.passing[key] = item
            line.passing.move_to_end(key, last=not is_first)

    # Out

    def first(self) -> T | None:
        """Whose turn it is; None when nobody waits."""
        line = self._next
        if line is None:
            if not self._lines:
                return None
            line = self._next = min(self._lines.values(), key=_key)
        return next(iter(line.items.values()))

    def first_of(self, tenant: str) -> T | None:
        """That tenant's next item."""
        line = self._lines.get(tenant)
        return None if line is None else next(iter(line.items.values()))

    def first_that_may_pass(self) -> T | None:
        """Of the items that may pass others, the one whose turn comes first."""
        if not self.passing:
            return None
        line = min((line for line in self._lines.values() if line.passing), key=_key)
        return next(iter(line.passing.values()))

    def serve(self, key: str, tenant: str, cost: float) -> bool:
        """The item leaves the queue and its tenant pays; False when it did not wait."""
        line = self._lines.get(tenant)
        if line is None or key not in line.items:
            return False
        if len(self._lines) == 1:
            self._clock = line.start
        else:
            self._clock = min(self._lines.values(), key=_key).start
            self._next = None
        self._turns += 1
        line.turn = self._turns
        line.start += cost / line.weight
        return self.discard(key, tenant)

    def discard(self, key: str, tenant: str) -> bool:
        """The item leaves the queue unserved; False when it did not wait."""
        line = self._lines.get(tenant)
        if line is None or line.items.pop(key, None) is None:
            return False
        self.size -= 1
        line.returned.discard(key)
        if line.passing and line.passing.pop(key, None) is not None:
            self.passing -= 1
        if not line.items:
            self._close(line)
        return True

    def whom_to_refuse(self, tenant: str) -> T | None:
        """For whom there is no room when one more of ``tenant`` comes and the queue is full: the
        latest item of the tenant that holds most for its weight; None when that is the newcomer.
        Those that came back neither count nor are refused: they stand before all others.
        """
        own = self._lines.get(tenant)
        most = (1 + (0 if own is None else _newcomers(own))) / self._weight(tenant)
        longest = None
        for line in self._lines.values():
            share = _newcomers(line) / line.weight
            if share > most:
                most, longest = share, line
        return None if longest is None else next(reversed(longest.items.values()))

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, DEFAULT_WEIGHT)

    def _open(self, tenant: str) -> _Line[T]:
        start = max(self._clock, self._tags.pop(tenant, 0.0))
        self._turns += 1
        line: _Line[T] = _Line(tenant, self._weight(tenant), start, self._turns)
        self._lines[tenant] = line
        self._next = None
        return line

    def _close(self, line: _Line[T]) -> None:
        del self._lines[line.tenant]
        self._next = None
        if self._lines:
            self._tags[line.tenant] = line.start
        else:
            self._tags.clear()
            self._clock = 0.0


def _newcomers(line: _Line[T]) -> int:
    return len(line.items) - len(line.returned)


def _key(line: _Line[T]) -> tuple[float, int]:
    return line.start, line.turn
