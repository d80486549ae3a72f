"""What ``up`` shows while engines load: a live table on a terminal, one line per change
elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table

from splitserve.kv_transfer.cache.settings import tier_names
from splitserve.orchestrator.cli.figures import printable
from splitserve.orchestrator.observe.dashboard import DASHBOARD_PATH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from splitserve.orchestrator.agent.status_file import NodeStatus
    from splitserve.orchestrator.config import CacheConfig, ClusterConfig
    from splitserve.orchestrator.launch.base import ClusterStatus

_ROUTER = "router"
_CACHE = "cache"
_OWED = {"legs": "legs", "transfers": "open transfers", "leased_blocks": "leased blocks"}


class LoadingDisplay:
    """Shows one cluster's way to readiness; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._shown: dict[str, str] = {}

    def __enter__(self) -> LoadingDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, status: ClusterStatus) -> None:
        """Show ``status``."""
        lines = {_CACHE: status.cache} if status.cache else {}
        lines |= {_ROUTER: status.router, **status.more_routers}
        lines |= {name: stage_of(node) for name, node in status.nodes.items()}
        if self._live is not None:
            self._live.update(_loading_table(status, lines))
            return
        for name, line in lines.items():
            if self._shown.get(name) != line:
                self._shown[name] = line
                self._console.print(
                    f"{name}: {line}{_after(status.nodes.get(name))}",
                    highlight=False,
                    soft_wrap=True,
                )


def stage_of(node: NodeStatus | None) -> str:
    """A node's state in a few words."""
    if node is None:
        return "starting"
    if node.refused:
        return f"refused by the router: {printable(node.refused)}"
    if node.phase == "loading":
        return f"loading: {node.stage}"
    if node.phase == "ready" and not node.router_connected:
        return "ready, waits for the router"
    if node.phase in ("dead", "failed"):
        return f"{node.phase}: {printable(node.likely_cause)}"
    return node.phase


def owed_in_words(owed: dict[str, int]) -> str:
    """What a node still owes of the role that it had before, as the router's status says it: ``3
    legs, 2 open transfers``; empty for nothing.
    """
    return ", ".join(f"{owed[key]} {what}" for key, what in _OWED.items() if owed[key])


def role_of(node: NodeStatus) -> str:
    """The node's role, and the pool that it came from where that is another one."""
    is_flipped = node.pool not in ("", node.role)
    return f"{node.role} (was {node.pool})" if is_flipped else node.role


def print_endpoints(
    console: Console, config: ClusterConfig, urls: Sequence[str], status: ClusterStatus
) -> None:
    """Show where everything listens, each router on one of ``urls``: a table on a terminal, one
    line per process elsewhere.
    """
    routers = {_ROUTER: status.router, **status.more_routers}
    rows = [
        (name, state, f"{url}/v1", "")
        for (name, state), url in zip(routers.items(), urls, strict=True)
    ]
    rows.append(("dashboard", status.router, f"{urls[0]}{DASHBOARD_PATH}", ""))
    for name, node in status.nodes.items():
        if node is not None:
            rows.append((name, node.phase, node.engine_url, f"{node.total_blocks} KV blocks"))
    if config.cache is not None:
        where = config.cache.socket_path or "on each host with nodes"
        rows.append((_CACHE, status.cache, where, _size_of(config.cache)))
    if not console.is_terminal:
        for row in rows:
            console.print("  ".join(row), highlight=False, soft_wrap=True)
        return
    table = Table(title=f"{config.name}: {config.model.name}", title_justify="left")
    for column in ("process", "state", "address", "size"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _size_of(cache: CacheConfig) -> str:
    """``cpu 1.0 GB, disk 4.0 GB, s3``."""
    names = tier_names(tier.type for tier in cache.tiers)
    sizes = [f" {t.capacity_bytes / 1e9:.1f} GB" if t.capacity_bytes else "" for t in cache.tiers]
    return ", ".join(name + size for name, size in zip(names, sizes, strict=True))


def _loading_table(status: ClusterStatus, lines: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, line in lines.items():
        node = status.nodes.get(name)
        seconds = f"{node.elapsed_s:.0f} s" if node is not None and node.phase == "loading" else ""
        table.add_row(name, line, seconds)
    return table


def _after(node: NodeStatus | None) -> str:
    return f" (after {node.elapsed_s:.0f} s)" if node is not None and node.elapsed_s >= 1 else ""
