"""Objects of the Prometheus Operator: what is scraped, and the alert rules that come with
splitserve.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

import yaml

from splitserve.orchestrator.config import nodes
from splitserve.orchestrator.launch.kubernetes import options as at
from splitserve.orchestrator.launch.kubernetes.policies import node_components
from splitserve.orchestrator.launch.kubernetes.router_pods import AGENTS

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.kubernetes.options import Manifest, Names
    from splitserve.orchestrator.launch.kubernetes.pod_config import PodConfig

_API = "monitoring.coreos.com/v1"
_POOL = "__meta_kubernetes_pod_label_app_kubernetes_io_component"
_INDEX = "__meta_kubernetes_pod_label_apps_kubernetes_io_pod_index"


def monitoring(pods: PodConfig, names: Names) -> list[Manifest]:
    """A PodMonitor for the router and one for each kind of node, and a PrometheusRule."""
    found = [_monitor("router", names, [_router_endpoint(pods, names)])]
    for component in node_components(pods):
        endpoints = _node_endpoints(component, pods, names)
        found.append(_monitor(component, names, endpoints))
    rules = resources.files("splitserve.configs") / "observability" / "alerts.yaml"
    rule: Manifest = {
        "apiVersion": _API,
        "kind": "PrometheusRule",
        "metadata": names.metadata(names.cluster),
        "spec": yaml.safe_load(rules.read_text()),
    }
    return [*found, rule]


def _monitor(component: str, names: Names, endpoints: list[Manifest]) -> Manifest:
    return {
        "apiVersion": _API,
        "kind": "PodMonitor",
        "metadata": names.metadata(names.of(component), component),
        "spec": {
            "selector": {"matchLabels": names.labels(component)},
            "podMetricsEndpoints": endpoints,
        },
    }


def _router_endpoint(pods: PodConfig, names: Names) -> Manifest:
    """Its metrics name nodes and endpoints themselves: these labels are kept."""
    relabelings = [_label("component", "router")]
    host = names.service_host(names.of(AGENTS))
    return _endpoint(at.PORT_NAME, relabelings, pods, names, host) | {"honorLabels": True}


def _node_endpoints(component: str, pods: PodConfig, names: Names) -> list[Manifest]:
    """The labels that the router's ``/internal/http_sd`` gives, as far as Kubernetes knows them:
    ``role`` is the pool, also while a node has the other role.
    """
    if pods.is_one_pod:
        host = f"{names.of(component)}-0.{names.service_host(names.of(component))}"
        return [
            _endpoint(
                f"http-{node.pool[0]}{node.index}",
                [
                    _label("component", "engine"),
                    _label("role", node.pool),
                    _label("pool", node.pool),
                    _label("node", node.name),
                ],
                pods,
                names,
                host,
            )
            for node in nodes(pods.config)
        ]
    name = {"sourceLabels": [_POOL, _INDEX], "separator": "-", "targetLabel": "node"}
    relabelings = [
        _label("component", "engine"),
        _label("role", component),
        _label("pool", component),
        name,
    ]
    host = f"{names.of(component)}-0.{names.service_host(names.of(component))}"
    return [_endpoint(at.PORT_NAME, relabelings, pods, names, host)]


def _label(name: str, value: str) -> Manifest:
    return {"targetLabel": name, "replacement": value}


def _endpoint(
    port: str, relabelings: list[Manifest], pods: PodConfig, names: Names, host: str
) -> Manifest:
    """``host`` is a name that the certificate has."""
    endpoint: Manifest = {"port": port, "path": "/metrics", "interval": "15s"}
    tls = pods.config.security.tls
    if tls is not None:
        secret = names.of("tls")
        settings: Manifest = {
            "ca": {"secret": {"name": secret, "key": "ca.crt"}},
            "serverName": host,
        }
        if tls.client_ca_file is not None:
            settings |= {
                "cert": {"secret": {"name": secret, "key": "tls.crt"}},
                "keySecret": {"name": secret, "key": "tls.key"},
            }
        endpoint |= {"scheme": "https", "tlsConfig": settings}
    return endpoint | {"relabelings": relabelings}
