"""Rendered manifests against Kubernetes' own schemas, and against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kubernetes_validate
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

KUBERNETES_VERSIONS = ("1.30", "1.37")
"""The oldest and the newest whose schemas are looked at."""
OPERATOR_API = "monitoring.coreos.com/v1"
ENDPOINT_KEYS = frozenset(
    {"port", "path", "interval", "scheme", "tlsConfig", "relabelings", "honorLabels"}
)
"""Of a PodMonitor's endpoint, in the API of the Prometheus Operator: no package carries its
schema."""


def problems(manifests: list[dict[str, Any]]) -> list[str]:
    """What Kubernetes would refuse or not find."""
    found = []
    for manifest in manifests:
        where = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["apiVersion"] == OPERATOR_API:
            found += [f"{where}: {problem}" for problem in _operator_problems(manifest)]
            continue
        for version in KUBERNETES_VERSIONS:
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                found.append(f"{where} ({version}): {error.message}")
    return [*found, *_dangling(manifests)]


def pod_specs(manifests: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, spec) of every pod template."""
    for manifest in manifests:
        if "template" in manifest.get("spec", {}):
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """All of a pod, those that come first too."""
    return [*spec.get("initContainers", []), *spec["containers"]]


def cluster_yaml(manifests: list[dict[str, Any]], file: str = "cluster.yaml") -> str:
    """What pods read."""
    text: str = next(m for m in manifests if m["kind"] == "ConfigMap")["data"][file]
    return text


def _operator_problems(manifest: dict[str, Any]) -> Iterator[str]:
    spec = manifest["spec"]
    if manifest["kind"] == "PrometheusRule":
        for group in spec["groups"]:
            for rule in group["rules"]:
                if not {"alert", "expr"} <= rule.keys():
                    yield f"{rule}: no rule"
        return
    if not spec["selector"]["matchLabels"]:
        yield "selects nothing"
    for endpoint in spec["podMetricsEndpoints"]:
        if unknown := endpoint.keys() - ENDPOINT_KEYS:
            yield f"unknown {unknown}"
        for relabeling in endpoint["relabelings"]:
            if unknown := relabeling.keys() - {
                "sourceLabels",
                "separator",
                "targetLabel",
                "replacement",
            }:
                yield f"unknown {unknown}"


def _dangling(manifests: list[dict[str, Any]]) -> Iterator[str]:
    """Names that lead nowhere: volumes, ports, selectors, doubled objects."""
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    yield from (f"{name} is there twice" for name in set(names) if names.count(name) > 1)
    pods = [
        (m["spec"]["template"]["metadata"]["labels"], m["spec"]["template"]["spec"])
        for m in manifests
        if "template" in m.get("spec", {})
    ]
    for name, spec in pod_specs(manifests):
        volumes = {volume["name"] for volume in spec["volumes"]}
        ports = [port["name"] for c in spec["containers"] for port in c.get("ports", [])]
        if len(set(ports)) < len(ports) or any(len(port) > 15 for port in ports):
            yield f"{name}: port names {ports}"
        for container in containers(spec):
            mounted = [mount["name"] for mount in container["volumeMounts"]]
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            if unknown := set(mounted) - volumes:
                yield f"{name}: no volumes {unknown}"
            if len(set(paths)) < len(paths):
                yield f"{name}: mounted twice: {paths}"
    for kind, wanted, port in _references(manifests):
        chosen = [spec for labels, spec in pods if wanted.items() <= labels.items()]
        if not chosen:
            yield f"{kind} selects no pod: {wanted}"
        elif port and not any(
            port in (p["name"], p["containerPort"])
            for spec in chosen
            for c in spec["containers"]
            for p in c.get("ports", [])
        ):
            yield f"{kind}: no port {port}"


def _references(
    manifests: list[dict[str, Any]],
) -> Iterator[tuple[str, dict[str, str], str | int]]:
    """(object, labels that it selects, port that it wants of them)."""
    for manifest in manifests:
        where, spec = f"{manifest['kind']}/{manifest['metadata']['name']}", manifest.get("spec", {})
        match manifest["kind"]:
            case "Service":
                for port in spec.get("ports", [{"targetPort": ""}]):
                    yield where, spec["selector"], port["targetPort"]
            case "PodMonitor":
                for endpoint in spec["podMetricsEndpoints"]:
                    yield where, spec["selector"]["matchLabels"], endpoint["port"]
            case "NetworkPolicy":
                wanted = spec["podSelector"]["matchLabels"]
                yield where, wanted, ""
                for rule in spec["ingress"]:
                    for port in rule.get("ports", []):
                        yield where, wanted, port["port"]
            case "PodDisruptionBudget" | "StatefulSet" | "Deployment" | "DaemonSet":
                yield where, spec["selector"]["matchLabels"], ""


def read_all(text: str) -> list[dict[str, Any]]:
    """The documents of a YAML stream."""
    return list(yaml.safe_load_all(text))
