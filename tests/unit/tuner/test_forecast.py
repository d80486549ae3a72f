"""What the forecast makes of the latest windows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.orchestrator.tuner.forecast import (
    CHANGE_LIMIT,
    Figure,
    Finished,
    Forecast,
    Forecaster,
)

WINDOW_S = 10.0


def watched(rates: list[float], prompt: int = 500, answer: int = 100) -> Forecaster:
    """One that has seen windows with so many arrivals per second, each ended in its window."""
    forecaster = Forecaster(WINDOW_S, horizon_s=100.0)
    forecaster.begin(0.0)
    for number, rate in enumerate(rates):
        count = round(rate * WINDOW_S)
        for place in range(count):
            at_s = WINDOW_S * (number + place / count)
            forecaster.arrived(at_s, prompt)
            forecaster.finished(at_s, Finished(prompt - 100, 100, answer, prompt))
    forecaster.pass_to(WINDOW_S * len(rates))
    return forecaster


def forecast_of(forecaster: Forecaster) -> Forecast:
    """Its forecast, which there has to be."""
    found = forecaster.forecast()
    assert found is not None
    return found


def test_a_steady_load_is_forecast_as_it_is() -> None:
    """Rate, prompts less what is cached of them, and answers."""
    found = forecast_of(watched([3.0] * 6))
    assert found.rate_per_s == pytest.approx(3.0)
    assert (found.prompt_tokens, found.cached_tokens) == (pytest.approx(400), pytest.approx(100))
    assert found.answer_tokens == pytest.approx(100)


def test_a_rising_rate_goes_on_rising() -> None:
    """The forecast is beyond what it is after a steady time at the last mean, but within bounds."""
    rising = forecast_of(watched([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])).rate_per_s
    assert forecast_of(watched([4.5] * 8)).rate_per_s < rising < 9.0


def test_one_odd_window_changes_little() -> None:
    """Ten times as many requests count as half as many more; a new level is believed at once the
    next window confirms it.
    """
    odd = forecast_of(watched([4.0] * 6 + [40.0, 4.0])).rate_per_s
    assert 4.0 < odd < 4.6
    assert forecast_of(watched([4.0] * 6 + [40.0, 40.0])).rate_per_s > 2 * odd


def test_nothing_is_forecast_from_nothing() -> None:
    """None without requests, and with too few."""
    assert Forecaster(WINDOW_S, 100.0).forecast() is None
    assert watched([0.3] * 3).forecast() is None


def test_what_stops_coming_is_forgotten() -> None:
    """After a pause of a day the rate is zero, and lengths are what they were."""
    forecaster = watched([5.0] * 6)
    forecaster.pass_to(86_400.0)
    found = forecast_of(forecaster)
    assert found.rate_per_s < 1e-6
    assert found.answer_tokens == pytest.approx(100)
    for number in range(2):
        forecaster.arrived(86_401.0 + number * WINDOW_S, 500)
    forecaster.pass_to(86_400.0 + 2 * WINDOW_S)
    assert 0 < forecast_of(forecaster).rate_per_s < 0.1


def test_estimates_are_weighed_by_what_has_ended() -> None:
    """Prompts that are announced at half their length are expected at their true length."""
    forecaster = Forecaster(WINDOW_S, 100.0)
    forecaster.begin(0.0)
    for number in range(60):
        forecaster.arrived(number, 300)
        forecaster.finished(number, Finished(600, 0, 50, 300))
    assert forecast_of(forecaster).prompt_tokens == pytest.approx(600)


def test_one_extreme_request_has_no_weight() -> None:
    """It counts as long as the next one, in the window's mean and in the sample."""
    forecaster = watched([5.0] * 6)
    before = forecast_of(forecaster)
    forecaster.arrived(60.0, 1_000_000)
    for number in range(50):
        forecaster.arrived(60.0 + number / 5, 500)
        forecaster.finished(60.0 + number / 5, Finished(400, 100, 100, 500))
    forecaster.finished(69.0, Finished(1_000_000, 0, 1_000_000, 1_000_000))
    forecaster.pass_to(70.0)
    after = forecast_of(forecaster)
    assert after.prompt_tokens == pytest.approx(before.prompt_tokens, rel=0.02)
    assert after.answer_tokens == pytest.approx(before.answer_tokens, rel=0.02)
    assert after.sample.new_tokens.max() < 1000


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.integers(1, 50))
def test_a_figure_stays_within_bounds(values: list[float], ahead: int) -> None:
    """Never negative, never beyond ``CHANGE_LIMIT`` times its level."""
    figure = Figure()
    for value in values:
        figure.add(value)
        found = figure.mean_ahead(ahead)
        assert math.isfinite(found)
        assert 0 <= found <= figure.level * CHANGE_LIMIT
