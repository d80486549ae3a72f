"""`splitserve doctor --json` names each planted misconfiguration, with its key and a remedy, and
nothing else as a reason not to start.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from click.testing import CliRunner
from support.doctor_plants import (
    PASSWORD,
    PLANTS,
    Cluster,
    Plant,
    Scene,
)
from support.store_servers import S3Server, redis_server

from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.config import nodes, parse
from splitserve.orchestrator.launch.checks import memory, transport_trial
from splitserve.orchestrator.launch.checks.subject import Subject
from splitserve.orchestrator.launch.checks.transport import transport
from splitserve.orchestrator.launch.checks.transport_trial import TrialError, try_pair
from splitserve.orchestrator.launch.finding import Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.store_servers import StoreServer

    from splitserve.orchestrator.config import NodeConfig

FULL_LIMIT_S = 40.0
"""Of all checks with their measurements on one pair: twice what is promised, for a busy machine."""
MEMORY_BYTES = 16 * 10**9


@pytest.fixture(scope="module")
def stores(
    free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[StoreServer, S3Server]]:
    """A Redis with a password and an S3 with a bucket."""
    folder = tmp_path_factory.mktemp("stores")
    redis = redis_server(free_port(), folder, "--requirepass", PASSWORD)
    s3 = S3Server(free_port(), folder)
    s3.make_bucket("bucket")
    yield redis, s3
    redis.kill()
    s3.kill()


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the command on a cluster and returns its report; what other tests take of this machine's
    memory is not counted.
    """
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: MEMORY_BYTES)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("S3_KEY", "key")

    def run(cluster: Cluster, *options: str) -> dict[str, Any]:
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump(cluster))
        result = CliRunner().invoke(main, ["doctor", str(path), "--json", *options])
        report: dict[str, Any] = json.loads(result.stdout)
        assert result.exit_code == (2 if report["severity"] == "FAIL" else 0)
        return report

    return run


def good_cluster(model: Path, redis: StoreServer, folder: Path) -> Cluster:
    """What every plant starts from."""
    cpus = sorted(os.sched_getaffinity(0))

    def pool(cpu: int) -> dict[str, Any]:
        args = {"dtype": "float32", "block_size": 128, "max_model_len": 2048}
        return {
            "cpus": [[cpu]],
            "kv_cache_bytes": "64 MB",
            "engine_args": args,
            "transfer": {"transport": "tcp"},
        }

    url = f"redis://:{PASSWORD}@127.0.0.1:{redis.port}/0"
    tiers = [
        {"type": "cpu", "capacity_bytes": "64 MB"},
        {"type": "disk", "capacity_bytes": "64 MB", "path": str(folder / "disk")},
        {"type": "redis", "url": url},
    ]
    return {
        "name": "doctor-test",
        "model": {"path": str(model), "served_name": "tiny"},
        "router": {"port": 0},
        "prefill": pool(cpus[0]),
        "decode": pool(cpus[-1]),
        "cache": {"tiers": tiers},
        "allow_shared_devices": len(cpus) < 2,
    }


def test_a_good_cluster(
    doctor: Callable[..., dict[str, Any]],
    stores: tuple[StoreServer, S3Server],
    tiny_model: Path,
    tmp_path: Path,
    summary: Callable[[str], None],
) -> None:
    """Nothing fails; transport and tiers are measured, in bounded time, and nothing is left in the
    tiers.
    """
    cluster = good_cluster(tiny_model, stores[0], tmp_path)
    for pool in ("prefill", "decode"):
        cluster[pool]["transfer"]["transport"] = "local"
    report = doctor(cluster)
    found = {finding["check"]: finding for finding in report["findings"]}
    assert failures(report) == {}
    (pair,) = found["transport"]["measured"]["pairs"]
    for way in ("put", "get"):
        assert pair[way]["bytes_per_s"] > 1e7
        assert 0 < pair[way]["latency_us"] < 1e6
    assert pair["page_bytes"] == 2 * 2 * 32 * 4 * 128  # K and V, heads, channels, bytes, tokens
    disk, redis = found["tiers"]["measured"]["tiers"]
    assert (disk["tier"], redis["tier"]) == ("disk", "redis")
    assert min(tier[f"{way}_ms"] for tier in (disk, redis) for way in ("put", "get", "delete")) > 0
    assert abs(found["clocks"]["measured"]["skew_s"]["redis"]) < 2
    assert not [path for path in (tmp_path / "disk").glob("chunks/*/*") if len(path.name) == 64]
    took = sum(finding["seconds"] for finding in report["findings"])
    assert took < FULL_LIMIT_S
    summary(f"doctor: {len(found)} checks of a good cluster, with measurements, in {took:.1f} s")


def test_planted_misconfigurations(
    doctor: Callable[..., dict[str, Any]],
    stores: tuple[StoreServer, S3Server],
    tiny_model: Path,
    tmp_path: Path,
    summary: Callable[[str], None],
) -> None:
    """Each one is named by the right check with the right key and a remedy, and no other check
    fails.
    """
    missed = {}
    for number, plant in enumerate(PLANTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with ExitStack() as stack, pytest.MonkeyPatch.context() as monkeypatch:
            scene = Scene(folder, tiny_model, *stores, monkeypatch, stack)
            cluster = good_cluster(tiny_model, stores[0], folder)
            plant.spoil(cluster, scene)
            report = doctor(cluster, *([] if plant.measured else ["--quick"]))
        if wrong := what_is_wrong(plant, report):
            missed[plant.name] = wrong
    summary(
        f"doctor: {len(PLANTS) - len(missed)} of {len(PLANTS)} planted misconfigurations named, "
        "each with its key and a remedy"
    )
    assert missed == {}


@pytest.fixture
def pair() -> tuple[NodeConfig, NodeConfig]:
    """Two mock nodes that speak `tcp`."""
    config = parse(
        "engine: mock\nmodel: {path: m}\n"
        "prefill: &pool {transfer: {transport: tcp}}\ndecode: *pool\n"
    )
    writer, reader = nodes(config)
    return writer, reader


def test_a_side_that_dies(
    pair: tuple[NodeConfig, NodeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node and its last words are told, and the other process is gone too."""
    monkeypatch.setattr(transport_trial, "PROGRAM", "splitserve.no_such_program")
    with pytest.raises(TrialError, match=r"prefill-0: the trial process ended with status 1") as e:
        try_pair(*pair, 1 << 16, {"PATH": ""})
    assert "no_such_program" in e.value.why


def test_a_side_that_cannot_have_its_transport(pair: tuple[NodeConfig, NodeConfig]) -> None:
    """The transport's own words."""
    config = parse(
        "engine: mock\nmodel: {path: m}\n"
        "prefill: &pool {transfer: {transport: tcp, host: 192.0.2.7}}\ndecode: *pool\n"
    )
    with pytest.raises(TrialError, match=r"prefill-0: .*192"):
        try_pair(nodes(config)[0], pair[1], 1 << 16, {"PATH": ""})


def test_a_busy_machine_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sides that are not ready in time are not measured, and that is said."""
    monkeypatch.setattr(transport_trial, "SETUP_DEADLINE_S", 0.001)
    config = parse(
        "engine: mock\nmodel: {path: m}\n"
        "prefill: &pool {transfer: {transport: tcp}}\ndecode: *pool\n"
    )
    finding = transport(Subject(config, os.environ))
    (problem,) = finding.problems
    assert problem.severity is Severity.WARN
    assert "could not be measured: no answer in 0.001 s" in problem.what


def failures(report: dict[str, Any]) -> dict[str, Any]:
    """The checks that fail."""
    return {f["check"]: f["problems"] for f in report["findings"] if f["severity"] == "FAIL"}


def what_is_wrong(plant: Plant, report: dict[str, Any]) -> str:
    """Why the report does not name the plant; empty when it does."""
    found = {finding["check"]: finding for finding in report["findings"]}
    problems = [p for p in found[plant.check]["problems"] if p["severity"] == plant.severity]
    named = [p for p in problems if plant.key in p["keys"]]
    others = failures(report).keys() - {plant.check}
    if not named:
        return f"{plant.check} says {found[plant.check]}"
    if not all(problem["fix"] for problem in named):
        return f"no remedy in {named}"
    return f"others fail too: {[failures(report)[name] for name in others]}" if others else ""
