"""The mock engine's end of its host's cache: the product's own pieces with the mock's chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.copy_thread import CacheThread
from splitserve.kv_transfer.cache.engine_cache import EngineCache
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.keys import model_digest
from splitserve.kv_transfer.cache.lookup_client import LookupClient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.kv_transfer.cache.settings import CacheClientConfig
    from splitserve.orchestrator.engines.mock.blocks import BlockPool
    from splitserve.orchestrator.engines.mock.model import KvMemory, KvShape


class PoolHolder:
    """Holds blocks as one more request would."""

    def __init__(self, pool: Callable[[], BlockPool]) -> None:
        self._pool = pool

    def hold(self, block_ids: Sequence[int]) -> None:
        """These blocks keep their content until they are let go."""
        held = self._pool().take(block_ids, 0)
        assert held is not None, f"blocks {block_ids} belong to nobody"

    def let_go(self, block_ids: Sequence[int]) -> None:
        """One holder less."""
        self._pool().give_back(block_ids)


def engine_cache(
    config: CacheClientConfig,
    shape: KvShape,
    ranks: int,
    *,
    incarnation: str,
    fingerprint: dict[str, str],
    pool: Callable[[], BlockPool],
) -> EngineCache:
    """The scheduler's end."""
    geometry = chunk_geometry(config.chunk_tokens, shape)
    model = model_digest(fingerprint, config.chunk_tokens, config.key_codec)
    lookups = LookupClient(
        config.socket_path, incarnation, ranks, model, geometry, limit_s=config.lookup_timeout_s
    )
    return EngineCache(
        config, lookups, PoolHolder(pool), model=model, geometry=geometry, ranks=ranks
    )


def cache_threads(
    config: CacheClientConfig,
    memories: Sequence[KvMemory],
    *,
    incarnation: str,
    fingerprint: dict[str, str],
) -> list[CacheThread]:
    """The workers' ends, by rank."""
    return [
        CacheThread(
            config,
            engine=incarnation,
            rank=rank,
            ranks=len(memories),
            model=model_digest(fingerprint, config.chunk_tokens, config.key_codec),
            layout=memory.layout,
            geometry=chunk_geometry(config.chunk_tokens, memory.shape),
        )
        for rank, memory in enumerate(memories)
    ]


def chunk_geometry(chunk_tokens: int, shape: KvShape) -> ChunkGeometry:
    """The chunks that the mock engine writes: it has keys only."""
    return ChunkGeometry(
        layers=shape.layers,
        chunk_tokens=chunk_tokens,
        block_tokens=shape.block_tokens,
        heads=shape.heads,
        key_bytes=shape.head_bytes,
        value_bytes=0,
        item_bytes=1,
        order="rows",
    )
