"""Advice from trials: what wins, what is kept within what is not known, and what is said."""

from __future__ import annotations

import math

import pytest
from support.tuner_trials import trial

from splitserve.orchestrator.tuner.recommendation import (
    Gain,
    gain_of,
    interval,
    percent,
    recommend,
)
from splitserve.orchestrator.tuner.search import Findings
from splitserve.orchestrator.tuner.trial import PARTS, Split, Trial

AGGREGATED, ONE, TWO, THREE = (Split(prefill, 4 - prefill) for prefill in range(4))


def findings(*finalists: Trial, variant: dict[Split, float] | None = None) -> Findings:
    """Each finalist on the whole workload and under one condition, the same unless it is said."""
    found = {
        each.split: (
            each,
            trial(each.split, (variant or {}).get(each.split, each.share_good), strain=each.strain),
        )
        for each in finalists
    }
    return Findings(finalists, (), found)


def test_the_most_good_requests_win() -> None:
    """And the gain over what runs and over not disaggregating is said."""
    found = findings(trial(AGGREGATED, 0.5), trial(ONE, 0.8), trial(TWO, 0.6))
    advice = recommend(found, TWO)
    assert advice.split == ONE
    assert advice.over_current is not None
    assert advice.over_current.expected == pytest.approx(1 / 3)
    assert advice.over_aggregated is not None
    assert advice.over_aggregated.expected == pytest.approx(0.6)
    assert not advice.are_targets_met


def test_what_wins_only_by_the_measured_profile_does_not_win() -> None:
    """A split that falls off when the profile is a little wrong has a lower score."""
    found = findings(trial(AGGREGATED, 0.3), trial(ONE, 0.95), trial(TWO, 0.9), variant={ONE: 0.4})
    assert recommend(found, None).split == TWO


def test_the_current_split_is_kept_for_less_than_what_is_not_known() -> None:
    """A gain of 3 % that may be none changes nothing; the reason names both."""
    found = findings(
        trial(AGGREGATED, 0.2),
        trial(ONE, 0.8, parts=[820, 820] * (PARTS // 2)),
        trial(TWO, 0.8, parts=[400, 1200] * (PARTS // 2)),
    )
    advice = recommend(found, TWO)
    assert (advice.split, advice.over_current) == (TWO, None)
    assert "1:3" in advice.because
    assert "it runs already" in advice.because


def test_a_sure_gain_changes_the_current_split() -> None:
    """The same 3 %, in every part of the workload."""
    found = findings(trial(AGGREGATED, 0.2), trial(ONE, 0.83), trial(TWO, 0.8))
    assert recommend(found, TWO).split == ONE


def test_aggregated_is_preferred_to_a_tie() -> None:
    """Two pools that serve no more are not worth running."""
    found = findings(trial(AGGREGATED, 0.80), trial(ONE, 0.805, strain=0.3))
    advice = recommend(found, None)
    assert advice.split == AGGREGATED
    assert "simpler" in advice.because


def test_a_gamble_is_not_advised() -> None:
    """A split that gains nothing as measured, and much or a loss as the profile errs, is none."""
    found = Findings(
        (trial(AGGREGATED, 0.2), trial(ONE, 0.2)),
        (),
        {
            AGGREGATED: (trial(AGGREGATED, 0.2), trial(AGGREGATED, 0.2), trial(AGGREGATED, 0.2)),
            ONE: (trial(ONE, 0.205), trial(ONE, 0.8), trial(ONE, 0.05)),
        },
    )
    advice = recommend(found, None)
    assert advice.split == AGGREGATED
    assert "not known" in advice.because


def test_aggregated_that_wins_is_said() -> None:
    """Also when something else runs already; with what it gains over the best split."""
    found = findings(trial(AGGREGATED, 0.86), trial(ONE, 0.8), trial(TWO, 0.7))
    advice = recommend(found, ONE)
    assert (advice.split, advice.best_split) == (AGGREGATED, ONE)
    assert advice.aggregated_gain is not None
    assert advice.aggregated_gain.expected == pytest.approx(0.075)


def test_equal_splits_are_told_apart_by_their_distance_to_the_targets() -> None:
    """All serve everything; the one with the most room is chosen."""
    found = findings(
        trial(AGGREGATED, 0.5),
        trial(ONE, 1.0, strain=0.9),
        trial(TWO, 1.0, strain=0.4),
        trial(THREE, 1.0, strain=0.7),
    )
    assert recommend(found, None).split == TWO
    assert recommend(found, THREE).split == THREE


def test_targets_that_nothing_meets_name_the_best_reachable() -> None:
    """No split serves anything: the nearest one, and the least times with their splits."""
    found = findings(
        trial(AGGREGATED, 0, strain=3.0), trial(ONE, 0, strain=2.0), trial(TWO, 0, strain=4.0)
    )
    advice = recommend(found, TWO)
    assert advice.split == ONE
    assert not advice.are_targets_met
    assert (advice.least_ttft.seconds, advice.least_ttft.split) == (2.0, ONE)
    assert "no split" in advice.because
    assert advice.is_beyond


@pytest.mark.parametrize(("most", "is_beyond"), [(0.02, True), (0.05, True), (0.06, False)])
def test_a_load_beyond_the_nodes_is_told(most: float, *, is_beyond: bool) -> None:
    """When the best line of the table serves next to nothing, whatever the other lines do."""
    found = findings(trial(AGGREGATED, 0.001), trial(ONE, most), trial(TWO, 0.0))
    assert recommend(found, TWO).is_beyond is is_beyond


def test_the_reason_agrees_with_the_table() -> None:
    """Where another split has more as measured, the reason names it."""
    found = findings(trial(AGGREGATED, 0.3), trial(ONE, 0.95), trial(TWO, 0.9), variant={ONE: 0.4})
    advice = recommend(found, None)
    assert advice.because.startswith("as measured 1:3 has more good requests (95.0%), but 2:2")
    found = findings(trial(AGGREGATED, 0.3), trial(ONE, 0.95), trial(TWO, 0.7))
    assert recommend(found, None).because.startswith("1:3 has the most good requests")


def test_an_interval_holds_its_gain_and_is_wider_for_uneven_times() -> None:
    """The same mean over parts that differ leaves more unknown; the seed decides the draws."""
    steady = {ONE: (trial(ONE, 0.9),), TWO: (trial(TWO, 0.6),)}
    uneven = {
        ONE: (trial(ONE, 0, parts=[900] * PARTS),),
        TWO: (trial(TWO, 0, parts=[300, 900] * (PARTS // 2)),),
    }
    narrow, wide = (gain_of(found, ONE, TWO, seed=1) for found in (steady, uneven))
    assert narrow.low == narrow.high == pytest.approx(0.5)
    assert wide.low < 0.5 < wide.high
    assert gain_of(uneven, ONE, TWO, seed=1) == wide


def test_a_gain_over_nothing_is_infinite() -> None:
    """Not an error, and said in words."""
    found = {ONE: (trial(ONE, 0.5),), TWO: (trial(TWO, 0.0),)}
    assert math.isinf(gain_of(found, ONE, TWO, seed=0).expected)
    assert percent(math.inf) == "from none"
    assert interval(Gain(TWO, 2.7, 0.0, math.inf)) == "+0.0 % or more"
    assert interval(Gain(TWO, math.inf, math.inf, math.inf)) == "from none"
    assert interval(Gain(TWO, 0.02, -0.01, 0.042)) == "-1.0 % to +4.2 %"
    assert (percent(0.0423), percent(11)) == ("+4.2 %", "x12")
    assert gain_of(found, TWO, TWO, seed=0).expected == 0
