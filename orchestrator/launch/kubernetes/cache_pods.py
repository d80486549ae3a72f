"""The cache server: one on each host that has nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.launch.checks.cache import arena_bytes
from splitserve.orchestrator.launch.kubernetes import options as at
from splitserve.orchestrator.launch.kubernetes import pods as common
from splitserve.orchestrator.launch.kubernetes.node_pods import cache_volume

if TYPE_CHECKING:
    from splitserve.orchestrator.config import CacheConfig
    from splitserve.orchestrator.launch.kubernetes.options import Manifest, Names, Options
    from splitserve.orchestrator.launch.kubernetes.pod_config import PodConfig

CACHE = "cache"
SERVER_BYTES = 512 * 2**20
"""Memory of the server beside its chunks."""


def cache_server(
    cache: CacheConfig, pods: PodConfig, names: Names, options: Options
) -> list[Manifest]:
    """The DaemonSet. ``cache`` has the tiers as they were written."""
    container, volumes = _container(cache, pods, names, options)
    spec = {
        "securityContext": common.pod_security(is_root=_shares_root(pods, options)),
        "terminationGracePeriodSeconds": 30,
        "nodeSelector": dict(options.node_selector),
        "initContainers": [_owner(container["volumeMounts"], pods, options)],
        "containers": [container],
        "volumes": volumes,
    }
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": names.metadata(names.of(CACHE), CACHE),
            "spec": {
                "selector": {"matchLabels": names.labels(CACHE)},
                "updateStrategy": {"type": "RollingUpdate"},
                "template": common.pod_template(names, CACHE, spec, pods, pods.cache_text),
            },
        }
    ]


def _container(
    cache: CacheConfig, pods: PodConfig, names: Names, options: Options
) -> tuple[Manifest, list[Manifest]]:
    """The server, and the volumes of its pod."""
    memory = SERVER_BYTES + arena_bytes(cache) + cache.write_queue_limit_bytes
    amounts = {"cpu": "1", "memory": at.mebibytes(memory)}
    mounts = [{"name": "cache", "mountPath": at.CACHE_FOLDER}]
    volumes = [cache_volume(names, kind="DirectoryOrCreate")]
    for number, (mount, path) in enumerate(pods.disk_paths.items()):
        tier = cache.tiers[int(mount.rpartition("-")[2])]
        kept: Manifest = {"hostPath": {"path": path, "type": "DirectoryOrCreate"}}
        if not path:
            kept = {"emptyDir": {"sizeLimit": at.mebibytes(tier.capacity_bytes or 0)}}
        volumes.append({"name": f"tier-{number}", **kept})
        mounts.append({"name": f"tier-{number}", "mountPath": mount})
    shared = [v for v in common.volumes(pods, names, options) if v["name"] in _SHARED]
    if cache.secret_file is not None:
        keys = [at.CLUSTER_SECRET, at.CACHE_SECRET]
        sealed = common.secret_volume("secret", names.of("secret"), keys)
        shared = [sealed if v["name"] == "secret" else v for v in shared]
    own = [m for m in common.mounts(pods, options) if m["name"] in _SHARED]
    container: Manifest = {
        "name": "cache",
        "image": options.image,
        "args": ["cache-server", at.CACHE_FILE],
        "env": [*common.plain_env(), *pods.cache_env],
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "securityContext": common.container_security(),
        "volumeMounts": [*own, *mounts],
    }
    return container, [*shared, *volumes]


_SHARED = ("cluster", "secret", "state", "tmp")


def _owner(mounts: list[Manifest], pods: PodConfig, options: Options) -> Manifest:
    """Kubernetes makes folders of the host for root: this gives them to the server's user."""
    folders = [
        mount["mountPath"]
        for mount in mounts
        if mount["name"] == "cache" or mount["name"].startswith("tier-")
    ]
    user = 0 if _shares_root(pods, options) else at.USER_ID
    security = common.container_security(["CHOWN"])
    return {
        "name": "folders",
        "image": options.image,
        "command": ["chown", f"{user}:{at.USER_ID}", *folders],
        "resources": {
            "requests": {"cpu": "10m", "memory": "32Mi"},
            "limits": {"memory": "32Mi"},
        },
        "securityContext": {**security, "runAsNonRoot": False, "runAsUser": 0},
        "volumeMounts": [m for m in mounts if m["mountPath"] in folders],
    }


def _shares_root(pods: PodConfig, options: Options) -> bool:
    """Server and engines trust each other as processes of one user."""
    return pods.is_one_pod or options.rdma is not None
