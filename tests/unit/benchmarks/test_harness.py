"""What the benchmarks conclude: statistics, the prompts of the equality run, and planted faults."""

from __future__ import annotations

import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports modules as a benchmark run as a file sees them; they are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "harness" / "engine_side"))
    yield import_module
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


def test_percentile_is_the_smallest_value_that_covers_the_share(benchmark: Any) -> None:
    """Of 100 values the 99th percentile is the 99th, of one value it is that value."""
    stats = benchmark("harness.stats")
    assert stats.percentile(list(range(1, 101)), 0.99) == 99
    assert stats.percentile([5.0], 0.99) == 5.0


def test_aa_spread_is_the_typical_difference_within_a_pair(benchmark: Any) -> None:
    """One outlier pair does not set the spread."""
    assert benchmark("harness.stats").aa_spread([10, 20, 30], [11, 19, 90]) == 1


def test_equality_prompts_cover_what_the_issue_asks(benchmark: Any) -> None:
    """100 prompts of 1 to 3,000 tokens: block multiples, neighbours, shared prefixes."""
    equality = benchmark("equality")
    found = equality.cases(list(range(50_000)), 128, 100)
    lengths = {len(case.prompt) for case in found}
    assert len(found) == 100
    assert {1, 127, 128, 129, 2047, 2048, 2049, 3000} <= lengths
    assert len({case.name for case in found}) == 100
    for before, case in pairwise(found):
        shared = case.shared_blocks * 128
        assert case.prompt[:shared] == before.prompt[:shared]


@pytest.mark.parametrize(
    ("fault", "local", "remote"),
    [
        ("none", [13, 14, 15], [21, 22, 23]),
        ("swap", [13, 14, 15], [23, 22, 21]),
        ("zero", [10, 14, 15], [21, 22, 23]),
        ("layer", [13, 14, 15], [1, 22, 23]),
    ],
)
def test_planted_faults_change_what_they_say(
    benchmark: Any, tmp_path: Path, fault: str, local: list[int], remote: list[int]
) -> None:
    """Two layers of 10 blocks here and 20 there; a write of three pages of the last layer."""
    written: list[list[list[int]]] = []

    class Recorder:
        def connect(self, peer: str, description: bytes, pairing: Any) -> None:
            """Nothing to do."""

        def write(self, peer: str, tag: int, here: Any, there: Any) -> int:
            written.append([here.tolist(), there.tolist()])
            return 1

    class Pairing:
        local_addresses = np.zeros(20)
        remote_addresses = np.zeros(40)

    fault_file = tmp_path / "fault"
    fault_file.write_text(fault)
    transport = benchmark("planted_faults").FaultyTransport(Recorder(), fault_file, 2)
    transport.connect("peer", b"", Pairing())
    transport.write("peer", 0, np.array([13, 14, 15]), np.array([21, 22, 23]))
    assert written == [[local, remote]]


def test_rankings_are_compared(benchmark: Any) -> None:
    """Kendall's tau: 1 for the same order, -1 for the reverse; a tie on one side counts half."""
    tau = benchmark("harness.accuracy").kendall_tau
    assert tau([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert tau([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(2 / 3)
    assert 0.8 < tau([1, 2, 3, 4], [1, 2, 3, 3]) < 1
    assert tau([1, 1], [2, 2]) == 1
    assert tau([1, 1], [2, 3]) == 0


def test_an_error_is_relative_to_what_was_measured(benchmark: Any) -> None:
    """And the spread of rounds to their median."""
    accuracy = benchmark("harness.accuracy")
    outcome = import_module("splitserve.orchestrator.tuner.outcome").Outcome
    measured, simulated = (
        outcome(np.arange(3.0), np.full(3, ttft), np.full(3, 0.1), np.arange(3.0) + 9)
        for ttft in (2.0, 2.5)
    )
    pair = accuracy.Pair(1, 7, measured, [measured, simulated, simulated])
    assert pair.error("ttft", 50) == pytest.approx(0.25)
    assert pair.error("itl", 90) == 0
    assert accuracy.spread([1.0, 1.1, 1.2]) == pytest.approx(0.1 / 1.1)


async def test_a_replay_measures_from_the_traces_times(benchmark: Any) -> None:
    """First tokens count from when a request should have left; what failed has none; a client that
    is too late says so.
    """
    replay, client = benchmark("harness.replay"), benchmark("harness.client")
    requests = replay.draw_trace(1, seconds=20, per_s=1, input_tokens=100, output_tokens=10)
    assert requests == replay.draw_trace(1, seconds=20, per_s=1, input_tokens=100, output_tokens=10)
    assert all(12 <= r.input_tokens <= 400 and 2 <= r.output_tokens <= 40 for r in requests)
    first, second = requests[:2]
    answer = client.Streamed(0.0, (100.5 + first.at_s, 102.5 + first.at_s), "", (), 5, 0)
    failed = client.RequestFailedError("503")
    found = replay.outcome_of([first, second], [answer, failed], 100.0)
    assert found.ttft_s[0] == pytest.approx(0.5)
    assert found.itl_s[0] == pytest.approx(2 / 4)
    assert np.isnan(found.ttft_s[1])
    with pytest.raises(ZeroDivisionError):
        replay.outcome_of([first], [ZeroDivisionError()], 100.0)


def test_tokens_are_counted_and_not_events(benchmark: Any) -> None:
    """Four tokens in each event, an event every 100 ms: 25 ms a token, but for the first event's;
    one token takes no time.
    """
    streamed = benchmark("harness.client").Streamed
    events = tuple(n / 10 for n in range(21))
    assert streamed(0.0, events, "", (), 81, 0).mean_itl == pytest.approx(0.025)
    assert streamed(0.0, events, "", (), 0, 0).mean_itl == pytest.approx(0.1)
    assert streamed(0.0, (0.5,), "", (), 1, 0).mean_itl == 0
