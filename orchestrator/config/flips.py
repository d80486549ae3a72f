"""Which clusters' nodes may change roles: those whose two pools are started alike.

What an engine can do is fixed when it starts (its memory, its batches, its graphs, its transport),
so a node is of use in the other role only if that pool's engines were started with the same values.
Addresses and ports are each node's own and may differ. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splitserve.orchestrator.config.nodes import POOLS

if TYPE_CHECKING:
    from splitserve.orchestrator.config.schema import ClusterConfig, PoolConfig

OWN_TRANSFER_KEYS = frozenset({"host", "port_base", "data_port_base"})
"""Where a node listens, whatever its role."""


def flip_obstacle(config: ClusterConfig) -> str:
    """Why no node of this cluster can change its role: the first key in which the pools differ,
    with both values; empty when they are started alike.
    """
    prefill, decode = (_profile(config.pool(pool), config.engine_of(pool)) for pool in POOLS)
    for key in [*prefill, *(key for key in decode if key not in prefill)]:
        ours, theirs = prefill.get(key), decode.get(key)
        if ours != theirs:
            what = _difference(key, ours, theirs)
            return f"{what}: nodes change roles only where both pools' engines are started alike"
    return ""


def _profile(pool: PoolConfig, engine: str) -> dict[str, Any]:
    """What engines of the pool are started with, by the key in the YAML."""
    args = {key: getattr(pool.engine_args, key) for key in type(pool.engine_args).model_fields}
    transfer = {key: getattr(pool.transfer, key) for key in type(pool.transfer).model_fields}
    profile: dict[str, Any] = {"engine": engine, "kv_cache_bytes": pool.kv_cache_bytes}
    profile |= {f"engine_args.{key}": v for key, v in (args | pool.engine_args.passed_on).items()}
    profile |= {key: _sizes(getattr(pool, key)) for key in ("cpus", "gpus")}
    profile |= {f"env.{name}": value for name, value in pool.env.items()}
    profile |= {f"transfer.{k}": v for k, v in transfer.items() if k not in OWN_TRANSFER_KEYS}
    return profile


def _sizes(lists: list[list[int]] | None) -> list[int] | None:
    """How many CPUs or GPUs the nodes have, each number once; None where nothing is said."""
    return None if lists is None else sorted({len(numbers) for numbers in lists})


def _difference(key: str, ours: Any, theirs: Any) -> str:
    names = [f"{pool}.{key}" for pool in POOLS]
    if key in ("cpus", "gpus"):
        shown = [_in_words(sizes, key) for sizes in (ours, theirs)]
        return f"{names[0]} {shown[0]} but {names[1]} {shown[1]}"
    if key.startswith("env."):
        # A value may be a secret
        return f"{names[0]} and {names[1]} are not the same"
    shown = ["not set" if value is None else str(value) for value in (ours, theirs)]
    return f"{names[0]} is {shown[0]} but {names[1]} is {shown[1]}"


def _in_words(sizes: list[int] | None, key: str) -> str:
    """``gives each node 2``."""
    if sizes is None:
        return "is not set"
    return f"gives each node {' or '.join(map(str, sizes))} {key[:-1].upper()}s"
