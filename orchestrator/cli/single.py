"""``splitserve node``, ``router`` and ``cache-server``: one process of a cluster each, for clusters
on several machines.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from splitserve.kv_transfer.cache.settings import CACHE_SECRET_ENV
from splitserve.orchestrator.config import ConfigError, router_url, tenants_by_key
from splitserve.orchestrator.launch.single import (
    holding,
    single,
    single_node,
    written_cache_settings,
)

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig


@click.command()
@click.argument("name")
@click.argument("cluster")
@click.option("--router", metavar="URL", help="Where the router is, instead of what the YAML says.")
@click.option("--host", metavar="ADDRESS", help="Where the node listens on this machine.")
@click.option("--advertise-host", metavar="ADDRESS", help="Where the router and other nodes find "
    "it, when that is not where it listens.")  # fmt: skip
def node(
    name: str, cluster: str, router: str | None, host: str | None, advertise_host: str | None
) -> None:
    """Run node NAME (such as prefill-0) of the cluster YAML CLUSTER on this machine: its agent and
    its engine, until SIGTERM.

    The cluster secret comes from SPLITSERVE_SECRET, SPLITSERVE_SECRET_FILE or security.secret_file.
    Exit status 0 after a stop or a drain, 2 when nothing was started, 3 when the engine failed.
    """
    prepared = single(cluster, os.environ)
    found = single_node(prepared, name, host=host, advertise_host=advertise_host)
    url = router if router is not None else _router_url(prepared.config)
    from splitserve.orchestrator.agent.run import run

    with holding(prepared, name) as folder:
        status = run(
            prepared.config,
            found.node,
            model=found.model,
            secret=prepared.secret,
            router_url=url.rstrip("/"),
            run_dir=folder,
        )
    raise click.exceptions.Exit(status)


@click.command("router")
@click.argument("cluster")
def router_command(cluster: str) -> None:
    """Run the router of the cluster YAML CLUSTER on this machine, until SIGTERM.

    Nodes find it by themselves, and it uses them when they do. Exit status 0 after a stop, 2 when
    nothing was started, 3 when its port is taken.
    """
    prepared = single(cluster, os.environ)
    _router_url(prepared.config)
    keys = tenants_by_key(prepared.config, os.environ)
    from splitserve.orchestrator.router.run import run

    with holding(prepared, "router"):
        status = run(prepared.config, prepared.secret, keys)
    raise click.exceptions.Exit(status)


@click.command("cache-server")
@click.argument("cluster")
def cache_server(cluster: str) -> None:
    """Run the cache server of this machine for the nodes of CLUSTER that run here, until
    SIGTERM.
    """
    prepared = single(cluster, os.environ)
    from splitserve.kv_transfer.cache.__main__ import serve

    with holding(prepared, "cache") as folder:
        path, secret = written_cache_settings(prepared, folder)
        environ = {CACHE_SECRET_ENV: secret.hex()} if secret is not None else {}
        status = serve(path, environ)
    raise click.exceptions.Exit(status)


def _router_url(config: ClusterConfig) -> str:
    """Raises ``ConfigError`` for a port that only its own process could know."""
    if config.router.port == 0:
        raise ConfigError(
            ["router.port: 0 takes a free port, which nodes elsewhere cannot know; give one"]
        )
    return router_url(config)
