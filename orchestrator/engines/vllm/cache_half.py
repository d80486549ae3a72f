"""The cache in vLLM's scheduler: the shape of a chunk, what identifies a prompt, and holding blocks
in vLLM's pool.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.kernels.quantise import NUMBERS
from splitserve.kv_transfer.cache.engine_cache import EngineCache, PromptIdentity
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.keys import Media, compile_keys, model_digest
from splitserve.kv_transfer.cache.lookup_client import LookupClient
from splitserve.orchestrator.engines.vllm.fingerprint import cpu_attention_isa
from splitserve.orchestrator.models.identity import weights_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from splitserve.kv_transfer.cache.settings import CacheClientConfig


class PoolHolder:
    """Holds blocks as one more request would: vLLM neither frees nor reuses them."""

    def __init__(self, pool: Callable[[], BlockPool | None]) -> None:
        self._pool = pool

    def hold(self, block_ids: Sequence[int]) -> None:
        """These blocks keep their content until they are let go."""
        pool = self._bound()
        pool.touch([pool.blocks[block_id] for block_id in block_ids])

    def let_go(self, block_ids: Sequence[int]) -> None:
        """One holder less; the last blocks of a prompt are reused first."""
        pool = self._bound()
        pool.free_blocks([pool.blocks[block_id] for block_id in reversed(block_ids)])

    def _bound(self) -> BlockPool:
        pool = self._pool()
        assert pool is not None, "blocks are held before vLLM has handed over its pool"
        return pool


def engine_cache(
    config: CacheClientConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    incarnation: str,
    fingerprint: dict[str, str],
    pool: Callable[[], BlockPool | None],
) -> EngineCache:
    """The scheduler's end of the host's cache. Compiles what makes keys, some three seconds."""
    compile_keys()
    ranks = vllm_config.parallel_config.tensor_parallel_size
    geometry = chunk_geometry(config.chunk_tokens, vllm_config, kv_cache_config)
    model = model_digest(fingerprint, config.chunk_tokens, config.key_codec)
    lookups = LookupClient(
        config.socket_path, incarnation, ranks, model, geometry, limit_s=config.lookup_timeout_s
    )
    return EngineCache(
        config, lookups, PoolHolder(pool), model=model, geometry=geometry, ranks=ranks
    )


def chunk_geometry(
    chunk_tokens: int, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> ChunkGeometry:
    """The chunks that this engine writes."""
    from vllm.platforms import current_platform

    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    item = spec.dtype.itemsize
    order = "rows"
    if current_platform.is_cpu():
        isa = cpu_attention_isa(vllm_config, spec.block_size)
        order = {"vec16": "vec"}.get(isa, isa)
    return ChunkGeometry(
        layers=len(group.layer_names),
        chunk_tokens=chunk_tokens,
        block_tokens=spec.block_size,
        heads=vllm_config.model_config.get_total_num_kv_heads(),
        key_bytes=spec.head_size * item,
        value_bytes=getattr(spec, "head_size_v", spec.head_size) * item,
        item_bytes=item,
        order=order,
        number=number if (number := str(spec.dtype).removeprefix("torch.")) in NUMBERS else "",
    )


def prompt_identity(request: Request) -> PromptIdentity:
    """What the request's KV depends on besides the model and the tokens."""
    adapter = request.lora_request
    return PromptIdentity(
        salt=request.cache_salt or "",
        adapter=_adapter(adapter.lora_name, adapter.lora_path) if adapter else "",
        media=tuple(
            Media(str(f.identifier), f.mm_position.offset, f.mm_position.length)
            for f in request.mm_features or ()
        ),
        is_known=getattr(request, "prompt_embeds", None) is None,
    )


Seen = tuple[tuple[str, int, int, int], ...]
"""(name, inode, size, time of the latest change) of each file of a folder."""


@lru_cache(maxsize=256)
def _adapter_content(path: str, _seen: Seen) -> str:
    return weights_identity(Path(path), None)


def _adapter(name: str, path: str) -> str:
    """Name and content: another adapter under an old name, or in an old folder, is another one."""
    files = sorted(Path(path).glob("*")) if Path(path).is_dir() else []
    stats = ((file.name, file.stat()) for file in files)
    seen = tuple((file, s.st_ino, s.st_size, s.st_ctime_ns) for file, s in stats)
    return f"{name}@{_adapter_content(path, seen)}"
