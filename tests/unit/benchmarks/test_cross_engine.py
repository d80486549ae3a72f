"""How the benchmark of two engines judges what it has measured."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def cross(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, as a benchmark run as a file sees it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield import_module("cross_engine")
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


def logs(**probabilities: float) -> dict[str, float]:
    return {token: math.log(value) for token, value in probabilities.items()}


def test_divergences_are_those_of_the_formula(cross: Any) -> None:
    """Nothing between equal ones; tokens that one side alone names are one token with the rest."""
    ours, theirs = logs(a=0.5, b=0.3, c=0.1), logs(a=0.4, b=0.4, d=0.1)
    expected = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4)
    assert cross.divergence(ours, theirs) == pytest.approx(expected)
    assert cross.divergence(ours, ours) == pytest.approx(0)
    assert not cross.agree(logs(a=0.5, b=0.4), logs(a=0.4, b=0.5))
    assert cross.agree(ours, theirs)


def test_a_block_counts_when_it_came_whole(cross: Any) -> None:
    """The last token is computed in any case; what the reader computed beside it counts in blocks
    of 128.
    """
    assert cross.Asked("r", 1025, 1, {}).reused == 1
    assert cross.Asked("r", 1024, 129, {}).reused == 1 - 128 / 1024


@pytest.mark.parametrize(
    ("kind", "share", "reused", "words"),
    [
        ("sent", 1.9, 1.0, ""),
        ("sent", 2.1, 1.0, "2.10 times the floor"),
        ("stored", 0.5, 0.94, "only 94.0%"),
        ("fault: none", 2.1, 1.0, "2.10 times the floor"),
        ("fault: zero", 30.0, 1.0, ""),
        ("fault: zero", 1.2, 1.0, "1.20 times the floor"),
        ("fault: shift", 1.2, 1.0, "1.20 times the floor"),
    ],
)
def test_limits(cross: Any, kind: str, share: float, reused: float, words: str) -> None:
    """Sharing must stay below twice the floor, planted faults must not."""
    row = cross.Row("a to b", kind, [1e-3, 3e-3], [2e-3 * share] * 2, 1.0, 1.0, reused)
    found = cross.problems([row])
    assert bool(found) is bool(words)
    assert all(words in sentence for sentence in found)


def test_texts_are_never_seen_twice(cross: Any) -> None:
    """Each place of a text has one token more; the next text begins behind it."""
    texts = cross.Texts.__new__(cross.Texts)
    texts._ids, texts._prefix, texts._places, texts._next = list(range(100)), 10, 3, 0
    first, second = texts.take(), texts.take()
    assert [len(prompt) for prompt in first] == [11, 12, 13]
    assert first[0] == first[1][:11]
    assert not set(first[-1]) & set(second[-1])
