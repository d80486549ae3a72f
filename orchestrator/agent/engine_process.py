"""One start of an engine: the guard, the engine behind it, and the reading of its output."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from splitserve.orchestrator.agent.processes import NODE_MARKER_ENV, kill_descendants
from splitserve.orchestrator.config import secret_variables
from splitserve.orchestrator.engines.command import secret_environment
from splitserve.orchestrator.launch.files import write_private

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from splitserve.orchestrator.agent.engine_log import EngineLog
    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.engines.command import EngineCommand

_log = logging.getLogger(__name__)

_KILL_DEADLINE_S = 5.0
_READ_BYTES = 2**16
_STOP_MARGIN_S = 5.0


class EngineProcess:
    """A running engine. The process that holds it must be a subreaper and must have no other
    children.

    The guard's end is seen through a pidfd and not through the end of its output: whoever kills the
    guard leaves orphans that keep the output open, and they are what has to be killed then.
    """

    def __init__(
        self, guard: subprocess.Popen[bytes], log: EngineLog, on_stage: Callable[[], None]
    ) -> None:
        assert guard.stdin is not None
        assert guard.stdout is not None
        self.guard_pid = guard.pid
        self.log = log
        self._guard = guard
        self._orders = guard.stdin
        self._output = guard.stdout
        self._on_stage = on_stage
        self._guard_ended = asyncio.Event()
        self._output_ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(guard.pid)
        os.set_blocking(self._output.fileno(), False)
        self._loop.add_reader(self._pidfd, self._on_guard_ended)
        self._loop.add_reader(self._output.fileno(), self._on_output)
        self._gone: asyncio.Task[int] = asyncio.create_task(self._wait())

    @classmethod
    def start(
        cls,
        command: EngineCommand,
        environ: Mapping[str, str],
        cpus: tuple[int, ...] | None,
        log: EngineLog,
        on_stage: Callable[[], None],
    ) -> EngineProcess:
        """The engine has been started with ``environ`` (secrets included), pinned to ``cpus``."""
        pin = ["--cpus", ",".join(str(cpu) for cpu in cpus)] if cpus else []
        guard = [sys.executable, "-m", "splitserve.orchestrator.agent.guard", *pin, "--"]
        process = subprocess.Popen(
            [*guard, *command.argv],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environ, **command.env},
            start_new_session=True,
        )
        return cls(process, log, on_stage)

    async def gone(self) -> int:
        """Wait until every process of the engine is proven gone; returns its exit status."""
        return await asyncio.shield(self._gone)

    async def stop(self, timeout_s: float) -> int:
        """Ask the engine to end, kill it after ``timeout_s``; returns when every process of it is
        gone.
        """
        return await self._end(f"stop {timeout_s}", timeout_s + _STOP_MARGIN_S)

    async def kill(self) -> int:
        """Kill the engine at once, stopped processes too; returns when every process of it is
        gone.
        """
        return await self._end("kill", _KILL_DEADLINE_S)

    async def _end(self, order: str, limit_s: float) -> int:
        """The guard ends the engine as ordered; a guard that does not is killed itself."""
        self._order(order)
        try:
            async with asyncio.timeout(limit_s):
                return await self.gone()
        except TimeoutError:
            _log.warning("the guard of the engine does not end; killing it")
            self._guard.kill()
            return await self.gone()

    def _order(self, order: str) -> None:
        try:
            self._orders.write(order.encode() + b"\n")
        except BrokenPipeError:
            _log.debug("the guard has ended before it could be told to %s", order)

    async def _wait(self) -> int:
        await self._guard_ended.wait()
        status = self._guard.wait()
        if status < 0:
            # somebody killed the guard: its orphans are now ours
            self.log.note(f"the guard was ended by signal {-status}; killing what it left")
            while not await asyncio.to_thread(kill_descendants, _KILL_DEADLINE_S):
                _log.warning("processes of the engine do not end although killed; waiting for them")
            status = 128 - status
        await self._output_ended.wait()
        self._orders.close()
        self._output.close()
        self.log.close()
        return status

    def _on_guard_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._guard_ended.set()

    def _on_output(self) -> None:
        try:
            data = os.read(self._output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._output.fileno())
            self._output_ended.set()
        elif self.log.feed(data):
            self._on_stage()


def engine_environment(
    config: ClusterConfig, node: str, secret_path: Path, secret: bytes, api_key: str
) -> dict[str, str]:
    """This process's environment for an engine, with the marker of its node and without what it
    must not know. The cluster secret is in ``secret_path``, readable by its owner only: more people
    and programs look at an environment.
    """
    text = secret.hex()
    if not secret_path.exists() or secret_path.read_text() != text:
        write_private(secret_path, text.encode())
    hidden = secret_variables(config)
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**inherited, NODE_MARKER_ENV: node, **secret_environment(secret_path, api_key)}
