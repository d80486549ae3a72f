"""Models of several types, tiny and random, and the transformers engine's parts around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers

from splitserve.orchestrator.engines.serving.connector import NoConnector
from splitserve.orchestrator.engines.serving.scheduler import Request, Scheduler
from splitserve.orchestrator.engines.transformers.attention import IMPLEMENTATION, PagedAttention
from splitserve.orchestrator.engines.transformers.engine import TransformersEngine
from splitserve.orchestrator.engines.transformers.memory import KvShape, TorchMemory
from splitserve.orchestrator.engines.transformers.sampling import Sampling

if TYPE_CHECKING:
    from splitserve.orchestrator.engines.serving.engine import Sampled
    from splitserve.orchestrator.engines.serving.scheduler import StepPlan

VOCABULARY = 199
LAYERS, HEADS, KV_HEADS, ITEMS = 3, 4, 2, 32
BLOCK = 32


def random_model(model_type: str) -> Any:
    """Float32, with attention that is sharp enough to tell tokens apart."""
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=ITEMS,
        max_position_embeddings=512,
        sliding_window=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "q_proj.weight" in name or "k_proj.weight" in name:
            weight.data *= 40
    return model


@dataclass
class Rig:
    """An engine without a server, stepped by hand."""

    model: Any
    order: str = "vec"
    step_tokens: int = 256
    blocks: int = 40
    layers_done: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = KvShape(LAYERS, KV_HEADS, ITEMS, BLOCK, self.order, torch.float32)
        self.memory = TorchMemory(shape, self.blocks, torch.device("cpu"))
        self.attention = PagedAttention(self.memory)
        self.model.set_attn_implementation(IMPLEMENTATION)
        connector = NoConnector()
        connector.layer_done = self.layers_done.append  # type: ignore[method-assign]
        self.scheduler = Scheduler(
            connector,
            blocks=self.blocks,
            block_tokens=BLOCK,
            step_limit_tokens=self.step_tokens,
            running_limit_requests=16,
        )
        self.engine = TransformersEngine(
            self.model, self.memory, self.attention, self.scheduler, connector
        )

    def add(self, name: str, prompt: list[int], max_tokens: int, **sampling: Any) -> Request:
        """A request that waits from now on."""
        chosen = Sampling(**({"temperature": 0.0} | sampling))
        request = Request(name, tuple(prompt), max_tokens, sampling=chosen)
        self.scheduler.add(request)
        return request

    async def step(self) -> dict[str, Sampled]:
        """One step; its new tokens."""
        return (await self.planned_step())[1]

    async def planned_step(self) -> tuple[StepPlan, dict[str, Sampled]]:
        """One step and what it was."""
        plan = self.scheduler.schedule()
        sampled = dict(await self.engine._compute(plan))
        tokens = {name: new.token for name, new in sampled.items()}
        self.scheduler.update(plan, tokens, NoConnector().end_step())
        return plan, sampled

    async def finish(self) -> dict[str, list[Sampled]]:
        """All answers."""
        found: dict[str, list[Sampled]] = {}
        while self.scheduler.has_work:
            for name, new in (await self.step()).items():
                found.setdefault(name, []).append(new)
        return found


def plain_answer(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """The greedy answer with transformers' own attention and without a cache."""
    model.set_attn_implementation("sdpa")
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(tokens):
            logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
            text.append(int(logits.argmax()))
    return text[len(prompt) :]
