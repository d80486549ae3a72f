"""Whether the CPUs and GPUs that nodes name are there, are each node's own, and lie together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.orchestrator.config.checks import shared_devices
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.launch.checks.cpu_lists import listed, parsed
from splitserve.orchestrator.launch.finding import Finding, Severity, failure, told, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.config import NodeConfig
    from splitserve.orchestrator.launch.checks.subject import Subject
    from splitserve.orchestrator.launch.finding import Problem

CPU_FOLDER = Path("/sys/devices/system/cpu")
NUMA_FOLDER = Path("/sys/devices/system/node")
QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
DEVICES = Path("/dev")
PAIRS_TOLD = 4
"""Pairs of nodes that one finding names."""


def cpus(subject: Subject) -> Finding:
    """Every CPU is there, belongs to one node, and has no other node on its sibling."""
    config, usable = subject.config, os.sched_getaffinity(0)
    problems: list[Problem] = []
    for node in subject.nodes:
        missing = set(node.cpus or ()) - usable
        if missing:
            what = (
                f"this machine has no CPU {listed(missing)} for {node.name}; "
                f"usable here: {listed(usable)}"
            )
            problems.append(failure(_key(node, "cpus"), what, "name CPUs of that list"))
    severity = Severity.WARN if config.allow_shared_devices else Severity.FAIL
    problems += told(shared_devices(config, "cpus"), severity)
    problems += _siblings(subject)
    problems += _threads(subject)
    problems += _quota(subject)
    return Finding("cpus", f"usable: {listed(usable)}", tuple(problems))


def gpus(subject: Subject) -> Finding:
    """Every GPU is there and belongs to one node."""
    config = subject.config
    wanted = {gpu for node in subject.nodes for gpu in node.gpus or ()}
    if not wanted:
        return Finding("gpus", "none asked for")
    # Counted: a container keeps the host's names of its devices, and CUDA numbers them from 0
    devices = [path for path in DEVICES.glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    present = frozenset(range(len(devices)))
    problems = [
        failure(
            _key(node, "gpus"),
            f"this machine has no NVIDIA GPU {listed(missing)} for {node.name}; "
            f"present: {listed(present) or 'none'}",
            "use `cpus` instead",
        )
        for node in subject.nodes
        if (missing := set(node.gpus or ()) - present)
    ]
    severity = Severity.WARN if config.allow_shared_devices else Severity.FAIL
    problems += told(shared_devices(config, "gpus"), severity)
    return Finding("gpus", f"present: {listed(present) or 'none'}", tuple(problems))


def numa(subject: Subject) -> Finding:
    """A node's CPUs, its KV and its peer lie on one NUMA node: memory of another one is slower."""
    check = "numa"
    places = numa_nodes()
    if len(places) < 2:
        return Finding(check, "one NUMA node")
    detail = "; ".join(f"NUMA node {number}: CPUs {listed(c)}" for number, c in places.items())
    homes = {
        node.name: frozenset(n for n, c in places.items() if c & set(node.cpus))
        for node in subject.nodes
        if node.cpus
    }
    problems = [*_split_nodes(subject, homes), *_far_pairs(subject, homes)]
    problems += _numa_memory(subject, homes)
    measured = {"homes": {name: sorted(home) for name, home in homes.items()}}
    return Finding(check, detail, tuple(problems), measured)


def numa_nodes() -> dict[int, frozenset[int]]:
    """The CPUs of each NUMA node; empty where the kernel does not say."""
    found: dict[int, frozenset[int]] = {}
    for path in NUMA_FOLDER.glob("node[0-9]*/cpulist"):
        try:
            found[int(path.parent.name.removeprefix("node"))] = parsed(path.read_text())
        except (OSError, ValueError):
            continue
    return {number: cpus for number, cpus in sorted(found.items()) if cpus}


def _siblings(subject: Subject) -> Iterator[Problem]:
    """Threads of one core share what it computes with."""
    owner = {cpu: node for node in subject.nodes for cpu in node.cpus or ()}
    told_of: set[frozenset[int]] = set()
    for cpu, node in owner.items():
        siblings = _threads_of_core(cpu)
        others = sorted(other for other in siblings - {cpu} if other in owner)
        if not others or siblings in told_of:
            continue
        told_of.add(siblings)
        neighbour = owner[others[0]]
        yield warning(
            tuple(dict.fromkeys((_key(node, "cpus"), _key(neighbour, "cpus")))),
            f"CPUs {cpu} ({node.name}) and {others[0]} ({neighbour.name}) are threads of one core "
            "and compute in turns",
            "name one thread of each core (`lscpu -e` shows which belong together)",
        )


def _threads_of_core(cpu: int) -> frozenset[int]:
    try:
        text = (CPU_FOLDER / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        return parsed(text)
    except (OSError, ValueError):
        return frozenset({cpu})


def _threads(subject: Subject) -> Iterator[Problem]:
    """More computing threads than cores wait for each other in every step."""
    for pool in POOLS:
        settings, environ = subject.config.pool(pool), subject.environment_of(pool)
        if "VLLM_CPU_OMP_THREADS_BIND" in settings.env:
            yield warning(
                f"{pool}.env.VLLM_CPU_OMP_THREADS_BIND",
                "it wins over the binding that splitserve derives from `cpus`, equal for all nodes "
                "of the pool",
                "remove it",
            )
        text = environ.get("OMP_NUM_THREADS", "")
        if not settings.cpus or not text.isdigit():
            continue
        cores = min(map(len, settings.cpus)) // settings.engine_args.tensor_parallel_size
        if int(text) > cores:
            where = f"{pool}.env." if "OMP_NUM_THREADS" in settings.env else ""
            yield warning(
                (f"{where}OMP_NUM_THREADS", f"{pool}.cpus"),
                f"{text} threads for {cores} CPUs of each rank",
                "unset the variable, or name more CPUs",
            )


def _quota(subject: Subject) -> Iterator[Problem]:
    """What a container may use of the CPUs that it sees."""
    try:
        quota, period = QUOTA_FILE.read_text().split()
        allowed = int(quota) / int(period)
    except (OSError, ValueError):  # "max": no limit
        return
    named = {cpu for node in subject.nodes for cpu in node.cpus or ()}
    if named and allowed < len(named):
        yield warning(
            ("prefill.cpus", "decode.cpus"),
            f"{len(named)} CPUs are named, but this container may use {allowed:g}",
            f"raise its CPU limit to {len(named)}, or name fewer CPUs",
        )


def _split_nodes(subject: Subject, homes: dict[str, frozenset[int]]) -> Iterator[Problem]:
    for node in subject.nodes:
        home = homes.get(node.name, frozenset())
        if len(home) > 1 and node.settings.engine_args.tensor_parallel_size == 1:
            yield warning(
                _key(node, "cpus"),
                f"{node.name} has CPUs on NUMA nodes {listed(home)}, and reads half of its KV and "
                "weights from the far one",
                "name CPUs of one NUMA node",
            )


def _far_pairs(subject: Subject, homes: dict[str, frozenset[int]]) -> Iterator[Problem]:
    far = [
        (writer, reader)
        for writer in subject.nodes
        for reader in subject.nodes
        if writer.pool == "prefill" and reader.pool == "decode"
        if homes.get(writer.name) and homes.get(reader.name)
        if not homes[writer.name] & homes[reader.name]
    ]
    if not far:
        return
    shown = ", ".join(
        f"{writer.name} ({listed(homes[writer.name])}) and {reader.name} "
        f"({listed(homes[reader.name])})"
        for writer, reader in far[:PAIRS_TOLD]
    )
    more = f" and {len(far) - PAIRS_TOLD} more pairs" if len(far) > PAIRS_TOLD else ""
    yield warning(
        ("prefill.cpus", "decode.cpus"),
        f"{shown}{more} are on different NUMA nodes: every page crosses between them",
        "put both on one NUMA node where there is room",
    )


def _numa_memory(subject: Subject, homes: dict[str, frozenset[int]]) -> Iterator[Problem]:
    needed: dict[int, int] = {}
    for node in subject.nodes:
        home = homes.get(node.name, frozenset())
        if len(home) == 1:
            ranks = node.settings.engine_args.tensor_parallel_size
            (number,) = home
            needed[number] = needed.get(number, 0) + node.settings.kv_cache_bytes * ranks
    for number, wanted in sorted(needed.items()):
        free = _free_bytes(number)
        if free is not None and wanted > free:
            yield warning(
                ("prefill.kv_cache_bytes", "decode.kv_cache_bytes"),
                f"{wanted / 1e9:.1f} GB of KV for nodes on NUMA node {number}, which has "
                f"{free / 1e9:.1f} GB free",
                "lower them, or spread the nodes",
            )


def _free_bytes(number: int) -> int | None:
    try:
        lines = (NUMA_FOLDER / f"node{number}" / "meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = sum(
        int(line.split()[3])
        for line in lines
        if line.split()[2:3] in (["MemFree:"], ["Inactive(file):"], ["Active(file):"])
    )
    return kilobytes * 1024


def _key(node: NodeConfig, what: str) -> str:
    return f"{node.pool}.{what}[{node.index}]"
