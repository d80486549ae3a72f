"""Likelihoods as OpenAI's two endpoints show them."""

from __future__ import annotations

from splitserve.orchestrator.engines.serving.engine import Likelihoods, Sampled
from splitserve.orchestrator.engines.serving.logprobs import LEAST, of_chat, of_completion

SAMPLED = [
    Sampled(1, Likelihoods(-0.5, ((1, -0.5), (2, -1.5)))),
    Sampled(2, Likelihoods(float("-inf"), ((1, -0.1),))),
]


def name(token: int) -> str:
    return {1: "ab", 2: "é"}[token]


def test_a_completion_shows_places_in_the_text() -> None:
    """Each token with the offset of its text; the chosen token is always among the likely ones, and
    what cannot be has a finite number.
    """
    assert of_completion(SAMPLED, name, 7) == {
        "text_offset": [7, 9],
        "token_logprobs": [-0.5, LEAST],
        "tokens": ["ab", "é"],
        "top_logprobs": [{"ab": -0.5, "é": -1.5}, {"é": LEAST, "ab": -0.1}],
    }


def test_a_chat_shows_bytes() -> None:
    """One entry per token, with as many likely ones as were asked for."""
    first, second = of_chat(SAMPLED, name)["content"]
    assert first["token"] == "ab"
    assert [one["token"] for one in first["top_logprobs"]] == ["ab", "é"]
    assert second["bytes"] == list("é".encode())
    assert [one["logprob"] for one in second["top_logprobs"]] == [-0.1]
