"""What ``up`` makes of what actors on Ray report."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from splitserve.orchestrator.agent.status_file import NodeStatus
from splitserve.orchestrator.config import parse
from splitserve.orchestrator.launch.files import ClusterFiles
from splitserve.orchestrator.launch.ray.launcher import RayLauncher

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.base import StartError

TEXT = """
launcher: ray
engine: mock
model: {path: m}
decode: {replicas: 2}
cache: {tiers: [{type: cpu, capacity_bytes: 1 MiB}]}
"""
NODES = ("prefill-0", "decode-0", "decode-1")


def status(name: str, **known: Any) -> dict[str, Any]:
    """What the agent of ``name`` wrote."""
    plain = {
        "phase": "ready",
        "role": name.rpartition("-")[0],
        "stage": "",
        "elapsed_s": 1.0,
        "incarnation": "i",
        "agent_pid": 7,
        "engine_url": "http://h:1",
        "log_path": "/logs/x",
        "router_connected": True,
    }
    found: dict[str, Any] = msgspec.to_builtins(NodeStatus(node=name, **{**plain, **known}))
    return found


def report(state: str = "running", host: str = "a", **more: Any) -> dict[str, Any]:
    """What an actor says."""
    plain = {"state": state, "why": "", "notes": [], "host": host, "address": host, "status": None}
    return {**plain, "host_id": host, **more}


def launcher_of(reports: dict[str, dict[str, Any]]) -> RayLauncher:
    """One that has heard this, and nothing else."""
    found = RayLauncher(
        parse(TEXT), ClusterFiles("default"), run="r", secret=bytes(32), say=lambda _: None
    )
    found._reports = reports
    return found


def whole(**instead: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Everything serves, on two hosts, but for ``instead`` (names with ``_``)."""
    reports = {name: report(status=status(name)) for name in NODES}
    reports["decode-1"] = report(host="b", status=status("decode-1"))
    reports |= {f"cache-{host}": report(host=host, is_ready=True) for host in "ab"}
    reports["router"] = report()
    return reports | {name.replace("_", "-"): value for name, value in instead.items()}


async def test_a_whole_cluster_is_told_as_one() -> None:
    """Each node by its agent's words, the cache as that of all hosts with nodes."""
    found = await launcher_of(whole()).status()
    assert {name: node.phase for name, node in found.nodes.items() if node} == dict.fromkeys(
        NODES, "ready"
    )
    assert found.cache == "ready"


@pytest.mark.parametrize(
    ("instead", "state"),
    [
        ({"cache_b": report(host="b", is_ready=False)}, "starting"),
        ({"cache_b": report("failed", host="b")}, "failed"),
    ],
)
async def test_the_cache_is_as_good_as_its_worst_host(
    instead: dict[str, dict[str, Any]], state: str
) -> None:
    """A host with nodes whose cache server is not there yet counts."""
    assert (await launcher_of(whole(**instead)).status()).cache == state


@pytest.mark.parametrize(
    ("name", "found", "words"),
    [
        ("router", report("failed", why="status 3"), "router failed on a (a): status 3"),
        (
            "decode_0",
            report("failed", status=status("decode-0", phase="failed", likely_cause="no memory")),
            "the engine of decode-0 failed on a (a): no memory",
        ),
        (
            "decode_0",
            report(status=status("decode-0", refused="other weights")),
            "the router will not use decode-0: other weights",
        ),
    ],
)
def test_a_start_that_fails_names_the_host(name: str, found: dict[str, Any], words: str) -> None:
    """And what its process said."""
    failure = launcher_of(whole(**{name: found})).failure()
    assert words in str(failure)
    assert launcher_of(whole()).failure() is None


@pytest.mark.parametrize(
    ("instead", "is_broken"),
    [
        ({"decode_0": report("failed")}, False),
        ({"decode_0": report("failed"), "decode_1": report("left")}, True),
        ({"decode_0": report("left"), "decode_1": report("left")}, False),
        ({"router": report("failed")}, True),
    ],
)
def test_a_cluster_without_a_role_or_router_is_broken(
    instead: dict[str, dict[str, Any]], is_broken: bool
) -> None:
    """Not while another node has the role, or all of them were drained."""
    broken: StartError | None = launcher_of(whole(**instead)).broken()
    assert (broken is not None) == is_broken


def test_a_router_that_ray_starts_no_more_is_the_end() -> None:
    """Not before Ray would have noticed that its host is lost, nor while another one is looked
    for.
    """
    launcher = launcher_of(whole())
    launcher._router_gone_at = time.monotonic()
    assert launcher.broken() is None
    launcher._router_gone_at -= 60
    assert "started it again 5 times" in str(launcher.broken())
    launcher._is_moving = True
    assert launcher.broken() is None


async def test_a_router_that_lost_its_host_keeps_no_up_waiting() -> None:
    """Nodes cannot be connected to it: they count as connected while another one serves. With both
    routers there they do not.
    """
    reports = {name: report(status=status(name, router_connected=False)) for name in NODES}
    for lost, connected in ((frozenset({"router-1"}), True), (frozenset[str](), False)):
        launcher = launcher_of(whole() | reports)
        launcher._brought = SimpleNamespace(lost_routers=lost)  # type: ignore[assignment]
        launcher.urls = ("http://127.0.0.1:1",)
        found = await launcher.status()
        assert {node.router_connected for node in found.nodes.values() if node} == {connected}
