"""Where a request's time went: the parts are never negative and always add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.orchestrator.router.request_parts import PARTS, Moments, overlap_of, parts_of

START = 1_000.0


def ms(*values: float | None) -> list[float | None]:
    """Moments that lie so many milliseconds after the request's arrival."""
    return [None if value is None else START + value / 1000 for value in values]


def moments(ended: float, *, is_streaming: bool = True, **after_ms: float) -> Moments:
    """By milliseconds after the arrival."""
    times = {name: START + value / 1000 for name, value in after_ms.items()}
    return Moments(START, START + ended / 1000, is_streaming, **times)


SPLIT = {"dispatched": 1, "prefill_started": 5, "prefill_ended": 55, "landed": 58, "first_data": 70}


@pytest.mark.parametrize(
    ("given_moments", "expected"),
    [
        (
            moments(100, **SPLIT),
            {
                "queue": 1,
                "reserve": 4,
                "prefill": 50,
                "transfer_exposed": 3,
                "first_step": 12,
                "decode": 30,
            },
        ),
        (
            moments(100, **SPLIT | {"redispatched": 3}),
            {
                "queue": 1,
                "retry": 2,
                "reserve": 2,
                "prefill": 50,
                "transfer_exposed": 3,
                "first_step": 12,
                "decode": 30,
            },
        ),
        (
            moments(100, is_streaming=False, **SPLIT | {"first_data": 100}),
            {"queue": 1, "reserve": 4, "prefill": 50, "transfer_exposed": 3, "decode": 42},
        ),
        (
            moments(100, dispatched=1, first_data=40),
            {"queue": 1, "prefill": 39, "decode": 60},
        ),
        (moments(100, is_streaming=False, dispatched=1, first_data=99), {"queue": 1, "answer": 99}),
        (moments(30), {"queue": 30}),
        (moments(30, dispatched=10), {"queue": 10, "prefill": 20}),
        (
            moments(60, dispatched=10, prefill_started=12, prefill_ended=40, landed=45),
            {"queue": 10, "reserve": 2, "prefill": 28, "transfer_exposed": 5, "first_step": 15},
        ),
        (
            moments(100, dispatched=1, landed=58, first_data=70),
            {"queue": 1, "prefill": 57, "first_step": 12, "decode": 30},
        ),
        # A late retry: its prefill node had computed the prompt before.
        (
            moments(100, **SPLIT | {"redispatched": 57}),
            {
                "queue": 1,
                "retry": 56,
                "reserve": 0,
                "prefill": 0,
                "transfer_exposed": 1,
                "first_step": 12,
                "decode": 30,
            },
        ),
        (moments(0), {"queue": 0}),
    ],
)
def test_examples(given_moments: Moments, expected: dict[str, float]) -> None:
    """Split, retried, unstreamed, alone, refused, cancelled, with missing facts."""
    assert list(parts_of(given_moments).items()) == list(expected.items())


some_time = st.none() | st.floats(-10, 1000, allow_nan=False)


@given(
    st.floats(0, 500),
    st.booleans(),
    st.lists(some_time, min_size=6, max_size=6),
)
def test_parts_add_up(ended: float, is_streaming: bool, times: list[float | None]) -> None:
    """Whatever is missing, out of order or of a clock that is off: no part is negative, all add up
    to the whole, and of a streamed answer those before the answer's rest to the first data.
    """
    at = [None if seconds is None else START + seconds for seconds in times]
    found = Moments(START, START + ended, is_streaming, *at)
    parts = parts_of(found)
    assert all(value >= 0 for value in parts.values()), parts
    assert list(parts) == [name for name in PARTS if name in parts]
    assert sum(parts.values()) == pytest.approx(ended * 1000, abs=0.02)
    first = found.first_data
    if is_streaming and first is not None and "decode" in parts:
        until_ms = min(max(0.0, first - START), ended) * 1000
        assert sum(parts.values()) - parts["decode"] == pytest.approx(until_ms, abs=0.02)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (ms(20, 50, 55), (30, 5)),  # Written beside the computation.
        (ms(52, 50, 55), (0, 5)),  # A late grant.
        (ms(None, 50, 50), (0, 0)),  # No page was missing.
        (ms(20, 50, 45), (25, 0)),  # The decode node's clock is behind.
        (ms(20, None, 55), (None, None)),
        (ms(20, 50, None), (None, None)),
    ],
)
def test_hidden_and_exposed(
    times: list[float | None], expected: tuple[float | None, float | None]
) -> None:
    """What travelled before the last layer was computed, and what came after it."""
    assert overlap_of(times[0], times[1], times[2]) == expected
