"""Fits of times: what was put in is found again, in bands that hold it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.orchestrator.tuner.fitting import Fit, FitError, fit, non_negative

LENGTHS = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048)


def prefill_rows(repeats: int = 2) -> np.ndarray:
    """Steps, tokens, attended tokens and requests of prompts up to four steps long."""
    rows = [(-(-n // 512), n, n * n / 2, 1) for n in LENGTHS]
    rows += [(1, 64, 64 * (cached + 32), 1) for cached in (512, 1024, 1536)]
    return np.array(rows * repeats, float)


def test_exact_times_give_exact_parts() -> None:
    """Without noise, to many digits and with hardly a band."""
    rows = prefill_rows()
    parts = np.array([0.01, 1e-4, 2e-8, 0.004])
    found = fit(rows, rows @ parts)
    for part, estimate in zip(parts, found.parts, strict=True):
        assert estimate.value == pytest.approx(part, rel=1e-6)
        assert estimate.low <= part * (1 + 1e-6)
        assert estimate.high == pytest.approx(part, rel=1e-3)
    assert found.error < 1e-6
    assert found.seconds(rows[3]) == pytest.approx(float(rows[3] @ parts))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_part_is_negative_and_none_could_be_better(seed: int) -> None:
    """The conditions of Kuhn and Tucker hold at the answer."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(12, 4))
    seconds = random.normal(size=12)
    values = non_negative(rows, seconds)
    slope = rows.T @ (seconds - rows @ values)
    assert (values >= 0).all()
    assert (slope <= 1e-6).all()
    assert np.abs(slope[values > 0]).max(initial=0) < 1e-6


def simulated(random: np.random.Generator, noise: float) -> tuple[np.ndarray, np.ndarray, Fit]:
    """(parts, rows, fit) of an engine whose times have that relative spread."""
    rows = prefill_rows(3)
    parts = np.array(
        [
            random.uniform(0.005, 0.05),
            random.uniform(2e-5, 5e-4),
            random.uniform(0, 1e-7),
            random.uniform(0.002, 0.02),
        ]
    )
    factors = 1 + noise * random.normal(size=len(rows))
    return parts, rows, fit(rows, (rows @ parts) * factors)


def test_bands_hold_the_truth() -> None:
    """Of 120 engines with 5 % of noise, in at least nine of ten for each part; and what is
    predicted is right within a few per cent.
    """
    random = np.random.default_rng(1)
    held, wrong = np.zeros(4), []
    for _ in range(120):
        parts, rows, found = simulated(random, 0.05)
        held += [e.low <= p <= e.high for p, e in zip(parts, found.parts, strict=True)]
        predicted = rows @ np.array([estimate.value for estimate in found.parts])
        wrong.append(np.median(np.abs(predicted / (rows @ parts) - 1)))
        assert 0.01 < found.error < 0.1
    assert (held / 120 >= 0.9).all(), held
    assert np.quantile(wrong, 0.95) < 0.03


def test_a_few_slow_answers_change_little() -> None:
    """One observation in twelve took three times as long."""
    random = np.random.default_rng(2)
    rows = prefill_rows(3)
    parts = np.array([0.02, 1e-4, 2e-8, 0.006])
    seconds = (rows @ parts) * (1 + 0.02 * random.normal(size=len(rows)))
    seconds[::12] *= 3
    found = fit(rows, seconds)
    predicted = rows @ np.array([estimate.value for estimate in found.parts])
    assert np.abs(predicted / (rows @ parts) - 1).max() < 0.06


def test_a_part_that_is_not_there() -> None:
    """Is zero or small, and its band begins at zero."""
    random = np.random.default_rng(3)
    rows = prefill_rows(3)
    parts = np.array([0.02, 1e-4, 0.0, 0.006])
    found = fit(rows, (rows @ parts) * (1 + 0.02 * random.normal(size=len(rows))))
    assert found.parts[2].low == 0
    assert found.parts[2].high < 2e-8


@pytest.mark.parametrize(
    "rows",
    [np.empty((0, 2)), np.ones((2, 2)), np.ones((9, 2)), np.array([[1.0, 2.0]] * 9)],
    ids=["none", "too few", "alike", "in proportion"],
)
def test_too_little_to_tell(rows: np.ndarray) -> None:
    """Is an error, and no guess."""
    with pytest.raises(FitError, match="do not tell 2 parts apart"):
        fit(rows, np.ones(len(rows)))
