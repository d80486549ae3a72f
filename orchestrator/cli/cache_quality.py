"""``splitserve cache quality``: what codecs would cost with the user's model and text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from splitserve.kv_transfer.cache.codecs.names import CODED
from splitserve.orchestrator.cli.cache_tables import wide_console
from splitserve.orchestrator.cli.errors import EXIT_FAILED, RefusedError
from splitserve.orchestrator.config import load
from splitserve.orchestrator.engines.transformers.findings import Measured
from splitserve.orchestrator.launch.checks.model import model_of
from splitserve.orchestrator.launch.quality_record import (
    keep_record,
    lossy_codecs,
    page_number,
    too_lossy,
)

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig

LINES = 10
"""Most lines of progress where there is no terminal."""
DEFAULT_TOKENS = 4096
DEFAULT_CHUNK_TOKENS = 256


@click.command()
@click.argument("cluster")
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="File with text as your users write it (default: cache.quality.text).",
)
@click.option(
    "--codec",
    "codecs",
    multiple=True,
    type=click.Choice(CODED),
    help="Measure this codec; may be given several times (default: all).",
)
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens of the text that are used.")
@click.option("--max-kl", type=click.FloatRange(min=0), help="Limit (default: cache.quality's).")
@click.option(
    "--controls",
    is_flag=True,
    help="Also measure codecs with a fault; a limit that they keep is too high for this text.",
)
@click.option("--no-limit", is_flag=True, help="Measure only: no limit is held.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def quality(
    cluster: str,
    text: Path | None,
    codecs: tuple[str, ...],
    tokens: int | None,
    max_kl: float | None,
    controls: bool,
    no_limit: bool,
    as_json: bool,
) -> None:
    """Measure what codecs cost with the model of CLUSTER, a YAML file or a built-in name.

    What was measured as the YAML's cache.quality says is kept in a file (cache.quality.record), by
    which every process of the cluster holds the limit. Exit status 1 when a codec that was named,
    or is used by a tier, costs more than the limit.
    """
    config = load(cluster)
    names = codecs or CODED
    measured = _measure(config, _text_of(config, text), names, tokens, has_controls=controls)
    limit = None if no_limit else max_kl
    section = config.cache.quality if config.cache is not None else None
    if section is not None and text is None and tokens is None:
        path = keep_record(config, [each for each in measured.codecs if each.codec in CODED])
        click.echo(f"kept in {path}", err=True)
    if limit is None and section is not None and not no_limit:
        limit = section.max_kl
    if as_json:
        click.echo(msgspec.json.encode(measured))
    else:
        show(measured, limit)
    held = codecs or lossy_codecs(config)
    problems = [] if limit is None else too_lossy(
        [found for found in measured.codecs if found.codec in held], limit
    )  # fmt: skip
    if limit is not None:
        problems += _blind(measured, limit)
    for problem in problems:
        click.echo(problem, err=True)
    if problems:
        raise click.exceptions.Exit(EXIT_FAILED)


def _blind(measured: Measured, limit: float) -> list[str]:
    """One sentence for each codec with a fault that looks good."""
    return [
        f"{found.codec} costs {found.kl:.2g} nats per token, within the limit: it tells nothing "
        "with this text; give a longer text, or lower the limit"
        for found in measured.codecs
        if found.codec not in CODED and found.kl <= limit
    ]


def _text_of(config: ClusterConfig, path: Path | None) -> str:
    section = config.cache.quality if config.cache is not None else None
    if path is None and section is not None:
        path = Path(section.text).expanduser()
    if path is None:
        raise RefusedError("name a text: --text FILE, or cache.quality.text in the YAML")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RefusedError(f"{path} is no text in UTF-8: {error}") from error


def _measure(
    config: ClusterConfig,
    text: str,
    names: tuple[str, ...],
    tokens: int | None,
    *,
    has_controls: bool,
) -> Measured:
    if config.engine == "mock":
        raise RefusedError("the mock engine has no model: name a cluster of real engines")
    number = page_number(config)
    if number is None:
        kind = config.prefill.engine_args.kv_cache_dtype
        raise RefusedError(f"pages of {kind} have no codec: their chunks are kept as they are")
    cache = config.cache
    section = cache.quality if cache is not None else None
    from splitserve.orchestrator.engines.transformers.controls import controls
    from splitserve.orchestrator.engines.transformers.quality import (
        KvKind,
        QualityError,
        QualityMeter,
        codec_coder,
    )

    chunk_tokens = cache.chunk_tokens if cache is not None else DEFAULT_CHUNK_TOKENS
    if tokens is None:
        tokens = section.tokens if section is not None else DEFAULT_TOKENS
    compute = section.compute if section is not None else "float32"
    try:
        click.echo(f"loading {config.model.name} in {compute}", err=True)
        meter = QualityMeter(model_of(config), KvKind(chunk_tokens, number), compute=compute)
        coders = {name: codec_coder(name) for name in names}
        if has_controls:
            coders |= controls(meter.rope_theta)
        click.echo(
            f"measuring {', '.join(coders)} on at most {tokens:,} tokens of the text; this may "
            "take minutes (--tokens, --codec: fewer are faster)",
            err=True,
        )
        with _Steps() as steps:
            found = meter.measure(text, coders, tokens=tokens, on_step=steps.told)
        return Measured(tuple(found))
    except QualityError as error:
        raise RefusedError(str(error)) from error


class _Steps:
    """Tells how far a measurement is: a bar on a terminal, else lines, ten at most."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._is_terminal = console.is_terminal
        self._bar = Progress(
            TextColumn("measuring"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("measuring", total=None)
        self._started_s = time.monotonic()

    def __enter__(self) -> _Steps:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def told(self, done: int, steps: int) -> None:
        """So many of all steps are done."""
        self._bar.update(self._task, completed=done, total=steps)
        is_due = done * LINES // steps > (done - 1) * LINES // steps
        if self._is_terminal or not done or not is_due:
            return
        took_s = time.monotonic() - self._started_s
        left_s = took_s / done * (steps - done)
        click.echo(f"{done} of {steps} steps in {took_s:.0f} s, {left_s:.0f} s to go", err=True)


def show(measured: Measured, limit: float | None) -> None:
    """The figures as a table."""
    table = Table()
    for column in ("codec", "KL per token", "99 % below", "same likeliest", "times fewer bytes"):
        table.add_column(column)
    for found in measured.codecs:
        table.add_row(
            found.codec,
            f"{found.kl:.2g}",
            f"{found.kl_p99:.2g}",
            f"{found.top1:.1%}",
            f"{found.ratio:.2f}",
        )
    console = wide_console()
    console.print(table)
    tokens = measured.codecs[0].tokens
    bound = "" if limit is None else f"; the limit is {limit:g} nats per token"
    console.print(f"{tokens} predictions behind cached chunks{bound}", highlight=False)
