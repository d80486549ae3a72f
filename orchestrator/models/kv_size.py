"""How many bytes of KV a model has per token, from its ``config.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from splitserve.orchestrator.models.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class _Config(msgspec.Struct):
    num_attention_heads: Annotated[int, Meta(ge=1)]
    num_hidden_layers: Annotated[int, Meta(ge=1)]
    hidden_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    kv_lora_rank: int | None = None


def kv_bytes_per_token(folder: Path) -> int:
    """Keys and values of all layers and heads, in the data type of the weights.

    Raises ``ModelError`` for a model whose KV has another shape (latent attention) or whose
    configuration does not say.
    """
    path = folder / "config.json"
    try:
        outer = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        inner = outer.get("text_config")
        config = msgspec.convert(outer | inner if isinstance(inner, dict) else outer, _Config)
        if config.kv_lora_rank:
            raise ValueError("its KV is latent")
        dtype = config.dtype or config.torch_dtype or "bfloat16"
        if dtype not in _ITEM_BYTES:
            raise ValueError(f"numbers of type {dtype}")
    except ValueError as error:  # msgspec's are ValueErrors too
        raise ModelError(
            f"{path} does not say how large a token's KV is ({error}); give --bytes-per-token"
        ) from error
    heads = config.num_key_value_heads or config.num_attention_heads
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * _ITEM_BYTES[dtype]
