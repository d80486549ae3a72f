"""What the pods of router, nodes and cache server have in common."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from splitserve.orchestrator.launch.kubernetes import options as at

if TYPE_CHECKING:
    from collections.abc import Iterable

    from splitserve.orchestrator.launch.kubernetes.options import Manifest, Names, Options
    from splitserve.orchestrator.launch.kubernetes.pod_config import PodConfig

SECRET_MODE = 0o440
"""Secrets belong to root and, by ``fsGroup``, to the group of the image's user."""


def pod_security(*, is_root: bool = False) -> Manifest:
    """``securityContext`` of a pod. Kubernetes gives added capabilities to processes of root only,
    so a pod that needs one runs as root, without all others.
    """
    user = 0 if is_root else at.USER_ID
    return {
        "runAsNonRoot": not is_root,
        "runAsUser": user,
        "runAsGroup": at.USER_ID,
        "fsGroup": at.USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(capabilities: Iterable[str] = ()) -> Manifest:
    """``securityContext`` of a container with these capabilities alone."""
    granted: Manifest = {"drop": ["ALL"]}
    if added := list(capabilities):
        granted["add"] = added
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": granted,
    }


def pod_template(
    names: Names, component: str, spec: Manifest, pods: PodConfig, text: str = ""
) -> Manifest:
    """A pod that is replaced when what it reads of the configuration changes."""
    digest = hashlib.sha256((text or pods.stable_text).encode()).hexdigest()[:16]
    return {
        "metadata": {
            "labels": names.labels(component),
            "annotations": {"splitserve/configuration": digest},
        },
        "spec": {
            "serviceAccountName": names.cluster,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **spec,
        },
    }


def plain_env() -> list[Manifest]:
    """Variables of every container: all that is written lies in its own volumes."""
    return [
        {"name": "XDG_STATE_HOME", "value": at.STATE_FOLDER},
        {"name": "HOME", "value": at.STATE_FOLDER},
    ]


def address_env() -> list[Manifest]:
    """What only the pod knows of itself."""
    found = {
        "POD_NAME": "metadata.name",
        "POD_IP": "status.podIP",
        "POD_INDEX": "metadata.labels['apps.kubernetes.io/pod-index']",
    }
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in found.items()
    ]


def secret_volume(name: str, secret: str, keys: Iterable[str]) -> Manifest:
    """A volume with these keys of the Secret as files."""
    items = [{"key": key, "path": key} for key in keys]
    return {
        "name": name,
        "secret": {"secretName": secret, "items": items, "defaultMode": SECRET_MODE},
    }


def volumes(pods: PodConfig, names: Names, options: Options) -> list[Manifest]:
    """Volumes of every pod."""
    found: list[Manifest] = [
        {"name": "cluster", "configMap": {"name": names.of("cluster")}},
        secret_volume("secret", names.of("secret"), [at.CLUSTER_SECRET]),
        {"name": "state", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    tls = pods.config.security.tls
    if tls is not None:
        keys = ["tls.crt", "tls.key", "ca.crt"]
        keys += [at.CLIENT_CA] if tls.client_ca_file is not None else []
        found.append(secret_volume("tls", names.of("tls"), keys))
    if options.model_claim:
        claim = {"claimName": options.model_claim, "readOnly": True}
        found.append({"name": "model", "persistentVolumeClaim": claim})
    elif options.model_host_path:
        path = {"path": options.model_host_path, "type": "Directory"}
        found.append({"name": "model", "hostPath": path})
    return found


def mounts(pods: PodConfig, options: Options) -> list[Manifest]:
    """Where each container has them."""
    found: list[Manifest] = [
        {"name": "cluster", "mountPath": at.CLUSTER_FOLDER, "readOnly": True},
        {"name": "secret", "mountPath": at.SECRET_FOLDER, "readOnly": True},
        {"name": "state", "mountPath": at.STATE_FOLDER},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if pods.config.security.tls is not None:
        found.append({"name": "tls", "mountPath": at.TLS_FOLDER, "readOnly": True})
    if options.model_claim or options.model_host_path:
        path = pods.config.model.path
        found.append({"name": "model", "mountPath": path, "readOnly": True})
    return found


def http_probe(path: str, port: int | str, **settings: int) -> Manifest:
    """A probe by ``GET``."""
    return {"httpGet": {"path": path, "port": port}, **settings}


def spread(names: Names, component: str) -> list[Manifest]:
    """Pods of one kind lie on different hosts, as far as there are enough."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": names.labels(component)},
        }
    ]
