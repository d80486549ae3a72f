"""The local launcher's watch over its children, when the machine runs out of something."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from router_stubs.cluster import until

from splitserve.orchestrator.agent.status_file import NodeStatus, status_path, write_status
from splitserve.orchestrator.config import ConfigError, load_resolved, parse
from splitserve.orchestrator.config.scaling import scaled
from splitserve.orchestrator.launch import child_logs, local
from splitserve.orchestrator.launch.child_logs import bound_log
from splitserve.orchestrator.launch.files import ClusterFiles
from splitserve.orchestrator.launch.local import LocalLauncher

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.orchestrator.launch.children import Child

CONFIG = """
engine: mock
model: {path: m}
supervision: {restart_delay_s: 0.001, restart_limit: 2}
"""


class Rig:
    """A launcher that starts nothing by itself, and what it has said."""

    def __init__(self, more: str = "") -> None:
        self.said: list[str] = []
        self.launcher = LocalLauncher(
            parse(CONFIG + more),
            ClusterFiles("rig"),
            model="m",
            run="rig-run",
            secret=bytes(32),
            say=self.said.append,
        )
        self.router = self.launcher._routers[0]

    async def keep(self) -> None:
        """Watch the router until nobody does any more."""
        self.launcher._children.watch_over(self.router)
        assert self.router.keeper is not None
        await asyncio.wait([self.router.keeper], timeout=20)
        await asyncio.sleep(0)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A launcher over a state folder of its own, with a router that ends at once."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    rig = Rig()
    rig.router.log_path.parent.mkdir(parents=True)
    rig.router.argv = ["true"]
    return rig


async def test_a_router_that_cannot_be_started_again_is_failed(rig: Rig) -> None:
    """Not silently dead: it is tried within its budget, said, and known as broken."""
    await rig.launcher._children.spawn(rig.router)
    assert rig.router.process is not None
    await rig.router.process.wait()
    rig.router.log_path.unlink()
    rig.router.log_path.parent.rmdir()
    await rig.keep()
    assert rig.router.state == "failed"
    assert rig.launcher.broken() is not None
    assert any("the router cannot be started: " in line for line in rig.said)
    assert rig.said[-1] == "router failed and stays down"


@pytest.mark.parametrize(("role", "is_broken"), [("prefill", True), ("decode", False)])
def test_a_role_without_any_node_ends_the_cluster(rig: Rig, role: str, is_broken: bool) -> None:
    """The only prefill node has failed for good, unless it is another decode node by now."""
    rig.launcher.files.begin_run("{}", "token")
    rig.launcher._agents["prefill-0"].state = "failed"
    rig.launcher._agents["decode-0"].state = "running"
    status = NodeStatus(
        node="prefill-0",
        phase="failed",
        role=role,
        pool="prefill",
        stage="",
        elapsed_s=0.0,
        incarnation="",
        agent_pid=1,
        engine_url="",
        log_path="",
    )
    write_status(rig.launcher.files.run_dir, status)
    assert (rig.launcher.broken() is not None) == is_broken


async def test_a_child_that_nobody_watches_is_failed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the watch itself is said, and `up` does not go on as if nothing had happened."""

    def fail(now: float) -> float:
        raise RuntimeError("no thread left")

    monkeypatch.setattr(rig.router.budget, "take", fail)
    await rig.launcher._children.spawn(rig.router)
    await rig.keep()
    assert rig.launcher.failure() is not None
    assert "not watched any more: RuntimeError('no thread left')" in rig.said[-1]


@pytest.mark.parametrize("state", ["left", "failed"])
async def test_a_node_that_is_down_is_started_again_when_it_is_wished(rig: Rig, state: str) -> None:
    """With a new budget, without the status that its last agent wrote; others stay down."""
    files, launcher = rig.launcher.files, rig.launcher
    files.begin_run("{}", "token")
    child, other = launcher._agents["prefill-0"], launcher._agents["decode-0"]
    child.argv, child.state, other.state = ["true"], state, state
    spent = child.budget
    status_path(files.run_dir, "prefill-0").write_text("old")
    files.wish_for("prefill-0")
    wishes = asyncio.create_task(launcher._grant_wishes())
    await until(lambda: child.keeper is not None and child.keeper.done(), 20)
    wishes.cancel()
    assert not files.is_wished("prefill-0")
    assert not status_path(files.run_dir, "prefill-0").exists()
    assert child.budget is not spent
    assert rig.said == ["prefill-0 is started again", "prefill-0 has left the cluster"]
    assert (child.exit_status, other.process) == (0, None)


async def test_a_cluster_is_resized(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new agent is started and watched with the new configuration; when its node goes it ends,
    and its files too. A size that cannot be changes nothing.
    """
    files, launcher = rig.launcher.files, rig.launcher
    files.begin_run("{}", "token")
    make_child = launcher._agent_child

    def child_that_stays(name: str) -> Child:
        child = make_child(name)
        child.argv = ["sleep", "60"]
        return child

    monkeypatch.setattr(launcher, "_agent_child", child_that_stays)
    small, large = launcher.config, scaled(launcher.config, "decode", 2).config
    await launcher.resize(large)
    child = launcher._agents["decode-1"]
    assert (child.state, load_resolved(files.config_path)) == ("running", large)
    assert set((await launcher.status()).nodes) == {"prefill-0", "decode-0", "decode-1"}
    status_path(files.run_dir, "decode-1").write_text("{}")
    monkeypatch.setattr(local, "taken_ports", lambda config, names: [f"{n}: no" for n in names])
    with pytest.raises(ConfigError, match="decode-2: no"):
        await launcher.resize(scaled(large, "decode", 3).config)
    assert launcher.config == load_resolved(files.config_path) == large
    await launcher.resize(small)
    assert child.process is not None
    assert child.process.returncode is not None
    assert set((await launcher.status()).nodes) == {"prefill-0", "decode-0"}
    assert not status_path(files.run_dir, "decode-1").exists()
    assert rig.said == ["decode-1 is started", "decode-1 is no part of the cluster any more"]


def test_a_log_is_bounded_on_a_full_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for its copy it is emptied."""

    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    path = tmp_path / "router.log"
    path.write_bytes(b"x" * 100)
    bound_log(path, 100)
    assert path.stat().st_size == 100
    monkeypatch.setattr(child_logs.shutil, "copyfile", full)
    bound_log(path, 50)
    assert [p.stat().st_size for p in tmp_path.iterdir()] == [0]


async def test_several_routers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a process with a number, a port and a log of its own; the cluster is broken when none
    of them is left, and cannot become ready while one is missing.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    rig = Rig("router: {port: 8000, replicas: 2}\n")
    routers = rig.launcher._routers
    assert [child.argv[-2:] for child in routers] == [["--index", "0"], ["--index", "1"]]
    assert [child.log_path.name for child in routers] == ["router.log", "router-1.log"]
    assert rig.launcher.urls == ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
    (tmp_path / "splitserve" / "rig").mkdir(parents=True)
    routers[0].state = "failed"
    assert "router 0 does not start" in str(rig.launcher.failure())
    assert rig.launcher.broken() is None
    status = await rig.launcher.status()
    assert (status.router, status.more_routers) == ("failed", {"router-1": "starting"})
    routers[1].state = "failed"
    assert rig.launcher.broken() is not None
