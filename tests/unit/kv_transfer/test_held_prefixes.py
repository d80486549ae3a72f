"""What an engine says of its own prefix cache, and what the listener knows after any history."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.kv_transfer import held_prefixes as subject
from splitserve.kv_transfer.held_prefixes import HeldPrefixes, PrefixReport
from splitserve.kv_transfer.prefix_marks import split_digests

BLOCK = 16


def mark(number: int) -> bytes:
    return number.to_bytes(8, "big")


class Listener:
    """What a router makes of the reports."""

    def __init__(self) -> None:
        self.known: dict[bytes, int] = {}

    def hear(self, report: PrefixReport) -> PrefixReport:
        if report.is_first:
            self.known.clear()
        for gone in split_digests(report.removed):
            del self.known[gone]
        self.known.update(zip(split_digests(report.added), report.tokens, strict=True))
        return report


def test_marks_are_held_by_full_cached_blocks() -> None:
    """A mark behind 40 tokens lies in the third block; one whose block is not full, or not cached,
    is not held.
    """
    cached = {b"b0", b"b2"}
    held = HeldPrefixes(BLOCK, cached.__contains__)
    held.note(((mark(1), 10), (mark(2), 20), (mark(3), 40), (mark(4), 49)), (b"b0", b"b1", b"b2"))
    report = held.report(from_start=False)
    assert report.is_first
    assert split_digests(report.added) == [mark(1), mark(3)]
    assert report.tokens == (10, 40)
    assert held.report(from_start=False) == PrefixReport()


def test_an_evicted_block_takes_its_marks_along() -> None:
    """Said in the report that finds out."""
    cached = {b"b0", b"b1"}
    held = HeldPrefixes(BLOCK, cached.__contains__)
    held.note(((mark(1), 16), (mark(2), 32)), (b"b0", b"b1"))
    listener = Listener()
    listener.hear(held.report(from_start=False))
    cached.remove(b"b1")
    assert split_digests(listener.hear(held.report(from_start=False)).removed) == [mark(2)]
    assert listener.known == {mark(1): 16}


def test_a_report_asks_about_a_bounded_number_of_blocks() -> None:
    """Those unused for longest first, all of them in the end."""
    asked: list[bytes] = []
    count = 3 * subject.CHECK_LIMIT_MARKS

    def is_cached(block: bytes) -> bool:
        asked.append(block)
        return True

    held = HeldPrefixes(1, is_cached)
    hashes = [mark(n) for n in range(count)]
    for n in range(count):
        held.note(((mark(n), n + 1),), hashes)
    for _ in range(3):
        asked.clear()
        held.report(from_start=False)
        assert len(asked) == subject.CHECK_LIMIT_MARKS
    asked.clear()
    held.report(from_start=False)
    assert asked == hashes[: subject.CHECK_LIMIT_MARKS]


def test_reports_are_bounded_and_say_that_there_is_more() -> None:
    """5,000 marks come in three reports."""
    held = HeldPrefixes(1, lambda block: True)
    for n in range(5_000):
        held.note(((mark(n), 1),), (b"b",))
    listener = Listener()
    sizes = []
    while (report := listener.hear(held.report(from_start=False))).has_more:
        sizes.append(len(report.tokens))
    assert sizes == [2_000, 2_000]
    assert len(listener.known) == 5_000


def test_the_number_of_marks_is_bounded() -> None:
    """Those unused for longest are forgotten, and that is said."""
    held = HeldPrefixes(1, lambda block: True, limit_marks=3)
    listener = Listener()
    for n in (1, 2, 3):
        held.note(((mark(n), 1),), (b"b",))
    listener.hear(held.report(from_start=False))
    held.note(((mark(1), 1),), (b"b",))
    held.note(((mark(4), 1),), (b"b",))
    listener.hear(held.report(from_start=False))
    assert len(held) == 3
    assert set(listener.known) == {mark(1), mark(3), mark(4)}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("nnerlf"), st.integers(0, 9)), max_size=60))
def test_the_listener_knows_what_is_held(history: list[tuple[str, int]]) -> None:
    """After any order of computing, evicting, reports and lost reports, a listener that has heard
    all that there is knows exactly the marks that are held.
    """
    cached: set[bytes] = set()
    held = HeldPrefixes(1, cached.__contains__, limit_marks=6)
    listener = Listener()
    from_start = False
    for what, n in history:
        if what == "n":
            cached.add(mark(n))
            held.note(((mark(n), 1),), (mark(n),))
        elif what == "e":
            cached.discard(mark(n))
        elif what == "l":
            held.report(from_start=from_start)
            from_start = True
        else:
            listener.hear(held.report(from_start=from_start or what == "f"))
            from_start = False
    while listener.hear(held.report(from_start=from_start)).has_more:
        from_start = False
    assert set(listener.known) == set(held._held) <= cached
