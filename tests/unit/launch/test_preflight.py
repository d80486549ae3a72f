"""What is refused before anything starts, with what to change."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from splitserve.kv_transfer.transports import same_host
from splitserve.orchestrator.config import ClusterConfig, ConfigError, parse
from splitserve.orchestrator.launch.checks import memory
from splitserve.orchestrator.launch.checks.cpu_lists import listed, parsed
from splitserve.orchestrator.launch.checks.model import room_problems
from splitserve.orchestrator.launch.checks.subject import Subject
from splitserve.orchestrator.launch.checks.table import CHECKS, Check
from splitserve.orchestrator.launch.finding import Finding, Severity, failure
from splitserve.orchestrator.launch.preflight import findings, preflight
from splitserve.orchestrator.models.folder_facts import ModelFacts

if TYPE_CHECKING:
    from pathlib import Path

MOCK = """
engine: mock
model: {path: m}
router: {port: 0}
prefill: &pool {kv_cache_bytes: 1 MiB, transfer: {transport: tcp}}
decode: *pool
"""


def problems_of(config: ClusterConfig) -> list[str]:
    """What ``preflight`` refuses."""
    with pytest.raises(ConfigError) as caught:
        preflight(config, {})
    return caught.value.problems


def test_a_mock_cluster_passes() -> None:
    """Every quick check is reported and none fails."""
    found = [finding for finding, _ in findings(Subject(parse(MOCK), {}))]
    assert [f.check for f in found] == [check.name for check in CHECKS if not check.measures]
    assert [f for f in found if f.failures] == []
    preflight(parse(MOCK), {})


def test_misspelt_keys_are_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else is wrong may come of them."""

    def failing(name: str) -> Check:
        return Check(name, lambda subject: Finding(name, "", (failure(name, "is wrong", "mend"),)))

    checks = tuple(map(failing, ("memory", "model", "engine_args", "cache")))
    monkeypatch.setattr("splitserve.orchestrator.launch.preflight.CHECKS", checks)
    told = [problem.partition(":")[0] for problem in map(str, problems_of(parse(MOCK)))]
    assert told == ["engine_args", "memory", "model", "cache"]


@pytest.mark.parametrize(
    ("kv_cache", "fix"),
    [("1", "raise it to at least "), ("100 kB", "raise it, or set max_model_len to at most ")],
)
def test_kv_without_room_for_a_request(kv_cache: str, fix: str) -> None:
    """What to do is something that can be done."""
    config = parse(MOCK.replace("1 MiB", kv_cache).replace("engine: mock", "engine: transformers"))
    facts = ModelFacts(
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=8,
        max_position=100_000,
        dtype="float32",
        has_latent_kv=False,
    )
    (problem,) = room_problems(config.prefill, "prefill", facts)
    assert problem.fix.startswith(fix)
    assert not problem.fix.endswith(" 0")


def test_a_cpu_that_does_not_exist() -> None:
    """The node, the CPU and the usable ones are named."""
    config = parse(
        MOCK.replace("{kv_cache_bytes", "{cpus: [[4000]], kv_cache_bytes", 1)
        + "allow_shared_devices: true\n"
    )
    problem = problems_of(config)[0]
    assert problem.startswith("prefill.cpus[0]: this machine has no CPU 4000 for prefill-0")
    assert str(min(os.sched_getaffinity(0))) in problem


def test_a_gpu_that_does_not_exist() -> None:
    """A GPU number that no machine has."""
    text = MOCK.replace("{kv_cache_bytes", "{gpus: [[999]], kv_cache_bytes", 1)
    config = parse(text + "experimental_cuda: true\nallow_shared_devices: true\n")
    assert "no NVIDIA GPU 999" in problems_of(config)[0]


def test_more_memory_than_there_is() -> None:
    """Both keys and the sums are named."""
    (problem,) = problems_of(parse(MOCK.replace("1 MiB", "900 TB")))
    assert problem.startswith(
        "prefill.kv_cache_bytes, decode.kv_cache_bytes: together 1800000.0 GB"
    )


def test_memory_of_a_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit below the machine's memory is what is available."""
    values = {"memory.max": 5 * 10**6, "memory.current": 4 * 10**6}
    monkeypatch.setattr(memory, "_number", lambda path: values[path.name])
    assert memory.available_memory_bytes() == 10**6


def test_a_port_in_use() -> None:
    """The key, the port and, where it can be seen, the process."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (problem,) = problems_of(parse(MOCK.replace("port: 0", f"port: {port}")))
    assert problem.startswith(
        f"router.port: port {port} on 127.0.0.1 is in use by process {os.getpid()}"
    )


def test_an_address_of_another_machine() -> None:
    """A host this machine does not have is named with its key."""
    text = MOCK.replace("*pool", "{host: 203.0.113.1, port_base: 9000, transfer: {transport: tcp}}")
    assert "cannot listen on 203.0.113.1" in problems_of(parse(text))[0]


def test_a_missing_model(tmp_path: Path) -> None:
    """A folder that is not there."""
    text = MOCK.replace("engine: mock\n", "").replace("path: m", f"path: {tmp_path}/none")
    text = text.replace(
        "prefill: &pool {", "allow_shared_devices: true\nprefill: &pool {cpus: [[0]], "
    )
    assert f"model.path: there is no model folder {tmp_path}/none" in problems_of(parse(text))


def test_a_missing_secret(tmp_path: Path) -> None:
    """A secret file that is not there, and an API key that is not set."""
    security = (
        f"security: {{secret_file: {tmp_path}/no, api_keys: [{{tenant: a, key_env: UNSET}}]}}\n"
    )
    problems = problems_of(parse(MOCK + security))
    assert [problem.split(":")[0] for problem in problems] == [
        "security.secret_file",
        "security.api_keys[0].key_env",
    ]


@pytest.mark.parametrize(
    ("numbers", "expected"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2,5"), ([1, 3, 4], "1,3-4")]
)
def test_numbers_are_shown_as_ranges(numbers: list[int], expected: str) -> None:
    """As `taskset` and `lscpu` write them."""
    assert listed(numbers) == expected
    assert parsed(expected) == frozenset(numbers)


def test_a_machine_that_forbids_copies_between_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """``local`` is refused with the cure."""
    monkeypatch.setattr(same_host, "obstacle", lambda: "no right to write")
    assert problems_of(parse(MOCK.replace("tcp", "local"))) == [
        "prefill.transfer.transport, decode.transfer.transport: no right to write"
    ]


def test_nixl_without_copies_between_engines_is_slow_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It works over TCP, so ``up`` goes on and ``doctor`` tells."""
    monkeypatch.setattr(same_host, "obstacle", lambda: "no right to write; give it")
    subject = Subject(parse(MOCK.replace("tcp", "nixl")), {})
    finding = {f.check: f for f, _ in findings(subject)}["rights"]
    assert not finding.failures
    (problem,) = finding.problems
    assert problem.severity is Severity.WARN
    assert problem.keys == ("prefill.transfer.transport", "decode.transfer.transport")
    assert problem.what == "UCX will use TCP, which is many times slower: no right to write"
    assert problem.fix == "give it"


def test_a_trial_copy_that_fails_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be tried is not passed."""

    def fails() -> str:
        raise OSError("no processes left")

    monkeypatch.setattr(same_host, "obstacle", fails)
    assert problems_of(parse(MOCK.replace("tcp", "local"))) == [
        "copies between engines: no processes left"
    ]


def test_traces_need_their_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing and the command that installs it are named."""
    text = MOCK + "observability: {tracing: {otlp_endpoint: 'http://127.0.0.1:4318'}}\n"
    preflight(parse(text), {})
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    (problem,) = problems_of(parse(text))
    assert problem.startswith("observability.tracing: opentelemetry.exporter.otlp.proto.http ")
    assert "pip install 'splitserve[tracing]'" in problem


def test_nothing_is_measured_on_cpus_that_do_not_exist() -> None:
    """What cannot work is told once, by the check that is about it; what does not depend on it is
    measured all the same.
    """
    text = MOCK.replace("{kv_cache_bytes", "{cpus: [[4000]], kv_cache_bytes", 1)
    subject = Subject(parse(text + "allow_shared_devices: true\n"), {})
    found = {f.check: f for f, _ in findings(subject, measures=True)}
    assert found["transport"].detail == "not looked at before cpus is mended"
    assert found["clocks"].detail == "nobody else's clock to compare with"
    assert [f.check for f in found.values() if f.failures] == ["cpus"]
