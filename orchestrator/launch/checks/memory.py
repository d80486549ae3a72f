"""Whether what the cluster takes of memory is there: KV, weights, engines, the cache's arena, and
shared memory.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.launch.checks.cache import arena_bytes
from splitserve.orchestrator.launch.finding import Finding, failure, warning
from splitserve.orchestrator.models.folder_facts import ITEM_BYTES, weight_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.config import NodeConfig
    from splitserve.orchestrator.launch.checks.subject import Subject
    from splitserve.orchestrator.launch.finding import Problem

OVERHEAD_BYTES = {"vllm": 2 * 10**9, "transformers": 10**9, "mock": 0}
"""Memory of one engine beside its KV and weights: vLLM's are three Python processes, for which
about 3 GB were measured with a small model.
"""
SHARED_ENGINE_BYTES = 2 * 2**20
"""What one engine's processes keep in ``/dev/shm`` to talk to each other."""
SHARED_THREAD_BYTES = 4 * 2**20
"""What each computing thread of several ranks on CPUs keeps there for their sums (vLLM's constant).
"""
SHARED_GPU_BYTES = 32 * 2**20
"""What each of several ranks on GPUs keeps there, for NCCL."""
FULL_SHARE = 0.9
"""Of what is available: beyond it the kernel begins to swap and to reclaim."""
SWAPPED_BYTES = 256 * 2**20

_GROUP = Path("/sys/fs/cgroup")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_MEMORY_INFO = Path("/proc/meminfo")
_SHARED = Path("/dev/shm")
_STRICT = 2


def memory(subject: Subject) -> Finding:
    """The sum of everything fits into what is available."""
    check, config = "memory", subject.config
    if subject.running is not None:
        return Finding(check, "taken by the running cluster")
    on_cpu = [node for node in subject.nodes if node.gpus is None]
    kv = sum(
        node.settings.kv_cache_bytes * node.settings.engine_args.tensor_parallel_size
        for node in on_cpu
    )
    engines = sum(
        OVERHEAD_BYTES[node.engine] + weights_in_memory(subject, node.pool) for node in on_cpu
    )
    cache = arena_bytes(config.cache)
    available = available_memory_bytes()
    cached = f", {cache / 1e9:.1f} GB of cache" if cache else ""
    detail = (
        f"{kv / 1e9:.1f} GB of KV{cached} and about {engines / 1e9:.1f} GB of engines, "
        f"{available / 1e9:.1f} GB available"
    )
    measured = {
        "kv_bytes": kv,
        "cache_bytes": cache,
        "engine_bytes": engines,
        "available_bytes": available,
    }
    needed = kv + cache + engines
    problems = [
        *_shortage(subject, needed, available, detail),
        *_overcommit(needed),
        *_swap(),
    ]
    return Finding(check, detail, tuple(problems), measured)


def shared_memory(subject: Subject) -> Finding:
    """``/dev/shm`` has room for what engines and transports keep there; the cache's arena is not
    there.
    """
    check = "shared_memory"
    needed = sum(shared_bytes(node) for node in subject.nodes if node.engine == "vllm")
    try:
        free = shutil.disk_usage(_SHARED).free
    except OSError as error:
        problem = failure(str(_SHARED), f"there is none ({error.strerror})", "mount a tmpfs there")
        return Finding(check, "not there", (problem,) if needed else ())
    detail = f"{free / 2**20:.0f} MiB free in {_SHARED}, about {needed / 2**20:.0f} MiB needed"
    measured = {"free_bytes": free, "needed_bytes": needed}
    if free >= needed or subject.running is not None:
        return Finding(check, detail, (), measured)
    problem = failure(
        str(_SHARED),
        f"{detail}; engines that run out of it are killed by a bus error",
        f"make it larger: docker run --shm-size={2 * needed // 2**20}m, or "
        f"mount -o remount,size={2 * needed // 2**20}m {_SHARED}",
    )
    return Finding(check, detail, (problem,), measured)


def shared_bytes(node: NodeConfig) -> int:
    """What one node's engine keeps in ``/dev/shm``."""
    ranks = node.settings.engine_args.tensor_parallel_size
    if ranks == 1:
        return SHARED_ENGINE_BYTES
    each = SHARED_GPU_BYTES * ranks if node.gpus is not None else 0
    return SHARED_ENGINE_BYTES + each + SHARED_THREAD_BYTES * len(node.cpus or ())


def available_memory_bytes() -> int:
    """Memory that can still be taken: the machine's, or what the control group leaves."""
    available: int = psutil.virtual_memory().available
    limit, used = (_number(_GROUP / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def weights_in_memory(subject: Subject, pool: str) -> int:
    """Bytes of weights in one engine's memory, in the type that it computes with."""
    facts, folder = subject.model_facts, subject.model_folder
    if facts is None or folder is None:
        return 0
    stored = ITEM_BYTES.get(facts.dtype or "", 0)
    computed = ITEM_BYTES.get(subject.config.pool(pool).engine_args.dtype, stored)
    return weight_bytes(folder) * computed // stored if stored else weight_bytes(folder)


def _shortage(subject: Subject, needed: int, available: int, detail: str) -> Iterator[Problem]:
    keys = [f"{pool}.kv_cache_bytes" for pool in POOLS]
    cache = subject.config.cache
    if cache is not None:
        has_tier = cache.tiers[0].type == "cpu"
        keys.insert(0, "cache.tiers[0].capacity_bytes" if has_tier else "cache.staging_bytes")
    fix = "lower them or use fewer replicas"
    if needed > available:
        yield failure(tuple(keys), f"together {detail}", fix)
    elif needed > FULL_SHARE * available:
        share = needed / available
        yield warning(tuple(keys), f"together {share:.0%} of what is available ({detail})", fix)


def _overcommit(needed: int) -> Iterator[Problem]:
    """With strict accounting memory is refused before it is used up."""
    if _number(_OVERCOMMIT) != _STRICT:
        return
    fields = _memory_info()
    left = fields.get("CommitLimit", 0) - fields.get("Committed_AS", 0)
    if left < needed:
        yield failure(
            "vm.overcommit_memory",
            f"it is {_STRICT} (strict), and of its limit {left / 1e9:.1f} GB are left for "
            f"{needed / 1e9:.1f} GB",
            "set it to 0 (sysctl vm.overcommit_memory=0), or raise vm.overcommit_ratio",
        )


def _swap() -> Iterator[Problem]:
    swap = psutil.swap_memory()
    if swap.used > SWAPPED_BYTES:
        yield warning(
            "vm.swappiness",
            f"{swap.used / 1e9:.1f} GB are swapped out: KV that is swapped out stalls every "
            "request that needs it",
            "free memory, or turn swap off (swapoff -a)",
        )


def _memory_info() -> dict[str, int]:
    """Bytes by name."""
    try:
        lines = [line.split() for line in _MEMORY_INFO.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if len(line) == 3}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
