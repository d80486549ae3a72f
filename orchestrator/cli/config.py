"""``splitserve config``: what may be written in a cluster YAML."""

from __future__ import annotations

from importlib import resources

import click

from splitserve.orchestrator.config import builtin_names, load
from splitserve.orchestrator.config.reference import reference


@click.group()
def config() -> None:
    """Explain and list cluster configurations."""


@config.command("reference")
def reference_command() -> None:
    """Print the reference of every key (docs/configuration.md)."""
    click.echo(reference(), nl=False)


@config.command("list")
def list_command() -> None:
    """List the built-in configurations."""
    for name in builtin_names():
        text = (resources.files("splitserve.configs") / f"{name}.yaml").read_text()
        summary = text.splitlines()[0].removeprefix("# ")
        click.echo(f"{name}  ({load(name).engine})\n    {summary}")


@config.command("show")
@click.argument("name")
def show_command(name: str) -> None:
    """Print the built-in configuration NAME, to copy and change."""
    load(name)
    click.echo((resources.files("splitserve.configs") / f"{name}.yaml").read_text(), nl=False)
