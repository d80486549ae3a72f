"""What the books say to operators: the cache's state in figures, and tenants' quotas. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.kv_transfer.cache.control_messages import (
    ENGINES_LIMIT,
    EVERY_TENANT,
    TENANTS_LIMIT,
    ArenaStat,
    EngineStat,
    Stat,
    TenantStat,
    TierStat,
)
from splitserve.kv_transfer.cache.index import CAPACITY, CLEARED, EXPIRED, QUOTA, REMOVED
from splitserve.kv_transfer.cache.quota_book import outer_tag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitserve.kv_transfer.cache.cache_book import CacheBook
    from splitserve.kv_transfer.cache.index import TierIndex
    from splitserve.kv_transfer.cache.tier_book import TierBook

ARENA = "cpu"
REASONS = (CAPACITY, QUOTA, EXPIRED, REMOVED, CLEARED)
OWN_FIELDS = frozenset(
    {"written_bytes", "writes_written", "writes_shed", "read_bytes", "hits", "errors", "broken"}
)
"""Counters of a lower tier that have a field in ``TierStat``."""

_encode = msgspec.msgpack.Encoder().encode


def stat(book: CacheBook, uptime_s: float, limit_bytes: int) -> Stat:
    """The cache's state in at most ``limit_bytes``: tenants that hold little, and then engines, are
    left out.
    """
    holders = _tenants(book, "")
    tenants, engines = holders[:TENANTS_LIMIT], _engines(book)[:ENGINES_LIMIT]
    while True:
        found = Stat(
            server=book.server,
            uptime_s=uptime_s,
            chunk_tokens=book.settings.chunk_tokens,
            arena=_arena(book),
            tiers=(*_arena_tier(book), *(_tier(book, tier) for tier in book.tiers)),
            tenants=tenants,
            tenants_left_out=len(holders) - len(tenants),
            engines=engines,
            counters=_counters(book),
        )
        if len(_encode(found)) <= limit_bytes or not (tenants or engines):
            return found
        tenants, engines = tenants[: len(tenants) // 2], _fewer(tenants, engines)


def quotas(
    book: CacheBook, tenant: str | None, tier: str, limit_bytes: int
) -> tuple[TenantStat, ...]:
    """What a tenant (None: each) holds and may hold in a tier (empty: in each), in at most
    ``limit_bytes``.
    """
    if tenant is not None:
        return (_tenant(book, tenant, tier),)
    found = _tenants(book, tier)[:TENANTS_LIMIT]
    while len(_encode(found)) > limit_bytes:
        found = found[: len(found) // 2]
    return found


def _fewer(
    tenants: tuple[TenantStat, ...], engines: tuple[EngineStat, ...]
) -> tuple[EngineStat, ...]:
    return engines if tenants else engines[: len(engines) // 2]


def _arena(book: CacheBook) -> ArenaStat:
    arena, index = book.arena.arena, book.arena.index
    return ArenaStat(
        bytes=arena.size_bytes,
        slots=arena.slots,
        slot_bytes=arena.slot_bytes,
        used=arena.slots - arena.free_slots,
        leased=index.leased,
        pinned=index.pinned,
        reserved=index.reserved,
    )


def _arena_tier(book: CacheBook) -> list[TierStat]:
    """The arena as a tier, where it is configured to be one."""
    if not book.keeps_in_arena:
        return []
    index = book.arena.index
    reads = book.loads.counters["chunks_lent"]
    writes = book.saves.counters["saved"] + book.counters["chunks_brought"]
    chunk_bytes = book.chunk_bytes if book.geometry is not None else 0
    failure = book.arena.arena.failure
    return [
        TierStat(
            name=ARENA,
            type=ARENA,
            capacity_bytes=book.arena.arena.size_bytes,
            used_bytes=index.used_bytes,
            chunks=len(index),
            pinned=index.pinned,
            trouble=f"not all of the memory could be had: {failure}" if failure else "",
            hits=book.hits[0],
            misses=book.misses[0],
            reads=reads,
            read_bytes=reads * chunk_bytes,
            writes=writes,
            written_bytes=writes * chunk_bytes,
            shed=book.saves.counters["no_room"],
            evictions=_evictions(index),
            broken_removed=book.counters["broken_in_arena"],
        )
    ]


def _tier(book: CacheBook, tier: TierBook) -> TierStat:
    index, health, counters = tier.index, tier.health, tier.counters
    return TierStat(
        name=tier.name,
        type=tier.settings.type,
        capacity_bytes=tier.settings.capacity_bytes,
        used_bytes=None if index is None else index.used_bytes,
        chunks=None if index is None else len(index),
        pinned=0 if index is None else index.pinned,
        state="ok" if tier.is_usable else "breaker open",
        trouble=health.last_error,
        hits=book.hits[tier.number],
        misses=book.misses[tier.number],
        reads=counters["hits"],
        read_bytes=counters["read_bytes"],
        writes=counters["writes_written"],
        written_bytes=counters["written_bytes"],
        shed=counters["writes_shed"],
        evictions=0 if index is None else _evictions(index),
        errors=counters["errors"],
        broken_removed=counters["broken"],
        waiting_bytes=tier.waiting_bytes,
        codec=tier.codec,
        latency_s=health.latency_s if health.has_answered else None,
        bytes_per_s=health.bytes_per_s if health.has_delivered else None,
    )


def _evictions(index: TierIndex[Any]) -> int:
    return index.gone[CAPACITY] + index.gone[QUOTA]


def _engines(book: CacheBook) -> tuple[EngineStat, ...]:
    return tuple(
        EngineStat(engine=hello.engine, rank=hello.rank, model=hello.model)
        for hello in book.engines.values()
    )


def _tenants(book: CacheBook, tier: str) -> tuple[TenantStat, ...]:
    """All that hold something or have a quota of their own, those that hold most first, behind what
    holds for every other one.
    """
    held: Counter[str] = Counter()
    for name, used in _used(book).items():
        if tier in ("", name):
            held.update(used)
    for tenant in book.quotas.named:
        held[tenant] += 0
    everyone = held.pop(EVERY_TENANT, None) is not None
    order = [tenant for tenant, _ in held.most_common()]
    return tuple(_tenant(book, t, tier) for t in [*[EVERY_TENANT] * everyone, *order])


def _tenant(book: CacheBook, tenant: str, tier: str) -> TenantStat:
    used = {name: held[tenant] for name, held in _used(book).items() if held.get(tenant)}
    limits = book.quotas.limits(tenant)
    return TenantStat(
        tenant=outer_tag(tenant),
        used_bytes={name: count for name, count in used.items() if tier in ("", name)},
        quota_bytes={name: limit for name, limit in limits.items() if tier in ("", name)},
    )


def _used(book: CacheBook) -> dict[str, Mapping[str, int]]:
    """Bytes by tier and tenant."""
    used = {ARENA: book.arena.index.used_bytes_by_tenant}
    return used | {tier.name: tier.used_bytes_by_tenant for tier in book.tiers}


def _counters(book: CacheBook) -> dict[str, float]:
    """What has no field of its own: counts since the start, and what is open now."""
    found: dict[str, float] = {}
    for counters in (book.counters, book.loads.counters, book.saves.counters):
        found.update(counters)
    found["open_loads"] = book.loads.open_loads
    found["open_reservations"] = book.saves.open_reservations
    found["departing"] = book.arena.departing
    found["touched_bytes"] = book.arena.arena.touched_bytes
    found["clients"] = len(book.engines)
    indexes: list[tuple[str, TierIndex[Any]]] = [(ARENA, book.arena.index)]
    for tier in book.tiers:
        own = {n: count for n, count in tier.counters.items() if n not in OWN_FIELDS}
        found.update({f"{tier.name}.{name}": count for name, count in own.items()})
        found[f"{tier.name}.breaker_trips"] = tier.health.trips
        if tier.index is not None:
            indexes.append((tier.name, tier.index))
    for name, index in indexes:
        found.update({f"{name}.gone_{reason}": index.gone[reason] for reason in REASONS})
    return found
