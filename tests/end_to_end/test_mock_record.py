"""``splitserve record`` beside a cluster of mock engines: what it writes is a trace of what clients
sent, and nothing of what they said.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from support.mock_cluster import Cluster, prompt_of, running_cluster
from support.mock_engines import DEADLINE_S, POLL_S

from splitserve.orchestrator.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 128
FULL_BYTES = 500
"""Of each file that a recorder on a full disk may write, what it says included."""
SENT = 10
"""Requests of which not all fit."""
CLUSTER = """
name: mock-record
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 1024, enable_faults: true}
  transfer: {transport: tcp, stream_min_bytes: 4096}
decode: *pool
policy: {prefix_routing: false}
supervision: {drain_timeout_s: 2, stop_timeout_s: 3}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One prefill and one decode node behind a router."""
    async with running_cluster(tmp_path_factory.mktemp("cluster"), CLUSTER) as cluster:
        yield cluster


class Recorder:
    """A running ``splitserve record``."""

    def __init__(self, cluster: Cluster, path: Path, *options: str) -> None:
        self.path = path
        self._said = path.with_suffix(".out")
        command = [*cluster.up.command(), "record", "--out", str(path), "--block-tokens", "128"]
        with self._said.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *options], stdout=output, stderr=subprocess.STDOUT, env=cluster.up.env
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    async def until(self, text: str) -> None:
        """It has said so."""
        end = time.monotonic() + DEADLINE_S
        while text not in self.said:
            assert time.monotonic() < end, f"{text!r} is not said:\n{self.said}"
            await asyncio.sleep(POLL_S)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    async def ended(self) -> int:
        """Its exit status."""
        return await asyncio.to_thread(self.process.wait, DEADLINE_S)


Started = Callable[[Recorder], Recorder]


@pytest.fixture
def started() -> Iterator[Started]:
    """Recorders that are given to it do not outlive the test."""
    with ExitStack() as stack:
        yield stack.enter_context


async def test_what_clients_send_becomes_a_trace(
    cluster: Cluster, tmp_path: Path, started: Started
) -> None:
    """Lengths exactly, in the order of arrival; equal beginnings are told although the router does
    not route by them; Ctrl-C waits for what runs. No text and no hash is in the file.
    """
    recorder = started(Recorder(cluster, tmp_path / "trace.jsonl"))
    await recorder.until("recording mock-record")
    head = prompt_of(512, start=1)
    await cluster.text(head + prompt_of(100, start=2), 5)
    await cluster.text(head + prompt_of(200, start=3), 7)
    stream = await cluster.client.completions.create(
        model="mock", prompt="Tell me a secret. " * 20, max_tokens=9, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    async for _ in stream:
        pass
    engine = await cluster.engine("decode-0")
    await engine.faults(hold_after_tokens=3)
    running = asyncio.create_task(cluster.text(prompt_of(40, start=4), 6))
    await engine.until(lambda status: status.running == 1, "answer")
    recorder.process.send_signal(signal.SIGINT)
    await recorder.until("waiting for 1 requests")
    await engine.faults()
    await running
    assert await recorder.ended() == 0
    assert "4 requests are in" in recorder.said

    requests = list(read_trace(recorder.path, BLOCK))
    lengths = [(request.input_tokens, request.output_tokens) for request in requests]
    assert lengths == [(612, 5), (712, 7), (360, 9), (40, 6)]
    assert [r.blocks for r in requests] == [
        (0, 1, 2, 3, 4), (0, 1, 2, 3, 5, 6), (7, 8, 9), (10,),
    ]  # fmt: skip
    times = [request.at_s for request in requests]
    assert times == sorted(times)
    assert times[0] == 0
    text = recorder.path.read_text()
    assert "secret" not in text
    keys = {key for line in text.splitlines() for key in json.loads(line)}
    assert keys == {"timestamp", "input_length", "output_length", "hash_ids"}


async def test_a_recording_ends_with_its_time_or_with_its_patience(
    cluster: Cluster, tmp_path: Path, started: Started
) -> None:
    """After --minutes, of a cluster named by its YAML; a second Ctrl-C leaves out what still runs.
    The file is always a trace.
    """
    engine = await cluster.engine("decode-0")
    yaml = str(cluster.up.output_path.with_name("cluster.yaml"))
    first = started(Recorder(cluster, tmp_path / "one.jsonl", yaml, "--minutes", "0.01"))
    await first.until("recording mock-record")
    assert await first.ended() == 0
    assert "0 requests are in" in first.said
    recorder = started(Recorder(cluster, tmp_path / "two.jsonl"))
    await recorder.until("recording mock-record")
    await cluster.text(prompt_of(40, start=5), 6)
    await engine.faults(hold_after_tokens=3)
    running = asyncio.create_task(cluster.text(prompt_of(40, start=6), 6))
    await engine.until(lambda status: status.running == 1, "answer")
    recorder.process.send_signal(signal.SIGINT)
    await recorder.until("waiting for 1 requests")
    recorder.process.send_signal(signal.SIGINT)
    assert await recorder.ended() == 0
    await engine.faults()
    await running
    assert "1 requests are in" in recorder.said
    assert "1 are left out" in recorder.said
    assert [r.output_tokens for r in read_trace(recorder.path, BLOCK)] == [6]


async def test_a_recording_says_why_it_ended(
    cluster: Cluster, tmp_path: Path, started: Started
) -> None:
    """A router that died: what was written stays a trace. A full disk is told with the file."""
    full = started(Recorder(cluster, tmp_path / "full.jsonl"))
    recorder = started(Recorder(cluster, tmp_path / "trace.jsonl"))
    for each in (full, recorder):
        await each.until("recording mock-record")
    resource.prlimit(full.process.pid, resource.RLIMIT_FSIZE, (FULL_BYTES, FULL_BYTES))
    for number in range(SENT):
        await cluster.text(prompt_of(40, start=10 + number), 6)
    assert await full.ended() == 1
    lines = full.path.read_bytes().splitlines()
    assert f"full.jsonl cannot be written: File too large; {len(lines)} requests" in full.said
    assert len(list(read_trace(full.path, BLOCK))) == len(lines) > 2
    (router,) = (
        process
        for process in cluster.up.processes()
        if process.cmdline()[1:3] == ["-m", "splitserve.orchestrator.router"]
    )
    engine = await cluster.engine("decode-0")
    await engine.faults(hold_after_tokens=3)
    running = asyncio.create_task(cluster.text(prompt_of(40, start=40), 6))
    await engine.until(lambda status: status.running == 1, "answer")
    router.kill()
    assert await recorder.ended() == 1
    assert "has ended the recording" in recorder.said
    assert "1 are left out" in recorder.said
    assert len(list(read_trace(recorder.path, BLOCK))) == SENT
    await asyncio.gather(running, return_exceptions=True)
