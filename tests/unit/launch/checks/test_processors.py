"""CPUs, their cores and their NUMA nodes, on machines that are folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from splitserve.orchestrator.config import parse
from splitserve.orchestrator.launch.checks import processors
from splitserve.orchestrator.launch.checks.subject import Subject
from splitserve.orchestrator.launch.finding import Severity

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.orchestrator.launch.finding import Finding

TWO_BY_TWO = {0: "0-3", 1: "4-7"}


def subject(prefill: str, decode: str, environ: dict[str, str] | None = None) -> Subject:
    """A mock cluster on these CPUs."""
    pools = "".join(
        f"{pool}: {{replicas: {cpus.count('[') - 1}, cpus: {cpus}, kv_cache_bytes: 1 GB,"
        " transfer: {transport: tcp}}\n"
        for pool, cpus in (("prefill", prefill), ("decode", decode))
    )
    return Subject(parse(f"engine: mock\nmodel: {{path: m}}\n{pools}"), environ or {})


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight CPUs on four cores (0 with 4, 1 with 5, ...) and two NUMA nodes with 8 GB each."""
    for cpu in range(8):
        place = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    for number, cpus in TWO_BY_TWO.items():
        place = tmp_path / "node" / f"node{number}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(cpus + "\n")
        (place / "meminfo").write_text(f"Node {number} MemFree:  8000000 kB\n")
    monkeypatch.setattr(processors, "CPU_FOLDER", tmp_path / "cpu")
    monkeypatch.setattr(processors, "NUMA_FOLDER", tmp_path / "node")
    monkeypatch.setattr(processors, "QUOTA_FILE", tmp_path / "cpu.max")
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


def said(finding: Finding) -> list[str]:
    """Its problems."""
    return [str(problem) for problem in finding.problems]


def test_cores_of_their_own(machine: Path) -> None:
    """Nothing to say."""
    assert said(processors.cpus(subject("[[0, 1]]", "[[2, 3]]"))) == []


def test_two_threads_of_one_core(machine: Path) -> None:
    """Both CPUs, both nodes and both keys are named, once per core; it starts all the same."""
    finding = processors.cpus(subject("[[0, 1]]", "[[4, 2]]"))
    (problem,) = finding.problems
    assert finding.severity is Severity.WARN
    assert problem.keys == ("prefill.cpus[0]", "decode.cpus[0]")
    assert "CPUs 0 (prefill-0) and 4 (decode-0)" in problem.what


def test_more_threads_than_cores(machine: Path) -> None:
    """A variable of the shell is inherited by the engines."""
    fitting = processors.cpus(subject("[[0, 1]]", "[[2, 3]]", {"OMP_NUM_THREADS": "2"}))
    assert said(fitting) == []
    problems = processors.cpus(subject("[[0, 1]]", "[[2, 3]]", {"OMP_NUM_THREADS": "8"})).problems
    assert [problem.keys for problem in problems] == [
        ("OMP_NUM_THREADS", "prefill.cpus"),
        ("OMP_NUM_THREADS", "decode.cpus"),
    ]


@pytest.mark.parametrize(
    ("quota", "named"), [("200000 100000\n", True), ("400000 100000\n", False), ("max 1\n", False)]
)
def test_what_a_container_may_use(machine: Path, quota: str, named: bool) -> None:
    """Fewer CPUs than are named is told with both numbers."""
    (machine / "cpu.max").write_text(quota)
    problems = said(processors.cpus(subject("[[0, 1]]", "[[2, 3]]")))
    assert bool(problems) == named
    assert not named or "4 CPUs are named, but this container may use 2" in problems[0]


def test_one_numa_node(machine: Path) -> None:
    """Nodes beside each other."""
    finding = processors.numa(subject("[[0, 1]]", "[[2, 3]]"))
    assert said(finding) == []
    assert finding.detail == "NUMA node 0: CPUs 0-3; NUMA node 1: CPUs 4-7"
    assert finding.measured["homes"] == {"prefill-0": [0], "decode-0": [0]}


def test_a_node_on_two_numa_nodes(machine: Path) -> None:
    """It is named with both."""
    (problem,) = processors.numa(subject("[[3, 4]]", "[[5, 6]]")).problems
    assert problem.keys == ("prefill.cpus[0]",)
    assert "prefill-0 has CPUs on NUMA nodes 0-1" in problem.what


def test_a_pair_on_two_numa_nodes(machine: Path) -> None:
    """The pair is named, and how many more there are beyond a few."""
    (problem,) = processors.numa(subject("[[0]]", "[[4]]")).problems
    assert problem.what.startswith("prefill-0 (0) and decode-0 (1) are on different NUMA nodes")
    many = subject("[[0], [1], [2]]", "[[4], [5]]")
    (problem,) = processors.numa(many).problems
    assert "and 2 more pairs" in problem.what


def test_a_numa_node_without_the_memory(machine: Path) -> None:
    """Both numbers."""
    (machine / "node" / "node0" / "meminfo").write_text("Node 0 MemFree:  1000000 kB\n")
    (problem,) = processors.numa(subject("[[0, 1]]", "[[2, 3]]")).problems
    assert "2.0 GB of KV for nodes on NUMA node 0, which has 1.0 GB free" in problem.what


def test_gpus_of_a_container_are_counted_from_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices keep the host's names there, and CUDA gives them numbers of its own."""
    for name in ("nvidia3", "nvidia6", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(processors, "DEVICES", tmp_path)
    text = """
engine: mock
model: {path: m}
experimental_cuda: true
prefill: {gpus: [[0]]}
decode: {gpus: [[1]]}
"""
    assert processors.gpus(Subject(parse(text), {})).problems == ()
    found = processors.gpus(Subject(parse(text.replace("[[1]]", "[[2]]")), {}))
    assert [problem.keys for problem in found.problems] == [("decode.gpus[0]",)]
