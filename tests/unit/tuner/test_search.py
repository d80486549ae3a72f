"""Which splits are tried, of few nodes and of many, and with which thresholds."""

from __future__ import annotations

from support.tuner_trials import Made

from splitserve.orchestrator.tuner.search import WINDOW, Question, search
from splitserve.orchestrator.tuner.trial import Job, Split


def hill(best: float) -> Made:
    """Goodput falls on both sides of a share of prefill nodes; not disaggregating has half."""

    def share(job: Job) -> float:
        split = job.split
        return 0.5 if split.is_aggregated else 1 - abs(split.prefill / split.nodes - best)

    return Made(share)


def question(
    nodes: int, current: Split | None = None, thresholds: tuple[int, ...] = ()
) -> Question:
    return Question(nodes, current, 0, thresholds, ((1, 0), (1, 1)))


def test_all_ratios_of_few_nodes_are_tried_once() -> None:
    """Sixteen nodes have fifteen ratios, and not disaggregating."""
    made = hill(0.3)
    findings = search(question(16), made)
    assert [trial.split for trial in findings.ratios] == [
        Split(prefill, 16 - prefill) for prefill in range(16)
    ]
    assert max(findings.ratios, key=lambda trial: trial.goodput).split == Split(5, 11)


def test_a_thousand_nodes_are_searched_with_few_trials() -> None:
    """The grid is refined down to the best ratio."""
    made = hill(0.237)
    findings = search(question(1000), made)
    assert max(findings.ratios, key=lambda trial: trial.goodput).split == Split(237, 763)
    assert findings.ratios[0].split == Split(0, 1000)
    assert len(findings.ratios) < 60


def test_one_node_cannot_be_split() -> None:
    """Only not disaggregating is tried."""
    findings = search(question(1), hill(0.5))
    assert list(findings.finalists) == [Split(0, 1)]


def test_the_best_the_current_and_aggregated_meet_all_conditions() -> None:
    """Each finalist has the whole workload and then the conditions asked for."""
    made = hill(0.25)
    findings = search(question(8, current=Split(6, 2)), made)
    expected = {Split(2, 6), Split(1, 7), Split(3, 5), Split(0, 8), Split(6, 2)}
    assert set(findings.finalists) == expected
    for split, trials in findings.finalists.items():
        assert len(trials) == 3
        assert {trial.split for trial in trials} == {split}
    assert Job(Split(6, 2), 1, 1) in made.jobs


def test_a_threshold_that_helps_is_a_finalist_with_fewer_prefill_nodes() -> None:
    """What a threshold saves on the prefill nodes moves the best ratio."""

    def share(job: Job) -> float:
        split = job.split
        if split.is_aggregated:
            return 0.1
        best = {0: 4, 100: 3, 200: 4}[split.threshold_tokens]
        height = {0: 0.7, 100: 0.9, 200: 0.5}[split.threshold_tokens]
        return height - 0.05 * abs(split.prefill - best)

    findings = search(question(8, thresholds=(100, 200)), Made(share))
    assert [trial.split.threshold_tokens for trial in findings.thresholds] == [0, 100, 200]
    assert Split(3, 5, 100) in findings.finalists


def test_a_threshold_that_does_not_help_is_none() -> None:
    """Less than a per cent is not worth another setting."""

    def share(job: Job) -> float:
        assert job.workload == WINDOW or not job.split.threshold_tokens
        return 0.80 + (0.005 if job.split.threshold_tokens else 0)

    findings = search(question(4, thresholds=(100,)), Made(share))
    assert not any(split.threshold_tokens for split in findings.finalists)
