"""What a cache server is told when it starts; ``up`` writes it as JSON, derived from the YAML's
``cache:``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from splitserve.kv_transfer.cache.codecs.names import CodecName

if TYPE_CHECKING:
    from collections.abc import Iterable

MIB = 1 << 20
DEFAULT_STAGING_BYTES = 256 * MIB
CACHE_SECRET_ENV = "SPLITSERVE_CACHE_SECRET"


class TierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier."""

    type: Literal["cpu", "disk", "redis", "mooncake", "s3"]
    capacity_bytes: int | None = None
    """None: the store's own limit (redis, mooncake, s3)."""
    eviction: Literal["lru", "s3fifo"] = "s3fifo"
    ttl_s: float | None = None
    admission: Literal["always", "second_use", "never"] = "always"
    """Which chunks are written to this tier: each new one, those that are used again, or none (it
    is read only).
    """
    url: str = ""
    """``redis://``, ``rediss://``, ``mooncake://``, ``s3://``, ``gs://``, ``az://`` or ``file://``
    (an object store in a folder); of a disk tier its folder. Credentials come from the environment.
    """
    options: dict[str, str] = {}
    codec: CodecName | Literal["auto"] = "raw"
    """How chunks of this tier are coded."""
    auto_codecs: tuple[CodecName, ...] = ("bf16z",)
    """Those among which ``auto`` may choose."""


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
    secret_env: str = CACHE_SECRET_ENV
    """Variable with the hex secret from which tenants' keys are derived."""


class CacheClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine is told of its host's cache; durations in seconds, sizes in bytes."""

    socket_path: str
    chunk_tokens: int
    key_codec: CodecName = "raw"
    """The codec of its tiers that loses most: part of every key (``codecs.names.worst_of``)."""
    lookup_timeout_s: float = 0.25
    """How long a request waits for the answer to its look-up before it is computed."""
    load_timeout_s: float = 30.0
    """How long a request waits for its chunks."""
    save_generated: bool = True
    """Whether the KV of answers is kept too."""
    save_limit_bytes: int = 256 * MIB
    """KV of this rank that waits to be copied into the arena; more is not saved."""


def tier_names(types: Iterable[str]) -> tuple[str, ...]:
    """What tiers are called, in their order: ``cpu``, ``disk``, ``s3``, ``s3-2``."""
    names: list[str] = []
    for kind in types:
        count = sum(name == kind or name.startswith(f"{kind}-") for name in names)
        names.append(f"{kind}-{count + 1}" if count else kind)
    return tuple(names)
