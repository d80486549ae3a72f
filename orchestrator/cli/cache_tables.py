"""The state of the cache as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def size(count: int | None) -> str:
    """``1.5 GB``; a dash for what is not known."""
    if count is None:
        return "-"
    for factor, unit in _UNITS:
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def print_stat(stat: dict[str, Any]) -> None:
    """The arena, the tiers, who holds what, and who is connected."""
    console = wide_console()
    arena = stat["arena"]
    lines = [
        f"cache server {stat['server']}, up for {stat['uptime_s']:.0f} s",
        f"memory: {size(arena['bytes'])} in {arena['slots']} slots of {size(arena['slot_bytes'])}: "
        f"{arena['used']} used, {arena['leased']} in use by engines, {arena['pinned']} pinned, "
        f"{arena['reserved']} being written",
        f"engines: {len({engine['engine'] for engine in stat['engines']})} connected",
    ]
    for line in lines:
        console.print(line, highlight=False)
    console.print(_tiers(stat["tiers"]))
    for tier in stat["tiers"]:
        if tier["trouble"]:
            console.print(f"{tier['name']}: {tier['trouble']}", highlight=False, markup=False)
    if stat["tenants"]:
        console.print(_tenants(stat["tenants"]))
    if stat["tenants_left_out"]:
        console.print(f"and {stat['tenants_left_out']} more tenants", highlight=False)


def print_quotas(tenants: list[dict[str, Any]]) -> None:
    """What each tenant holds and may hold."""
    if not tenants:
        wide_console().print("no tenant holds anything, and there are no quotas", highlight=False)
        return
    wide_console().print(_tenants(tenants))


def _tiers(tiers: list[dict[str, Any]]) -> Table:
    table = Table()
    columns = ("tier", "state", "codec", "used", "capacity", "chunks", "hit rate", "read")
    for column in (*columns, "written", "latency", "speed", "errors", "broken"):
        table.add_column(column, overflow="fold")
    for tier in tiers:
        looks = tier["hits"] + tier["misses"]
        chunks, latency, speed = tier["chunks"], tier["latency_s"], tier["bytes_per_s"]
        table.add_row(
            tier["name"],
            tier["state"],
            tier["codec"],
            size(tier["used_bytes"]),
            size(tier["capacity_bytes"]),
            "-" if chunks is None else str(chunks),
            f"{tier['hits'] / looks:.0%} of {looks}" if looks else "-",
            size(tier["read_bytes"]),
            size(tier["written_bytes"]),
            "-" if latency is None else f"{latency * 1000:.1f} ms",
            "-" if speed is None else f"{speed / 1e9:.2f} GB/s",
            str(tier["errors"]),
            str(tier["broken_removed"]),
        )
    return table


def _tenants(tenants: list[dict[str, Any]]) -> Table:
    table = Table()
    for column in ("tenant", "tier", "used", "quota"):
        table.add_column(column, overflow="fold")
    for tenant in tenants:
        used, quota = tenant["used_bytes"], tenant["quota_bytes"]
        for tier in dict.fromkeys([*used, *quota]):
            bound = size(quota[tier]) if tier in quota else "-"
            table.add_row(tenant["tenant"] or "(all)", tier, size(used.get(tier, 0)), bound)
    return table


def wide_console() -> Console:
    """Wide enough for whole rows where nobody reads along."""
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=200, markup=False)
