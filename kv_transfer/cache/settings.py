"""What a cache server is told when it starts; ``up`` writes it as JSON, derived from the YAML's
``cache:``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MIB = 1 << 20
DEFAULT_STAGING_BYTES = 256 * MIB


class TierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier."""

    type: Literal["cpu", "disk", "redis", "s3"]
    capacity_bytes: int | None = None
    """None: the store's own limit (redis, s3)."""
    eviction: Literal["lru", "s3fifo"] = "s3fifo"
    ttl_s: float | None = None
    admission: Literal["always", "second_use", "never"] = "always"
    """Which chunks are written to this tier: each new one, those that are used again, or none (it
    is read only).
    """
    url: str = ""
    """``redis://``, ``rediss://``, ``s3://``, ``file://``; credentials come from the environment.
    """
    options: dict[str, str] = {}


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cache server of one host."""

    socket_path: str
    chunk_tokens: int
    tiers: tuple[TierSettings, ...]
    staging_bytes: int = DEFAULT_STAGING_BYTES
    """Size of the arena when there is no ``cpu`` tier."""
    write_queue_limit_bytes: int = 256 * MIB
    """Chunks that wait to be written to lower tiers; more are not written there."""
    quota_bytes: dict[str, dict[str, int]] = {}
    """Tenant to tier name to bytes; ``*`` stands for every tenant that is not named."""
    encrypt: bool = False
    """Chunks in lower tiers are sealed with AES-GCM under a key of their tenant."""
    secret_env: str = "SPLITSERVE_CACHE_SECRET"
    """Variable with the hex secret from which tenants' keys are derived."""
