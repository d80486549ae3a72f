"""The likelihoods of an answer's tokens in OpenAI's two shapes. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.orchestrator.engines.serving.engine import Sampled

LEAST = -9999.0
"""JSON has no infinity; vLLM writes this for what cannot be."""


def of_completion(
    sampled: Sequence[Sampled], name: Callable[[int], str], offset: int
) -> dict[str, Any]:
    """``offset``: characters of the answer before these tokens."""
    tokens: list[str] = []
    chosen: list[float] = []
    top: list[dict[str, float]] = []
    offsets: list[int] = []
    for one in sampled:
        assert one.likelihoods is not None
        text = name(one.token)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        chosen.append(max(one.likelihoods.chosen, LEAST))
        likely = {name(token): max(value, LEAST) for token, value in one.likelihoods.top}
        top.append({text: chosen[-1]} | likely)
    return {
        "text_offset": offsets,
        "token_logprobs": chosen,
        "tokens": tokens,
        "top_logprobs": top,
    }


def of_chat(sampled: Sequence[Sampled], name: Callable[[int], str]) -> dict[str, Any]:
    """As the chat endpoint shows them."""
    content = []
    for one in sampled:
        assert one.likelihoods is not None
        top = [_entry(token, value, name) for token, value in one.likelihoods.top]
        content.append(_entry(one.token, one.likelihoods.chosen, name) | {"top_logprobs": top})
    return {"content": content}


def _entry(token: int, value: float, name: Callable[[int], str]) -> dict[str, Any]:
    text = name(token)
    return {"token": text, "logprob": max(value, LEAST), "bytes": list(text.encode())}
