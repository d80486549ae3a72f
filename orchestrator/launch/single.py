"""One process of a cluster, run by itself: what ``splitserve node``, ``router`` and
``cache-server`` need before they begin.

This is how a cluster on several machines is run, whoever starts the processes: systemd, Kubernetes,
Ray, or a person. All of them read the same cluster YAML; what is only this machine's business (its
address, free ports, the folder of the model) is found here. There has to be one secret for all.
"""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from splitserve.orchestrator.config import (
    ConfigError,
    cache_secret,
    dump_resolved,
    load,
    nodes,
    shared_secret,
)
from splitserve.orchestrator.launch.cache_settings import cache_settings
from splitserve.orchestrator.launch.checks.model import model_of
from splitserve.orchestrator.launch.files import ClusterFiles, RunningClusterError, write_private
from splitserve.orchestrator.launch.paths import with_cache_paths, with_log_dir, with_profile_path
from splitserve.orchestrator.launch.ports import node_with_ports

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from splitserve.orchestrator.config import ClusterConfig, NodeConfig


@dataclass(frozen=True)
class Single:
    """A cluster as one of its processes sees it."""

    source: str
    config: ClusterConfig
    """With the paths of this machine filled in."""
    secret: bytes

    @property
    def files(self) -> ClusterFiles:
        """Where this machine's processes of the cluster leave their traces."""
        return ClusterFiles(self.config.name)


def single(source: str, environ: Mapping[str, str]) -> Single:
    """The cluster of ``source``. Raises ``ConfigError``."""
    config = with_log_dir(with_profile_path(with_cache_paths(load(source))))
    return Single(source, config, shared_secret(config, environ))


@dataclass(frozen=True)
class SingleNode:
    """What an agent is started with."""

    cluster: Single
    node: NodeConfig
    """With its ports and addresses on this machine."""
    model: str
    """Folder or Hub id, as this machine has it."""


def single_node(
    cluster: Single, name: str, *, host: str | None, advertise_host: str | None
) -> SingleNode:
    """The node ``name`` on this machine. ``host`` is where it listens and ``advertise_host`` where
    it is found, instead of what the YAML says. Raises ``ConfigError``.
    """
    known = {node.name: node for node in nodes(cluster.config)}
    if name not in known:
        raise ConfigError([f"no node {name!r}; the YAML has {', '.join(known)}"], cluster.source)
    node = known[name]
    if host is not None:
        node = replace(node, host=host, transfer_host=host)
    if advertise_host is not None:
        node = replace(node, advertise_host=advertise_host)
    if not node.advertise_host and node.host in ("0.0.0.0", "::"):
        raise ConfigError(
            [
                f"{node.pool}.advertise_host: {name} listens on {node.host}, where nobody finds it;"
                f" give the address of this machine (--advertise-host, {node.pool}.hosts)"
            ]
        )
    try:
        node = node_with_ports(node)
    except OSError as error:
        raise ConfigError(
            [
                f"{node.pool}.hosts: this machine cannot listen on {node.host} for {name}: {error};"
                " start the node on the machine that has this address, or give another (--host)"
            ]
        ) from error
    return SingleNode(cluster, node, model_of(cluster.config))


@contextmanager
def holding(cluster: Single, process: str) -> Iterator[Path]:
    """The folder of this machine's processes of the cluster, while no other process of that name
    runs here. Raises ``RunningClusterError``.
    """
    files = cluster.files
    if files.is_running():
        raise RunningClusterError(
            f"{files.name} is run by `splitserve up` on this machine; stop it with "
            f"`splitserve down {files.name}`"
        )
    folder = files.run_dir
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    files.log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    Path(cluster.config.observability.log_dir or files.log_dir).mkdir(
        parents=True, exist_ok=True, mode=0o700
    )
    with (folder / f"{process}.lock").open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunningClusterError(
                f"{process} of {files.name} runs on this machine already; end that process first"
            ) from None
        write_private(folder / f"{process}.json", dump_resolved(cluster.config).encode())
        yield folder


def written_cache_settings(cluster: Single, folder: Path) -> tuple[Path, bytes | None]:
    """The file that the cache server reads, and the secret that it encrypts with. Raises
    ``ConfigError`` when the cluster has no cache.
    """
    cache = cluster.config.cache
    if cache is None:
        raise ConfigError(["cache: the cluster has none; add the section"], cluster.source)
    path = folder / "cache.json"
    write_private(path, msgspec.json.encode(cache_settings(cache, cluster.secret)))
    return path, cache_secret(cluster.config, cluster.secret) if cache.encrypt else None
