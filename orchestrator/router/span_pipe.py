"""The router's end of its traces: hands the records of traced requests to the process that makes
and sends their spans (``observe.span_program``), and keeps that process running.

A pipe that is full loses records, which are counted: requests never wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from splitserve.orchestrator.observe.sent_counts import SentCounts

if TYPE_CHECKING:
    from splitserve.orchestrator.config.tracing_schema import TracingConfig

_log = logging.getLogger(__name__)

PROGRAM = "splitserve.orchestrator.observe.span_program"
HELD_LIMIT_BYTES = 2**20
"""Records that wait in the router for the process to read them."""
RESTART_DELAY_S = 5.0
"""Doubled with each life that was short."""
RESTART_DELAY_LIMIT_S = 300.0
STOP_TIMEOUT_S = 3.0
"""Longer than the program's own limit."""


class SpanPipe:
    """Owns the process. Made in the loop that it is used in; ``start`` comes first, ``stop``
    last.
    """

    def __init__(self, tracing: TracingConfig, port: int, model: str) -> None:
        settings = {
            "tracing": tracing.model_dump(mode="json"),
            "instance": f"{socket.gethostname()}:{port}",
            "model": model,
        }
        self._argv = [sys.executable, "-m", PROGRAM, msgspec.json.encode(settings).decode()]
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._lost = 0
        self._past = SentCounts()
        """Of processes that have ended."""
        self._present = SentCounts()

    @property
    def counts(self) -> SentCounts:
        """What became of the traced requests so far."""
        return self._past + self._present + SentCounts(dropped=self._lost)

    def start(self) -> None:
        """The process runs soon."""
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    def send(self, lines: list[bytes]) -> None:
        """One record per line, each with its end."""
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            self._lost += len(lines)
            return
        if process.stdin.transport.get_write_buffer_size() > HELD_LIMIT_BYTES:
            self._lost += len(lines)
            return
        process.stdin.write(b"".join(lines))

    async def stop(self) -> None:
        """What was handed over is sent, within a bound; the process has ended."""
        if self._keeper is None:
            return
        self._is_stopping = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await asyncio.wait((self._keeper,), timeout=STOP_TIMEOUT_S)
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)

    async def _keep(self) -> None:
        delay = RESTART_DELAY_S
        while True:
            began = time.monotonic()
            try:
                await self._run()
            except OSError as error:
                _log.error("the process that sends traces cannot be started: %s", error)
            if self._is_stopping:
                return
            if time.monotonic() - began > RESTART_DELAY_LIMIT_S:
                delay = RESTART_DELAY_S
            await asyncio.sleep(delay)
            delay = min(2 * delay, RESTART_DELAY_LIMIT_S)

    async def _run(self) -> None:
        """One life of the process."""
        process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        try:
            async for line in process.stdout:
                with contextlib.suppress(msgspec.DecodeError):
                    self._present = msgspec.json.decode(line, type=SentCounts)
            status = await process.wait()
            if not self._is_stopping:
                _log.error("the process that sends traces ended with status %s", status)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            self._past, self._present = self._past + self._present, SentCounts()
            self._process = None
