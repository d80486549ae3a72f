"""The routers: a Service for clients, one for agents, and a Deployment of one pod, or a StatefulSet
of several, whose pods agents find by their names.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from splitserve.orchestrator.launch.kubernetes import options as at
from splitserve.orchestrator.launch.kubernetes import pods as common

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.kubernetes.options import Manifest, Names, Options
    from splitserve.orchestrator.launch.kubernetes.pod_config import PodConfig

ROUTER = "router"
AGENTS = "router-agents"
READY_PATH = "/health"
"""200 once a decode node can be used."""
LIVE_PATH = "/openapi.json"
"""Answered from memory, whatever nodes there are."""
UNLISTED_S = 5
"""In which Services stop sending new connections to a pod that is to end."""
STOPPING_SPARE_S = 15
RESOURCES = {
    "requests": {"cpu": "1", "memory": "1Gi"},
    "limits": {"memory": "2Gi"},
}
"""One event loop; request bodies that wait are bounded by ``router.queue_limit_requests``."""


def router(pods: PodConfig, names: Names, options: Options) -> list[Manifest]:
    """Their objects."""
    port, replicas = pods.config.router.port, pods.config.router.replicas
    spec = _spec(pods, names, options)
    if replicas > 1:
        spec["topologySpreadConstraints"] = common.spread(names, ROUTER)
    template = common.pod_template(names, ROUTER, spec, pods, pods.stable_text)
    workload: Manifest = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": names.metadata(names.of(ROUTER), ROUTER),
        "spec": {
            "replicas": 1,
            # Agents reach it by the Service, behind which a second one would take half of them
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": names.labels(ROUTER)},
            "template": template,
        },
    }
    if replicas > 1:
        workload |= {
            "kind": "StatefulSet",
            "spec": {
                "serviceName": names.of(AGENTS),
                "replicas": replicas,
                "podManagementPolicy": "Parallel",
                "updateStrategy": {"type": "RollingUpdate"},
                "selector": {"matchLabels": names.labels(ROUTER)},
                "template": template,
            },
        }
    return [
        _service(ROUTER, names, port),
        _service(AGENTS, names, port, is_for_agents=True, is_headless=replicas > 1),
        workload,
    ]


def router_hosts(names: Names, replicas: int) -> list[str]:
    """The name by which agents reach each of several routers."""
    service = names.service_host(names.of(AGENTS))
    return [f"{names.of(ROUTER)}-{index}.{service}" for index in range(replicas)]


def _service(
    part: str, names: Names, port: int, *, is_for_agents: bool = False, is_headless: bool = False
) -> Manifest:
    """Agents have to reach a router that is not ready, or it never would be; ``is_headless``: by
    the name of its pod.
    """
    spec: Manifest = {
        "selector": names.labels(ROUTER),
        "ports": [{"name": at.PORT_NAME, "port": port, "targetPort": at.PORT_NAME}],
    }
    if is_for_agents:
        spec["publishNotReadyAddresses"] = True
    if is_headless:
        spec["clusterIP"] = "None"
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(names.of(part), ROUTER),
        "spec": spec,
    }


def _spec(pods: PodConfig, names: Names, options: Options) -> Manifest:
    grace = UNLISTED_S + pods.config.supervision.drain_timeout_s + STOPPING_SPARE_S
    volumes, mounts = common.volumes(pods, names, options), common.mounts(pods, options)
    if pods.key_files:
        volumes.append(common.secret_volume("api-keys", names.of("api-keys"), pods.key_files))
        mounts.append({"name": "api-keys", "mountPath": at.KEYS_FOLDER, "readOnly": True})
    arguments, env = [ROUTER, at.CLUSTER_FILE], common.plain_env()
    if pods.config.router.replicas > 1:
        arguments += ["--index", "$(POD_INDEX)", "--host", "0.0.0.0"]
        env += common.address_env()
    return {
        "securityContext": common.pod_security(),
        "terminationGracePeriodSeconds": math.ceil(grace),
        "containers": [
            {
                "name": ROUTER,
                "image": options.image,
                "args": arguments,
                "env": [*env, *pods.router_env],
                "ports": [{"name": at.PORT_NAME, "containerPort": pods.config.router.port}],
                "resources": RESOURCES,
                "securityContext": common.container_security(),
                "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(UNLISTED_S)]}}},
                "startupProbe": {**_probe(LIVE_PATH, pods), "periodSeconds": 2,
                                 "failureThreshold": 60},
                "readinessProbe": {**_probe(READY_PATH, pods), "periodSeconds": 2,
                                   "timeoutSeconds": 3, "failureThreshold": 2},
                "livenessProbe": {**_probe(LIVE_PATH, pods), "periodSeconds": 10,
                                  "timeoutSeconds": 5, "failureThreshold": 6},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }  # fmt: skip


def _probe(path: str, pods: PodConfig) -> Manifest:
    """The kubelet has no certificate to show where clients need one."""
    tls = pods.config.security.tls
    if tls is not None and tls.client_ca_file is not None:
        return {"tcpSocket": {"port": at.PORT_NAME}}
    scheme = "HTTPS" if tls is not None else "HTTP"
    return {"httpGet": {"path": path, "port": at.PORT_NAME, "scheme": scheme}}
