"""From a mix or a trace to a recommendation, with the real simulator and on processes."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import msgspec
import pytest
from support.tuner_profile import FAST

from splitserve.orchestrator.traces import TraceRequest
from splitserve.orchestrator.tuner import tuning
from splitserve.orchestrator.tuner.evaluation import Setting, Workers
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.profile import Estimate, PrefillTime
from splitserve.orchestrator.tuner.trial import Job, Split
from splitserve.orchestrator.tuner.tuning import (
    SIMULATED_NODES,
    TuningError,
    Wish,
    thresholds_of,
    tune,
)
from splitserve.orchestrator.tuner.workload import Lengths, Mix, drawn_requests

TARGETS = Targets(ttft_s=0.5, itl_s=0.03)


def mix(inputs: int, outputs: int, rate: float) -> Mix:
    return Mix(Lengths(inputs), Lengths(outputs), rate)


def requests(count: int = 300) -> list[TraceRequest]:
    return drawn_requests(mix(500, 20, 20), count, seed=3)


def test_long_prompts_want_prefill_nodes_and_long_answers_decode_nodes() -> None:
    """Prompts that need two nodes and streams that must not be disturbed; and the other way."""
    wish = Wish(4, replace(TARGETS, itl_s=0.012), searches_threshold=False)
    prompts, answers = (
        tune(drawn_requests(some, 300, seed=1), FAST, wish).recommendation.best_split
        for some in (mix(3000, 10, 10), mix(100, 400, 8))
    )
    assert prompts is not None
    assert answers is not None
    assert prompts.prefill > answers.prefill


def test_the_same_wish_has_the_same_answer() -> None:
    """Nothing depends on the process or the time."""
    wish = Wish(3, TARGETS, Split(1, 2))
    assert tune(requests(), FAST, wish) == tune(requests(), FAST, wish)


def test_processes_find_what_one_finds_and_end() -> None:
    """Trials on two processes are equal to those made here; afterwards none is left."""
    setting = Setting((tuple(requests(50)),), (FAST,), TARGETS)
    jobs = [Job(Split(prefill, 3 - prefill)) for prefill in range(3)]
    told: list[Split] = []
    with Workers(setting, 2, lambda trial: told.append(trial.split)) as workers:
        found = workers(jobs)
        assert workers(jobs) == found
    with Workers(setting, 1) as workers:
        assert repr(workers(jobs)) == repr(found)
    assert sorted(told) == [job.split for job in jobs]
    assert multiprocessing.active_children() == []


def test_a_band_is_a_condition_of_the_finalists() -> None:
    """A profile that is unsure has more trials of each finalist than one that is sure."""
    prefill = FAST.prefill
    unsure = msgspec.structs.replace(
        FAST, prefill=PrefillTime(prefill.base_s, Estimate(1e-4, 5e-5, 2e-4), prefill.attention_s)
    )
    wish = Wish(2, TARGETS, searches_threshold=False)
    sure = tune(requests(), FAST, wish).findings.finalists
    found = tune(requests(), unsure, wish).findings.finalists
    assert {len(trials) for trials in sure.values()} == {2}
    assert {len(trials) for trials in found.values()} == {4}


def test_of_a_thousand_nodes_a_part_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """And said; splits and goodput are those of all nodes, and what runs keeps its numbers."""
    monkeypatch.setattr(tuning, "FIRST_PASS_REQUESTS", 5_000)
    current = Split(301, 699)
    tuned = tune(mix(200, 5, 2000), FAST, Wish(1000, TARGETS, current, searches_threshold=False))
    assert {trial.split.nodes for trial in tuned.findings.ratios} == {1000}
    assert current in tuned.findings.finalists
    assert max(trial.goodput for trial in tuned.findings.ratios) == pytest.approx(2000, rel=0.2)
    assert tuned.rate_per_s == pytest.approx(2000, rel=0.2)
    assert any(f"{1000 // (1000 // SIMULATED_NODES + 1)} nodes" in note for note in tuned.notes)


def test_what_does_not_fit_the_model_is_left_out_and_said() -> None:
    """Or refused, when nothing is left."""
    too_long = TraceRequest(0, FAST.limits.max_model_len, 1, ())
    wish = Wish(1, TARGETS)
    tuned = tune([too_long, *requests(20)], FAST, wish)
    assert tuned.requests == 20
    assert "1 of 21 requests" in tuned.notes[0]
    with pytest.raises(TuningError, match="max_model_len"):
        tune([too_long], FAST, wish)


def test_thresholds_are_round_numbers_among_the_prompts() -> None:
    """Percentiles with two digits, and none at all."""
    lengths = [TraceRequest(0, tokens, 1, ()) for tokens in range(1, 1235)]
    assert thresholds_of(lengths) == (0, 310, 620, 930, 1100)
