"""An engine's end of its host's cache, in the process that runs its scheduler and its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.copy_thread import CacheThread
from splitserve.kv_transfer.cache.engine_cache import EngineCache
from splitserve.kv_transfer.cache.keys import model_digest
from splitserve.kv_transfer.cache.lookup_client import LookupClient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.kv_transfer.cache.settings import CacheClientConfig
    from splitserve.orchestrator.engines.serving.blocks import BlockPool
    from splitserve.orchestrator.engines.serving.memory import RankMemory


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
    memories: Sequence[RankMemory],
    *,
    incarnation: str,
    fingerprint: dict[str, str],
    pool: Callable[[], BlockPool],
) -> EngineCache:
    """The scheduler's end."""
    geometry, ranks = memories[0].geometry(config.chunk_tokens), len(memories)
    model = model_digest(fingerprint, config.chunk_tokens, config.key_codec)
    lookups = LookupClient(
        config.socket_path, incarnation, ranks, model, geometry, limit_s=config.lookup_timeout_s
    )
    return EngineCache(
        config, lookups, PoolHolder(pool), model=model, geometry=geometry, ranks=ranks
    )


def cache_threads(
    config: CacheClientConfig,
    memories: Sequence[RankMemory],
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
            geometry=memory.geometry(config.chunk_tokens),
        )
        for rank, memory in enumerate(memories)
    ]
