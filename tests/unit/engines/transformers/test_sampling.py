"""How tokens are chosen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from splitserve.orchestrator.engines.serving.scheduler import Request
from splitserve.orchestrator.engines.transformers.sampling import Sampler, Sampling

LOGITS = torch.tensor([4.0, 3.0, 2.0, 1.0, -50.0])


def request(name: str = "r", **fields: Any) -> Request:
    own = {key: fields.pop(key) for key in ("min_tokens", "end_ids", "answer") if key in fields}
    return Request(name, (3,), 9, sampling=Sampling(**fields), **own)


def drawn(tries: int = 300, **fields: Any) -> Counter[int]:
    sampler = Sampler(torch.device("cpu"))
    asked = request(**fields)
    return Counter(sampler.choose(asked, LOGITS.clone()).token for _ in range(tries))


def test_greedy_takes_the_likeliest() -> None:
    """At temperature 0, and at one that is as good as 0."""
    assert set(drawn(5, temperature=0.0)) == set(drawn(5, temperature=1e-6)) == {0}


@pytest.mark.parametrize(
    ("fields", "possible"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0}),
        ({"top_p": 0.65}, {0, 1}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 0.3}, {0, 1}),
        ({"temperature": 3.0}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.99}, {0, 1, 2}),
    ],
)
def test_unlikely_tokens_are_left_out(fields: dict[str, Any], possible: set[int]) -> None:
    """Exactly those: every other one is drawn now and then."""
    assert set(drawn(seed=1, **fields)) == possible


def test_a_seed_gives_the_same_tokens() -> None:
    """Whatever else the engine draws meanwhile; without one they differ."""

    def answer(seed: int | None) -> list[int]:
        sampler, asked, other = Sampler(torch.device("cpu")), request("a", seed=seed), request("b")
        tokens = []
        for _ in range(40):
            sampler.choose(other, LOGITS.clone())
            tokens.append(sampler.choose(asked, LOGITS.clone()).token)
        return tokens

    assert answer(7) == answer(7) != answer(8)
    assert answer(None) != answer(None)


def test_a_forgotten_request_draws_anew() -> None:
    """Those that a step still computes go on."""
    sampler = Sampler(torch.device("cpu"))
    asked = request("a", seed=7)
    first = [sampler.choose(asked, LOGITS.clone()).token for _ in range(20)]
    sampler.keep(["a"])
    second = [sampler.choose(asked, LOGITS.clone()).token for _ in range(20)]
    sampler.keep([])
    assert [sampler.choose(asked, LOGITS.clone()).token for _ in range(20)] == first != second


def test_an_answer_does_not_end_too_early() -> None:
    """Until ``min_tokens`` are there, tokens that end it are not chosen."""
    sampler = Sampler(torch.device("cpu"))
    fields = {"temperature": 0.0, "min_tokens": 1, "end_ids": frozenset({0})}
    assert sampler.choose(request(**fields), LOGITS.clone()).token == 1
    assert sampler.choose(request(answer=[2], **fields), LOGITS.clone()).token == 0


def test_what_came_before_is_less_likely() -> None:
    """Repetition counts the prompt too; presence and frequency the answer only."""
    sampler = Sampler(torch.device("cpu"))

    def likeliest(answer: list[int], logits: list[float], **fields: Any) -> int:
        asked = request(temperature=0.0, answer=answer, **fields)
        return sampler.choose(asked, torch.tensor(logits)).token

    logits = [1.0, 1.2, 1.1, 1.3]  # the prompt is token 3
    assert likeliest([], logits) == 3
    assert likeliest([], logits, repetition_penalty=2.0) == 1
    assert likeliest([1], logits, repetition_penalty=2.0) == 2
    assert likeliest([], logits, presence_penalty=1.0) == 3
    assert likeliest([3], logits, presence_penalty=1.0) == 1
    assert likeliest([3, 1, 1], [1.0, 1.2, 0.1, 1.3], frequency_penalty=0.2) == 3
    assert likeliest([3], [-1.0, -2.0, -2.0, -0.9], repetition_penalty=2.0) == 0


def test_likelihoods_are_the_models_own() -> None:
    """Before temperature and penalties; the likeliest come first."""
    sampler = Sampler(torch.device("cpu"))
    asked = request(temperature=2.0, top_k=1, repetition_penalty=3.0, top_logprobs=2)
    sampled = sampler.choose(asked, LOGITS.clone())
    expected = torch.log_softmax(LOGITS, -1)
    assert sampled.likelihoods is not None
    assert sampled.likelihoods.chosen == pytest.approx(float(expected[0]))
    assert [token for token, _ in sampled.likelihoods.top] == [0, 1]
    assert sampled.likelihoods.top[1][1] == pytest.approx(float(expected[1]))
    assert sampler.choose(request(temperature=0.0), LOGITS.clone()).likelihoods is None
