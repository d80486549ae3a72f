"""What must be equal in two engines for one's KV to be usable in the other, in vLLM's words: the
KV of this engine is written as that of ``FORM`` and may be exchanged with it.

Pages of the two hold the same numbers at the same places, each computed with its own kernels from
the same weights: keys after the rotation of half-split RoPE, values, both in the model's type.
``docs/decisions.md`` says why that is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.engines.transformers.loading import ATTENTION_NAME
from splitserve.orchestrator.engines.versions import TESTED
from splitserve.orchestrator.models.identity import (
    layers_identity,
    tokenizer_identity,
    weights_identity,
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from splitserve.orchestrator.engines.transformers.loading import ModelShape

FORM = "vllm " + ".".join(TESTED["vllm"].version.split(".")[:2])
"""Whose pages and chunks these are."""


def engine_fingerprint(
    folder: Path, shape: ModelShape, *, block_tokens: int, isa: str, device: torch.device
) -> dict[str, str]:
    """Named values, equal to those of a vLLM engine with the same weights and settings."""
    fingerprint = {
        "engine": FORM,
        "weights": weights_identity(folder, None),
        "tokenizer": tokenizer_identity(folder, None),
        "dtype": str(shape.dtype).removeprefix("torch."),
        "kv_cache_dtype": "auto",
        "quantization": "None",
        "block_size": str(block_tokens),
        "layers": layers_identity(map(ATTENTION_NAME.format, range(shape.layers))),
        "kv_layout": "LBHNC",
        "rope": repr(getattr(shape.config, "rope_parameters", None)),
        "device": device.type,
    }
    if device.type == "cpu":
        fingerprint["attention_isa"] = isa
    return fingerprint
