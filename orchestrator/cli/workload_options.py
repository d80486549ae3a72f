"""The options that say what clients will ask: a trace, or a mix of lengths at a rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.traces import TraceError, read_trace
from splitserve.orchestrator.tuner.workload import (
    Lengths,
    Mix,
    WorkloadError,
    parse_lengths,
    spread_ticks,
    with_rate,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.traces import TraceRequest


def workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--trace``, ``--isl``, ``--osl``, ``--rate`` and ``--block-tokens``."""
    for option in reversed(
        [
            click.option(
                "--trace",
                type=click.Path(path_type=Path),
                help="Recorded requests: Mooncake's JSON lines, Azure's CSV, or what "
                "`splitserve record` wrote; also packed (.gz).",
            ),
            click.option(
                "--isl",
                metavar="N[:CV]",
                help="Tokens of a prompt on the average, and their coefficient of variation.",
            ),
            click.option("--osl", metavar="N[:CV]", help="The same of an answer."),
            click.option(
                "--rate",
                type=float,
                help="Requests per second; a trace is made as much faster or slower.",
            ),
            click.option(
                "--block-tokens",
                default=512,
                show_default=True,
                type=click.IntRange(min=1),
                help="Tokens of a block in the trace.",
            ),
        ]
    ):
        command = option(command)
    return command


def workload_of(
    trace: Path | None, isl: str | None, osl: str | None, rate: float | None, block_tokens: int
) -> list[TraceRequest] | Mix:
    """What the options ask for; raises ``RefusedError`` for what does not go together or cannot
    be.
    """
    if trace is not None and (isl or osl):
        raise RefusedError("give --trace, or --isl, --osl and --rate, not both")
    if trace is None and not (isl and osl and rate is not None):
        raise RefusedError("give --trace FILE, or --isl, --osl and --rate together")
    try:
        if trace is None:
            assert isl is not None
            assert osl is not None
            assert rate is not None
            return Mix(_lengths("--isl", isl), _lengths("--osl", osl), rate)
        requests = spread_ticks(list(read_trace(trace, block_tokens)))
        return requests if rate is None else with_rate(requests, rate)
    except (WorkloadError, TraceError) as error:
        raise RefusedError(str(error)) from error


def _lengths(option: str, text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except WorkloadError as error:
        raise RefusedError(f"{option}: {error}") from error
