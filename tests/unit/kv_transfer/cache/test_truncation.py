"""Prompts whose beginning was cut off are found by their content."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.kv_transfer.cache.truncation import Truncated, find_truncated


def test_a_dropped_head_is_found() -> None:
    """The second prompt is the first without its first two blocks, and one more."""
    assert find_truncated([[1, 2, 3, 4, 5], [3, 4, 5, 6]], 2) == [
        Truncated(request=1, earlier=0, kept=0, dropped=2, lost=3)
    ]


def test_a_system_prompt_that_stays_is_no_loss() -> None:
    """What the cache does find is told apart from what it loses."""
    assert find_truncated([[9, 8, 1, 2, 3, 4], [9, 8, 3, 4, 5]], 2) == [
        Truncated(request=1, earlier=0, kept=2, dropped=2, lost=2)
    ]


def test_what_hits_is_not_truncated() -> None:
    """Equal prompts, longer and shorter ones, and other text."""
    assert find_truncated([[1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2], [7, 8, 9], []], 2) == []


def test_text_that_moved_back_is_not_truncated() -> None:
    """Something was put in front of it: nothing was dropped."""
    assert find_truncated([[1, 2, 3], [0, 1, 2, 3]], 2) == []


def test_short_runs_and_padding_do_not_count() -> None:
    """A run is as long as asked for, and more than one id repeated."""
    assert find_truncated([[1, 2, 3, 4], [3, 4]], 3) == []
    assert find_truncated([[1, 0, 0, 0, 0], [2, 0, 0, 0, 5]], 2) == []


def test_each_turn_of_a_sliding_window_is_found() -> None:
    """A chat that keeps its last four blocks loses three of them at every turn."""
    turns = [list(range(start, start + 4)) for start in range(5)]
    assert [found.lost for found in find_truncated(turns, 2)] == [3, 3, 3, 3]
    assert [found.earlier for found in find_truncated(turns, 2)] == [0, 1, 2, 3]


def test_several_runs_are_added_up() -> None:
    """The longest one says from where; all are lost."""
    earlier = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    found = find_truncated([earlier, [2, 3, 4, 0, 7, 8]], 2)
    assert found == [Truncated(request=1, earlier=0, kept=0, dropped=1, lost=5)]


def test_a_run_has_a_length() -> None:
    """Zero is refused."""
    with pytest.raises(ValueError, match="at least one id"):
        find_truncated([], 0)


@settings(max_examples=200, deadline=None)
@given(
    head=st.integers(1, 50),
    length=st.integers(1, 80),
    least=st.integers(1, 40),
    tail=st.integers(0, 5),
)
def test_a_cut_is_found_exactly_when_the_rest_is_long_enough(
    head: int, length: int, least: int, tail: int
) -> None:
    """Wherever the cut is, whatever the length of runs asked for."""
    text = list(range(head + length))
    new = [-1 - number for number in range(tail)]
    expected = [Truncated(1, 0, 0, head, length)] if length >= least else []
    assert find_truncated([text, text[head:] + new], least) == expected
