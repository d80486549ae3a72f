"""What an engine is started with. Each engine has a pure function from configuration to command; it
is chosen by name here.

Secrets are not part of a command: they travel by environment (``secret_environment``), so a command
can be printed and logged.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from ssl import CERT_REQUIRED
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.kv_transfer.cache.settings import CacheClientConfig
from splitserve.kv_transfer.channel import SECRET_FILE_ENV
from splitserve.orchestrator.config import nodes
from splitserve.orchestrator.config.checks import is_loopback

if TYPE_CHECKING:
    from splitserve.orchestrator.config import CacheConfig, ClusterConfig, NodeConfig

API_KEY_ENV = "VLLM_API_KEY"
"""Environment variable with the key that the engine asks for, for every engine."""

_BUILDERS = {
    "vllm": "splitserve.orchestrator.engines.vllm.launch_arguments",
    "transformers": "splitserve.orchestrator.engines.transformers.launch_arguments",
    "mock": "splitserve.orchestrator.engines.mock.launch_arguments",
}


@dataclass(frozen=True)
class EngineCommand:
    """A process to start: arguments, and environment variables to add. Holds no secret."""

    argv: tuple[str, ...]
    env: dict[str, str]
    warm_up: dict[str, Any] | None = None
    """A completion to ask for before the node takes part, so that what the engine compiles in its
    first steps keeps no client waiting; None when it compiles nothing.
    """


def engine_command(
    config: ClusterConfig, node: NodeConfig, model: str, incarnation: str
) -> EngineCommand:
    """The command of a node's engine. ``model`` is a folder or Hub id, ``incarnation`` new for
    every start.
    """
    if node.engine not in _BUILDERS:
        raise ValueError(f"unknown engine {node.engine!r}; known: {', '.join(_BUILDERS)}")
    command: EngineCommand = import_module(_BUILDERS[node.engine]).command(
        config, node, model, incarnation
    )
    return command


def expected_fingerprint(config: ClusterConfig, pool: str) -> dict[str, str]:
    """What the pool's engines will say of their KV, as far as the YAML decides it, by key below the
    pool; the real fingerprint comes from a loaded model.
    """
    expected: dict[str, str] = import_module(
        _BUILDERS[config.engine_of(pool)]
    ).expected_fingerprint(config.pool(pool))
    return expected


def secret_environment(secret_path: Path, api_key: str) -> dict[str, str]:
    """Where the engine finds the cluster secret, and its key, which must never be printed."""
    return {SECRET_FILE_ENV: str(secret_path), API_KEY_ENV: api_key}


def transfer_settings(config: ClusterConfig, node: NodeConfig, incarnation: str) -> dict[str, Any]:
    """What the connector reads, as ``kv_connector_extra_config``.

    ``warm_addresses`` are the control addresses of the prefill nodes, to which a decode node
    introduces itself at start; those whose machines find their ports themselves are not known here.
    """
    transfer = node.settings.transfer
    warm = [
        address
        for other in nodes(config)
        if other.pool == "prefill" and node.pool == "decode" and other.control_port_base
        for address in other.control_addresses
    ]
    settings: dict[str, Any] = {
        "transport": transfer.transport,
        "control_host": node.transfer_host,
        "control_port_base": node.control_port_base,
        "advertise_host": node.advertise_host,
        "data_port_base": node.data_port_base,
        "endpoint_port": node.endpoint_port,
        "incarnation": incarnation,
        "lease_s": transfer.lease_s,
        "transfer_deadline_s": transfer.deadline_s,
        "retarget_wait_s": transfer.retarget_wait_s,
        "fence_timeout_s": transfer.fence_timeout_s,
        "quarantine_limit_bytes": transfer.quarantine_limit_bytes,
        "stream_min_bytes": transfer.stream_min_bytes,
        "node": node.name,
        "role": node.pool,
        "warm_addresses": warm,
        "experimental_cuda": config.experimental_cuda,
    }
    if config.cache is not None:
        settings["cache"] = msgspec.to_builtins(_cache_client(config.cache))
    return settings


def _cache_client(cache: CacheConfig) -> CacheClientConfig:
    assert cache.socket_path is not None, "the configuration's paths are filled in by `up`"
    return CacheClientConfig(
        socket_path=cache.socket_path,
        chunk_tokens=cache.chunk_tokens,
        key_codec=cache.key_codec,
        lookup_timeout_s=cache.lookup_timeout_s,
        load_timeout_s=cache.load_timeout_s,
        save_generated=cache.save_generated,
        save_limit_bytes=cache.save_limit_bytes,
    )


def common_arguments(config: ClusterConfig, node: NodeConfig, model: str) -> list[str]:
    """Flags that every engine understands."""
    settings, args = node.settings, node.settings.engine_args
    argv = ["--model", model, "--served-model-name", config.model.name]
    argv += ["--host", node.host, "--port", str(node.http_port)]
    argv += _tls_arguments(config)
    argv += ["--block-size", str(args.block_size)]
    argv += ["--kv-cache-memory-bytes", str(settings.kv_cache_bytes)]
    argv += ["--tensor-parallel-size", str(args.tensor_parallel_size)]
    for flag, value in (
        ("--max-model-len", args.max_model_len),
        ("--max-num-seqs", args.max_num_seqs),
        ("--max-num-batched-tokens", args.max_num_batched_tokens),
    ):
        argv += [flag, str(value)] if value is not None else []
    return argv


def _tls_arguments(config: ClusterConfig) -> list[str]:
    tls = config.security.tls
    if tls is None:
        return []
    files = {"--ssl-certfile": tls.cert_file, "--ssl-keyfile": tls.key_file}
    if tls.client_ca_file is not None:
        files["--ssl-ca-certs"] = tls.client_ca_file
    argv = ["--enable-ssl-refresh"]
    argv += ["--ssl-cert-reqs", str(int(CERT_REQUIRED))] if tls.client_ca_file is not None else []
    for flag, file in files.items():
        argv += [flag, str(Path(file).expanduser())]
    return argv


def passed_on_arguments(node: NodeConfig) -> list[str]:
    """Keys of ``engine_args`` that splitserve does not know, as ``--kebab-case`` flags.

    ``true`` becomes a bare flag and ``false`` its ``--no-`` form; lists repeat the value, mappings
    become JSON, in lists too (``lora_modules: [{name: a, path: /adapters/a}]``).
    """
    argv: list[str] = []
    for key, value in node.settings.engine_args.passed_on.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            argv += [f"--{name}", *(_as_flag_value(item) for item in value)]
        elif isinstance(value, dict):
            argv += [f"--{name}", json.dumps(value)]
        elif value is not None:
            argv += [f"--{name}", str(value)]
    return argv


def _as_flag_value(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def network_environment(node: NodeConfig) -> dict[str, str]:
    """Variables that keep every socket of a node on loopback, unless the YAML opens its transfer
    host.
    """
    env = {
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if is_loopback(node.transfer_host):
        env["UCX_NET_DEVICES"] = "lo"
    return env
