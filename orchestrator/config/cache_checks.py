"""What the keys of the section ``cache`` must agree on, with each other and with the pools.
Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from splitserve.kv_transfer.cache.settings import tier_names
from splitserve.orchestrator.config.nodes import POOLS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.config.cache_schema import CacheConfig, TierConfig
    from splitserve.orchestrator.config.schema import ClusterConfig

SCHEMES = {
    "redis": ("redis", "rediss"),
    "mooncake": ("mooncake",),
    "s3": ("s3", "gs", "az", "file"),
}
"""URL schemes of the tiers that need a URL."""
EVERY_TENANT = "*"
_SECRET_OPTION = re.compile(
    r"(^|_)(token|secret|password|credentials?|account_key|access_key|access_key_id|sas_key)$"
    r"|secret",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"^\$\{[A-Za-z_][A-Za-z0-9_]*\}$")
_USER_INFO = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)[^/?#]*@")
_QUERY = re.compile(r"([?&][^=&]*(?:pass|secret|token|key|sig)[^=&]*=)[^&#]*", re.IGNORECASE)


def cache_problems(config: ClusterConfig) -> list[str]:
    """One sentence per contradiction, each naming the key and what to change."""
    cache = config.cache
    if cache is None:
        return []
    problems = [*_chunk_problems(cache, config)]
    for index, tier in enumerate(cache.tiers):
        problems += _tier_problems(f"cache.tiers[{index}]", index, tier)
    problems += [*_repeated_tiers(cache), *_quota_problems(cache, config)]
    problems += _lasting_secrets(cache, config)
    if cache.quality is not None and config.engine == "mock":
        problems.append("cache.quality: the mock engine has no model to measure; remove it")
    return problems


def shown_url(url: str) -> str:
    """``url`` without user name, password and other secrets."""
    return _QUERY.sub(r"\1(hidden)", _USER_INFO.sub(r"\1(hidden)@", url))


def _chunk_problems(cache: CacheConfig, config: ClusterConfig) -> Iterator[str]:
    for pool in POOLS:
        block = config.pool(pool).engine_args.block_size
        if cache.chunk_tokens % block:
            nearest = max(1, round(cache.chunk_tokens / block)) * block
            yield (
                f"cache.chunk_tokens is {cache.chunk_tokens}, no multiple of "
                f"{pool}.engine_args.block_size {block}; use {nearest}"
            )


def _tier_problems(where: str, index: int, tier: TierConfig) -> Iterator[str]:
    if tier.type == "cpu" and index:
        yield f"{where}: a cpu tier comes first; move it to the top of cache.tiers"
    if tier.type in ("cpu", "disk") and tier.capacity_bytes is None:
        yield f"{where}.capacity_bytes: required for a {tier.type} tier, e.g. 4 GiB"
    if tier.path is not None and tier.type != "disk":
        yield f"{where}.path: only a disk tier has one; give a {tier.type} tier a `url`"
    if tier.type in SCHEMES:
        yield from _url_problems(where, tier)
    elif tier.url is not None:
        remedy = "give its folder as `path`" if tier.type == "disk" else "remove it"
        yield f"{where}.url: a {tier.type} tier has none; {remedy}"
    if tier.type == "cpu" and tier.codec not in ("raw", "auto"):
        yield (
            f"{where}.codec: engines write their pages into the cpu tier as they are; remove it, "
            f"or give {tier.codec} to a tier below"
        )
    if tier.type == "cpu" and tier.admission != "always":
        yield f"{where}.admission: every chunk passes through the cpu tier; remove it"
    for name in tier.options:
        if _SECRET_OPTION.search(name) and not _VARIABLE.match(tier.options[name]):
            yield (
                f"{where}.options.{name}: secrets do not belong into the YAML; write ${{NAME}} "
                "and set that environment variable for `splitserve up`"
            )


def _url_problems(where: str, tier: TierConfig) -> Iterator[str]:
    schemes = SCHEMES[tier.type]
    known = ", ".join(f"{scheme}://" for scheme in schemes)
    if tier.url is None:
        yield f"{where}.url: required for a {tier.type} tier ({known})"
        return
    try:
        parts = urlsplit(tier.url)
        parts.port  # noqa: B018  (raises for what is no port)
    except ValueError as error:
        yield f"{where}.url: {shown_url(tier.url)} is no URL: {error}"
        return
    if parts.scheme not in schemes or not tier.url.startswith(f"{parts.scheme}://"):
        yield f"{where}.url: a {tier.type} tier takes {known} (got {shown_url(tier.url)!r})"
    elif parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            yield f"{where}.url: write file:///FOLDER with an absolute path"
    elif not parts.netloc.rpartition("@")[2]:
        what = "bucket" if tier.type == "s3" else "host"
        yield f"{where}.url: {shown_url(tier.url)} names no {what}"


def _repeated_tiers(cache: CacheConfig) -> Iterator[str]:
    first: dict[tuple[str, str], int] = {}
    for index, tier in enumerate(cache.tiers):
        place = (tier.type, tier.path or tier.url or "")
        earlier = first.setdefault(place, index)
        if earlier != index:
            yield (
                f"cache.tiers[{index}]: the same {tier.type} tier as cache.tiers[{earlier}]; "
                "remove one, or give them different places"
            )


def _quota_problems(cache: CacheConfig, config: ClusterConfig) -> Iterator[str]:
    tiers = tier_names([tier.type for tier in cache.tiers])
    tenants = {key.tenant for key in config.security.api_keys}
    seen: set[tuple[str, str]] = set()
    for index, quota in enumerate(cache.quotas):
        where = f"cache.quotas[{index}]"
        if quota.tier not in tiers:
            yield f"{where}.tier: there is no tier {quota.tier!r}; known: {', '.join(tiers)}"
        if quota.tenant != EVERY_TENANT and quota.tenant not in tenants:
            known = ", ".join(sorted(tenants)) or "none, since there are no security.api_keys"
            yield f"{where}.tenant: there is no tenant {quota.tenant!r}; known: {known}"
        if (quota.tenant, quota.tier) in seen:
            yield f"{where}: a second quota of {quota.tenant} in {quota.tier}; remove one"
        seen.add((quota.tenant, quota.tier))


def _lasting_secrets(cache: CacheConfig, config: ClusterConfig) -> Iterator[str]:
    """Chunks that outlive `up` are found again only with the secrets that they were stored with."""
    if config.security.secret_file is not None:
        return
    if cache.encrypt and cache.secret_file is None:
        yield (
            "cache.encrypt: the keys would follow from a cluster secret that is new at each `up`; "
            "set cache.secret_file or security.secret_file"
        )
    lower = [tier.type for tier in cache.tiers if tier.type != "cpu"]
    if lower and config.security.api_keys:
        yield (
            "security.secret_file: needed when tenants have keys and the cache has a "
            f"{lower[0]} tier; without it tenants' salts are new at each `up`, and nothing that was"
            " stored before is found"
        )
