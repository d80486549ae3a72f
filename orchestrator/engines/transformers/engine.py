"""The engine: a step of the scheduler as one forward pass of a transformers model.

The pass runs in a thread of its own, so that HTTP goes on meanwhile; nothing else touches the
model. Pages change only in two ways: by the pass, in blocks that the scheduler gave to the requests
of the step, and by transfers and loads, in blocks of parked requests, which no pass reads. So pages
from elsewhere never come under a running computation, and the engine need not be paused for them.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from splitserve.orchestrator.engines.serving.engine import Engine, Sampled
from splitserve.orchestrator.engines.transformers.attention import PagedAttention, Span, StepInputs
from splitserve.orchestrator.engines.transformers.sampling import Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from splitserve.orchestrator.engines.serving.connector import Connector, NoConnector
    from splitserve.orchestrator.engines.serving.scheduler import Chunk, Scheduler, StepPlan
    from splitserve.orchestrator.engines.transformers.memory import TorchMemory


class TransformersEngine(Engine):
    """Requests in, tokens out. Used from one event loop."""

    def __init__(
        self,
        model: PreTrainedModel,
        memory: TorchMemory,
        attention: PagedAttention,
        scheduler: Scheduler,
        connector: Connector | NoConnector,
    ) -> None:
        super().__init__(scheduler, connector)
        self._model = model
        self._device = memory.device
        self._block_tokens = memory.shape.block_tokens
        self._attention = attention
        self._sampler = Sampler(memory.device)
        self._thread = ThreadPoolExecutor(1, "forward")

    async def _compute(self, plan: StepPlan) -> dict[str, Sampled]:
        if not plan.chunks:
            return {}
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._forward, plan)

    @torch.inference_mode()
    def _forward(self, plan: StepPlan) -> dict[str, Sampled]:
        """The tokens of all chunks, one after the other, in one pass; then the new tokens."""
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        spans: list[Span] = []
        last_rows: list[int] = []
        for chunk in plan.chunks:
            spans.append(self._span(chunk, len(tokens)))
            places = range(chunk.first, chunk.first + chunk.tokens)
            tokens += chunk.request.tokens[chunk.first : chunk.first + chunk.tokens]
            positions += places
            blocks += [chunk.block_ids[place // self._block_tokens] for place in places]
            if chunk.samples:
                last_rows.append(len(tokens) - 1)
        rows = torch.tensor([tokens, positions, blocks], device=self._device)
        self._attention.begin(
            StepInputs(spans, rows[2], rows[1] % self._block_tokens, self.connector.layer_done)
        )
        logits = self._model(
            input_ids=rows[None, 0],
            position_ids=rows[None, 1],
            use_cache=False,
            logits_to_keep=torch.tensor(last_rows, dtype=torch.long, device=self._device),
        ).logits[0]
        sampling = [chunk.request for chunk in plan.chunks if chunk.samples]
        self._sampler.keep([chunk.request.id for chunk in plan.chunks])
        return {
            request.id: self._sampler.choose(request, row.float())
            for request, row in zip(sampling, logits, strict=True)
        }

    def _span(self, chunk: Chunk, first_row: int) -> Span:
        used = -(-(chunk.first + chunk.tokens) // self._block_tokens)
        block_ids = torch.tensor(chunk.block_ids[:used], device=self._device)
        return Span(first_row, chunk.tokens, chunk.first, block_ids)
