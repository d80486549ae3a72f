"""When clients are said to suffer."""

from __future__ import annotations

import itertools
from typing import Any

from splitserve.orchestrator.tuner.live_watch import LiveWatch
from splitserve.orchestrator.tuner.outcome import Targets

_ids = itertools.count()
BOTH = Targets(ttft_s=0.1, itl_s=0.02)


def line(first_ms: float | None = 50, **changes: Any) -> dict[str, Any]:
    """A request's record: 11 tokens, 10 ms apart."""
    return {
        "id": f"r{next(_ids)}",
        "endpoint": "chat",
        "streaming": True,
        "outcome": "ok",
        "first_data_ms": first_ms,
        "last_data_ms": (first_ms or 0) + 100,
        "output_tokens": 11,
    } | changes


def looked(watch: LiveWatch, *lines: dict[str, Any]) -> str:
    """What the watch says to these."""
    return watch.look(lines)


def test_says_how_many_have_missed() -> None:
    """Three or more of those that came since the first look, and more than a tenth."""
    watch = LiveWatch(BOTH)
    assert looked(watch, line()) == ""
    late = [line(500) for _ in range(3)]
    assert looked(watch, *late[:2]) == ""
    assert looked(watch, *late) == (
        "3 of 3 requests of clients have missed their targets since the measuring began"
    )


def test_each_counts_once_and_probes_never() -> None:
    """The router tells of the same ones again and again."""
    watch = LiveWatch(BOTH)
    looked(watch)
    same = line(500)
    for _ in range(9):
        assert looked(watch, same, line(500, endpoint="probe")) == ""
    assert (watch.requests, watch.misses) == (1, 1)


def test_some_misses_among_many_are_chance() -> None:
    """Three of forty are no reason to stop."""
    watch = LiveWatch(BOTH)
    looked(watch)
    assert looked(watch, *(line() for _ in range(37)), *(line(500) for _ in range(3))) == ""


def test_those_who_suffered_before() -> None:
    """Twice as many as before may miss, but never most of them."""
    watch = LiveWatch(BOTH)
    looked(watch, *(line(500 if n % 5 == 0 else 50) for n in range(20)))
    assert looked(watch, *(line(500 if n % 4 == 0 else 50) for n in range(20))) == ""
    watch = LiveWatch(BOTH)
    looked(watch, line(500))
    assert looked(watch, *(line(500) for _ in range(3)))


def test_what_is_no_miss() -> None:
    """Answers in one piece, those that left, those without a first token, and without targets."""
    watch = LiveWatch(BOTH)
    looked(watch)
    for _ in range(4):
        looked(watch, line(500, streaming=False), line(500, outcome="cancelled"), line(None))
    assert (watch.requests, watch.misses) == (12, 0)
    free = LiveWatch(Targets())
    looked(free)
    assert looked(free, *(line(9999) for _ in range(9))) == ""


def test_gaps_count_where_the_router_knows_the_tokens() -> None:
    """100 ms between 3 tokens miss a target of 20 ms; without their number nothing is known."""
    watch = LiveWatch(BOTH)
    looked(watch)
    assert looked(watch, *(line(output_tokens=3) for _ in range(3)))
    watch = LiveWatch(BOTH)
    looked(watch)
    assert looked(watch, *(line(output_tokens=None) for _ in range(9))) == ""
