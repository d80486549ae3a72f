"""The request log, written by a process beside the router."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest_asyncio
from router_stubs.cluster import until
from support.standing_still import tell

from splitserve.orchestrator.core.effects import Timeline
from splitserve.orchestrator.observe.trace_context import UNTRACED, TraceContext
from splitserve.orchestrator.router import record_pipe
from splitserve.orchestrator.router.record_pipe import RecordPipe, log_pipe
from splitserve.orchestrator.router.request_log import RequestLog
from splitserve.orchestrator.router.token_counts import Tally

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path
    from typing import IO

    import pytest

TRACED = TraceContext(f"00-{'a' * 32}-{'b' * 14}", "c" * 16, "-01")


def timeline(number: int) -> Timeline:
    """Of a split request."""
    return Timeline(
        request_id=f"r{number}",
        endpoint="completions",
        tenant="acme",
        streaming=True,
        prompt_tokens=7,
        received=10.0,
        decision="split",
        prefill_node="p0",
        decode_node="d0",
        attempts=1,
        first_dispatched=10.001,
        dispatched=10.001,
        prefill_answered=10.002,
        prefill_status=200,
        first_data=10.0035,
        last_data=10.25,
        status=200,
        outcome="ok",
    )


class Written:
    """A log in a file, and the process that writes it."""

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self._path = path
        self.pipe: RecordPipe = log_pipe(stream)
        self.log = RequestLog(stream, 10, None, self.pipe)

    def add(self, first: int, end: int, trace: TraceContext | None = None) -> None:
        """Requests of those numbers have ended."""
        for number in range(first, end):
            self.log.add(timeline(number), Tally(f"x{number}", 7, 2, 16, trace))
        self.log.flush()

    def records(self) -> list[dict[str, Any]]:
        """What the file has."""
        return [json.loads(line) for line in self._path.read_bytes().splitlines()]

    def tell(self, number: signal.Signals) -> None:
        """The process gets a signal."""
        assert self.pipe._process is not None
        tell(self.pipe._process.pid, number)


@pytest_asyncio.fixture
async def written(tmp_path: Path) -> AsyncIterator[Written]:
    """With a process that runs."""
    with (tmp_path / "log").open("wb") as stream:
        written = Written(tmp_path / "log", stream)
        written.pipe.start()
        await until(lambda: written.pipe.is_running)
        yield written
        await written.pipe.stop()


async def test_a_process_writes_the_same_lines(written: Written, tmp_path: Path) -> None:
    """As the router itself would, traced or not; signals for the router do not end it, the end of
    its input does, after the last line.
    """
    with (tmp_path / "own").open("wb") as stream:
        own = RequestLog(stream, 10)
        own._wall_offset = written.log._wall_offset
        for number, trace in enumerate((None, UNTRACED, TRACED)):
            written.add(number, number + 1, trace)
            own.add(timeline(number), Tally(f"x{number}", 7, 2, 16, trace))
        own.flush()
    await until(lambda: len(written.records()) == 3)
    written.tell(signal.SIGINT)
    written.tell(signal.SIGTERM)
    assert written.records() == [
        json.loads(x) for x in (tmp_path / "own").read_bytes().splitlines()
    ]
    written.add(3, 103)
    await written.pipe.stop()
    assert [record["id"] for record in written.records()] == [f"r{n}" for n in range(103)]


async def test_without_the_process_the_router_writes(written: Written) -> None:
    """From the moment it is known that it died."""
    written.tell(signal.SIGKILL)
    await until(lambda: not written.pipe.is_running)
    written.add(0, 2)
    assert [record["request_id"] for record in written.records()] == ["x0", "x1"]


async def test_a_process_that_stands_still(
    written: Written, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for it: lines beyond the bound are lost, which is said once each way."""
    monkeypatch.setattr(record_pipe, "HELD_LIMIT_BYTES", 100_000)
    written.tell(signal.SIGSTOP)
    written.add(0, 2_000)
    assert caplog.text.count("cannot be written as fast as requests end") == 1
    written.tell(signal.SIGCONT)
    await until(lambda: bool(written.records()) and written.records()[0]["id"] == "r0")
    count = 2_000

    def is_said() -> bool:
        nonlocal count
        written.add(count, count + 1)
        count += 1
        return "lines of the request log were lost" in caplog.text

    await until(is_said)
    lost = written.pipe.counts.dropped
    assert lost > 0
    await until(lambda: len(written.records()) == count - lost)
