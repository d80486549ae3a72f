"""How much memory a node's container is given: a bound that its engine keeps, or else the kernel
ends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.config import ConfigError
from splitserve.orchestrator.launch.checks.cache import arena_bytes
from splitserve.orchestrator.launch.checks.memory import (
    shared_bytes,
    weights_in_memory,
)
from splitserve.orchestrator.launch.checks.subject import Subject

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig, NodeConfig
    from splitserve.orchestrator.launch.kubernetes.options import Options

AGENT_BYTES = 256 * 2**20
ENGINE_BYTES = 4 * 10**9
"""Bound of one vLLM engine beside its KV and weights; about 3 GB were measured."""
PLAIN_ENGINE_BYTES = 2 * 10**9
"""The same of a transformers engine."""
RANK_BYTES = 2 * 10**9
"""What each rank beyond the first one adds."""
MOCK_BYTES = 512 * 2**20
SHARED_LEAST_BYTES = 64 * 2**20
"""What a container has without being asked for."""
SHARED_SPARE = 2
"""Engines that run out of ``/dev/shm`` are killed by a bus error; unused room costs nothing."""


def shm_bytes(config: ClusterConfig, node: NodeConfig) -> int:
    """Size of the node's ``/dev/shm``."""
    needed = shared_bytes(node) if node.engine == "vllm" else 0
    return max(SHARED_LEAST_BYTES, SHARED_SPARE * needed)


def node_bytes(config: ClusterConfig, node: NodeConfig, weights: int) -> int:
    """All that is charged to the node's container: KV of CPU engines, weights, processes, shared
    memory, and the cache's arena, whose pages count for whom touches them first.
    """
    ranks = node.settings.engine_args.tensor_parallel_size
    kv = node.settings.kv_cache_bytes * ranks if node.gpus is None else 0
    processes = MOCK_BYTES
    if node.engine != "mock":
        own = ENGINE_BYTES if node.engine == "vllm" else PLAIN_ENGINE_BYTES
        processes = AGENT_BYTES + own + RANK_BYTES * (ranks - 1) + weights
    return kv + processes + shm_bytes(config, node) + arena_bytes(config.cache)


def weights_of(config: ClusterConfig, pool: str, options: Options) -> int:
    """Bytes of weights of one engine. Raises ``ConfigError`` when nobody knows."""
    if config.engine == "mock":
        return 0
    if options.model_memory_bytes is not None:
        return options.model_memory_bytes
    found = weights_in_memory(Subject(config, {}), pool)
    if not found:
        raise ConfigError(
            [
                f"model.path: {config.model.path} is not on this machine, so the memory of its "
                "weights is not known; give it: --model-memory 16GB"
            ]
        )
    return found
