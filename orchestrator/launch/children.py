"""The processes that ``up`` keeps alive, as its children.

Every child is tethered: the kernel kills it when ``up`` dies, whatever the way. A child that dies
alone is started again within its budget, only after everything of its last life is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import psutil

from splitserve.orchestrator.agent.processes import marked, reap_children
from splitserve.orchestrator.launch.child_logs import bound_log
from splitserve.orchestrator.launch.tether import tethered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from splitserve.orchestrator.agent.restart_budget import RestartBudget

_log = logging.getLogger(__name__)

_SWEEP_DEADLINE_S = 10.0
_SWEEP_POLL_S = 0.05
_LOG_CHECK_S = 5.0


@dataclass
class Child:
    """A process that ``up`` keeps alive: the router, the cache server or an agent."""

    name: str
    title: str
    """What people call it: ``the router``, ``the agent of prefill-0``."""
    argv: list[str]
    env: dict[str, str]
    log_path: Path
    budget: RestartBudget
    final_exits: frozenset[int] = frozenset()
    """Exit statuses after which starting it again cannot help."""
    leave_exit: int | None = None
    """The exit status of one that has left the cluster as it was asked to."""
    process: asyncio.subprocess.Process | None = None
    keeper: asyncio.Task[None] | None = None
    state: str = "starting"
    """``starting``, ``running``, ``dead`` (waits for a restart), ``failed`` or ``left`` (drained).
    """
    exit_status: int | None = None
    started: float = field(default_factory=time.monotonic)


class Children:
    """All children of one run, in the order in which they start. ``say`` gets one line for each
    thing a person should know.
    """

    def __init__(self, run: str, say: Callable[[str], None]) -> None:
        self._run = run
        self._say = say
        self._hurry = asyncio.Event()
        self._all: list[Child] = []
        self._log_task: asyncio.Task[None] | None = None

    def add(self, child: Child) -> Child:
        """``child`` belongs to the run; it is started by ``start``."""
        self._all.append(child)
        return child

    async def start(self) -> None:
        """Every child runs and is watched, and their logs keep their bound."""
        for child in self._all:
            await self.spawn(child)
            self.watch_over(child)
        self._log_task = asyncio.create_task(self._bound_logs())

    async def remove(self, child: Child, timeout_s: float) -> None:
        """The child is no part of the run any more, and nothing of it lives: SIGTERM, and SIGKILL
        after ``timeout_s``.
        """
        await cancel(child.keeper)
        await self.end([child], timeout_s)
        await asyncio.to_thread(sweep, self._run, child.name)
        self._all.remove(child)

    async def stop_watching(self) -> None:
        """No child is started again."""
        await cancel(self._log_task, *(child.keeper for child in self._all))

    def hurry(self) -> None:
        """An end under way no longer waits for anybody."""
        self._hurry.set()

    async def end(self, children: Iterable[Child], timeout_s: float) -> None:
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

    async def spawn(self, child: Child) -> None:
        """It runs. Raises ``OSError``."""
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

    def watch_over(self, child: Child) -> None:
        """It is started again when it dies."""
        child.keeper = asyncio.create_task(self._keep(child))
        child.keeper.add_done_callback(partial(self._keeper_ended, child))

    async def spawn_again(self, child: Child, delay: float | None) -> bool:
        """True once it runs; False when its budget is spent."""
        while delay is not None:
            await asyncio.sleep(delay)
            try:
                await self.spawn(child)
            except OSError as error:
                self._say(f"{child.title} cannot be started: {error}")
                delay = child.budget.take(time.monotonic())
            else:
                return True
        child.state = "failed"
        self._say(f"{child.name} failed and stays down")
        return False

    async def _keep(self, child: Child) -> None:
        """Start ``child`` again whenever it dies, until its budget is spent or it ended for a
        reason.
        """
        while True:
            assert child.process is not None
            child.exit_status = await child.process.wait()
            if child.exit_status == child.leave_exit:
                child.state = "left"
                self._say(f"{child.name} has left the cluster")
                return
            await asyncio.to_thread(sweep, self._run, child.name)
            reap_children(keep=[c.process.pid for c in self._all if c.process is not None])
            delay = None
            if child.exit_status not in child.final_exits:
                delay = child.budget.take(time.monotonic())
            if delay is None:
                child.state = "failed"
                self._say(f"{child.name} failed and stays down; its log is {child.log_path}")
                return
            child.state = "dead"
            self._say(f"{child.title} died ({ending(child.exit_status)}); starting it again")
            if not await self.spawn_again(child, delay):
                return

    def _keeper_ended(self, child: Child, keeper: asyncio.Task[None]) -> None:
        """A child that nobody watches counts as failed."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            child.state = "failed"
            self._say(f"{child.title} is not watched any more: {error!r}")

    async def _bound_logs(self) -> None:
        """Keep the children's logs, which they only append to, within their bound."""
        while True:
            for child in self._all:
                try:
                    bound_log(child.log_path)
                except OSError as error:
                    _log.error("cannot bound %s: %s", child.log_path, error)
            await asyncio.sleep(_LOG_CHECK_S)


async def cancel(*tasks: asyncio.Task[None] | None) -> None:
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


def ending(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "running"
    return f"signal {-status}" if status < 0 else f"status {status}"
