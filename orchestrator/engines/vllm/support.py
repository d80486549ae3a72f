"""Which engines the connector works with: what was tested is accepted, the rest is refused at start
with a sentence.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from splitserve.orchestrator.engines.connector_config import connector_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class UnsupportedEngineError(ValueError):
    """This engine configuration cannot take part in a split; the message says what to change."""


def extra_config(vllm_config: VllmConfig) -> dict[str, Any]:
    """What the launcher put into ``kv_connector_extra_config``."""
    assert vllm_config.kv_transfer_config is not None
    return dict(vllm_config.kv_transfer_config.kv_connector_extra_config)


PLUGINS_ENV = "VLLM_PLUGINS"
"""vLLM's own variable: the only plugins that it loads."""
PLUGIN = "splitserve_resumed_answers"


def refuse_missing_plugin(environ: Mapping[str, str]) -> None:
    """Raise ``UnsupportedEngineError`` when vLLM was told not to load what continues an answer:
    without it the text at the seam may be wrong.
    """
    named = environ.get(PLUGINS_ENV)
    if named is not None and PLUGIN not in named.split(","):
        raise UnsupportedEngineError(
            f"{PLUGINS_ENV} is {named!r}, which leaves out {PLUGIN}: an answer that another engine "
            "has begun would not go on exactly. Add it to the list, or unset the variable"
        )


def refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ``UnsupportedEngineError`` unless this engine's KV can be split."""
    refuse_missing_plugin(os.environ)
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedEngineError(
            f"the model has {len(groups)} KV cache groups (hybrid or sliding-window attention); "
            "only models with one kind of full attention can be split"
        )
    if kv_cache_config.has_mamba_layers:
        raise UnsupportedEngineError("models with Mamba layers cannot be split")
    if model.use_mla:
        raise UnsupportedEngineError("models with latent attention (MLA) cannot be split yet")
    for what, size in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("data_parallel_size", parallel.data_parallel_size),
        ("prefill_context_parallel_size", getattr(parallel, "prefill_context_parallel_size", 1)),
        ("decode_context_parallel_size", getattr(parallel, "decode_context_parallel_size", 1)),
    ):
        if size != 1:
            raise UnsupportedEngineError(f"{what} is {size}; only 1 works in a split. Use replicas")
    total_heads = model.get_total_num_kv_heads()
    if total_heads % parallel.tensor_parallel_size:
        raise UnsupportedEngineError(
            f"tensor_parallel_size {parallel.tensor_parallel_size} does not divide the "
            f"model's {total_heads} KV heads; heads held twice cannot be split"
        )
    if vllm_config.speculative_config is not None:
        raise UnsupportedEngineError("speculative decoding cannot be combined with a split yet")
    if (
        vllm_config.device_config.device_type != "cpu"
        and not connector_config(extra_config(vllm_config)).experimental_cuda
    ):
        raise UnsupportedEngineError(
            f"device {vllm_config.device_config.device_type}: answers equal to one engine's have "
            "been shown on CPU only; set experimental_cuda: true to try"
        )
