"""From a model's folder to what the engine computes with: its shape, its weights, its text.

What was tested is accepted; everything else is refused before a weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

from splitserve.orchestrator.engines.transformers.attention import IMPLEMENTATION
from splitserve.orchestrator.engines.transformers.memory import KvShape
from splitserve.orchestrator.engines.transformers.tested_models import TESTED_MODELS
from splitserve.orchestrator.engines.transformers.text import Text

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION_NAME = "model.layers.{}.self_attn.attn"
"""What vLLM calls the attention of a layer in these."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
POSITIONS = ("default", "linear", "llama3", "yarn")
"""Rotations that depend on a token's own place only; the others change with what is computed beside
it, and so would stored keys.
"""
_AMX_DTYPES = (torch.bfloat16,)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ModelShape:
    """What a model's ``config.json`` says, checked."""

    config: PretrainedConfig
    dtype: torch.dtype
    layers: int
    kv_heads: int
    head_items: int
    longest: int
    """Tokens of prompt and answer that the model was made for."""
    vocabulary_tokens: int

    def kv_shape(self, block_tokens: int, isa: str) -> KvShape:
        """With vLLM's names for the orders of pages. Raises ``ValueError`` for sizes that the order
        does not take.
        """
        order = {"vec16": "vec"}.get(isa, isa)
        shape = KvShape(
            self.layers, self.kv_heads, self.head_items, block_tokens, order, self.dtype
        )
        _ = shape.page_format
        return shape


def read_shape(folder: Path, dtype: str) -> ModelShape:
    """Raises ``ValueError`` for a model that this engine does not serve, with the reason."""
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder)
    except OSError as error:
        raise ValueError(f"{folder}: {error}") from error
    if config.model_type not in TESTED_MODELS:
        raise ValueError(
            f"models of type {config.model_type} were not tested with the transformers engine; "
            f"tested: {', '.join(TESTED_MODELS)}. Use engine: vllm"
        )
    if getattr(config, "quantization_config", None):
        raise ValueError("the transformers engine serves no quantised weights; use engine: vllm")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds != {"full_attention"} or (window and getattr(config, "use_sliding_window", True)):
        raise ValueError(
            "the model has layers of sliding-window attention; only full attention can be split"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in POSITIONS:
        raise ValueError(
            f"positions of type {rope} depend on the longest text in a step: their keys cannot be "
            "sent or kept. Use engine: vllm"
        )
    heads = config.num_attention_heads
    return ModelShape(
        config=config,
        dtype=_dtype(config, dtype),
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_items=getattr(config, "head_dim", None) or config.hidden_size // heads,
        longest=config.max_position_embeddings,
        vocabulary_tokens=config.vocab_size,
    )


def _dtype(config: Any, dtype: str) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    own = getattr(config, "dtype", None) or torch.float32
    assert isinstance(own, torch.dtype)
    return own


def page_isa(shape: ModelShape, block_tokens: int, device: torch.device) -> str:
    """What decides the order of numbers in pages, as vLLM 0.32 chooses it for this processor
    (``_get_attn_isa``); ``rows`` on a GPU. On processors that are none of Intel's or AMD's vLLM has
    orders of its own, so the two engines do not pair there.
    """
    if device.type != "cpu":
        return "rows"
    if shape.head_items % 32 and shape.head_items % 16 == 0:
        return "vec16"
    if block_tokens % 32:
        return "vec16"
    has_tiles = torch.cpu._is_amx_tile_supported()
    return "amx" if has_tiles and shape.dtype in _AMX_DTYPES else "vec"


def load_model(folder: Path, shape: ModelShape, device: torch.device) -> PreTrainedModel:
    """The weights, with our attention, which must be registered. Raises ``ValueError``."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=shape.dtype,
            attn_implementation=IMPLEMENTATION,
        )
    except OSError as error:
        raise ValueError(f"{folder}: {error}") from error
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def load_text(folder: Path) -> Text:
    """Its tokenizer. Raises ``ValueError``."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except OSError as error:
        raise ValueError(f"{folder}: {error}") from error
    return Text(tokenizer)


@dataclass(frozen=True)
class Generation:
    """What the model's ``generation_config.json`` says, where a request does not."""

    defaults: dict[str, float]
    end_ids: frozenset[int]


def read_generation(model: PreTrainedModel) -> Generation:
    """As vLLM takes it."""
    config: Any = model.generation_config
    given = {name: getattr(config, name, None) for name in _SAMPLING}
    ends = config.eos_token_id
    ends = model.config.eos_token_id if ends is None else ends
    listed = ends if isinstance(ends, list) else [ends]
    return Generation(
        {name: value for name, value in given.items() if value is not None},
        frozenset(token for token in listed if token is not None),
    )
