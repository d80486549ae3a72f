"""``splitserve doctor``: every check that ``up`` makes before it starts anything, with what it
found.
"""

from __future__ import annotations

import os

import click

from splitserve.orchestrator.cli.errors import EXIT_REFUSED
from splitserve.orchestrator.cli.up import roles_in_words
from splitserve.orchestrator.config import load
from splitserve.orchestrator.config.flips import flip_obstacle
from splitserve.orchestrator.launch.paths import with_cache_paths, with_profile_path
from splitserve.orchestrator.launch.preflight import findings


@click.command()
@click.argument("config", default="quickstart")
def doctor(config: str) -> None:
    """Check CONFIG against this machine; nothing is started. Exit status 2 when something must be
    changed.
    """
    bad = 0
    loaded = with_profile_path(with_cache_paths(load(config)))
    for finding in findings(loaded, os.environ):
        click.echo(f"{'FAIL' if finding.problems else 'ok':5} {finding.check}: {finding.detail}")
        for problem in finding.problems:
            bad += 1
            click.echo(f"      - {problem}")
    click.echo(f"{'ok':5} roles: {roles_in_words(flip_obstacle(loaded))}")
    if bad:
        raise click.exceptions.Exit(EXIT_REFUSED)
