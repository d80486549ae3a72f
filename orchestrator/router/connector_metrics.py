"""What the connectors count in their engines, as metrics: one family for each thing, with its unit
in the name.

Connectors report names and numbers. A name that is not in the tables here is a counter of the
family ``splitserve_connector``, up to a bound, so that nothing that an engine tells is lost and no
engine can make any number of series.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric

    from splitserve.orchestrator.core.membership import Node

OTHER_COUNTERS_LIMIT = 64
"""Of one node; the sum of all others is ``other``."""
TIERS_LIMIT = 16
_NODE = ("node", "role")

_COUNTERS: Final[dict[str, tuple[str, str]]] = {
    "sent_transfers": ("transfers_sent", "Transfers whose every page was written to a peer"),
    "sent_pages": ("transfer_sent_pages", "KV pages written to peers"),
    "sent_bytes": ("transfer_sent_bytes", "Bytes of KV pages written to peers"),
    "received_transfers": ("transfers_received", "Transfers that landed whole"),
    "received_pages": ("transfer_received_pages", "KV pages of transfers that landed"),
    "received_bytes": ("transfer_received_bytes", "Bytes of KV of transfers that landed"),
    "failed_receives": (
        "transfers_failed",
        "Transfers that did not land; the prompts were computed where they were wanted",
    ),
    "expired_receives": ("transfers_expired", "Transfers that were given up at their deadline"),
    "retargeted_receives": ("transfers_retargeted", "Transfers granted anew to another peer"),
    "declined_transfers": (
        "transfers_declined",
        "Transfers that the decode node did not want after all, and computed the prompt itself",
    ),
    "refused_grants": (
        "transfer_grants_refused",
        "Grants refused by the prefill node, since the prompts or the layouts differed",
    ),
    "fenced_sends": ("transfers_fenced", "Transfers that a peer has had stopped"),
    "expired_leases": (
        "transfer_leases_expired",
        "Computed prompts that no peer had taken in time; their blocks were freed",
    ),
    "ignored_transfer_params": (
        "transfer_params_ignored",
        "Requests whose transfer parameters were not this cluster's",
    ),
    "traces_exported": ("traced_transfers_exported", "Transfers whose spans the collector took"),
    "traces_failed": ("traced_transfers_failed", "Transfers whose spans it did not take"),
    "traces_dropped": (
        "traced_transfers_dropped",
        "Traced transfers that ended faster than spans could be sent",
    ),
    "cache_asked_chunks": ("cache_client_asked_chunks", "Chunks that prompts looked for"),
    "cache_hit_chunks": ("cache_client_hit_chunks", "Chunks that were found for prompts"),
    "cache_load_tokens": ("cache_client_load_tokens", "Tokens of prompts ordered from the cache"),
    "cache_loads": ("cache_client_loads", "Loads of prompts, by rank"),
    "cache_loads_failed": ("cache_client_loads_failed", "Loads that did not bring every chunk"),
    "cache_loads_late": ("cache_client_loads_late", "Loads that ended at their deadline"),
    "cache_loads_that_would_not_pay": (
        "cache_client_loads_avoided",
        "Prefixes that were cheaper to compute than to load",
    ),
    "cache_loaded_chunks": ("cache_client_loaded_chunks", "Chunks copied out of the cache"),
    "cache_loaded_bytes": ("cache_client_loaded_bytes", "Bytes of KV copied out of the cache"),
    "cache_load_seconds": ("cache_client_load_seconds", "Time that loads took, by rank"),
    "cache_load_estimate_seconds": (
        "cache_client_load_estimate_seconds",
        "Time that loads were expected to take",
    ),
    "cache_load_outcome_seconds": (
        "cache_client_load_outcome_seconds",
        "Time that the same loads took",
    ),
    "cache_saved_compute_seconds": (
        "cache_client_saved_compute_seconds",
        "Time that computing what was loaded would have taken",
    ),
    "cache_saves": ("cache_client_saves", "Chunks ordered to be saved, by rank"),
    "cache_saved_chunks": ("cache_client_saved_chunks", "Chunks copied into the cache"),
    "cache_saved_bytes": ("cache_client_saved_bytes", "Bytes of KV copied into the cache"),
    "cache_saves_shed": ("cache_client_saves_shed", "Saves given up so that serving is not slowed"),
    "cache_saves_postponed": ("cache_client_saves_postponed", "Saves that waited for a later step"),
    "cache_chunks_shed": ("cache_client_shed_chunks", "Chunks not saved, beyond the bound"),
    "cache_chunks_present": ("cache_client_present_chunks", "Chunks that the cache had already"),
    "cache_chunks_without_room": ("cache_client_roomless_chunks", "Chunks that found no room"),
    "cache_connections": ("cache_client_connections", "Connections made to the cache server"),
}
"""Name in the connector's report: the metric, without prefix and ``_total``, and its text."""

GAUGES: Final[dict[str, tuple[str, str]]] = {
    "cache_connected": ("cache_client_connections_open", "Ranks that are connected to the cache"),
    "cache_held_bytes": ("cache_client_held_bytes", "Bytes of KV that wait to be saved"),
    "cache_prefill_tokens_per_s": (
        "cache_client_prefill_tokens_per_second",
        "Prefill speed as measured, against which loads are weighed",
    ),
    "cache_copy_bytes_per_s": (
        "cache_client_copy_bytes_per_second",
        "Speed of copies from the cache, as measured",
    ),
}
_TIER = re.compile(r"cache_load_chunks_tier_([0-9]{1,2})")


def connector_families(nodes: list[Node]) -> Iterable[Metric]:
    """Every node's figures, of the families in the order of the tables."""
    reports = [(node, node.state.counters if node.state else {}) for node in nodes]
    for name, (metric, text) in _COUNTERS.items():
        family = CounterMetricFamily(f"splitserve_{metric}", text, labels=_NODE)
        for node, report in reports:
            if name in report:
                family.add_metric([node.name, node.role], report[name])
        yield family
    for name, (metric, text) in GAUGES.items():
        gauge = GaugeMetricFamily(f"splitserve_{metric}", text, labels=_NODE)
        for node, report in reports:
            if name in report:
                gauge.add_metric([node.name, node.role], report[name])
        yield gauge
    by_tier = CounterMetricFamily(
        "splitserve_cache_client_tier_chunks",
        "Chunks that were loaded, by the number of the tier that had them (0 is the fastest)",
        labels=(*_NODE, "tier"),
    )
    other = CounterMetricFamily(
        "splitserve_connector", "Other counters of the connectors", labels=(*_NODE, "counter")
    )
    for node, report in reports:
        rest = {}
        for name in sorted(report.keys() - _COUNTERS.keys() - GAUGES.keys()):
            tier = _TIER.fullmatch(name)
            if tier is not None and int(tier[1]) < TIERS_LIMIT:
                by_tier.add_metric([node.name, node.role, tier[1]], report[name])
            else:
                rest[name] = report[name]
        for name, value in _bounded(rest).items():
            other.add_metric([node.name, node.role, name], value)
    yield by_tier
    yield other


def _bounded(counters: dict[str, float]) -> dict[str, float]:
    names = list(counters)
    shown = {name: counters[name] for name in names[:OTHER_COUNTERS_LIMIT]}
    if len(names) > OTHER_COUNTERS_LIMIT:
        shown["other"] = sum(counters[name] for name in names[OTHER_COUNTERS_LIMIT:])
    return shown
