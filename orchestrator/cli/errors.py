"""Exit statuses of the command line, and how errors are told to people: what, where, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from splitserve.orchestrator.cli.entry import EXIT_INTERRUPTED
from splitserve.orchestrator.cli.figures import as_lines
from splitserve.orchestrator.config import ConfigError
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.files import RunningClusterError
from splitserve.orchestrator.models.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

EXIT_FAILED = 1
"""Something that was started failed."""
EXIT_REFUSED = 2
"""The command line or the configuration is wrong; nothing was started."""
EXIT_NOT_RUNNING = 3
"""No such cluster is running."""
EXIT_DIFFERS = 4
"""An audit has found something that differs."""


STARTING = ("up", "quickstart", "node", "router", "cache-server", "scale")
"""Commands that start something, so that a refusal says that they did not."""


class RefusedError(Exception):
    """What was asked for is not done; the message says why and what to do."""


class TellingGroup(click.Group):
    """A command group that turns this project's errors into messages and exit statuses."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the chosen command."""
        try:
            result: object = super().invoke(ctx)
        except (ConfigError, RunningClusterError, ModelError, RefusedError) as error:
            _tell(_lines_of(error, ctx.invoked_subcommand))
            raise click.exceptions.Exit(EXIT_REFUSED) from error
        except StartError as error:
            _tell(iter([f"error: {error}", *(f"  | {line}" for line in error.details)]))
            raise click.exceptions.Exit(EXIT_FAILED) from error
        except KeyboardInterrupt:
            raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
        except OSError as error:
            if error.filename is None:
                raise
            _tell(iter([f"error: {error.filename}: {error.strerror}"]))
            raise click.exceptions.Exit(EXIT_FAILED) from error
        return result


def _lines_of(error: Exception, command: str | None) -> Iterator[str]:
    if not isinstance(error, ConfigError):
        yield f"error: {error}"
        return
    rest = "; nothing was started" if command in STARTING else ""
    yield f"error: {error.source or 'this configuration'} cannot be used{rest}:"
    for problem in error.problems:
        yield f"  - {problem}"


def _tell(lines: Iterator[str]) -> None:
    for line in lines:
        for part in as_lines(line):
            click.echo(part, err=True)
