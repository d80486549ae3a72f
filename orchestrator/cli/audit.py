"""``splitserve status --audit``: what the engines hold, compared with what the router believes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from splitserve.orchestrator.cli.errors import EXIT_DIFFERS
from splitserve.orchestrator.cli.router_client import RouterClient

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord


def show_audit(files: ClusterFiles, record: ClusterRecord, *, as_json: bool) -> None:
    """Print every difference with its owner. Exits with ``EXIT_DIFFERS`` when there is one."""
    found = RouterClient(files, record).audit()
    differences: list[dict[str, Any]] = found["differences"]
    if as_json:
        click.echo(json.dumps(found, indent=1))
    elif not differences:
        nodes = ", ".join(found["nodes"]) or "no node"
        click.echo(f"{files.name}: nothing differs ({nodes})")
    else:
        Console(soft_wrap=not Console().is_terminal, markup=False).print(_table(differences))
    if differences:
        raise click.exceptions.Exit(EXIT_DIFFERS)


def _table(differences: list[dict[str, Any]]) -> Table:
    table = Table()
    for column in ("node", "what", "owner", "blocks", "since", "why", "what to do"):
        table.add_column(column, overflow="fold")
    for difference in differences:
        table.add_row(
            difference["node"],
            difference["kind"],
            difference["owner"],
            str(difference["blocks"]),
            f"{difference['since_s']:.0f} s",
            difference["explanation"],
            difference["remedy"],
        )
    return table
