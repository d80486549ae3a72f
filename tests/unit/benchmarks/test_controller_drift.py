"""The benchmark of the controller: its loads are what they claim, and its bars can be missed."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def drift_benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, as a benchmark run as a file sees it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield import_module("controller_drift")
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


def test_requests_drift_as_the_trace_does(drift_benchmark: Any) -> None:
    """Lengths begin with the first window's means, end with the last one's, and the work per
    second is the same all the time.
    """
    subject = drift_benchmark
    drift = subject.read_drift(subject.TRACE, subject.MODEL, 0, 3, 1500.0)
    requests = subject.requests_of(
        drift, subject.PROFILE, subject.TARGETS, subject.NODES, subject.DEMAND, seed=1
    )
    assert requests == sorted(requests, key=lambda request: request.at_s)
    first = [r for r in requests if r.at_s < 750]
    last = [r for r in requests if r.at_s >= 3750]
    for part, mix in ((first, drift.mixes[0]), (last, drift.mixes[2])):
        prompts, answers = np.array([(r.input_tokens, r.output_tokens) for r in part]).T
        assert prompts.mean() == pytest.approx(mix.prompt, rel=0.15)
        assert answers.mean() == pytest.approx(mix.answer, rel=0.15)
    middle = drift.at(1500.0)
    assert middle.prompt == pytest.approx((drift.mixes[0].prompt * drift.mixes[1].prompt) ** 0.5)
    rates = [len(first) / 750, len(last) / 750]
    for rate, mix in zip(rates, (drift.mixes[0], drift.mixes[2]), strict=True):
        work = rate * drift_work(subject, mix)
        assert work == pytest.approx(subject.DEMAND * subject.NODES, rel=0.1)


def drift_work(subject: Any, mix: Any) -> float:
    """Node seconds of a request."""
    seconds: float = import_module("harness.drifts").node_seconds(
        mix, subject.PROFILE, subject.TARGETS
    )
    return seconds


def test_bars_can_be_missed(drift_benchmark: Any) -> None:
    """Each by one round that misses it; a drift that a fixed split serves does not count."""
    subject = drift_benchmark
    good = subject.Round(0, "nodes", 1000, 1000, "2 3", {"2:6": 800, "3:5": 700}, 950, [], 300.0)
    assert all(subject.summary([good])["bars"].values())
    for bad in (
        replace(good, controller=890),
        replace(good, controller=940, fixed={"2:6": 945}),
        replace(good, least_between_s=299.0),
    ):
        assert list(subject.summary([good, bad])["bars"].values()).count(False) == 1
    easy = replace(good, controller=100, fixed={"2:6": 960})
    assert subject.summary([good, easy])["rounds_that_count"] == 1
    with pytest.raises(AssertionError, match="some fixed split is nearly as good"):
        subject.summary([easy])
