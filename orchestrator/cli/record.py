"""``splitserve record``: what arrives at the router, as a trace without any text."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import click
import msgspec

from splitserve.orchestrator.cli.errors import EXIT_FAILED, RefusedError
from splitserve.orchestrator.cli.router_tls import router_tls
from splitserve.orchestrator.cli.running_nodes import name_of
from splitserve.orchestrator.cli.up import chosen_cluster, not_running
from splitserve.orchestrator.router.recordings import RECORDING_PATH
from splitserve.orchestrator.trace_recording import Arrived, Began, TraceLines, decode_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord

CONNECT_TIMEOUT_S = 10.0
FINISH_LIMIT_S = 3600.0
"""How long the last requests are waited for."""


class RecordingError(click.ClickException):
    """The recording has ended early; the message says why, and what the file holds."""

    exit_code = EXIT_FAILED


@click.command()
@click.argument("cluster", required=False)
@click.option(
    "--out",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The file to write; it must not be there yet.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Record for so long; default: until Ctrl-C.",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Tokens of the blocks by which shared beginnings are told.",
)
def record(cluster: str | None, path: Path, minutes: float | None, block_tokens: int) -> None:
    """Write what arrives at the routers of CLUSTER (a name, or the YAML it was started from;
    default: the only one that runs) as a trace.

    One JSON line per request (Mooncake's form): when it came, how long prompt and answer were, and
    numbers that say which prompts begin alike. No text, no key and no hash of either. `splitserve
    tune --trace` and `cache advise --trace` read it.

    At the end, requests that still run are waited for; Ctrl-C once more leaves them out.
    """
    files = chosen_cluster(name_of(cluster))
    found = files.record()
    if found is None or not files.is_running():
        raise click.exceptions.Exit(not_running(files.name))
    if path.suffix == ".gz":
        raise RefusedError(f"--out {path}: the file is written unpacked; pack it afterwards")
    with TraceFile(path) as file:
        recording = Recording(files, found, file, TraceLines(block_tokens))
        asyncio.run(recording.run(None if minutes is None else minutes * 60))


class TraceFile:
    """A new file that holds whole lines only, whatever happens. Raises ``OSError`` when there is
    one of that name already, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise RefusedError(f"--out {path}: there is such a file; name another one") from error
        self._size = 0
        self.lines = 0
        """That it holds."""

    def append(self, lines: bytes) -> None:
        """All of the lines are in the file, or none of them. Raises ``OSError``."""
        at = 0
        try:
            while at < len(lines):
                at += os.write(self._file, lines[at:])
        except OSError:
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += len(lines)
        self.lines += lines.count(b"\n")

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


class Recording:
    """One recording, from the first line to the last."""

    def __init__(
        self, files: ClusterFiles, record: ClusterRecord, file: TraceFile, lines: TraceLines
    ) -> None:
        self._files = files
        self._record = record
        self._file = file
        self._lines = lines
        self._stop = asyncio.Event()
        self._asked = record.url
        """The router that was asked last, or has ended the recording."""
        self._begun = 0
        """Routers that listen to this recorder."""
        self._all_ended = asyncio.Event()
        """No request runs, and none is taken up any more."""

    async def run(self, seconds: float | None) -> None:
        """The time is over, or somebody has stopped it; the file is complete. Raises
        ``RecordingError``.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S)
        failure = ""
        async with aiohttp.ClientSession(timeout=timeout) as session, AsyncExitStack() as stack:
            try:
                streams = {}
                for one in self._record.routers:
                    self._asked = one.url
                    streams[one.url] = await self._begin(session, stack, one.url)
                await self._follow(streams, seconds)
            except aiohttp.ClientError as error:
                failure = f"the router on {self._asked} has ended the recording: {error}"
        # Nobody will say how those end that still run
        self._append(self._lines.give_up())
        if failure:
            raise RecordingError(f"{failure}; {self._told()}")
        click.echo(self._told())

    async def _begin(
        self, session: aiohttp.ClientSession, stack: AsyncExitStack, url: str
    ) -> aiohttp.StreamReader:
        """The lines of one router. Raises ``aiohttp.ClientError``."""
        tls = router_tls(self._record)
        response = await stack.enter_async_context(
            session.get(
                url.removesuffix("/v1") + RECORDING_PATH,
                headers=self._headers(),
                ssl=tls if tls is not None else True,
            )
        )
        if response.status != 200:
            text = (await response.text())[:500]
            raise RecordingError(f"the router answers {response.status}: {text}")
        return response.content

    async def _follow(
        self, streams: Mapping[str, aiohttp.StreamReader], seconds: float | None
    ) -> None:
        """Raises ``aiohttp.ClientError`` when a router ends it."""
        reading = asyncio.create_task(self._read_all(streams))
        try:
            await self._wait(reading, self._stop, seconds)
            self._close()
            if not (reading.done() or self._all_ended.is_set()):
                self._stop.clear()
                click.echo(
                    f"waiting for {self._lines.open_requests} requests that still run; "
                    "Ctrl-C leaves them out"
                )
                ending = asyncio.create_task(self._all_ended.wait())
                await self._wait(ending, self._stop, FINISH_LIMIT_S, reading)
                ending.cancel()
            if reading.done():
                await reading
                raise aiohttp.ServerDisconnectedError("it was stopped")
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read_all(self, streams: Mapping[str, aiohttp.StreamReader]) -> None:
        """Until one of the routers ends it; ``_asked`` is that one's URL then."""
        tasks = {
            asyncio.create_task(self._read(s, len(streams))): url for url, s in streams.items()
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            first = next(iter(done))
            self._asked = tasks[first]
            await first
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, stream: aiohttp.StreamReader, routers: int) -> None:
        """All lines that the router sends are taken, with times of this process's clock."""
        ahead_s = 0.0
        while line := await stream.readline():
            told = decode_line(line)
            if isinstance(told, Began):
                ahead_s = time.monotonic() - told.at_s
                self._begun += 1
                if self._begun == routers:
                    name = self._record.name
                    click.echo(f"recording {name} to {self._file.path}; Ctrl-C ends it")
            elif isinstance(told, Arrived):
                told = msgspec.structs.replace(told, at_s=told.at_s + ahead_s)
            self._append(self._lines.take(told))
            if self._lines.is_closed and not self._lines.open_requests:
                self._all_ended.set()

    async def _wait(
        self,
        task: asyncio.Task[Any],
        event: asyncio.Event,
        seconds: float | None,
        *others: asyncio.Task[Any],
    ) -> None:
        """Until one of the tasks is done, the event is set or the time is over."""
        waiting = asyncio.create_task(event.wait())
        await asyncio.wait(
            (task, waiting, *others), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        waiting.cancel()

    def _append(self, lines: bytes) -> None:
        try:
            self._file.append(lines)
        except OSError as error:
            raise RecordingError(
                f"{self._file.path} cannot be written: {error.strerror}; {self._told()}"
            ) from error

    def _close(self) -> None:
        self._lines.is_closed = True
        if not self._lines.open_requests:
            self._all_ended.set()

    def _told(self) -> str:
        count = self._lines.left_out
        left_out = f", {count} are left out" if count else ""
        return f"{self._file.lines} requests are in {self._file.path}{left_out}"

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._files.token_path.read_text()}"}
