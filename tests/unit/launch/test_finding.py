"""Sentences of the configuration become problems with keys and a remedy."""

from __future__ import annotations

import pytest

from splitserve.orchestrator.launch.finding import (
    Finding,
    Problem,
    Severity,
    failure,
    gravest,
    warning,
)


@pytest.mark.parametrize(
    ("sentence", "keys", "what", "fix"),
    [
        (
            "prefill.cpus[0]: no CPU 7; usable: 0-1",
            ("prefill.cpus[0]",),
            "no CPU 7",
            "usable: 0-1",
        ),
        (
            "prefill.transfer.transport, decode.transfer.transport: no right; give it",
            ("prefill.transfer.transport", "decode.transfer.transport"),
            "no right",
            "give it",
        ),
        (
            "router.port (line 3): a whole number, without quotes or unit (got 'x')",
            ("router.port",),
            "a whole number, without quotes or unit (got 'x')",
            "",
        ),
        (
            "prefill.engine_args.dtype is float32 but decode.engine_args.dtype is bfloat16: KV "
            "pages would not fit; give both pools the same value",
            ("prefill.engine_args.dtype", "decode.engine_args.dtype"),
            "prefill.engine_args.dtype is float32 but decode.engine_args.dtype is bfloat16: KV "
            "pages would not fit",
            "give both pools the same value",
        ),
        (
            "port 8000 is used by router.port and prefill-0 HTTP (prefill.port_base); move one",
            ("router.port", "prefill.port_base"),
            "port 8000 is used by router.port and prefill-0 HTTP (prefill.port_base)",
            "move one",
        ),
        ("model: required, but missing", ("model",), "required, but missing", ""),
        ("nothing at all", (), "nothing at all", ""),
    ],
)
def test_a_told_problem(sentence: str, keys: tuple[str, ...], what: str, fix: str) -> None:
    """Keys are what it begins with, else those inside it; the remedy is its last part; and it is
    shown as it was told.
    """
    problem = Problem.told(sentence)
    assert (problem.keys, problem.what, problem.fix) == (keys, what, fix or problem.fix)
    assert str(problem) == sentence
    assert problem.severity is Severity.FAIL


def test_the_gravest_problem_counts() -> None:
    """A finding is as grave as its worst problem; only failures keep a cluster from starting."""
    assert gravest([]) is Severity.OK
    slow, wrong = warning("a.b", "slow", "hurry"), failure(("c", "d"), "wrong", "mend it")
    assert Finding("x", "").severity is Severity.OK
    assert Finding("x", "", (slow,)).severity is Severity.WARN
    finding = Finding("x", "looked", (slow, wrong, slow), {"figure_s": 1.0})
    assert finding.severity is Severity.FAIL
    assert finding.failures == ["c, d: wrong; mend it"]
    assert finding.as_dict()["problems"][1] == {
        "severity": "FAIL",
        "keys": ["c", "d"],
        "what": "wrong",
        "fix": "mend it",
    }
