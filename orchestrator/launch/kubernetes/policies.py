"""What bounds the pods: their account, who may reach them, how many may leave at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.launch.kubernetes import options as at
from splitserve.orchestrator.launch.kubernetes.node_pods import ALL_NODES, http_ports

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.kubernetes.options import Manifest, Names, Options
    from splitserve.orchestrator.launch.kubernetes.pod_config import PodConfig


def node_components(pods: PodConfig) -> list[str]:
    """Components whose pods run nodes."""
    return [ALL_NODES] if pods.is_one_pod else ["prefill", "decode"]


def policies(pods: PodConfig, names: Names, options: Options) -> list[Manifest]:
    """ServiceAccount, PodDisruptionBudgets and NetworkPolicies."""
    components = node_components(pods)
    found: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": names.metadata(names.cluster),
            "automountServiceAccountToken": False,
        }
    ]
    found += [_budget(component, names) for component in ("router", *components)]
    found.append(_policy("router", names, [{"ports": [_port(at.PORT_NAME)]}]))
    for component in components:
        ingress: list[Manifest] = [
            {"from": [{"podSelector": {"matchLabels": names.labels()}}]},
        ]
        if options.has_monitoring:
            label = {"kubernetes.io/metadata.name": options.monitoring_namespace}
            ports = [_port(number) for number in http_ports(pods, component)]
            ingress.append(
                {"from": [{"namespaceSelector": {"matchLabels": label}}], "ports": ports}
            )
        found.append(_policy(component, names, ingress))
    if pods.cache_text:
        found.append(_policy("cache", names, []))
    return found


def _budget(component: str, names: Names) -> Manifest:
    """Hosts are emptied one pod of a kind at a time; it drains before it ends."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": names.metadata(names.of(component), component),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": names.labels(component)}},
    }


def _policy(component: str, names: Names, ingress: list[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": names.metadata(names.of(component), component),
        "spec": {
            "podSelector": {"matchLabels": names.labels(component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _port(port: int | str) -> Manifest:
    return {"port": port, "protocol": "TCP"}
