"""What the index knows of who has which beginning of a prompt."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.orchestrator.core.prefix_index import Held, PrefixIndex

MARKS = [number.to_bytes(8, "big") for number in range(12)]


def take(index: PrefixIndex, source: str, *marks: int, **more: Any) -> None:
    """The source says that it holds these marks, ten tokens apart."""
    added = [(MARKS[number], 10 * (number + 1)) for number in marks]
    index.take(source, **({"is_first": False, "added": added, "removed": ()} | more))


def test_the_longest_beginning_of_each_source() -> None:
    """By the deepest mark that it holds, holes before it or not."""
    index = PrefixIndex()
    take(index, "a", 0, 1, 2)
    take(index, "b", 0, 3)
    take(index, "c", 7)
    assert index.longest(MARKS[:5]) == {"a": Held(3, 30), "b": Held(4, 40)}
    assert index.longest(MARKS[:1]) == {"a": Held(1, 10), "b": Held(1, 10)}
    assert index.longest(MARKS[5:9]) == {}
    assert index.longest([]) == {}


def test_what_is_removed_or_gone_is_not_found() -> None:
    """Nothing is left of a source without marks."""
    index = PrefixIndex()
    take(index, "a", 0, 1)
    take(index, "b", 1)
    index.take("a", is_first=False, added=(), removed=(MARKS[1], MARKS[5]))
    assert index.longest(MARKS) == {"b": Held(2, 20), "a": Held(1, 10)}
    assert index.longest(MARKS[2:]) == {}
    index.drop("b")
    index.drop("nobody")
    assert index.longest(MARKS) == {"a": Held(1, 10)}
    index.take("a", is_first=False, added=(), removed=(MARKS[0],))
    assert (len(index), index._marks, index._holders) == (0, {}, {})


def test_a_first_report_voids_what_was_said_before() -> None:
    """Of that source alone."""
    index = PrefixIndex()
    take(index, "a", 0, 1, 2)
    take(index, "b", 2)
    take(index, "a", 0, is_first=True)
    assert index.longest(MARKS) == {"b": Held(3, 30), "a": Held(1, 10)}
    assert (index.size_of("a"), index.size_of("b"), index.size_of("c")) == (1, 1, 0)


def test_a_source_has_a_bound() -> None:
    """What it says beyond is not taken; what it has already is brought up to date."""
    index = PrefixIndex(source_limit_marks=2)
    take(index, "a", 0, 1, 2)
    take(index, "b", 2)
    index.take("a", is_first=False, added=((MARKS[0], 99), (MARKS[3], 1)), removed=())
    assert index.size_of("a") == 2
    assert index.longest(MARKS[:1]) == {"a": Held(1, 99)}
    assert index.longest(MARKS[2:4]) == {"b": Held(1, 30)}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.booleans(),
            st.sets(st.integers(0, 11)),
            st.sets(st.integers(0, 11)),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_the_index_is_what_its_sources_have_said(
    history: list[tuple[str, bool, set[int], set[int], bool]],
) -> None:
    """After any history of reports and losses, for every prompt whose first mark somebody has."""
    index, model = PrefixIndex(), dict[str, set[int]]()
    for source, is_first, added, removed, is_lost in history:
        held = set() if is_first else model.get(source, set())
        model[source] = (held - removed) | added
        marks = [(MARKS[number], 10 * (number + 1)) for number in sorted(added)]
        gone = [MARKS[number] for number in removed]
        index.take(source, is_first=is_first, added=marks, removed=gone)
        if is_lost:
            del model[source]
            index.drop(source)
    for length in range(12):
        depths = {s: max((n for n in held if n < length), default=-1) for s, held in model.items()}
        expected = {s: Held(n + 1, 10 * (n + 1)) for s, n in depths.items() if n >= 0}
        if not any(0 in held for held in model.values()):
            expected = {}
        assert index.longest(MARKS[:length]) == expected
    assert len(index) == len(set().union(*model.values()))
