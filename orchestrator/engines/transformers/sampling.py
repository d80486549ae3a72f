"""How the next token is chosen, as vLLM understands the same parameters.

The order is vLLM's: likelihoods are told of the model's own numbers; then penalties and the tokens
that may not come yet, then temperature, ``min_p``, ``top_k`` and ``top_p``, then the draw.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from splitserve.orchestrator.engines.serving.engine import Likelihoods, Sampled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.engines.serving.scheduler import Request

GREEDY_BELOW = 1e-5
"""vLLM takes a lower temperature for 0."""
NEVER = float("-inf")


@dataclass(frozen=True)
class Sampling:
    """What a request asks for."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    top_logprobs: int | None = None
    """How many likely tokens are told at each place; None: no likelihoods at all."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens count."""
        return self.repetition_penalty != 1.0 or bool(
            self.presence_penalty or self.frequency_penalty
        )


@dataclass
class Sampler:
    """Holds a source of chance per request that draws."""

    device: torch.device
    _generators: dict[str, torch.Generator] = field(default_factory=dict)

    def choose(self, request: Request, logits: torch.Tensor) -> Sampled:
        """The next token after ``logits``, float32 ``[vocabulary]``, which may be changed."""
        sampling = request.sampling
        assert isinstance(sampling, Sampling)
        likelihoods = None
        if sampling.top_logprobs is not None:
            told = torch.log_softmax(logits, -1)
        if len(request.answer) < request.min_tokens and request.end_ids:
            ends = [token for token in request.end_ids if 0 <= token < logits.shape[0]]
            logits[ends] = NEVER
        if sampling.has_penalties:
            _penalise(logits, request, sampling)
        if sampling.is_greedy:
            token = int(logits.argmax())
        else:
            token = self._draw(request.id, logits, sampling)
        if sampling.top_logprobs is not None:
            likelihoods = _likelihoods(told, token, sampling.top_logprobs)
        return Sampled(token, likelihoods)

    def keep(self, request_ids: Sequence[str]) -> None:
        """No other request will be asked for again."""
        self._generators = {
            name: self._generators[name] for name in request_ids if name in self._generators
        }

    def _draw(self, request_id: str, logits: torch.Tensor, sampling: Sampling) -> int:
        probabilities = torch.softmax(_narrowed(logits / sampling.temperature, sampling), -1)
        if not bool(torch.isfinite(probabilities).all()):
            # an extreme penalty leaves no numbers to draw by; other requests must go on
            return int(torch.nan_to_num(logits, nan=NEVER).argmax())
        generator = self._generators.get(request_id)
        if generator is None:
            generator = torch.Generator(self.device)
            if sampling.seed is None:
                generator.seed()
            else:
                generator.manual_seed(sampling.seed)
            self._generators[request_id] = generator
        return int(torch.multinomial(probabilities, 1, generator=generator))


def _narrowed(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Without the tokens that ``min_p``, ``top_k`` and ``top_p`` leave out."""
    if sampling.min_p > 0:
        probabilities = torch.softmax(logits, -1)
        logits = logits.masked_fill(probabilities < sampling.min_p * probabilities.max(), NEVER)
    if 0 < sampling.top_k < logits.shape[0]:
        least = torch.topk(logits, sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, NEVER)
    if sampling.top_p < 1:
        ordered, places = torch.sort(logits, descending=True)
        before = torch.softmax(ordered, -1).cumsum(-1).roll(1)
        before[0] = 0.0  # the likeliest token always stays
        logits = logits.index_fill(0, places[before >= sampling.top_p], NEVER)
    return logits


def _penalise(logits: torch.Tensor, request: Request, sampling: Sampling) -> None:
    """Tokens that came before are less likely; those of the prompt count for repetition only."""
    answer = torch.tensor(request.answer, dtype=torch.long, device=logits.device)
    seen = torch.tensor(request.tokens, dtype=torch.long, device=logits.device).unique()
    before = logits[seen]
    penalty = sampling.repetition_penalty
    logits[seen] = torch.where(before > 0, before / penalty, before * penalty)
    tokens, counts = answer.unique(return_counts=True)
    logits[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _likelihoods(told: torch.Tensor, token: int, count: int) -> Likelihoods:
    values, tokens = torch.topk(told, min(count, told.shape[0]))
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return Likelihoods(float(told[token]), top)
