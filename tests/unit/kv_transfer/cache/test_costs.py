"""Whether a load pays."""

from __future__ import annotations

import pytest

from splitserve.kv_transfer.cache.costs import LOAD_OVERHEAD_S, FetchCosts
from splitserve.kv_transfer.cache.messages import TierSpeed

ARENA, DISK, SLOW = 0, 1, 2
CHUNK_BYTES = 2_000_000
SPEEDS = (TierSpeed(0.0, 0.0), TierSpeed(1e-3, 1e9), TierSpeed(0.5, 1e6))


@pytest.fixture
def costs() -> FetchCosts:
    """100 tokens in a chunk, computed in 0.1 s; copied in 1 ms, read from disk in 2 ms more."""
    made = FetchCosts(100, CHUNK_BYTES)
    made.step_took(1000, 1.0)
    return made


def test_everything_is_loaded_before_anything_was_measured() -> None:
    """An engine that has computed nothing yet takes what there is."""
    assert FetchCosts(100, CHUNK_BYTES).worth(bytes([SLOW] * 5), SPEEDS, 0) == 5


def test_what_takes_longer_than_computing_is_not_loaded(costs: FetchCosts) -> None:
    """Chunks of the slow tier take two seconds each; those before it are loaded."""
    assert costs.worth(bytes([ARENA] * 4), SPEEDS, 0) == 4
    assert costs.worth(bytes([SLOW] * 4), SPEEDS, 0) == 0
    assert costs.worth(bytes([ARENA, DISK, SLOW, SLOW]), SPEEDS, 0) == 2


def test_a_slow_chunk_is_loaded_for_the_fast_ones_behind_it(costs: FetchCosts) -> None:
    """When the sum pays: 30 chunks save 3 s, one slow one costs 2.5 s."""
    assert costs.worth(bytes([SLOW, *[ARENA] * 10]), SPEEDS, 0) == 0
    assert costs.worth(bytes([SLOW, *[ARENA] * 30]), SPEEDS, 0) == 31


def test_tokens_that_the_engine_has_save_nothing(costs: FetchCosts) -> None:
    """A chunk of which one token is missing is computed."""
    assert costs.worth(bytes([ARENA]), SPEEDS, skipped_tokens=99) == 0
    assert costs.worth(bytes([ARENA]), SPEEDS, skipped_tokens=50) == 1


def test_estimates(costs: FetchCosts) -> None:
    """A tier's latency counts once in a load."""
    assert costs.load_s(bytes([ARENA, DISK, DISK]), SPEEDS) == pytest.approx(
        LOAD_OVERHEAD_S + 3 * 1e-3 + 2 * 2e-3 + 1e-3
    )
    assert costs.compute_s(500) == pytest.approx(0.5)


def test_small_steps_say_nothing(costs: FetchCosts) -> None:
    """Steps of few prompt tokens and steps without a time leave the rate alone; others move it."""
    costs.step_took(31, 10.0)
    costs.step_took(100, 0.0)
    assert costs.prefill_tokens_per_s == 1000
    costs.step_took(100, 1.0)
    assert 100 < costs.prefill_tokens_per_s < 1000
