"""``splitserve status --audit``: what the engines hold, compared with what the router believes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from splitserve.orchestrator.cli.errors import EXIT_DIFFERS
from splitserve.orchestrator.cli.router_client import RouterClient, RouterSilentError

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord


def show_audit(files: ClusterFiles, record: ClusterRecord, *, as_json: bool) -> None:
    """Print every difference with its owner. Exits with ``EXIT_DIFFERS`` when there is one.

    Each router knows of its own requests only, so all that are there are asked; one at least has to
    answer.
    """
    found = _asked(files, record)
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


def _asked(files: ClusterFiles, record: ClusterRecord) -> dict[str, Any]:
    """The nodes that some router knows, and the differences that any of them sees."""
    answers, silence = [], None
    for one in record.routers:
        try:
            answers.append(RouterClient(files, one).audit())
        except RouterSilentError as error:
            silence = error
    if not answers:
        assert silence is not None
        raise silence
    differences = {
        (found["node"], found["kind"], found["owner"]): found
        for answer in answers
        for found in answer["differences"]
    }
    nodes = sorted({node for answer in answers for node in answer["nodes"]})
    return {"nodes": nodes, "differences": list(differences.values())}


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
