"""The cache server's figures as metrics. The server of the router's host is asked when the router
is scraped; it has no HTTP server of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric

    from splitserve.kv_transfer.cache.control_messages import Stat, TierStat

_TIER_GAUGES: Final = {
    "used_bytes": ("used_bytes", "Bytes of chunks in the tier, where it knows"),
    "capacity_bytes": ("capacity_bytes", "Bytes that the tier may hold, where it has a bound"),
    "chunks": ("chunks", "Chunks in the tier, where it knows"),
    "pinned": ("pinned_chunks", "Chunks that are pinned in the tier"),
    "waiting_bytes": ("waiting_bytes", "Bytes of chunks that wait to be written to the tier"),
    "latency_s": ("latency_seconds", "Time that the tier takes until the first byte, as measured"),
    "bytes_per_s": ("read_bytes_per_second", "Speed at which the tier is read, as measured"),
}
_TIER_COUNTERS: Final = {
    "hits": ("hits", "Chunks that look-ups found in the tier"),
    "misses": ("misses", "Chunks that look-ups did not find in the tier"),
    "reads": ("reads", "Chunks read from the tier"),
    "read_bytes": ("read_bytes", "Bytes read from the tier"),
    "writes": ("writes", "Chunks written to the tier"),
    "written_bytes": ("written_bytes", "Bytes written to the tier"),
    "shed": ("shed_chunks", "Chunks not written to the tier because too many waited"),
    "evictions": ("evictions", "Chunks that made room in the tier for others"),
    "errors": ("errors", "Reads and writes of the tier that failed"),
    "broken_removed": ("broken_chunks", "Chunks in the tier that were broken, and removed"),
}
_ARENA: Final = {
    "slots": "Slots of the shared memory, each for one chunk",
    "used": "Slots that hold a chunk",
    "leased": "Slots that are being read or filled",
    "pinned": "Slots whose chunk is pinned",
    "reserved": "Slots that are promised to engines",
}


def cache_families(stat: Stat | None) -> Iterable[Metric]:
    """``stat`` is what the cache server says; None when it does not answer."""
    up = GaugeMetricFamily("splitserve_cache_up", "1 when the host's cache server answers")
    up.add_metric([], float(stat is not None))
    yield up
    tiers = stat.tiers if stat is not None else ()
    usable = GaugeMetricFamily(
        "splitserve_cache_tier_up", "1 when the tier is used, 0 while it fails", labels=("tier",)
    )
    for tier in tiers:
        usable.add_metric([tier.name], float(tier.state == "ok"))
    yield usable
    for field, (name, text) in _TIER_GAUGES.items():
        yield _of_tiers(GaugeMetricFamily, name, text, tiers, field)
    for field, (name, text) in _TIER_COUNTERS.items():
        yield _of_tiers(CounterMetricFamily, name, text, tiers, field)
    yield from _arena_families(stat)


def _of_tiers(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    tiers: tuple[TierStat, ...],
    field: str,
) -> Metric:
    family = kind(f"splitserve_cache_tier_{name}", text, labels=("tier",))
    for tier in tiers:
        value = getattr(tier, field)
        if value is not None:
            family.add_metric([tier.name], value)
    return family


def _arena_families(stat: Stat | None) -> Iterable[Metric]:
    size = GaugeMetricFamily("splitserve_cache_arena_bytes", "Bytes of the shared memory")
    if stat is not None:
        size.add_metric([], stat.arena.bytes)
    yield size
    for field, text in _ARENA.items():
        name = "slots" if field == "slots" else f"{field}_slots"
        family = GaugeMetricFamily(f"splitserve_cache_arena_{name}", text)
        if stat is not None:
            family.add_metric([], getattr(stat.arena, field))
        yield family
