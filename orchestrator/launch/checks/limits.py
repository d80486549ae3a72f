"""What the system lets one user or container have: open files, processes, locked memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from splitserve.orchestrator.launch.finding import Finding, failure, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.launch.checks.subject import Subject
    from splitserve.orchestrator.launch.finding import Problem

FILES_OF_ONE_REQUEST = 3
"""In the router: the client's connection and one to each engine."""
FILES_AT_REST = 128
"""Of the router, or of an engine, without any request."""
RUNNING_REQUESTS = 64
"""Requests that run at a time where ``engine_args.max_num_seqs`` does not say."""
THREADS_OF_ENGINE = 128
"""Threads of one engine's processes and of its agent; they count as processes."""
ADDRESS_SPACE_BYTES = 16 * 10**9
"""What an engine's processes reserve of addresses beside its KV; they use a fraction of it."""
_PIDS = (Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids.current"))
_INFINIBAND = Path("/sys/class/infiniband")


def limits(subject: Subject) -> Finding:
    """The limits of this shell are high enough for what it starts."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    threads, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    detail = (
        f"open files {_shown(files)}, processes {_shown(threads)}, locked memory "
        f"{_shown(locked)} bytes"
    )
    measured = {"open_files": files, "processes": threads, "locked_bytes": locked}
    problems = [
        *_files(subject, files, most_files),
        *_threads(subject, threads),
        *_locked(subject, locked),
        *_address_space(subject),
    ]
    return Finding("limits", detail, tuple(problems), measured)


def _files(subject: Subject, limit: int, most: int) -> Iterator[Problem]:
    if not subject.has_router:
        return
    config = subject.config
    running = sum(
        node.settings.engine_args.max_num_seqs or RUNNING_REQUESTS
        for node in subject.nodes
        if node.pool == "decode"
    )
    at_once = config.router.queue_limit_requests + running
    wanted = FILES_AT_REST + FILES_OF_ONE_REQUEST * at_once
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return
    raising = f"ulimit -n {wanted} before `splitserve up`"
    if most not in (resource.RLIM_INFINITY,) and most < wanted:
        raising += f" (the hard limit is {most}: raise it too, LimitNOFILE= in systemd)"
    if limit < 2 * FILES_AT_REST:
        yield failure(
            "ulimit -n",
            f"{limit} open files: router and engines need {2 * FILES_AT_REST} at rest",
            raising,
        )
    else:
        yield warning(
            ("ulimit -n", "router.queue_limit_requests"),
            f"{limit} open files, but {at_once} requests at a time may need {wanted}",
            f"{raising}, or a smaller queue_limit_requests",
        )


def _threads(subject: Subject, limit: int) -> Iterator[Problem]:
    count = len(subject.nodes)
    wanted = count * THREADS_OF_ENGINE if subject.running is None else 0
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0:
        left = limit - _own_threads()
        if left < wanted:
            yield failure(
                "ulimit -u",
                f"{limit} processes and threads, of which {max(0, left)} are left; {count} engines "
                f"need about {wanted}",
                f"ulimit -u {limit + wanted}",
            )
    most, used = (_number(path) for path in _PIDS)
    if most is not None and used is not None and most - used < wanted:
        yield failure(
            "pids.max",
            f"this container may have {most} processes and threads, and has {used}; {count} "
            f"engines need about {wanted}",
            f"raise the limit: docker run --pids-limit {used + 2 * wanted}",
        )


def _locked(subject: Subject, limit: int) -> Iterator[Problem]:
    """RDMA registers memory, which locks it."""
    config = subject.config
    transports = {config.prefill.transfer.transport, config.decode.transfer.transport}
    if not transports & {"nixl", "ucx"} or not _INFINIBAND.is_dir():
        return
    largest = max((node.settings.kv_cache_bytes for node in subject.nodes), default=0)
    has_device = next(_INFINIBAND.iterdir(), None) is not None
    if has_device and limit != resource.RLIM_INFINITY and limit < largest and os.geteuid() != 0:
        yield warning(
            "ulimit -l",
            f"{limit} bytes may be locked, but RDMA registers {largest / 1e9:.1f} GB of KV",
            "ulimit -l unlimited (LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in docker)",
        )


def _address_space(subject: Subject) -> Iterator[Problem]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    largest = max((node.settings.kv_cache_bytes for node in subject.nodes), default=0)
    has_vllm = any(node.engine == "vllm" for node in subject.nodes)
    wanted = largest + (ADDRESS_SPACE_BYTES if has_vllm else 0)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        yield failure(
            "ulimit -v",
            f"a process may have {limit / 1e9:.1f} GB of addresses, and an engine reserves about "
            f"{wanted / 1e9:.1f} GB",
            "ulimit -v unlimited (memory is bounded by kv_cache_bytes and the container's limit)",
        )


def _own_threads() -> int:
    """Threads of this user."""
    user, total = os.getuid(), 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == user:
            total += process.info["num_threads"] or 0
    return total


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
