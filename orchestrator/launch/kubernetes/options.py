"""What is asked for beside the cluster YAML, and the names that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Manifest = dict[str, Any]
"""A Kubernetes object, or a part of one."""

PORT_NAME = "http"
HEALTH_PORT = 8090
"""Where agents answer probes; containers of one pod take the next ones."""
USER_ID = 10001
"""User and group of the image."""
CLUSTER_FOLDER = "/etc/splitserve/cluster"
CLUSTER_FILE = f"{CLUSTER_FOLDER}/cluster.yaml"
CACHE_FILE = f"{CLUSTER_FOLDER}/cache-server.yaml"
PROFILE_FILE = f"{CLUSTER_FOLDER}/profile.json"
QUALITY_FILE = f"{CLUSTER_FOLDER}/quality.json"
CLUSTER_SECRET, CACHE_SECRET, CLIENT_CA = "cluster-secret", "cache-secret", "client-ca.crt"
"""Keys of Secrets, and names of files."""
SECRET_FOLDER = "/etc/splitserve/secret"
KEYS_FOLDER = "/etc/splitserve/api-keys"
TLS_FOLDER = "/etc/splitserve/tls"
STATE_FOLDER = "/var/lib/splitserve"
CACHE_FOLDER = "/run/splitserve-cache"
"""The folder of the cache's socket, which the host's pods share."""


@dataclass(frozen=True)
class Options:
    """What is only Kubernetes' business."""

    namespace: str = "default"
    image: str = ""
    """Image of every container."""
    model_claim: str = ""
    """PersistentVolumeClaim that holds the model's folder, mounted at ``model.path``."""
    model_host_path: str = ""
    """Folder of every host that is mounted there instead."""
    model_memory_bytes: int | None = None
    """Weights in one engine's memory, where the model is not on this machine."""
    node_selector: tuple[tuple[str, str], ...] = ()
    """Labels of the hosts for nodes and cache servers."""
    rdma: tuple[str, int] | None = None
    """Extended resource of RDMA devices and how many each node gets."""
    monitoring_namespace: str = "monitoring"
    """Where Prometheus runs; it may reach engines' metrics."""
    has_monitoring: bool = True
    """Whether PodMonitor and PrometheusRule are rendered (objects of the Prometheus Operator)."""


@dataclass(frozen=True)
class Names:
    """Names of the objects of one cluster."""

    cluster: str
    namespace: str

    def of(self, part: str) -> str:
        """The object for ``part``: ``NAME-part``."""
        return f"{self.cluster}-{part}"

    def labels(self, component: str = "") -> dict[str, str]:
        """Labels of an object; with ``component`` also those that select its pods."""
        found = {
            "app.kubernetes.io/name": "splitserve",
            "app.kubernetes.io/instance": self.cluster,
        }
        return found | ({"app.kubernetes.io/component": component} if component else {})

    def metadata(self, name: str, component: str = "") -> Manifest:
        """``metadata`` of the object called ``name``."""
        return {"name": name, "namespace": self.namespace, "labels": self.labels(component)}

    def service_host(self, service: str) -> str:
        """The DNS name of a Service, for every namespace of the cluster."""
        return f"{service}.{self.namespace}.svc"


def mebibytes(size: float) -> str:
    """Bytes as a quantity, rounded up."""
    return f"{math.ceil(size / 2**20)}Mi"
