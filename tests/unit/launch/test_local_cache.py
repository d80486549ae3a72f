"""The cache server as a child of ``up``: first to start, kept up, last to end; a stand-in for the
program, and for all others.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest
from router_stubs.cluster import until

from splitserve.kv_transfer.cache.settings import CACHE_SECRET_ENV, CacheSettings
from splitserve.kv_transfer.channel import SECRET_ENV
from splitserve.orchestrator.config import cache_secret, parse
from splitserve.orchestrator.launch import local
from splitserve.orchestrator.launch.files import ClusterFiles
from splitserve.orchestrator.launch.local import LocalLauncher
from splitserve.orchestrator.launch.paths import with_cache_paths

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CONFIG = """
engine: mock
model: {path: m}
security: {secret_file: /s}
supervision: {restart_delay_s: 0.001, restart_limit: 1}
cache: {encrypt: true, tiers: [{type: cpu, capacity_bytes: 1 MB}]}
"""
PROGRAM = """
import json, os, pathlib, socket, sys
settings = json.loads(pathlib.Path(sys.argv[1]).read_bytes())
place = pathlib.Path(settings["socket_path"])
(place.parent / "environment.json").write_text(json.dumps(dict(os.environ)))
place.unlink(missing_ok=True)
os.chdir(place.parent)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(place.name)
server.listen()
while True:
    server.accept()
"""
WAIT_S = 20


class Rig:
    """A launcher of a stand-in cache server beside processes that do nothing."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.files = ClusterFiles("rig-with-a-name-as-long-as-they-may-be-0123456789")
        text = f"name: {self.files.name}\n{CONFIG}"
        self.launcher = LocalLauncher(
            with_cache_paths(parse(text)),
            self.files,
            model="m",
            run="rig-cache-run",
            secret=bytes(32),
            say=self.said.append,
        )
        assert self.launcher._cache is not None
        self.cache = self.launcher._cache
        self.others = [*self.launcher._routers, *self.launcher._agents.values()]
        self.cache.argv = [sys.executable, "-c", PROGRAM, self.cache.argv[-1]]
        for child in self.others:
            child.argv = ["sleep", "60"]

    async def is_ready(self) -> bool:
        """Whether the launcher takes the cache for usable."""
        return (await self.launcher.status()).cache == "ready"


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """Its folder is deeper than a Unix socket's address may be long."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("deep" * 20)))
    monkeypatch.setattr(local, "become_subreaper", lambda: None)
    monkeypatch.setattr(local, "kill_descendants", lambda deadline_s: True)
    rig = Rig()
    rig.files.begin_run("{}", "token")
    yield rig
    await rig.launcher.stop(0.0)
    assert all(
        child.process is None or child.process.returncode is not None for child in rig.others
    )


async def ready(rig: Rig) -> None:
    """It is."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if await rig.is_ready():
                return
            await asyncio.sleep(0.02)


async def test_it_starts_first_with_its_settings(rig: Rig) -> None:
    """Settings in a private file, its own secret and not the cluster's, and the launcher knows when
    it listens.
    """
    await rig.launcher.start()
    await ready(rig)
    path = rig.files.cache_settings_path
    settings = msgspec.json.decode(path.read_bytes(), type=CacheSettings)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(settings.socket_path) > 107
    environment = json.loads((rig.files.run_dir / "environment.json").read_text())
    assert SECRET_ENV not in environment
    expected = cache_secret(rig.launcher.config, bytes(32))
    assert environment[CACHE_SECRET_ENV] == expected.hex()
    assert all(rig.cache.started <= other.started for other in rig.others)
    assert rig.cache.log_path.name == "cache.log"


async def test_it_is_started_again_and_the_rest_goes_on(rig: Rig) -> None:
    """Within its budget; after that it is down, which does not break a cluster that serves."""
    await rig.launcher.start()
    await ready(rig)
    for _ in range(2):
        assert rig.cache.process is not None
        old = rig.cache.process
        old.kill()
        await old.wait()
        await until(
            lambda old=old: rig.cache.process is not old or rig.cache.state == "failed", WAIT_S
        )
        if rig.cache.state != "failed":
            await ready(rig)
    assert rig.said == [
        "the cache server died (signal 9); starting it again",
        f"cache failed and stays down; its log is {rig.cache.log_path}",
    ]
    assert (await rig.launcher.status()).cache == "failed"
    assert rig.launcher.broken() is None
    assert all(child.state == "running" for child in rig.others)
    failure = rig.launcher.failure()
    assert failure is not None
    assert str(failure).startswith("the cache server does not start (signal 9)")


async def test_settings_that_it_refuses_are_not_tried_again(rig: Rig) -> None:
    """Exit status 2 is final, and its last words are told."""
    rig.cache.argv = [sys.executable, "-c", "import sys; print('no such store'); sys.exit(2)"]
    await rig.launcher.start()
    await until(lambda: rig.cache.state == "failed", WAIT_S)
    failure = rig.launcher.failure()
    assert failure is not None
    assert failure.details == ("no such store",)


async def test_it_ends_last(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the router and the agents have ended: their engines may still save."""
    await rig.launcher.start()
    order: list[list[str]] = []
    end = rig.launcher._children.end

    async def noted(children: object, timeout_s: float) -> None:
        chosen = list(children)  # type: ignore[call-overload]
        order.append([child.name for child in chosen])
        await end(chosen, timeout_s)

    monkeypatch.setattr(rig.launcher._children, "end", noted)
    await rig.launcher.stop(0.0)
    assert order == [["router"], ["prefill-0", "decode-0"], ["cache"]]
    assert rig.cache.process is not None
    assert rig.cache.process.returncode is not None
