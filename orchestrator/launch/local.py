"""All processes of a cluster on this machine, as children of ``up``.

Every child is tethered: the kernel kills it when ``up`` dies, whatever the way, and a killed
agent's guard ends its engine. A router or agent that dies alone is started again
(``supervision.restart_*``), an agent only after everything of its last life is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import psutil

from splitserve.kv_transfer.channel import SECRET_ENV
from splitserve.orchestrator.agent.agent import EXIT_ENGINE_FAILED, EXIT_STOPPED
from splitserve.orchestrator.agent.engine_log import LOG_LIMIT_BYTES
from splitserve.orchestrator.agent.processes import (
    NODE_MARKER_ENV,
    RUN_MARKER_ENV,
    become_subreaper,
    kill_descendants,
    marked,
    reap_children,
)
from splitserve.orchestrator.agent.restart_budget import RestartBudget
from splitserve.orchestrator.agent.status_file import read_status, status_path
from splitserve.orchestrator.config import nodes, router_url
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.launch.base import ClusterStatus, StartError
from splitserve.orchestrator.launch.tether import tethered

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.launch.files import ClusterFiles

_log = logging.getLogger(__name__)

ROUTER = "router"
ROUTER_EXIT_REFUSED = 2
"""The router cannot use the configuration or the secrets it was given."""
_HEALTH_TIMEOUT_S = 1.0
_SWEEP_DEADLINE_S = 10.0
_SWEEP_POLL_S = 0.05
_STOP_MARGIN_S = 6.0
_LOG_CHECK_S = 5.0
_WISH_POLL_S = 0.25
_TAIL_BYTES = 4096
_TAIL_LINES = 15
_HEAD_LINES = 4


@dataclass
class Child:
    """A process that ``up`` keeps alive: the router or an agent."""

    name: str
    argv: list[str]
    env: dict[str, str]
    log_path: Path
    budget: RestartBudget
    process: asyncio.subprocess.Process | None = None
    keeper: asyncio.Task[None] | None = None
    state: str = "starting"
    """``starting``, ``running``, ``dead`` (waits for a restart), ``failed`` or ``left`` (drained).
    """
    exit_status: int | None = None
    started: float = field(default_factory=time.monotonic)


class LocalLauncher:
    """The local cluster. ``say`` gets one line for each thing a person should know."""

    def __init__(
        self,
        config: ClusterConfig,
        files: ClusterFiles,
        *,
        model: str,
        run: str,
        secret: bytes,
        say: Callable[[str], None],
    ) -> None:
        self.config = config
        self.files = files
        self.run = run
        self.url = router_url(config)
        self._model = model
        self._secret = secret
        self._say = say
        self._hurry = asyncio.Event()
        self._log_task: asyncio.Task[None] | None = None
        self._wish_task: asyncio.Task[None] | None = None
        self._log_dir = Path(config.observability.log_dir or files.log_dir)
        self._router = self._router_child()
        self._agents = {node.name: self._agent_child(node.name) for node in nodes(config)}

    async def start(self) -> None:
        """See ``Launcher``."""
        become_subreaper()
        self._log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        for child in self._children():
            await self._spawn(child)
            self._watch_over(child)
        self._log_task = asyncio.create_task(self._bound_logs())
        self._wish_task = asyncio.create_task(self._grant_wishes())

    async def status(self) -> ClusterStatus:
        """See ``Launcher``."""
        found = {name: read_status(self.files.run_dir, name) for name in self._agents}
        return ClusterStatus(router=await self._router_state(), nodes=found)

    def failure(self) -> StartError | None:
        """See ``Launcher``."""
        if self._router.state == "failed":
            return self._failure_of_router()
        for name, child in self._agents.items():
            status = read_status(self.files.run_dir, name)
            if child.state == "failed":
                return self._failure_of_agent(child)
            if status is not None and status.refused:
                return StartError(f"the router will not use {name}: {status.refused}")
        return None

    def broken(self) -> StartError | None:
        """Why a cluster that served cannot serve any more: its router, or every node of a pool, is
        down for good.
        """
        if self._router.state == "failed":
            return self._failure_of_router()
        for pool in POOLS:
            agents = [child for name, child in self._agents.items() if name.startswith(f"{pool}-")]
            failed = [child for child in agents if child.state == "failed"]
            if failed and all(child.state in ("failed", "left") for child in agents):
                return self._failure_of_agent(failed[-1])
        return None

    async def stop(self, drain_s: float) -> None:
        """See ``Launcher``."""
        # Wishes first: one that is being granted makes another keeper
        await _cancel(self._wish_task)
        await _cancel(self._log_task, *(child.keeper for child in self._children()))
        await self._end([self._router], drain_s + _STOP_MARGIN_S if drain_s else 1.0)
        stop_s = self.config.supervision.stop_timeout_s
        await self._end(list(self._agents.values()), stop_s + _STOP_MARGIN_S)
        if not await asyncio.to_thread(kill_descendants, _SWEEP_DEADLINE_S):
            self._say("some processes do not end although killed; see `splitserve status`")
        await asyncio.to_thread(sweep, self.run)

    def hurry(self) -> None:
        """A stop under way no longer waits for anybody."""
        self._hurry.set()

    def _children(self) -> list[Child]:
        return [self._router, *self._agents.values()]

    def _router_child(self) -> Child:
        argv = [sys.executable, "-m", "splitserve.orchestrator.router"]
        argv += ["--config", str(self.files.config_path)]
        return self._child(ROUTER, argv, self._log_dir / "router.log")

    def _agent_child(self, name: str) -> Child:
        argv = [sys.executable, "-m", "splitserve.orchestrator.agent", "--node", name]
        argv += ["--config", str(self.files.config_path), "--model", self._model]
        return self._child(name, argv, self._log_dir / f"{name}.agent.log")

    def _child(self, name: str, argv: list[str], log_path: Path) -> Child:
        env = {
            **os.environ,
            SECRET_ENV: self._secret.hex(),
            RUN_MARKER_ENV: self.run,
            NODE_MARKER_ENV: name,
        }
        return Child(name, argv, env, log_path, RestartBudget.of(self.config.supervision))

    async def _spawn(self, child: Child) -> None:
        with child.log_path.open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                *tethered(child.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child.env,
                start_new_session=True,
            )
        child.state = "running"
        child.started = time.monotonic()

    def _watch_over(self, child: Child) -> None:
        child.keeper = asyncio.create_task(self._keep(child))
        child.keeper.add_done_callback(partial(self._keeper_ended, child))

    async def _grant_wishes(self) -> None:
        """Start agents that have left or failed when an operator asks for it."""
        while True:
            for name, child in self._agents.items():
                if child.state in ("left", "failed") and self.files.is_wished(name):
                    await self._bring_back(child)
            await asyncio.sleep(_WISH_POLL_S)

    async def _bring_back(self, child: Child) -> None:
        """Another agent of a node without one runs, with all its restarts before it; what the last
        one wrote is gone when the wish is.
        """
        status_path(self.files.run_dir, child.name).unlink(missing_ok=True)
        self.files.take_wish(child.name)
        self._say(f"{child.name} is started again")
        child.budget = RestartBudget.of(self.config.supervision)
        if await self._spawn_again(child, 0.0):
            self._watch_over(child)

    async def _keep(self, child: Child) -> None:
        """Start ``child`` again whenever it dies, until its budget is spent or it ended for a
        reason.
        """
        while True:
            assert child.process is not None
            child.exit_status = await child.process.wait()
            if child is not self._router and child.exit_status == EXIT_STOPPED:
                child.state = "left"
                self._say(f"{child.name} has left the cluster")
                return
            await asyncio.to_thread(sweep, self.run, child.name)
            reap_children(keep=self._pids())
            delay = None
            if not self._is_final(child):
                delay = child.budget.take(time.monotonic())
            if delay is None:
                child.state = "failed"
                self._say(f"{child.name} failed and stays down; its log is {child.log_path}")
                return
            child.state = "dead"
            self._say(
                f"{self._named(child)} died ({_ending(child.exit_status)}); starting it again"
            )
            if not await self._spawn_again(child, delay):
                return

    async def _spawn_again(self, child: Child, delay: float | None) -> bool:
        """True once it runs; False when its budget is spent."""
        while delay is not None:
            await asyncio.sleep(delay)
            try:
                await self._spawn(child)
            except OSError as error:
                self._say(f"{self._named(child)} cannot be started: {error}")
                delay = child.budget.take(time.monotonic())
            else:
                return True
        child.state = "failed"
        self._say(f"{child.name} failed and stays down")
        return False

    def _keeper_ended(self, child: Child, keeper: asyncio.Task[None]) -> None:
        """A child that nobody watches counts as failed."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            child.state = "failed"
            self._say(f"{self._named(child)} is not watched any more: {error!r}")

    def _named(self, child: Child) -> str:
        return "the router" if child is self._router else f"the agent of {child.name}"

    async def _bound_logs(self) -> None:
        """Keep the logs of the router and the agents, which they only append to, within their
        bound.
        """
        while True:
            for child in self._children():
                try:
                    bound_log(child.log_path)
                except OSError as error:
                    _log.error("cannot bound %s: %s", child.log_path, error)
            await asyncio.sleep(_LOG_CHECK_S)

    def _is_final(self, child: Child) -> bool:
        """Whether starting it again cannot help."""
        if child is self._router:
            return child.exit_status == ROUTER_EXIT_REFUSED
        return child.exit_status == EXIT_ENGINE_FAILED

    def _pids(self) -> list[int]:
        return [child.process.pid for child in self._children() if child.process is not None]

    async def _router_state(self) -> str:
        if self._router.state != "running":
            return self._router.state
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{self.url}/health") as response,
            ):
                return "ready" if response.status == 200 else "waits for nodes"
        except (aiohttp.ClientError, OSError, TimeoutError):
            return "starting"

    def _failure_of_router(self) -> StartError:
        status = self._router.exit_status
        return StartError(
            f"the router does not start ({_ending(status)}); its log is {self._router.log_path}",
            tail(self._router.log_path),
        )

    def _failure_of_agent(self, child: Child) -> StartError:
        status = read_status(self.files.run_dir, child.name)
        if child.exit_status == EXIT_ENGINE_FAILED and status is not None:
            return StartError(
                f"the engine of {child.name} failed: {status.likely_cause} "
                f"(exit status {status.exit_status}); its log is {status.log_path}",
                _shortened(status.last_lines),
            )
        return StartError(
            f"the agent of {child.name} failed ({_ending(child.exit_status)}); "
            f"its log is {child.log_path}",
            tail(child.log_path),
        )

    async def _end(self, children: list[Child], timeout_s: float) -> None:
        """SIGTERM to all of them; SIGKILL to those that still live after ``timeout_s``."""
        alive = [
            child.process
            for child in children
            if child.process is not None and child.process.returncode is None
        ]
        for process in alive:
            process.terminate()
        if not alive:
            return
        ended = asyncio.gather(*(process.wait() for process in alive))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((ended, hurry), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        for process in alive:
            if process.returncode is None:
                process.kill()
        await ended


async def _cancel(*tasks: asyncio.Task[None] | None) -> None:
    """They have ended."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def sweep(run: str, node: str | None = None) -> None:
    """No process of ``run`` (and ``node``) is left, found by the marker in its environment; at most
    ``_SWEEP_DEADLINE_S``.
    """
    end = time.monotonic() + _SWEEP_DEADLINE_S
    while (left := marked(run, node)) and time.monotonic() < end:
        for process in left:
            try:
                process.kill()
            except psutil.Error as error:
                _log.debug("cannot kill %s: %s", process, error)
        time.sleep(_SWEEP_POLL_S)


def bound_log(path: Path, limit_bytes: int = LOG_LIMIT_BYTES) -> None:
    """A log over the limit has been moved to ``NAME.1`` and emptied.

    Its writer appends to the same file for its whole life, so the content is copied and the file
    truncated; lines written between the two are lost.
    """
    if not path.exists() or path.stat().st_size <= limit_bytes:
        return
    kept = path.with_name(path.name + ".1")
    try:
        shutil.copyfile(path, kept)
    except OSError as error:  # Above all a full disk: then room is worth more than old lines.
        _log.error("%s is emptied without a copy: %s", path, error)
        kept.unlink(missing_ok=True)
    os.truncate(path, 0)


def tail(path: Path) -> tuple[str, ...]:
    """The last lines of a log."""
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = handle.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-_TAIL_LINES:])


def _shortened(lines: tuple[str, ...]) -> tuple[str, ...]:
    """An engine's story on half a screen: its first errors and its last lines."""
    if len(lines) <= _TAIL_LINES:
        return lines
    return (*lines[:_HEAD_LINES], "...", *lines[_HEAD_LINES - _TAIL_LINES :])


def _ending(status: int | None) -> str:
    if status is None:
        return "running"
    return f"signal {-status}" if status < 0 else f"status {status}"
