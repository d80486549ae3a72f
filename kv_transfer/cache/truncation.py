"""Prompts that would have hit, had their beginning not been cut off. Pure.

A client that drops the oldest turns of a chat to stay below a limit sends text that was computed
before, at another position, behind other text: its KV is of no use. In chained keys this cannot be
seen, since everything behind the cut gets new ones. It takes ids that stand for content alone: one
per token, or one per block when whole blocks were cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GRAM_LIMIT = 8
"""Ids by which a shared run is recognised, at most."""


@dataclass(frozen=True, slots=True)
class Truncated:
    """A prompt that repeats a run of an earlier one further to the front."""

    request: int
    """Place in the record, from 0."""
    earlier: int
    """Place of the request that had the longest such run."""
    kept: int
    """Ids before the run that the cache does find, such as a system prompt."""
    dropped: int
    """How many ids further to the front the longest run is."""
    lost: int
    """Ids of all such runs in this prompt: they would have been hits at their old place."""


def find_truncated(requests: Iterable[Sequence[int]], least: int) -> list[Truncated]:
    """Requests that repeat at least ``least`` ids in a row of an earlier request, further to the
    front than there, behind the part that some earlier request begins with, too.

    ``requests`` are ids of content alone. Of equal runs the latest is compared. Runs of one
    repeated id (padding) do not count.
    """
    if least < 1:
        raise ValueError("a run has at least one id")
    width = min(least, GRAM_LIMIT)
    stride = least - width + 1  # every run of `least` ids contains an indexed gram
    seen = _Prefixes()
    texts: list[Sequence[int]] = []
    where: dict[tuple[int, ...], tuple[int, int]] = {}
    found = []
    for number, ids in enumerate(requests):
        kept = seen.shared(ids)
        runs = _shifted_runs(ids, kept, texts, where, width, least)
        if runs:
            _, earlier, shift = max(runs)
            lost = sum(length for length, _, _ in runs)
            found.append(Truncated(number, earlier, kept, shift, lost))
        seen.add(ids)
        texts.append(ids)
        for start in range(0, len(ids) - width + 1, stride):
            where[tuple(ids[start : start + width])] = (number, start)
    return found


class _Prefixes:
    """A tree of all sequences so far."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        """(number of a node, next id) to the number of the node behind it; the root is 0."""

    def shared(self, ids: Sequence[int]) -> int:
        """How many of ``ids``, from the first one on, an earlier sequence begins with."""
        node = 0
        for position, number in enumerate(ids):
            following = self._nodes.get((node, number))
            if following is None:
                return position
            node = following
        return len(ids)

    def add(self, ids: Sequence[int]) -> None:
        node = 0
        for number in ids:
            node = self._nodes.setdefault((node, number), len(self._nodes) + 1)


def _shifted_runs(
    ids: Sequence[int],
    kept: int,
    texts: list[Sequence[int]],
    where: dict[tuple[int, ...], tuple[int, int]],
    width: int,
    least: int,
) -> list[tuple[int, int, int]]:
    """(length, earlier request, ids by which it moved to the front) of each run behind ``kept``."""
    runs = []
    start = kept
    end_of_last = kept
    while start + width <= len(ids):
        place = where.get(tuple(ids[start : start + width]))
        if place is None or place[1] <= start:
            start += 1
            continue
        earlier, position = place
        shift = position - start
        first, end = _extent(ids, texts[earlier], start, shift, end_of_last)
        if end - first < least:
            start += 1
            continue
        if not _is_padding(ids[first:end]):
            runs.append((end - first, earlier, shift))
            end_of_last = end
        start = end
    return runs


def _is_padding(run: Sequence[int]) -> bool:
    return len(run) > 1 and len(set(run)) == 1


def _extent(
    ids: Sequence[int], text: Sequence[int], start: int, shift: int, floor: int
) -> tuple[int, int]:
    """First and end of the run around ``start`` in which ``ids`` equals ``text`` moved by
    ``shift``; not before ``floor``.
    """
    first, end = start, start
    while first > floor and ids[first - 1] == text[first - 1 + shift]:
        first -= 1
    while end < len(ids) and end + shift < len(text) and ids[end] == text[end + shift]:
        end += 1
    return first, end
