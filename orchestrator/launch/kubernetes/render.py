"""From a cluster and options to files of manifests."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import yaml

from splitserve.orchestrator.config import ConfigError
from splitserve.orchestrator.config.checks import is_loopback
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.engines.versions import own_version
from splitserve.orchestrator.launch.kubernetes.cache_pods import cache_server
from splitserve.orchestrator.launch.kubernetes.monitoring import monitoring
from splitserve.orchestrator.launch.kubernetes.node_pods import node_sets
from splitserve.orchestrator.launch.kubernetes.options import Names
from splitserve.orchestrator.launch.kubernetes.pod_config import pod_config
from splitserve.orchestrator.launch.kubernetes.policies import policies
from splitserve.orchestrator.launch.kubernetes.router_pods import router

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.config import ClusterConfig, PoolConfig
    from splitserve.orchestrator.launch.kubernetes.options import Manifest, Options
    from splitserve.orchestrator.launch.kubernetes.pod_config import PodConfig

NAME_LIMIT_CHARACTERS = 40
"""Kubernetes appends to the names of StatefulSets, and allows 63 in labels."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_CONFIG_LIMIT_BYTES = 2**20
"""Of a ConfigMap, which Kubernetes keeps in etcd."""


def render(config: ClusterConfig, options: Options) -> dict[str, list[Manifest]]:
    """Manifests by file name without ending, in the order in which they are applied. Raises
    ``ConfigError`` with everything that pods cannot do.
    """
    if problems := list(_problems(config, options)):
        raise ConfigError(problems)
    if not options.image:
        options = replace(options, image=default_image(config))
    names = Names(config.name, options.namespace)
    pods = pod_config(config, names)
    files = {
        "config": [_config_map(pods, names)],
        "policies": policies(pods, names, options),
        "router": router(pods, names, options),
    }
    if config.cache is not None:
        files["cache"] = cache_server(config.cache, pods, names, options)
    files |= node_sets(pods, names, options)
    if options.has_monitoring:
        files["monitoring"] = monitoring(pods, names)
    return files


def to_yaml(manifests: list[Manifest]) -> str:
    """One YAML stream."""
    return yaml.dump_all(
        manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True, allow_unicode=True
    )


def default_image(config: ClusterConfig) -> str:
    """What the Dockerfiles are built as, in the words of ``docs/kubernetes.md``."""
    build = "cuda" if any(config.pool(pool).gpus is not None for pool in POOLS) else "cpu"
    return f"splitserve:{own_version()}-{build}"


def _config_map(pods: PodConfig, names: Names) -> Manifest:
    data = {"cluster.yaml": pods.text}
    if pods.cache_text:
        data["cache-server.yaml"] = pods.cache_text
    if pods.profile:
        data["profile.json"] = pods.profile
    if pods.quality:
        data["quality.json"] = pods.quality
    if sum(len(text.encode()) for text in data.values()) > _CONFIG_LIMIT_BYTES:
        raise ConfigError(["the cluster YAML and its profile are larger than a ConfigMap may be"])
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.metadata(names.of("cluster")),
        "data": data,
    }


def _problems(config: ClusterConfig, options: Options) -> Iterator[str]:
    """A sentence for each thing that is in the way."""
    if not _NAME.fullmatch(config.name) or len(config.name) > NAME_LIMIT_CHARACTERS:
        yield (
            f"name: {config.name!r} is no name for Kubernetes; use at most "
            f"{NAME_LIMIT_CHARACTERS} lower-case letters, digits and -, a letter first"
        )
    if not _NAMESPACE.fullmatch(options.namespace):
        yield f"--namespace: {options.namespace!r} is none; use lower-case letters, digits and -"
    if not config.security.api_keys:
        yield (
            "security.api_keys: every pod of the Kubernetes cluster reaches the router; add a key"
        )
    if config.router.port == 0:
        yield "router.port: 0 takes a free port, which a Service cannot know; give one"
    for pool in POOLS:
        yield from _pool_problems(pool, config.pool(pool))
    transport = config.prefill.transfer.transport
    if options.rdma is not None and transport not in ("nixl", "ucx"):
        yield f"--rdma: the transport {transport} uses no RDMA; leave it out, or use nixl"
    yield from _model_problems(config, options)
    if config.cache is not None and not options.node_selector:
        yield (
            "cache: its server takes memory on every host of the Kubernetes cluster; name the "
            "hosts for it and the nodes: --node-selector KEY=VALUE"
        )
    yield from _disk_problems(config)
    yield from _loopback_problems(config)


def _pool_problems(pool: str, settings: PoolConfig) -> Iterator[str]:
    if settings.hosts is not None:
        yield f"{pool}.hosts: Kubernetes places nodes and gives them addresses; leave it out"
    for key, lists in (("cpus", settings.cpus), ("gpus", settings.gpus)):
        if lists is not None and len({len(numbers) for numbers in lists}) > 1:
            yield (
                f"{pool}.{key}: pods of one StatefulSet are alike; give each replica the same "
                "number of them"
            )


def _model_problems(config: ClusterConfig, options: Options) -> Iterator[str]:
    given = [f for f, v in (("--model-claim", options.model_claim),
                            ("--model-host-path", options.model_host_path)) if v]  # fmt: skip
    if len(given) > 1:
        yield "--model-claim and --model-host-path: give one of them"
    path = config.model.path
    if config.engine == "mock":
        if given:
            yield f"{given[0]}: the mock engine has no model; leave it out"
        return
    if path.startswith("/"):
        if not given:
            yield (
                f"model.path: {path} is a folder that pods do not have; give the volume to mount "
                "there: --model-claim NAME or --model-host-path FOLDER"
            )
        return
    if given:
        yield f"model.path: {path} is no absolute folder, where {given[0]} could be mounted"
    elif "/" not in path or path.startswith((".", "~")):
        yield (
            f"model.path: {path} is found on this machine only; give the absolute folder that it "
            "shall have in pods, or a Hub id (owner/name)"
        )


def _disk_problems(config: ClusterConfig) -> Iterator[str]:
    for index, tier in enumerate(config.cache.tiers if config.cache is not None else ()):
        if tier.path is not None and not tier.path.startswith("/"):
            yield (
                f"cache.tiers[{index}].path: {tier.path} is a folder of the host; give it from "
                "the root on"
            )


def _loopback_problems(config: ClusterConfig) -> Iterator[str]:
    """URLs that lead to the pod itself."""
    urls = {}
    if config.observability.tracing is not None:
        urls["observability.tracing.otlp_endpoint"] = config.observability.tracing.otlp_endpoint
    for index, tier in enumerate(config.cache.tiers if config.cache is not None else ()):
        urls[f"cache.tiers[{index}].url"] = tier.url or ""
        urls[f"cache.tiers[{index}].options.endpoint"] = tier.options.get("endpoint", "")
    for key, url in urls.items():
        host = urlsplit(url).hostname or ""
        if is_loopback(host):
            yield f"{key}: {host} is the pod itself; name the Service or the host of it"


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, nothing by reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
