"""`splitserve profile` on real processes whose times are known."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
import pytest_asyncio
from support.mock_cluster import Cluster, prompt_of, running_cluster

from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    EngineLimits,
    PrefillTime,
    Profile,
    TransferTime,
    exactly,
    parse_profile,
    write_profile,
)

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Callable

    from splitserve.orchestrator.tuner.profile import Estimate

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

LIMIT_S = 20
KV_BYTES = 4 * 2 * 32
"""Of a token in the mock engine."""
TRUE = Profile(
    model="mock",
    engine="mock 1",
    hardware="none",
    limits=EngineLimits(
        step_tokens=128, sequences=8, block_tokens=16, total_blocks=1024, max_model_len=512
    ),
    kv_bytes_per_token=KV_BYTES,
    prefill=PrefillTime(exactly(0.03), exactly(4e-4), exactly(4e-7)),
    decode=DecodeTime(exactly(0.005), exactly(0.0008), exactly(1e-5)),
    transfers=(TransferTime("", "", exactly(0.04), exactly(5e5)),),
)
CLUSTER = """
name: mock-profile
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  replicas: 1
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 16, max_model_len: 512, max_num_batched_tokens: 128,
    max_num_seqs: 8, profile: PROFILE, enable_faults: true}
  transfer: {transport: tcp, stream_min_bytes: 4096}
decode: *pool
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A prefill and a decode node that take the times of ``TRUE``."""
    folder = tmp_path_factory.mktemp("profile")
    path = folder / "true.json"
    path.write_bytes(write_profile(TRUE))
    async with running_cluster(folder, CLUSTER.replace("PROFILE", str(path))) as cluster:
        yield cluster


async def measure(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command beside the cluster."""
    return await asyncio.to_thread(cluster.up.run, "profile", *arguments, limit_s=100)


def is_right(found: Estimate, true: Estimate) -> bool:
    """Within a tenth, or, on a machine that others use, within a band that says so."""
    is_held = found.low <= true.value <= found.high < 2 * true.value
    return is_held or found.value == pytest.approx(true.value, rel=0.1)


async def test_finds_what_the_engines_take(cluster: Cluster) -> None:
    """Predictions are right within a tenth, with their parts; and it says who was measured. What
    goes on between processes counts as a request's time and as a transfer's latency.
    """
    result = await measure(cluster, "--minutes", "0.13", "--json")
    assert result.returncode == 0, result.stderr + cluster.up.story()
    found = parse_profile(result.stdout.encode(), "stdout")
    assert parse_profile(profile_path(cluster).read_bytes(), "file") == found
    story = result.stdout + result.stderr
    assert (found.model, found.engine) == ("mock", "mock 1"), story
    assert found.hardware.startswith("1 prefill and 1 decode on "), story
    assert found.fingerprint["weights"] == "seed 0"
    assert found.kv_bytes_per_token == KV_BYTES
    assert found.limits == TRUE.limits
    for lengths in ((100, 0), (450, 0), (64, 300)):
        assert found.prefill.seconds(*lengths) == pytest.approx(
            TRUE.prefill.seconds(*lengths), rel=0.1, abs=0.01
        ), story
    assert is_right(found.prefill.token_s, TRUE.prefill.token_s), story
    for batch in ((1, 50), (8, 400), (4, 1000)):
        assert found.decode.seconds(*batch) == pytest.approx(
            TRUE.decode.seconds(*batch), rel=0.1
        ), story
    assert is_right(found.decode.base_s, TRUE.decode.base_s), story
    assert is_right(found.decode.sequence_s, TRUE.decode.sequence_s), story
    link, true = found.transfer(), TRUE.transfer()
    assert is_right(link.bytes_per_s, true.bytes_per_s), story
    assert 0.9 * true.latency_s.value < link.latency_s.value < true.latency_s.value + 0.05, story
    assert 0 <= found.request_s < 0.05
    # Both nodes run here, and what they seem to compute takes no cores
    assert found.nodes_per_host == 2
    assert found.prefill.neighbour.low < 0.2, story
    assert found.decode.neighbour.low < 0.2, story


async def test_clients_come_first(cluster: Cluster) -> None:
    """While a client has the decode node nothing is measured there: the command gives up, says why
    and leaves the file as it was.
    """
    path = profile_path(cluster)
    before = path.read_bytes() if path.exists() else None
    decode = await cluster.engine("decode-0")
    # The client stays until the command has ended, however long that takes
    await decode.faults(hold_after_tokens=5)
    stream = await cluster.client.completions.create(
        model="mock",
        prompt=prompt_of(40, 1),
        max_tokens=40,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    result = await measure(cluster, "--minutes", "0.02")
    await decode.faults()
    assert result.returncode == 1, result.stdout
    assert "1 requests of clients are on decode-0" in result.stderr
    assert "nothing was written" in result.stderr
    assert (path.read_bytes() if path.exists() else None) == before
    pieces = [chunk async for chunk in stream]
    assert pieces[-1].choices[0].finish_reason == "length"


async def test_an_interrupt_leaves_nothing(cluster: Cluster) -> None:
    """Ctrl-C ends the probes that are out: soon no leg is on any node, and nothing is written."""
    path = profile_path(cluster)
    before = path.read_bytes() if path.exists() else None
    command = await asyncio.create_subprocess_exec(
        *cluster.up.command(),
        "profile",
        env=cluster.up.env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        await until(cluster, lambda legs: legs > 0, "no probe was sent")
        command.send_signal(signal.SIGINT)
        output, _ = await asyncio.wait_for(command.communicate(), LIMIT_S)
    finally:
        if command.returncode is None:
            command.kill()
            await command.wait()
    assert command.returncode == 130, output.decode()
    assert b"Traceback" not in output
    await until(cluster, lambda legs: legs == 0, "probes are left")
    assert (path.read_bytes() if path.exists() else None) == before


async def test_it_stops_when_clients_suffer(cluster: Cluster) -> None:
    """Clients' first tokens come later than the target: the command ends and says so."""
    is_over = False

    async def client(number: int) -> None:
        while not is_over:
            answer = await cluster.client.completions.create(
                model="mock", prompt=prompt_of(100, number), max_tokens=2, stream=True
            )
            assert [chunk async for chunk in answer]
            await asyncio.sleep(0.1)

    clients = [asyncio.create_task(client(number)) for number in range(2, 4)]
    result = await measure(cluster, "--minutes", "0.3", "--ttft-ms", "20")
    is_over = True
    await asyncio.gather(*clients)
    assert result.returncode == 1, result.stdout
    assert "have missed their targets" in result.stderr


async def until(cluster: Cluster, is_right: Callable[[int], bool], problem: str) -> None:
    """The router counts so many legs on its nodes."""
    end = time.monotonic() + LIMIT_S
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{cluster.url}/internal/status") as answer:
                nodes = (await answer.json())["nodes"].values()
            if is_right(sum(node["prefill_legs"] + node["decode_legs"] for node in nodes)):
                return
            assert time.monotonic() < end, problem
            await asyncio.sleep(0.02)


def profile_path(cluster: Cluster) -> Path:
    """Where the profile goes when nothing else is said."""
    return Path(cluster.up.env["XDG_STATE_HOME"]) / "splitserve/mock-profile/profile.json"
