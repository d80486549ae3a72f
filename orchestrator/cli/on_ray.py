"""What commands do with a cluster on Ray beside asking its router. Ray is imported late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.ray.installed import require_ray

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.launch.files import ClusterFiles


def down_on_ray(files: ClusterFiles, config: ClusterConfig) -> None:
    """Nothing of the cluster is left on the Ray cluster. Raises ``StartError``, ``ConfigError``."""
    require_ray()
    from splitserve.orchestrator.launch.ray.ray_cluster import connect, take_back_signals
    from splitserve.orchestrator.launch.ray.take_down import take_down

    cluster = connect(config)
    take_back_signals()
    try:
        drain_s = config.supervision.drain_timeout_s
        was_there = take_down(cluster, config, drain_s=drain_s, say=click.echo)
    finally:
        cluster.close()
    files.remove_record()
    if was_there:
        click.echo(f"{config.name} has been stopped")
    else:
        click.echo(f"nothing of {config.name} was on the Ray cluster")


def start_again(config: ClusterConfig, node: str) -> None:
    """A node that has left or failed is being started where its actor is. Raises ``StartError``,
    ``ConfigError``.
    """
    require_ray()
    from splitserve.orchestrator.launch.ray.ray_cluster import SilentActorError, connect

    cluster = connect(config)
    try:
        cluster.ask(node, "start_again")
    except SilentActorError as error:
        raise StartError(
            f"{error}; `splitserve up` with the same YAML brings a lost node back"
        ) from error
    finally:
        cluster.close()
