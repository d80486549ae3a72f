"""``splitserve top``, ``trace`` and ``bench`` beside a cluster of mock engines: what operators see
of requests that clients have sent.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
import pytest_asyncio
from support.mock_cluster import Cluster, prompt_of, running_cluster
from support.up_process import wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

BENCH_LIMIT_S = 200.0
"""The load generator imports vLLM."""
CLUSTER = """
name: mock-terminal
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 1024}
  transfer: {transport: tcp, stream_min_bytes: 4096}
decode: *pool
supervision: {drain_timeout_s: 2, stop_timeout_s: 3}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One prefill and one decode node behind a router."""
    async with running_cluster(tmp_path_factory.mktemp("cluster"), CLUSTER) as cluster:
        yield cluster


async def ran(cluster: Cluster, *words: str, limit_s: float = 60.0) -> str:
    """What the command prints; it succeeds."""
    done = await asyncio.to_thread(cluster.up.run, *words, limit_s=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_a_request_is_seen_and_traced(cluster: Cluster) -> None:
    """``top`` shows nodes and the request, in 80 columns without a terminal; ``trace`` its parts,
    from the router and, as its record, from the log.
    """
    stream = await cluster.client.completions.create(
        model="mock", prompt=prompt_of(500, start=1), max_tokens=9, stream=True,
        extra_body={"ignore_eos": True}, extra_headers={"x-request-id": "seen-1"},
    )  # fmt: skip
    async for _ in stream:
        pass
    frame = await ran(cluster, "top")
    assert "mock-terminal  serving" in frame
    assert "prefill-0   prefill  ready" in frame
    assert "decode-0    decode   ready" in frame
    assert "seen-1" in frame
    assert "prefill-0→decode-0" in frame
    assert max(map(len, frame.splitlines())) <= 80
    shown = await ran(cluster, "trace", "seen-1")
    assert "split: prefill-0 → decode-0" in shown
    assert "queue" in shown
    record = json.loads(await ran(cluster, "trace", "seen-1", "mock-terminal", "--json"))
    assert record["prompt_tokens"] == 500
    (log,) = (path for path in cluster.up.logs() if path.name == "router.log")
    await asyncio.to_thread(wait_for, lambda: '"seen-1"' in log.read_text(), 30, "the line")


@pytest.mark.timeout(240)
async def test_a_trace_goes_through_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """By the real load generator: at its own times, with its own lengths; the table, the file and
    the picture tell of them, and its requests can be traced.
    """
    trace = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp": 250 * n, "input_length": 150, "output_length": 5, "hash_ids": [0, n + 1]}
        for n in range(4)
    )
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "result.json"
    options = ["--trace", str(trace), "--block-tokens", "100", "--out", str(out)]
    goals = ["--goodput", "ttft:60000"]
    said = await ran(cluster, "bench", *options, *goals, limit_s=BENCH_LIMIT_S)
    for words in ("Successful requests:  4", "Median TTFT (ms)", "P99 TPOT (ms)", "Mean ITL (ms)",
                  "P99 E2EL (ms)", "Request goodput (req/s)"):  # fmt: skip
        assert " ".join(words.split()) in " ".join(said.split()), said
    document = json.loads(out.read_bytes())
    result = document["runs"][0]["result"]
    assert result["input_lens"] == [150] * 4
    assert result["output_lens"] == [5] * 4
    assert result["request_goodput"] > 0
    times = [at - result["start_times"][0] for at in result["start_times"]]
    # The first may have been sent late, at most by what the run took beyond the last one's start
    late_s = result["duration"] - times[-1]
    assert all(at >= 0.25 * n - late_s - 0.01 for n, at in enumerate(times)), (late_s, times)
    assert document["cluster"]["prefill_nodes"] == document["cluster"]["decode_nodes"] == 1
    assert ElementTree.parse(out.with_suffix(".svg")).getroot().tag.endswith("svg")
    request_id = said.partition("`splitserve trace ")[2].split()[0]
    assert "ok, status 200" in await ran(cluster, "trace", request_id)
