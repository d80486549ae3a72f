"""What must be equal in two vLLM engines for one's KV to be usable in the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.orchestrator.models.identity import (
    layers_identity,
    tokenizer_identity,
    weights_identity,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def engine_fingerprint(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, str]:
    """Named values; equal in all ranks of an engine, and in both engines of a possible pair."""
    import vllm
    from vllm.platforms import current_platform

    model, cache = vllm_config.model_config, vllm_config.cache_config
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    folder = Path(model.model)
    fingerprint = {
        "engine": "vllm " + ".".join(re.findall(r"\d+", vllm.__version__)[:2]),
        "weights": _weights(folder, model.revision, vllm_config.load_config.load_format),
        "tokenizer": tokenizer_identity(folder, model.tokenizer_revision),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "block_size": str(spec.block_size),
        "layers": layers_identity(group.layer_names),
        "kv_layout": str(kv_cache_config.kv_cache_layout or cache.get_resolved_kv_cache_layout()),
        "rope": repr(getattr(model.hf_text_config, "rope_parameters", None)),
        "device": current_platform.device_type,
    }
    if current_platform.is_cpu():
        fingerprint["attention_isa"] = cpu_attention_isa(vllm_config, spec.block_size)
    return fingerprint


def _weights(folder: Path, revision: str | None, load_format: object) -> str:
    """Content of a local checkpoint by size and samples of each file, or a hub id with its
    revision.
    """
    if str(getattr(load_format, "value", load_format)) == "dummy":
        return f"dummy of {folder.name}"
    return weights_identity(folder, revision)


def cpu_attention_isa(vllm_config: VllmConfig, block_size: int) -> str:
    """On CPU the bytes inside a block depend on the instruction set that attention uses."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model = vllm_config.model_config
    return str(_get_attn_isa(
        model.dtype, block_size, model.get_head_size(), vllm_config.cache_config.cache_dtype
    ))  # fmt: skip
