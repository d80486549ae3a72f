"""The cluster YAML as pods read it: addresses, ports and files of pods instead of those of the
machine on which it was written, and names of Secrets instead of where secrets lie there.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from splitserve.kv_transfer.cache.codecs.names import RAW
from splitserve.orchestrator.config import ConfigError, parse
from splitserve.orchestrator.config.checks import port_overlaps
from splitserve.orchestrator.config.credentials import SECRET_NAMES
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.launch.checks.cache import arena_bytes
from splitserve.orchestrator.launch.kubernetes import options as at
from splitserve.orchestrator.launch.kubernetes.router_pods import AGENTS, router_hosts
from splitserve.orchestrator.launch.quality_record import (
    held_quality,
    record_text,
    require_quality,
)

if TYPE_CHECKING:
    from splitserve.orchestrator.config import CacheConfig, ClusterConfig
    from splitserve.orchestrator.launch.kubernetes.options import Manifest, Names

HTTP_PORT, CONTROL_PORT, DATA_PORT = 10_001, 12_001, 16_001
"""First ports of prefill nodes where the YAML leaves them open: room for a thousand nodes, since
processes of all pods check the whole YAML. In pods of one node each, it takes the first.
"""
POOL_PORTS = 10_000
"""By which those of decode nodes are higher."""
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SECRET_KEY = re.compile(r"[A-Za-z0-9._-]{1,253}")
_TRACING_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"


@dataclass(frozen=True)
class PodConfig:
    """A cluster as its pods see it."""

    config: ClusterConfig
    """Of router and nodes."""
    text: str
    cache_text: str
    """The YAML of the cache server, which alone knows the tiers below memory; "" without a
    cache.
    """
    stable_text: str
    """What a change of starts pods anew: all but the number of nodes."""
    router_env: tuple[Manifest, ...]
    node_env: dict[str, tuple[Manifest, ...]]
    """By pool."""
    cache_env: tuple[Manifest, ...]
    key_files: tuple[str, ...]
    """Keys of the Secret of API keys that the router reads as files."""
    disk_paths: dict[str, str] = field(default_factory=dict)
    """Mount path to the host's folder ("" for none) of each disk tier."""
    profile: str = ""
    """Content of the profile by which roles are decided."""
    quality: str = ""
    """The record by which pods know that lossy codecs keep ``cache.quality``."""

    @property
    def is_one_pod(self) -> bool:
        """Whether all nodes share a pod, since their transport copies between its processes."""
        return self.config.prefill.transfer.transport == "local"


def pod_config(config: ClusterConfig, names: Names) -> PodConfig:
    """Raises ``ConfigError`` for what pods cannot have."""
    if config.launcher != "local":
        raise ConfigError(
            [
                "launcher: Kubernetes places the nodes itself; remove `launcher`, `ray` and "
                "`placement`, and say what a node gets with `cpus` or `gpus`"
            ]
        )
    data: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    data["name"] = config.name
    router = data.setdefault("router", {})
    for key in ("host", "advertise_host", "hosts"):
        router.pop(key, None)
    if config.router.replicas > 1:
        hosts = router_hosts(names, config.router.replicas)
        router |= {"port": config.router.port, "hosts": hosts}
    else:
        host = names.service_host(names.of(AGENTS))
        router |= {"host": "0.0.0.0", "port": config.router.port, "advertise_host": host}
    node_env = {pool: _pool(pool, config, data, names) for pool in POOLS}
    data["allow_shared_devices"] = True
    data.setdefault("observability", {}).pop("log_dir", None)
    router_env, key_files = _security(config, data, names)
    profile = _profile(config, data)
    cache_text, disks = "", dict[str, str]()
    cache_env: tuple[Manifest, ...] = ()
    if config.cache is not None:
        cache_text, cache_env, disks = _cache(config, config.cache, data, names)
    tracing: tuple[Manifest, ...] = ()
    if config.observability.tracing is not None:
        tracing = (secret_env(names.of("tracing"), _TRACING_HEADERS, optional=True),)
    text = _yaml(data)
    seen = parse(text, "the YAML of the pods")
    if problems := port_overlaps(seen):
        raise ConfigError(problems)
    return PodConfig(
        config=seen,
        text=text,
        cache_text=cache_text,
        stable_text=_yaml(_without_counts(data)),
        router_env=(*router_env, *tracing),
        node_env={pool: (*env, *tracing) for pool, env in node_env.items()},
        cache_env=cache_env,
        key_files=key_files,
        disk_paths=disks,
        profile=profile,
        quality=record_text(config),
    )


def secret_env(secret: str, key: str, *, optional: bool = False) -> Manifest:
    """The variable ``key`` from the Secret."""
    reference: Manifest = {"name": secret, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": key, "valueFrom": {"secretKeyRef": reference}}


def _pool(
    pool: str, config: ClusterConfig, data: dict[str, Any], names: Names
) -> tuple[Manifest, ...]:
    """The pool's section is rewritten; returns variables of its containers."""
    settings = config.pool(pool)
    section = data.setdefault(pool, {})
    for key in ("host", "advertise_host", "cpus", "gpus"):
        section.pop(key, None)
    for key, lists in (("cpus", settings.cpus), ("gpus", settings.gpus)):
        if lists is not None:
            section[key] = [list(range(len(numbers))) for numbers in lists]
    shift = POOL_PORTS if pool == "decode" else 0
    section["port_base"] = settings.port_base or HTTP_PORT + shift
    transfer = section.setdefault("transfer", {})
    transfer.pop("host", None)
    transfer["port_base"] = settings.transfer.port_base or CONTROL_PORT + shift
    if settings.transfer.transport in ("tcp", "local"):
        transfer["data_port_base"] = settings.transfer.data_port_base or DATA_PORT + shift
    secret = [name for name in settings.env if SECRET_NAMES.search(name)]
    if secret:
        section["env"] = {k: v for k, v in settings.env.items() if k not in secret}
    return tuple(secret_env(names.of(f"{pool}-env"), name) for name in secret)


def _security(
    config: ClusterConfig, data: dict[str, Any], names: Names
) -> tuple[tuple[Manifest, ...], tuple[str, ...]]:
    """(variables of the router with keys, keys that it reads as files)."""
    security = data.setdefault("security", {})
    security["secret_file"] = f"{at.SECRET_FOLDER}/{at.CLUSTER_SECRET}"
    if config.security.tls is not None:
        files = {"cert_file": "tls.crt", "key_file": "tls.key", "ca_file": "ca.crt"}
        if config.security.tls.client_ca_file is not None:
            files["client_ca_file"] = at.CLIENT_CA
        security["tls"] = {key: f"{at.TLS_FOLDER}/{file}" for key, file in files.items()}
    env, files_of_keys = [], list[str]()
    for entry, key in zip(config.security.api_keys, security.get("api_keys", []), strict=True):
        if entry.key_env is not None:
            env.append(secret_env(names.of("api-keys"), entry.key_env))
        else:
            files_of_keys.append(Path(str(entry.key_file)).name)
            key["key_file"] = f"{at.KEYS_FOLDER}/{files_of_keys[-1]}"
    odd = [name for name in files_of_keys if not _SECRET_KEY.fullmatch(name)]
    if odd:
        raise ConfigError(
            [
                f"security.api_keys: {odd[0]!r} cannot be the key of a Secret; name the file with "
                "letters, digits, -, _ and ."
            ]
        )
    twice = [name for name, times in Counter(files_of_keys).items() if times > 1]
    if twice:
        raise ConfigError(
            [
                f"security.api_keys: two files are called {twice[0]}, which is the key of the "
                f"Secret {names.of('api-keys')}; give each file its own name"
            ]
        )
    return tuple(env), tuple(files_of_keys)


def _profile(config: ClusterConfig, data: dict[str, Any]) -> str:
    autotune = config.policy.autotune
    if autotune.mode == "off":
        return ""
    if autotune.profile is None:
        raise ConfigError(
            [
                "policy.autotune.profile: pods have no profile of an earlier run; name the file, "
                "or set policy.autotune.mode: off"
            ]
        )
    try:
        text = Path(autotune.profile).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [f"policy.autotune.profile: {autotune.profile} cannot be read: {error}; correct it"]
        ) from error
    data["policy"]["autotune"]["profile"] = at.PROFILE_FILE
    return text


def _cache(
    config: ClusterConfig, cache: CacheConfig, data: dict[str, Any], names: Names
) -> tuple[str, tuple[Manifest, ...], dict[str, str]]:
    """(YAML of the cache server, variables for it, folders of disk tiers). Router and nodes are
    left with what they need to know: the socket, the memory that engines map, and what chunks may
    have lost, which is part of their keys.
    """
    section: dict[str, Any] = data["cache"]
    section["socket_path"] = f"{at.CACHE_FOLDER}/cache.sock"
    disks: dict[str, str] = {}
    for index, tier in enumerate(cache.tiers):
        if tier.type == "disk":
            mount = f"{STATE_OF_TIERS}-{index}"
            disks[mount] = tier.path or ""
            section["tiers"][index]["path"] = mount
    if cache.secret_file is not None:
        section["secret_file"] = f"{at.SECRET_FOLDER}/{at.CACHE_SECRET}"
    require_quality(config)
    if held_quality(config) is not None:
        section["quality"]["record"] = at.QUALITY_FILE
    variables = dict.fromkeys(_VARIABLE.findall(_yaml(section["tiers"])))
    env = tuple(secret_env(names.of("cache-credentials"), name) for name in variables)
    whole = _yaml(data)
    data["cache"] = {key: value for key, value in section.items() if key not in _SERVER_ONLY}
    data["cache"]["tiers"] = [{"type": "cpu", "capacity_bytes": arena_bytes(cache)}]
    if cache.key_codec != RAW:
        data["cache"]["lossy_codec"] = cache.key_codec
    return whole, env, disks


STATE_OF_TIERS = "/var/lib/splitserve-tier"
"""Beginning of the folders of disk tiers."""
_SERVER_ONLY = ("quotas", "encrypt", "secret_file")


def _without_counts(data: dict[str, Any]) -> dict[str, Any]:
    """The same for every number of nodes."""
    found = dict(data)
    for pool in POOLS:
        section = {key: value for key, value in data[pool].items() if key != "replicas"}
        for key in ("cpus", "gpus"):
            if key in section:
                section[key] = section[key][0]
        found[pool] = section
    return found


def _yaml(data: object) -> str:
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
