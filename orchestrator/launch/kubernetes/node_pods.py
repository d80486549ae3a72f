"""Pods of nodes: a StatefulSet for each pool, or one pod of all nodes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from splitserve.orchestrator.agent.health import LIVE_PATH, READY_PATH, STARTED_PATH
from splitserve.orchestrator.config import nodes
from splitserve.orchestrator.launch.kubernetes import options as at
from splitserve.orchestrator.launch.kubernetes import pods as common
from splitserve.orchestrator.launch.kubernetes.memory import node_bytes, shm_bytes, weights_of

if TYPE_CHECKING:
    from splitserve.orchestrator.config import NodeConfig
    from splitserve.orchestrator.launch.kubernetes.options import Manifest, Names, Options
    from splitserve.orchestrator.launch.kubernetes.pod_config import PodConfig

ALL_NODES = "nodes"
"""The StatefulSet whose only pod has all nodes."""
LEAVING_SPARE_S = 15
"""For what an agent does beside draining and stopping its engine."""
STARTING_SPARE_S = 60
"""For what it does before the engine starts; it gives up on the engine itself."""
STARTUP_PERIOD_S, READY_PERIOD_S, LIVE_PERIOD_S = 5, 5, 10
MOCK_CPU = "250m"
GPU = "nvidia.com/gpu"


def node_sets(pods: PodConfig, names: Names, options: Options) -> dict[str, list[Manifest]]:
    """By file: the StatefulSets of the nodes, each with the Service that names its pods."""
    found = nodes(pods.config)
    if pods.is_one_pod:
        groups = {ALL_NODES: found}
    else:
        groups = {
            pool: [node for node in found if node.pool == pool] for pool in ("prefill", "decode")
        }
    return {
        group: [_service(group, names), _set(group, members, pods, names, options)]
        for group, members in groups.items()
    }


def http_ports(pods: PodConfig, component: str) -> list[int]:
    """Ports of the engines' HTTP servers in a pod of that component."""
    found = nodes(pods.config)
    if component == ALL_NODES:
        return [node.http_port for node in found]
    return [next(node.http_port for node in found if node.pool == component)]


def _service(group: str, names: Names) -> Manifest:
    """Gives each pod a DNS name, also before its engine is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(names.of(group), group),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.labels(group),
        },
    }


def _set(
    group: str, members: list[NodeConfig], pods: PodConfig, names: Names, options: Options
) -> Manifest:
    supervision = pods.config.supervision
    shown = members if pods.is_one_pod else members[:1]
    grace = supervision.drain_timeout_s + supervision.stop_timeout_s + LEAVING_SPARE_S
    spec: Manifest = {
        "securityContext": common.pod_security(is_root=bool(_capabilities(pods, options))),
        "terminationGracePeriodSeconds": math.ceil(grace),
        "containers": [
            _container(node, index, pods, names, options) for index, node in enumerate(shown)
        ],
        "volumes": [*common.volumes(pods, names, options), *_own_volumes(shown, pods, names)],
    }
    if pods.is_one_pod:
        spec["shareProcessNamespace"] = True
    else:
        spec["topologySpreadConstraints"] = common.spread(names, group)
    if options.node_selector:
        spec["nodeSelector"] = dict(options.node_selector)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": names.metadata(names.of(group), group),
        "spec": {
            "serviceName": names.of(group),
            "replicas": 1 if pods.is_one_pod else len(members),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "selector": {"matchLabels": names.labels(group)},
            "template": common.pod_template(
                names, group, spec, pods, pods.text if pods.is_one_pod else ""
            ),
        },
    }


def _container(
    node: NodeConfig, index: int, pods: PodConfig, names: Names, options: Options
) -> Manifest:
    health = at.HEALTH_PORT + index
    return {
        "name": node.name if pods.is_one_pod else "node",
        "image": options.image,
        "args": _arguments(node, health, pods, names),
        "env": [*common.plain_env(), *common.address_env(), *pods.node_env[node.pool]],
        "ports": [
            {"name": _port_name("http", node, pods), "containerPort": node.http_port},
            {"name": _port_name("health", node, pods), "containerPort": health},
        ],
        "resources": _resources(node, pods, options),
        "securityContext": common.container_security(_capabilities(pods, options)),
        "startupProbe": common.http_probe(
            STARTED_PATH,
            health,
            periodSeconds=STARTUP_PERIOD_S,
            failureThreshold=math.ceil(
                (node.settings.startup_timeout_s + STARTING_SPARE_S) / STARTUP_PERIOD_S
            ),
        ),
        "readinessProbe": common.http_probe(
            READY_PATH, health, periodSeconds=READY_PERIOD_S, timeoutSeconds=3, failureThreshold=2
        ),
        "livenessProbe": common.http_probe(
            LIVE_PATH, health, periodSeconds=LIVE_PERIOD_S, timeoutSeconds=5, failureThreshold=6
        ),
        "volumeMounts": [*common.mounts(pods, options), *_own_mounts(node, pods)],
    }


def _arguments(node: NodeConfig, health: int, pods: PodConfig, names: Names) -> list[str]:
    """SIGTERM makes the agent drain, so that no hook has to."""
    name = node.name if pods.is_one_pod else f"{node.pool}-$(POD_INDEX)"
    arguments = ["node", name, at.CLUSTER_FILE, "--host", "$(POD_IP)"]
    if pods.config.security.tls is not None:
        service = names.of(ALL_NODES if pods.is_one_pod else node.pool)
        host = f"$(POD_NAME).{names.service_host(service)}"
        arguments += ["--advertise-host", host]
    if node.cpus is not None:
        arguments += ["--cpus", str(len(node.cpus))]
    if not pods.is_one_pod:
        arguments.append("--own-address")
    return [*arguments, "--health-port", str(health)]


def _resources(node: NodeConfig, pods: PodConfig, options: Options) -> Manifest:
    """Requests equal limits: the kernel never has to choose whom it ends, and where the kubelet's
    CPU manager is `static` the CPUs are the node's own.
    """
    config = pods.config
    memory = at.mebibytes(node_bytes(config, node, weights_of(config, node.pool, options)))
    amounts: Manifest = {"memory": memory}
    if node.cpus is not None:
        amounts["cpu"] = str(len(node.cpus))
    elif config.engine == "mock":
        amounts["cpu"] = MOCK_CPU
    else:
        amounts["cpu"] = str(2 * len(node.gpus or ()))
    if node.gpus is not None:
        amounts[GPU] = str(len(node.gpus))
    if options.rdma is not None:
        resource, count = options.rdma
        amounts[resource] = str(count)
    return {"requests": amounts, "limits": dict(amounts)}


def _capabilities(pods: PodConfig, options: Options) -> list[str]:
    """`local` copies into other processes; RDMA devices pin the memory that they write to."""
    if pods.is_one_pod:
        return ["SYS_PTRACE"]
    return ["IPC_LOCK"] if options.rdma is not None else []


def _own_volumes(shown: list[NodeConfig], pods: PodConfig, names: Names) -> list[Manifest]:
    size = sum(shm_bytes(pods.config, node) for node in shown)
    shm = {"medium": "Memory", "sizeLimit": at.mebibytes(size)}
    found: list[Manifest] = [{"name": "shm", "emptyDir": shm}]
    if pods.config.cache is not None:
        found.append(cache_volume(names, kind="Directory"))
    return found


def _own_mounts(node: NodeConfig, pods: PodConfig) -> list[Manifest]:
    found: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if pods.config.cache is not None:
        found.append({"name": "cache", "mountPath": at.CACHE_FOLDER})
    return found


def cache_volume(names: Names, *, kind: str) -> Manifest:
    """The host's folder of the cache's socket; a pod with ``Directory`` waits until the cache
    server has made it.
    """
    path = f"{at.CACHE_FOLDER}/{names.namespace}-{names.cluster}"
    return {"name": "cache", "hostPath": {"path": path, "type": kind}}


def _port_name(name: str, node: NodeConfig, pods: PodConfig) -> str:
    """Unique in its pod, of at most 15 characters."""
    return f"{name}-{node.pool[0]}{node.index}" if pods.is_one_pod else name
