"""``splitserve node``, ``router`` and ``cache-server``: one process of a cluster each, for clusters
on several machines.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import click

from splitserve.kv_transfer.cache.settings import CACHE_SECRET_ENV
from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.config.tls import client_context
from splitserve.orchestrator.launch.single import (
    holding,
    recorded,
    single_cache,
    single_node,
    single_router,
    written_cache_settings,
)

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.single import SingleNode


@click.command()
@click.argument("name")
@click.argument("cluster")
@click.option("--router", "routers", metavar="URL", multiple=True, help="Where a router is, "
    "instead of what the YAML says; once for each router, or several with commas.")  # fmt: skip
@click.option("--host", metavar="ADDRESS", help="Where the node listens on this machine.")
@click.option("--advertise-host", metavar="ADDRESS", help="Where the router and other nodes find "
    "it, when that is not where it listens.")  # fmt: skip
@click.option("--cpus", metavar="N", type=click.IntRange(min=1), help="How many CPUs it has, "
    "instead of which ones the YAML says: those of its container.")  # fmt: skip
@click.option("--own-address", is_flag=True, help="No other node has its address: it takes the "
    "first of the YAML's fixed ports, whatever its number.")  # fmt: skip
@click.option("--health-port", metavar="PORT", type=click.IntRange(1, 65535), help="Answer GET "
    "/livez, /startupz and /readyz where the node listens.")  # fmt: skip
def node(
    name: str,
    cluster: str,
    routers: tuple[str, ...],
    host: str | None,
    advertise_host: str | None,
    cpus: int | None,
    own_address: bool,
    health_port: int | None,
) -> None:
    """Run node NAME (such as prefill-0) of the cluster YAML CLUSTER on this machine: its agent and
    its engine, until SIGTERM.

    The cluster secret comes from SPLITSERVE_SECRET, SPLITSERVE_SECRET_FILE or security.secret_file.
    Exit status 0 after a stop or a drain, 2 when nothing was started, 3 when the engine failed.
    """
    prepared = single_node(
        cluster,
        os.environ,
        name,
        routers=[url for given in routers for url in given.split(",") if url],
        host=host,
        advertise_host=advertise_host,
        cpus=cpus,
        has_own_address=own_address,
    )
    from splitserve.orchestrator.agent.run import run

    _ask_routers(prepared)
    with holding(prepared, name) as folder:
        status = run(
            prepared.config,
            prepared.node,
            model=prepared.model,
            secret=prepared.secret,
            router_urls=prepared.router_urls,
            run_dir=folder,
            health_port=health_port,
        )
    raise click.exceptions.Exit(status)


@click.command("router")
@click.argument("cluster")
@click.option("--index", metavar="I", type=click.IntRange(min=0), default=0, help="Which router of "
    "`router.replicas`; 0 is the first.")  # fmt: skip
@click.option("--host", metavar="ADDRESS", help="Where it listens, instead of what the YAML says.")
def router_command(cluster: str, index: int, host: str | None) -> None:
    """Run the router of the cluster YAML CLUSTER, or one of its routers, on this machine, until
    SIGTERM.

    Nodes find it by themselves, and it uses them when they do. Exit status 0 after a stop, 2 when
    nothing was started, 3 when its port is taken.
    """
    prepared = single_router(cluster, os.environ, index, host)
    from splitserve.orchestrator.router.run import run

    with holding(prepared, f"router-{index}" if index else "router"), recorded(prepared):
        status = run(prepared.config, prepared.secret, prepared.tenant_by_key, index=index)
    raise click.exceptions.Exit(status)


@click.command("cache-server")
@click.argument("cluster")
def cache_server(cluster: str) -> None:
    """Run the cache server of this machine for the nodes of CLUSTER that run here, until
    SIGTERM.
    """
    prepared = single_cache(cluster, os.environ)
    from splitserve.kv_transfer.cache.__main__ import serve

    with holding(prepared, "cache") as folder:
        path, secret = written_cache_settings(prepared, folder)
        environ = {CACHE_SECRET_ENV: secret.hex()} if secret is not None else {}
        status = serve(path, environ)
    raise click.exceptions.Exit(status)


def _ask_routers(node: SingleNode) -> None:
    """Raises ``RefusedError`` when one of them would never take the node."""
    from splitserve.orchestrator.agent.first_contact import RouterRefusesError, ask_routers

    tls = client_context(node.config.security.tls)
    try:
        lines = asyncio.run(ask_routers(node.router_urls, node.secret, tls))
    except RouterRefusesError as error:
        raise RefusedError(f"{node.node.name} was not started: {error}") from error
    for line in lines:
        click.echo(f"warning: {line}", err=True)
