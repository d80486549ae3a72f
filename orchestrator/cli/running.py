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

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rich.console import Console

    from splitserve.orchestrator.launch.files import ScaleOrder
    from splitserve.orchestrator.launch.plan import Plan

_POLL_S = 0.25
_WATCH_S = 1.0
_READY_MARGIN_S = 60.0


async def run_cluster(
    plan: Plan, console: Console, while_serving: Callable[[str], Awaitable[None]] | None = None
) -> None:
    """The cluster has been up and is down again, with nothing left behind.

    It serves until a signal comes, or until ``while_serving(url)`` returns. Raises ``StartError``
    when it cannot become ready or falls apart for good, and whatever ``while_serving`` raises.
    """
    files = ClusterFiles(plan.config.name)
    with files.lock():
        files.begin_run(dump_resolved(plan.config), operator_token(plan.secret))
        launcher = LocalLauncher(
            plan.config,
            files,
            model=plan.model,
            run=plan.run,
            secret=plan.secret,
            say=lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True),
        )
        await _Run(plan, console, files, launcher).through(while_serving)


class _Run:
    """One run: from the first process to the last."""

    def __init__(
        self, plan: Plan, console: Console, files: ClusterFiles, launcher: LocalLauncher
    ) -> None:
        self._plan = plan
        self._console = console
        self._files = files
        self._launcher = launcher
        self._stop = asyncio.Event()
        self._drain_s = 0.0
        self._record = ClusterRecord(
            name=plan.config.name,
            run=plan.run,
            pid=os.getpid(),
            source=plan.source,
            url=launcher.urls[0],
            more_urls=launcher.urls[1:],
            nodes=tuple(node.name for node in nodes(plan.config)),
            phase="starting",
            started=time.time(),
            log_dir=str(plan.config.observability.log_dir),
            tls=tls_files(plan.config.security.tls),
        )

    async def through(self, while_serving: Callable[[str], Awaitable[None]] | None) -> None:
        """Start, serve, stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        self._files.write_record(self._record)
        try:
            await self._launcher.start()
            if await self._wait_until_ready():
                self._drain_s = self._plan.config.supervision.drain_timeout_s
                await self._serve(while_serving)
        finally:
            self._note("stopping")
            await self._launcher.stop(self._drain_s)
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
                        f"not ready after {limit:.0f} s; see the logs in "
                        f"{self._plan.config.observability.log_dir}"
                    )
                await self._pause(_POLL_S)
        return False

    async def _serve(self, while_serving: Callable[[str], Awaitable[None]] | None) -> None:
        self._note("serving")
        status = await self._launcher.status()
        print_endpoints(self._console, self._plan.config, self._launcher.urls, status)
        logs = self._plan.config.observability.log_dir
        self._console.print(f"logs: {logs}", highlight=False, soft_wrap=True)
        if while_serving is None:
            self._console.print("serving; Ctrl-C stops everything", highlight=False)
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
            if (order := self._files.take_scale_order()) is not None:
                await self._scale(order)
            await self._pause(_WATCH_S)

    async def _scale(self, order: ScaleOrder) -> None:
        """The cluster has the size that was asked for, or the answer says why not."""
        problems: tuple[str, ...] = ()
        try:
            found = scaled(
                self._launcher.config, order.pool, order.replicas, cpus=order.cpus, gpus=order.gpus
            )
            await self._launcher.resize(found.config)
            names = tuple(node.name for node in nodes(found.config))
            self._record = msgspec.structs.replace(self._record, nodes=names)
            self._files.write_record(self._record)
        except ConfigError as error:
            problems = tuple(error.problems)
        self._files.answer_scale(ScaleAnswer(ticket=order.ticket, problems=problems))

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
