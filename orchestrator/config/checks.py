"""What several keys must agree on. Pure: the machine is not asked (that is
``launch.checks``).
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections import Counter
from typing import TYPE_CHECKING

from splitserve.orchestrator.config.autotune_checks import autotune_problems
from splitserve.orchestrator.config.cache_checks import cache_problems
from splitserve.orchestrator.config.nodes import POOLS, nodes, router_hosts, router_ports
from splitserve.orchestrator.config.ray_checks import ray_problems
from splitserve.orchestrator.config.tracing_schema import tracing_problems

if TYPE_CHECKING:
    from splitserve.orchestrator.config.schema import ClusterConfig, PoolConfig

EQUAL_IN_BOTH_POOLS = ("block_size", "dtype", "kv_cache_dtype")
SHAPES_PROMPTS = (
    "chat_template",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "exclude_tools_when_tool_choice_none",
    "tokenizer",
    "tokenizer_mode",
    "tokenizer_revision",
)
"""Flags of vLLM that make tokens of a request; with other ones a node would make another prompt."""
OWNED_ENGINE_ARGS = {
    "model": "set `model.path`",
    "served_model_name": "set `model.served_name`",
    "host": "set `prefill.host` or `decode.host`",
    "port": "set `prefill.port_base` or `decode.port_base`",
    "api_key": (
        "the engines get a random key that only the router knows; clients' keys are "
        "`security.api_keys`"
    ),
    "kv_transfer_config": "splitserve's connector is set by `transfer`",
    "kv_cache_memory_bytes": "set `kv_cache_bytes`",
    "gpu_memory_utilization": "set `kv_cache_bytes`",
    "num_gpu_blocks_override": "set `kv_cache_bytes`",
    "data_parallel_size": "data-parallel engines are not supported; use `replicas`",
    "pipeline_parallel_size": (
        "pipeline-parallel engines are not supported yet; use `tensor_parallel_size`"
    ),
    "distributed_executor_backend": "splitserve starts and watches the engine's processes itself",
    "config": "write the engine's options under `engine_args`",
    "speculative_config": "speculative decoding cannot be combined with a split yet",
    "otlp_traces_endpoint": "set `observability.tracing.otlp_endpoint`",
    "uds": "the router reaches engines over TCP",
    "ssl_keyfile": "set `security.tls.key_file`",
    "ssl_certfile": "set `security.tls.cert_file`",
    "ssl_ca_certs": "set `security.tls.client_ca_file`",
    "ssl_cert_reqs": "set `security.tls.client_ca_file`",
    "enable_ssl_refresh": "the engines read `security.tls.cert_file` again when it changes",
}
"""Flags that splitserve sets itself, and what to write instead."""
SECRET_FLAG = re.compile(r"(^|(?<!_per_prompt)_)(token|secret|password|credentials?|api_key)$")
TYPING_ERROR_RATIO = 0.9
"""An engine flag that is so similar to a key of ours is taken for a misspelt one."""


def problems_between_keys(config: ClusterConfig) -> list[str]:
    """One sentence per contradiction, each naming both keys and what to change."""
    problems = pool_differences(config)
    for pool in POOLS:
        problems += _pool_problems(pool, config.pool(pool), config)
    if not config.allow_shared_devices:
        problems += shared_devices(config, "cpus") + shared_devices(config, "gpus")
    problems += port_overlaps(config) + _weight_differences(config) + cache_problems(config)
    problems += [*autotune_problems(config), *ray_problems(config)]
    problems += tracing_problems(config.observability.tracing)
    breaker = config.policy.breaker
    if breaker.open_limit_s < breaker.open_s:
        problems.append(
            f"policy.breaker.open_limit_s is {breaker.open_limit_s:g} but policy.breaker.open_s is"
            f" {breaker.open_s:g}: the longest delay cannot be shorter than the first"
        )
    problems += _router_problems(config)
    return problems


def _router_problems(config: ClusterConfig) -> list[str]:
    router = config.router
    problems = []
    key = "router.hosts" if router.hosts is not None else "router.host"
    open_hosts = [host for host in router_hosts(config) if not is_loopback(host)]
    if open_hosts and not config.security.api_keys:
        problems.append(
            f"{key}: {open_hosts[0]} serves the network without any key; add "
            "security.api_keys or use 127.0.0.1"
        )
    if router.hosts is None:
        return problems
    if len(router.hosts) != router.replicas:
        problems.append(
            f"router.hosts: {_counted(len(router.hosts), 'host')} for "
            f"{_counted(router.replicas, 'replica')}; give one per "
            "replica"
        )
    plain = type(router)()
    for name in ("host", "advertise_host"):
        if getattr(router, name) != getattr(plain, name):
            problems.append(
                f"router.{name}: router.hosts says where each router listens and is found; leave "
                "one of them out"
            )
    return problems


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def pool_differences(config: ClusterConfig) -> list[str]:
    """What has to be equal in both pools and is not."""
    problems = []
    for key in EQUAL_IN_BOTH_POOLS:
        ours, theirs = (getattr(config.pool(pool).engine_args, key) for pool in POOLS)
        if ours != theirs:
            problems.append(
                f"prefill.engine_args.{key} is {ours} but decode.engine_args.{key} is {theirs}: "
                "KV pages would not fit; give both pools the same value"
            )
    prefill, decode = (
        {key.replace("-", "_"): value for key, value in args.passed_on.items()}
        for args in (config.pool(pool).engine_args for pool in POOLS)
    )
    for key in SHAPES_PROMPTS:
        if prefill.get(key) != decode.get(key):
            problems.append(
                f"prefill.engine_args.{key} is {prefill.get(key)} but decode.engine_args.{key} is "
                f"{decode.get(key)}: the two would make different prompts of one request; give "
                "both pools the same value"
            )
    ours, theirs = config.prefill.transfer.transport, config.decode.transfer.transport
    if ours != theirs:
        problems.append(
            f"prefill.transfer.transport is {ours} but decode.transfer.transport is {theirs}: "
            "both ends must speak the same; give both pools the same value"
        )
    return problems


def _weight_differences(config: ClusterConfig) -> list[str]:
    weights: dict[str, float] = {}
    problems = []
    for index, key in enumerate(config.security.api_keys):
        first = weights.setdefault(key.tenant, key.weight)
        if key.weight != first:
            problems.append(
                f"security.api_keys[{index}].weight is {key.weight:g}, but an earlier key of tenant"
                f" {key.tenant!r} has {first:g}: give all keys of a tenant the same weight"
            )
    return problems


def _pool_problems(pool: str, settings: PoolConfig, config: ClusterConfig) -> list[str]:
    problems = []
    ranks = settings.engine_args.tensor_parallel_size
    for key, lists in (("cpus", settings.cpus), ("gpus", settings.gpus)):
        if lists is None:
            continue
        if len(lists) != settings.replicas:
            problems.append(
                f"{pool}.{key}: {_counted(len(lists), 'list')} for "
                f"{_counted(settings.replicas, 'replica')}; give one "
                "list per replica"
            )
        for index, numbers in enumerate(lists):
            if len(set(numbers)) != len(numbers) or not numbers:
                problems.append(
                    f"{pool}.{key}[{index}]: give at least one number, each once (got {numbers})"
                )
            elif len(numbers) % ranks:
                problems.append(
                    f"{pool}.{key}[{index}]: {len(numbers)} do not split over "
                    f"tensor_parallel_size {ranks}; "
                    f"give a multiple of {ranks}"
                )
    problems += _host_problems(pool, settings)
    problems += _engine_problems(pool, settings, config)
    has_gpus = settings.gpus is not None or bool(settings.placement and settings.placement.num_gpus)
    if settings.gpus is not None and not config.experimental_cuda:
        problems.append(
            f"{pool}.gpus: CUDA nodes have not been shown to give equal answers yet; "
            "use `cpus`, or set `experimental_cuda: true` to accept that"
        )
    if has_gpus and config.cache is not None:
        problems.append(
            f"{pool}.gpus: the shared cache copies pages of CPU engines only so far; remove `cache`"
            f" or give {pool}.cpus"
        )
    engine = config.engine_of(pool)
    says_devices = settings.cpus is not None or settings.gpus is not None
    if engine == "vllm" and not says_devices and config.launcher != "ray":
        problems.append(
            f"{pool}.cpus: required; left to themselves all engines bind the same core. Give "
            "one list per replica, e.g. [[0]]"
        )
    if not has_gpus and engine == "vllm" and settings.engine_args.block_size % 32:
        problems.append(
            f"{pool}.engine_args.block_size: {settings.engine_args.block_size} is no multiple "
            "of 32, which CPU attention needs"
        )
    for key in settings.engine_args.passed_on:
        name = key.replace("-", "_").removeprefix("no_")
        known = difflib.get_close_matches(name, type(settings.engine_args).model_fields, n=1)
        if name in OWNED_ENGINE_ARGS:
            problems.append(
                f"{pool}.engine_args.{key}: set by splitserve; {OWNED_ENGINE_ARGS[name]}"
            )
        elif SECRET_FLAG.search(name):
            problems.append(
                f"{pool}.engine_args.{key}: everybody on this machine sees a process's flags; give "
                f"the secret as a variable under {pool}.env (HF_TOKEN for the Hub)"
            )
        elif "\0" in str(settings.engine_args.passed_on[key]):
            problems.append(f"{pool}.engine_args.{key}: a flag cannot hold a NUL character")
        elif known and difflib.SequenceMatcher(None, name, known[0]).ratio() > TYPING_ERROR_RATIO:
            problems.append(f"{pool}.engine_args.{key}: did you mean {known[0]!r}?")
    return problems


def _engine_problems(pool: str, settings: PoolConfig, config: ClusterConfig) -> list[str]:
    if config.engine == "mock" and settings.engine is not None:
        return [
            f"{pool}.engine: {settings.engine} cannot take KV of the cluster's engine, mock, which "
            "has no model; leave it out, or give the cluster another engine"
        ]
    args, problems = settings.engine_args, []
    if config.engine_of(pool) != "transformers":
        return []
    if args.tensor_parallel_size != 1:
        problems.append(
            f"{pool}.engine_args.tensor_parallel_size: the transformers engine has one rank; use 1"
            " and more replicas, or engine: vllm"
        )
    if args.kv_cache_dtype != "auto":
        problems.append(
            f"{pool}.engine_args.kv_cache_dtype: the transformers engine keeps KV in the model's "
            f"type; {args.kv_cache_dtype} needs engine: vllm"
        )
    return problems


def _host_problems(pool: str, settings: PoolConfig) -> list[str]:
    if settings.hosts is None:
        return []
    problems = []
    if len(settings.hosts) != settings.replicas:
        problems.append(
            f"{pool}.hosts: {_counted(len(settings.hosts), 'host')} for "
            f"{_counted(settings.replicas, 'replica')}; give one "
            "per replica"
        )
    plain = type(settings)()
    for key, given, default in (
        ("host", settings.host, plain.host),
        ("advertise_host", settings.advertise_host, plain.advertise_host),
        ("transfer.host", settings.transfer.host, plain.transfer.host),
    ):
        if given != default:
            problems.append(
                f"{pool}.{key}: {pool}.hosts says where each node listens and is found; leave one "
                "of them out"
            )
    return problems


def shared_devices(config: ClusterConfig, key: str) -> list[str]:
    """CPUs or GPUs that two nodes name; ``key`` is ``cpus`` or ``gpus``."""
    owners: dict[tuple[str, int], list[str]] = {}
    for node in nodes(config):
        host = node.host if node.settings.hosts else ""
        for number in getattr(node, key) or ():
            owners.setdefault((host, number), []).append(node.name)
    return [
        f"{key[:-1].upper()} {number} is given to {' and '.join(names)}: they would slow each "
        "other; "
        f"give each node its own in prefill.{key} and decode.{key}"
        " (or set allow_shared_devices: true)"
        for (_, number), names in sorted(owners.items())
        if len(set(names)) > 1
    ]


def port_overlaps(config: ClusterConfig) -> list[str]:
    """Ports that are given twice, or are none."""
    uses = fixed_ports(config)
    count = Counter(port for port, _, _ in uses)
    problems = []
    for port in sorted(port for port, times in count.items() if times > 1):
        names = [use for other, _, use in uses if other == port]
        problems.append(
            f"port {port} is used by {' and '.join(names)}; move one of them, or write 0 to "
            "take free ports"
        )
    problems += [
        f"{use}: port {port} is beyond 65535; lower its port_base"
        for port, _, use in uses
        if port > 65535
    ]
    return problems


def fixed_ports(config: ClusterConfig) -> list[tuple[int, str, str]]:
    """(port, host, who uses it) for every port that is not 0."""
    uses: list[tuple[int, str, str]] = []
    for host, port in zip(router_hosts(config), router_ports(config), strict=True):
        # Routers with hosts of their own have the same port
        if port not in [other for other, _, _ in uses]:
            uses.append((port, host, "router.port"))
    for node in nodes(config):
        uses.append((node.http_port, node.host, f"{node.name} HTTP ({node.pool}.port_base)"))
        uses.append(
            (node.endpoint_port, "127.0.0.1", f"{node.name} endpoint ({node.pool}.port_base)")
        )
        for rank in range(node.settings.engine_args.tensor_parallel_size):
            for base, use in (
                (node.control_port_base, f"control ({node.pool}.transfer.port_base)"),
                (node.data_port_base, f"data ({node.pool}.transfer.data_port_base)"),
            ):
                port = base + rank if base else 0
                uses.append((port, node.transfer_host, f"{node.name} {use}"))
    return [use for use in uses if use[0]]
