"""How many bytes of KV a model has per token, from its ``config.json``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from splitserve.orchestrator.models.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def kv_bytes_per_token(folder: Path) -> int:
    """Keys and values of all layers and heads, in the data type of the weights.

    Raises ``ModelError`` for a model whose KV has another shape (latent attention) or whose
    configuration does not say.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}") from error
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config | config["text_config"]
    try:
        return _bytes_per_token(config)
    except (KeyError, TypeError) as error:
        raise ModelError(
            f"{path} does not say how large a token's KV is ({error}); give --bytes-per-token"
        ) from error


def _bytes_per_token(config: dict[str, Any]) -> int:
    if config.get("kv_lora_rank"):
        raise KeyError("latent attention is not counted")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return 2 * int(config["num_hidden_layers"]) * int(kv_heads) * int(head_dim) * _ITEM_BYTES[dtype]
