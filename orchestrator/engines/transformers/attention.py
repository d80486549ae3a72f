"""Attention over paged KV, as an attention implementation of transformers.

transformers lets every model of its own compute attention in a registered function
(``AttentionInterface``, part of its public interface). Ours writes the step's new keys and values
into the pages of its requests, says that the layer's pages are final, and then lets each request
attend to its own tokens: those of the step, and those that the pages hold, whoever has written
them.

What it does not know: scheduling, and where pages come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.orchestrator.engines.transformers.memory import TorchMemory

IMPLEMENTATION = "splitserve_paged"
_EXTRA_ARITHMETIC = ("softcap", "s_aux", "position_bias", "sliding_window")
"""Arguments by which some models change what attention is; None where they do not."""


@dataclass(frozen=True)
class Span:
    """One request's tokens in a step: rows ``first_row`` and following."""

    first_row: int
    tokens: int
    past_tokens: int
    """Its tokens before these, whose KV is in the pages."""
    block_ids: torch.Tensor
    """Of the blocks that hold all of its tokens so far, in order."""


@dataclass(frozen=True)
class StepInputs:
    """One step, as the attention of every layer needs it."""

    spans: Sequence[Span]
    block_ids: torch.Tensor  # [rows], the block of each row's token
    offsets: torch.Tensor  # [rows], its place there
    layer_done: Callable[[int], None]


class PagedAttention:
    """Used by one forward pass at a time."""

    def __init__(self, memory: TorchMemory) -> None:
        self._memory = memory
        self._step: StepInputs | None = None
        AttentionInterface.register(IMPLEMENTATION, self)

    def begin(self, step: StepInputs) -> None:
        """The next forward pass computes this step."""
        self._step = step

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, query heads, rows, items]
        key: torch.Tensor,  # [1, heads, rows, items]
        value: torch.Tensor,  # [1, heads, rows, items]
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # [1, rows, query heads, items]
        """One layer's attention of the step. Raises ``ValueError`` for a model that computes more
        than plain causal attention.
        """
        step, layer = self._step, module.layer_idx
        assert step is not None, "a forward pass without a step"
        changed = [name for name in _EXTRA_ARITHMETIC if kwargs.get(name) is not None]
        if changed or attention_mask is not None or dropout:
            raise ValueError(
                f"layer {layer} asks for {', '.join(changed) or 'a mask or dropout'}: only plain "
                "causal attention can be split"
            )
        pages = self._memory.layers[layer]
        pages.write(step.block_ids, step.offsets, key[0].transpose(0, 1), value[0].transpose(0, 1))
        step.layer_done(layer)
        out = torch.empty_like(query)
        for span in step.spans:
            rows = slice(span.first_row, span.first_row + span.tokens)
            keys, values, mask = key[:, :, rows], value[:, :, rows], None
            if span.past_tokens:
                kept = pages.read(span.block_ids, span.past_tokens + span.tokens)
                keys, values = (numbers.transpose(0, 1)[None] for numbers in kept)
                mask = _causal(span, query.device)
            out[:, :, rows] = scaled_dot_product_attention(
                query[:, :, rows],
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None and span.tokens > 1,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return out.transpose(1, 2), None


def _causal(span: Span, device: torch.device) -> torch.Tensor | None:
    """Which tokens so far each of the span's tokens sees; None where it is a single one, which sees
    all.
    """
    if span.tokens == 1:
        return None
    whole = torch.ones(span.tokens, span.past_tokens + span.tokens, dtype=torch.bool, device=device)
    return whole.tril(span.past_tokens)
