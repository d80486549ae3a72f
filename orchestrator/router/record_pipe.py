"""The router's end of a process that is told of requests that have ended: one makes and sends spans
(``observe.span_program``), one writes the log (``observe.log_program``). Keeps it running.

A pipe that is full loses requests, which are counted: the router never waits.
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
    from typing import IO

    from splitserve.orchestrator.config.tracing_schema import TracingConfig

_log = logging.getLogger(__name__)

SPAN_PROGRAM = "splitserve.orchestrator.observe.span_program"
LOG_PROGRAM = "splitserve.orchestrator.observe.log_program"
HELD_LIMIT_BYTES = 4 * 2**20
"""Requests that wait in the router for the process to read them, some 20,000."""
RESTART_DELAY_S = 5.0
"""Doubled with each life that was short."""
RESTART_DELAY_LIMIT_S = 300.0
STOP_TIMEOUT_S = 3.0
"""Longer than the span program's own limit."""


def span_pipe(tracing: TracingConfig, port: int, model: str) -> RecordPipe:
    """For spans of the router that listens on that port."""
    settings = {
        "tracing": tracing.model_dump(mode="json"),
        "instance": f"{socket.gethostname()}:{port}",
        "model": model,
    }
    return RecordPipe(
        [SPAN_PROGRAM, msgspec.json.encode(settings).decode()], "the process that sends traces"
    )


def log_pipe(stream: IO[bytes]) -> RecordPipe:
    """For the lines of the log, which go where ``stream`` leads."""
    return RecordPipe([LOG_PROGRAM], "the process that writes the request log", stream)


class RecordPipe:
    """Owns the process. Made in the loop that it is used in; ``start`` comes first, ``stop``
    last.
    """

    def __init__(self, arguments: list[str], title: str, output: IO[bytes] | None = None) -> None:
        """``arguments`` are the module that the process runs, and its own. Its standard output is
        ``output``; without one it tells counts there.
        """
        self._argv = [sys.executable, "-m", *arguments]
        self._title = title
        self._output = output
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

    @property
    def is_running(self) -> bool:
        """Whether there is a process that could take something."""
        process = self._process
        return process is not None and process.stdin is not None and not process.stdin.is_closing()

    def send(self, frame: bytes, requests: int) -> bool:
        """The process is told of so many requests; False when they are lost."""
        process = self._process
        if (
            process is None
            or process.stdin is None
            or process.stdin.is_closing()
            or process.stdin.transport.get_write_buffer_size() > HELD_LIMIT_BYTES
        ):
            self._lost += requests
            return False
        process.stdin.write(frame)
        return True

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
                _log.error("%s cannot be started: %s", self._title, error)
            if self._is_stopping:
                return
            if time.monotonic() - began > RESTART_DELAY_LIMIT_S:
                delay = RESTART_DELAY_S
            await asyncio.sleep(delay)
            delay = min(2 * delay, RESTART_DELAY_LIMIT_S)

    async def _run(self) -> None:
        """One life of the process."""
        process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if self._output is None else self._output,
        )
        assert process.stdin is not None
        self._process = process
        try:
            if process.stdout is not None:
                await self._read_counts(process.stdout)
            status = await process.wait()
            if not self._is_stopping:
                _log.error("%s ended with status %s", self._title, status)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            self._past, self._present = self._past + self._present, SentCounts()
            self._process = None

    async def _read_counts(self, output: asyncio.StreamReader) -> None:
        async for line in output:
            with contextlib.suppress(msgspec.DecodeError):
                self._present = msgspec.json.decode(line, type=SentCounts)
