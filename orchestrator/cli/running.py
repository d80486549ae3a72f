"""Runs a planned cluster in the foreground: up, shown while it loads, watched, and down again
whatever happens.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import msgspec

from splitserve.orchestrator.agent.auth import operator_token
from splitserve.orchestrator.cli.display import LoadingDisplay, print_endpoints
from splitserve.orchestrator.config import ConfigError, dump_resolved, nodes
from splitserve.orchestrator.config.scaling import scaled
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.files import (
    ClusterFiles,
    ClusterRecord,
    ScaleAnswer,
    tls_files,
)
from splitserve.orchestrator.launch.local import LocalLauncher
from splitserve.orchestrator.launch.ray.installed import require_ray

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rich.console import Console

    from splitserve.orchestrator.launch.base import Launcher
    from splitserve.orchestrator.launch.plan import Plan

SERVING_LINE = "serving; Ctrl-C stops everything"
"""The last line of an `up` that nobody interrupts. True where it runs in the foreground."""
_POLL_S = 0.25
_WATCH_S = 1.0
_READY_MARGIN_S = 60.0


async def run_cluster(
    plan: Plan,
    console: Console,
    while_serving: Callable[[str], Awaitable[None]] | None = None,
    *,
    leaves: bool = False,
) -> bool:
    """The cluster has been up and is down again, with nothing left behind; or True: it serves on.

    It serves until a signal comes, or until ``while_serving(url)`` returns; with ``leaves``, which
    needs a launcher whose processes live without this one, on and on. Raises ``StartError`` when
    it cannot become ready or falls apart for good, and whatever ``while_serving`` raises.
    """
    files = ClusterFiles(plan.config.name)
    with files.lock():
        launcher = _launcher(plan, files, console)
        return await _Run(plan, console, files, launcher, leaves=leaves).through(while_serving)


def _launcher(plan: Plan, files: ClusterFiles, console: Console) -> Launcher:
    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    config, run, secret = plan.config, plan.run, plan.secret
    if config.launcher == "ray":
        require_ray()
        from splitserve.orchestrator.launch.ray.launcher import RayLauncher

        return RayLauncher(config, files, run=run, secret=secret, say=say)
    files.begin_run(dump_resolved(config), operator_token(secret))
    return LocalLauncher(config, files, model=plan.model, run=run, secret=secret, say=say)


class _Run:
    """One run: from the first process to the last."""

    def __init__(
        self,
        plan: Plan,
        console: Console,
        files: ClusterFiles,
        launcher: Launcher,
        *,
        leaves: bool,
    ) -> None:
        self._plan = plan
        self._console = console
        self._files = files
        self._launcher = launcher
        self._leaves = leaves
        self._stop = asyncio.Event()
        self._drain_s = 0.0
        self._is_recorded = False
        self._record = ClusterRecord(
            name=plan.config.name,
            run=plan.run,
            pid=os.getpid(),
            source=plan.source,
            url="",
            nodes=tuple(node.name for node in nodes(plan.config)),
            phase="starting",
            started=time.time(),
            log_dir=launcher.logs,
            launcher=plan.config.launcher,
            tls=tls_files(plan.config.security.tls),
        )

    async def through(self, while_serving: Callable[[str], Awaitable[None]] | None) -> bool:
        """Start, serve, stop; True when it has been left to serve on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        runs_on = False
        try:
            if await self._start() and await self._wait_until_ready():
                self._drain_s = self._plan.config.supervision.drain_timeout_s
                await self._show()
                if self._leaves:
                    runs_on = True
                else:
                    await self._serve(while_serving)
        except (StartError, ConfigError):
            runs_on = self._launcher.is_adopted and self._drain_s == 0
            raise
        finally:
            await self._end(runs_on=runs_on)
        return runs_on

    async def _start(self) -> bool:
        """True when everything has been started, False when asked to stop before."""
        if self._launcher.urls:
            self._record_run()
        starting = asyncio.create_task(self._launcher.start())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,))
            return False
        try:
            starting.result()
        except ConfigError as error:
            raise ConfigError(error.problems, self._plan.source) from error
        self._record_run()
        return True

    def _record_run(self) -> None:
        """The commands on this machine find the cluster."""
        url, *more = self._launcher.urls
        self._record = msgspec.structs.replace(
            self._record,
            url=url,
            more_urls=tuple(more),
            run=self._launcher.run,
            nodes=tuple(node.name for node in nodes(self._launcher.config)),
        )
        self._files.write_record(self._record)
        self._is_recorded = True

    async def _end(self, *, runs_on: bool) -> None:
        if runs_on:
            await self._launcher.leave()
            return
        if self._is_recorded:
            self._note("stopping")
        await self._launcher.stop(self._drain_s)
        if self._is_recorded:
            self._files.remove_record()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._console.print("stopping at once", highlight=False)
            self._launcher.hurry()
            return
        self._console.print(
            "stopping: running requests finish first; once more to stop at once", highlight=False
        )
        self._stop.set()

    async def _wait_until_ready(self) -> bool:
        """True when every node serves, False when asked to stop before."""
        limit = _READY_MARGIN_S + max(
            node.settings.startup_timeout_s for node in nodes(self._plan.config)
        )
        end = time.monotonic() + limit
        with LoadingDisplay(self._console) as display:
            while not self._stop.is_set():
                status = await self._launcher.status()
                display.update(status)
                if (failure := self._launcher.failure()) is not None:
                    raise failure
                if status.is_ready:
                    return True
                if time.monotonic() > end:
                    raise StartError(
                        f"not ready after {limit:.0f} s; see the logs in {self._launcher.logs}"
                    )
                await self._pause(_POLL_S)
        return False

    async def _show(self) -> None:
        status = await self._launcher.status()
        print_endpoints(self._console, self._launcher.config, self._launcher.urls, status)
        self._console.print(f"logs: {self._launcher.logs}", highlight=False, soft_wrap=True)
        # After the lines, which `up --detach` shows until then
        self._note("serving")

    async def _serve(self, while_serving: Callable[[str], Awaitable[None]] | None) -> None:
        if while_serving is None:
            self._console.print(SERVING_LINE, highlight=False)
            await self._watch()
            return
        work = asyncio.ensure_future(while_serving(self._launcher.urls[0]))
        watch = asyncio.create_task(self._watch())
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        for task in (work, watch):
            if not task.done():
                task.cancel()
        outcomes = await asyncio.gather(work, watch, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _watch(self) -> None:
        """Returns when asked to stop; raises ``StartError`` when the router, or the last node of a
        role, is down for good.
        """
        while not self._stop.is_set():
            if (failure := self._launcher.broken()) is not None:
                raise failure
            await self._scale_if_asked()
            self._note_nodes()
            if self._launcher.urls != (self._record.url, *self._record.more_urls):
                self._record_run()
            await self._pause(_WATCH_S)

    async def _scale_if_asked(self) -> None:
        """The cluster has the size that was asked for, or the answer says why not. A cluster on Ray
        is scaled by the command itself, which needs no ``up``.
        """
        launcher = self._launcher
        if not isinstance(launcher, LocalLauncher):
            return
        if (order := self._files.take_scale_order()) is None:
            return
        problems: tuple[str, ...] = ()
        try:
            found = scaled(
                launcher.config, order.pool, order.replicas, cpus=order.cpus, gpus=order.gpus
            )
            await launcher.resize(found.config)
            self._note_nodes()
        except ConfigError as error:
            problems = tuple(error.problems)
        self._files.answer_scale(ScaleAnswer(ticket=order.ticket, problems=problems))

    def _note_nodes(self) -> None:
        """The record names the nodes that the cluster has now."""
        names = tuple(node.name for node in nodes(self._launcher.config))
        if names != self._record.nodes:
            self._record = msgspec.structs.replace(self._record, nodes=names)
            self._files.write_record(self._record)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return

    def _note(self, phase: str) -> None:
        """Say how far the run is; what cannot be written must not keep it from ending well."""
        self._record = msgspec.structs.replace(self._record, phase=phase)
        try:
            self._files.write_record(self._record)
        except OSError as error:
            self._console.print(f"`splitserve status` is out of date: {error}", highlight=False)
