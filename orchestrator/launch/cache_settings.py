"""From the cluster YAML's ``cache:`` to what the cache server is told, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.settings import CacheSettings, TierSettings
from splitserve.orchestrator.config import tenant_tag
from splitserve.orchestrator.config.cache_checks import EVERY_TENANT
from splitserve.orchestrator.config.cache_schema import AUTO_LOSSLESS

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.codecs.names import CodecName
    from splitserve.orchestrator.config import CacheConfig, TierConfig


def cache_settings(cache: CacheConfig, secret: bytes) -> CacheSettings:
    """The cache server's settings, of a configuration whose paths are filled in; ``secret`` is the
    cluster's. Tenants go by their tags.
    """
    assert cache.socket_path is not None, "the configuration's paths are filled in by `up`"
    quotas: dict[str, dict[str, int]] = {}
    for quota in cache.quotas:
        is_named = quota.tenant != EVERY_TENANT
        tenant = tenant_tag(secret, quota.tenant) if is_named else EVERY_TENANT
        quotas.setdefault(tenant, {})[quota.tier] = quota.limit_bytes
    return CacheSettings(
        socket_path=cache.socket_path,
        chunk_tokens=cache.chunk_tokens,
        tiers=tuple(tier_settings(tier, cache.auto_codecs) for tier in cache.tiers),
        staging_bytes=cache.staging_bytes,
        write_queue_limit_bytes=cache.write_queue_limit_bytes,
        quota_bytes=quotas,
        encrypt=cache.encrypt,
    )


def tier_settings(
    tier: TierConfig, auto_codecs: tuple[CodecName, ...] = AUTO_LOSSLESS
) -> TierSettings:
    """One tier's settings; a disk tier's URL is its folder. ``auto_codecs`` are those among which
    ``codec: auto`` may choose.
    """
    url = tier.url or ""
    if tier.type == "disk":
        assert tier.path is not None, "the configuration's paths are filled in by `up`"
        url = tier.path
    return TierSettings(
        type=tier.type,
        capacity_bytes=tier.capacity_bytes,
        eviction=tier.eviction,
        ttl_s=tier.ttl_s,
        admission=tier.admission,
        url=url,
        options=tier.options,
        codec=tier.codec,
        auto_codecs=auto_codecs,
    )
