"""One process of a cluster, run by itself: what ``splitserve node``, ``router`` and
``cache-server`` need before they begin.

This is how a cluster on several machines is run, whoever starts the processes: systemd, Kubernetes,
Ray, or a person. All of them read the same cluster YAML; what is only this machine's business (its
address, free ports, the folder of the model) is found here. There has to be one secret for all.

Everything that is wrong is told before anything starts, with the name of the machine: who reads it
may sit at another one.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from splitserve.orchestrator.agent.auth import operator_token
from splitserve.orchestrator.config import (
    ConfigError,
    cache_secret,
    dump_resolved,
    for_router,
    load,
    nodes,
    router_urls,
    shared_secret,
    tenants_by_key,
)
from splitserve.orchestrator.launch.cache_settings import cache_settings
from splitserve.orchestrator.launch.checks.model import model_of
from splitserve.orchestrator.launch.checks.subject import ROUTER, Subject
from splitserve.orchestrator.launch.files import (
    ClusterFiles,
    ClusterRecord,
    RunningClusterError,
    tls_files,
    write_private,
)
from splitserve.orchestrator.launch.given_cpus import with_given_cpus
from splitserve.orchestrator.launch.paths import with_cache_paths, with_log_dir, with_profile_path
from splitserve.orchestrator.launch.ports import node_with_ports
from splitserve.orchestrator.launch.preflight import check
from splitserve.orchestrator.launch.quality_record import require_quality

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from splitserve.orchestrator.config import ClusterConfig, NodeConfig


@dataclass(frozen=True)
class Single:
    """A cluster as one of its processes sees it."""

    config: ClusterConfig
    """With the paths of this machine filled in."""
    secret: bytes

    @property
    def files(self) -> ClusterFiles:
        """Where this machine's processes of the cluster leave their traces."""
        return ClusterFiles(self.config.name)


@dataclass(frozen=True)
class SingleNode(Single):
    """What an agent is started with."""

    node: NodeConfig
    """With its ports and addresses on this machine."""
    model: str
    """Folder or Hub id, as this machine has it."""
    router_urls: tuple[str, ...]


@dataclass(frozen=True)
class SingleRouter(Single):
    """What a router is started with."""

    index: int
    urls: tuple[str, ...]
    """Of all routers."""
    source: str
    tenant_by_key: Mapping[str, str]


def single_node(
    source: str,
    environ: Mapping[str, str],
    name: str,
    *,
    routers: Sequence[str] = (),
    host: str | None = None,
    advertise_host: str | None = None,
    cpus: int | None = None,
    has_own_address: bool = False,
) -> SingleNode:
    """The node ``name`` on this machine, which has what it needs. ``host`` is where it listens,
    ``advertise_host`` where it is found, ``routers`` the routers' URLs and ``cpus`` how many CPUs
    it has, instead of what the YAML says. A node that ``has_own_address`` takes the first of the
    YAML's fixed ports, whatever its number. Raises ``ConfigError``, also for lossy codecs that are
    not known to be within ``cache.quality``.
    """
    with _named(source):
        config = _loaded(source)
        secret = shared_secret(config, environ)
        node = _placed(config, name, host, advertise_host)
        if cpus is not None:
            node = with_given_cpus(node, cpus, os.sched_getaffinity(0))
        if has_own_address:
            node = _with_first_ports(node)
        check(Subject(config, environ, here=frozenset({name}), placed=node))
        require_quality(config)
        urls = tuple(url.rstrip("/") for url in routers) or fixed_router_urls(config)
        found, model = node_with_ports(node), model_of(config)
        return SingleNode(with_log_dir(config), secret, found, model, tuple(dict.fromkeys(urls)))


def single_router(
    source: str, environ: Mapping[str, str], index: int = 0, host: str | None = None
) -> SingleRouter:
    """The router ``index`` on this machine, which has what it needs. ``host`` is where it listens,
    instead of what the YAML says. Raises ``ConfigError``.
    """
    with _named(source):
        config = _loaded(source)
        secret = shared_secret(config, environ)
        urls = fixed_router_urls(config)
        if index >= len(urls):
            raise ConfigError(
                [f"--index {index}: router.replicas is {len(urls)}, so the last is "
                 f"{len(urls) - 1}; raise it, or use a smaller index"]
            )  # fmt: skip
        config = for_router(config, index, host)
        check(Subject(config, environ, here=frozenset({ROUTER})))
        keys = tenants_by_key(config, environ)
        path = str(Path(source).absolute())
        return SingleRouter(with_log_dir(config), secret, index, urls, path, keys)


def single_cache(source: str, environ: Mapping[str, str]) -> Single:
    """The cache server on this machine. Raises ``ConfigError``, also for lossy codecs that are not
    known to be within ``cache.quality``.
    """
    with _named(source):
        config = _loaded(source)
        if config.cache is None:
            raise ConfigError(["cache: the cluster has none; add the section"])
        require_quality(config)
        return Single(with_log_dir(config), shared_secret(config, environ))


def fixed_router_urls(config: ClusterConfig) -> tuple[str, ...]:
    """Where nodes elsewhere find the routers. Raises ``ConfigError`` for a port that only its own
    process could know.
    """
    if config.router.port == 0:
        raise ConfigError(
            ["router.port: 0 takes a free port, which nodes elsewhere cannot know; give one"]
        )
    return router_urls(config)


@contextmanager
def _named(source: str) -> Iterator[None]:
    """A ``ConfigError`` names the YAML and this machine."""
    try:
        yield
    except ConfigError as error:
        where = f"{source} (on {socket.gethostname()})"
        raise ConfigError(error.problems, where) from error


def _loaded(source: str) -> ClusterConfig:
    return with_profile_path(with_cache_paths(load(source)))


def _placed(
    config: ClusterConfig, name: str, host: str | None, advertise_host: str | None
) -> NodeConfig:
    known = {node.name: node for node in nodes(config)}
    if name not in known:
        raise ConfigError([f"no node {name!r}; the YAML has {', '.join(known)}"])
    node = known[name]
    if host is not None:
        node = replace(node, host=host, transfer_host=host)
    if advertise_host is not None:
        node = replace(node, advertise_host=advertise_host)
    for listens in (node.host, node.transfer_host):
        if not node.advertise_host and listens in ("0.0.0.0", "::"):
            raise ConfigError(
                [
                    f"{node.pool}.advertise_host: {name} listens on {listens}, where nobody finds "
                    f"it; give the address of this machine (--advertise-host, {node.pool}.hosts)"
                ]
            )
    return node


def _with_first_ports(node: NodeConfig) -> NodeConfig:
    settings = node.settings
    return replace(
        node,
        http_port=settings.port_base,
        endpoint_port=settings.port_base and settings.port_base + 1,
        control_port_base=settings.transfer.port_base,
        data_port_base=settings.transfer.data_port_base,
    )


@contextmanager
def holding(cluster: Single, process: str) -> Iterator[Path]:
    """The folder of this machine's processes of the cluster, while no other process of that name
    runs here. Raises ``RunningClusterError``.
    """
    files = cluster.files
    found = files.record()
    if files.is_running() and found is not None and found.launcher == "local":
        raise RunningClusterError(
            f"{files.name} is run by `splitserve up` on this machine; stop it first with "
            f"`splitserve down {files.name}`"
        )
    folder = files.run_dir
    for path in (folder, files.log_dir, Path(cluster.config.observability.log_dir or folder)):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / f"{process}.lock").open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunningClusterError(
                f"{process} of {files.name} runs on this machine already; end that process first"
            ) from None
        yield folder


@contextmanager
def recorded(router: SingleRouter) -> Iterator[None]:
    """``splitserve status``, ``flip``, ``down`` and the other commands find the routers on this
    machine, by what the first of them that was started here has written. Raises
    ``RunningClusterError``.
    """
    files, config = router.files, router.config
    found = files.record()
    if files.is_running() and found is not None and found.launcher == "none":
        yield
        return
    record = ClusterRecord(
        name=config.name,
        run=secrets.token_hex(8),
        pid=os.getpid(),
        source=router.source,
        url=router.urls[router.index],
        more_urls=tuple(url for url in router.urls if url != router.urls[router.index]),
        nodes=tuple(node.name for node in nodes(config)),
        phase="serving",
        started=time.time(),
        log_dir=str(config.observability.log_dir),
        launcher="none",
        tls=tls_files(config.security.tls),
    )
    with files.lock():
        write_private(files.config_path, dump_resolved(config).encode())
        write_private(files.token_path, operator_token(router.secret).encode())
        files.write_record(record)
        try:
            yield
        finally:
            files.record_path.unlink(missing_ok=True)
            files.token_path.unlink(missing_ok=True)


def written_cache_settings(cluster: Single, folder: Path) -> tuple[Path, bytes | None]:
    """The file that the cache server reads, and the secret that it encrypts with."""
    cache = cluster.config.cache
    assert cache is not None
    path = folder / "cache.json"
    write_private(path, msgspec.json.encode(cache_settings(cache, cluster.secret)))
    return path, cache_secret(cluster.config, cluster.secret) if cache.encrypt else None
