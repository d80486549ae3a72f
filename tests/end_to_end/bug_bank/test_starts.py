"""What cannot work is refused at the start with a sentence that names it; what was chosen can be
seen.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from end_to_end.bug_bank.conftest import PAIR
from support.bank_client import prompt_of
from support.idle_check import router_status
from support.mock_cluster import Cluster, alone
from support.mock_engines import (
    POLL_S,
    START_DEADLINE_S,
    EngineOptions,
    MockProcess,
    pair_of,
    running,
)
from support.up_process import UpProcess

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 12


async def _ends_or_serves(engine: MockProcess) -> bool:
    """Whether it serves; False when its process has ended. One of both in bounded time."""
    end = time.monotonic() + START_DEADLINE_S
    while engine.is_alive and "Started server process" not in engine.story():
        assert time.monotonic() < end, f"neither ready nor ended\n{engine.story()}"
        await asyncio.sleep(POLL_S)
    return engine.is_alive


@pytest.mark.parametrize(
    "env", [{"UCX_TLS": "rc"}, {"UCX_NET_DEVICES": "mlx5_77:1"}], ids=["rc only", "no such device"]
)
async def test_what_this_machine_may_lack(tmp_path: Path, env: dict[str, str]) -> None:
    """A46 (vllm-project/vllm#35799): RDMA only, or a device by name. Where the machine has it pages
    travel; else the engine ends at once and says which setting it was.
    """
    options = EngineOptions("prefill", "nixl", env=env)
    pair = pair_of(tmp_path, options, replace(options, role="decode"))
    try:
        pair.prefill.start()
        serves = await _ends_or_serves(pair.prefill)
    finally:
        pair.prefill.close()
    if serves:
        again = pair_of(tmp_path, options, replace(options, role="decode"))
        async with running(again.prefill, again.decode):
            prompt = prompt_of(200, number=9900)
            assert (await again.answer(prompt, TOKENS))[0] == alone(prompt)
    else:
        ((name, value),) = env.items()
        story = pair.prefill.log_path.read_text()
        assert "TransportError: UCX cannot be used with" in story
        assert f"{name}={value}" in story


async def test_tcp_only(tmp_path: Path) -> None:
    """A46: pages travel, the first transfer too is bounded in time, and the log names what UCX was
    told and how the pages went.
    """
    options = EngineOptions("prefill", "nixl", env={"UCX_TLS": "tcp"})
    pair = pair_of(tmp_path, options, replace(options, role="decode"))
    async with running(pair.prefill, pair.decode):
        prompt = prompt_of(200, number=9901)
        async with asyncio.timeout(20):
            assert (await pair.answer(prompt, TOKENS))[0] == alone(prompt)
        await pair.until_idle()
        log = pair.prefill.log_path.read_text()
        assert "nixl: UCX with UCX_TLS=tcp, UCX_NET_DEVICES=lo" in log
        assert "are carried by the network" in log


def test_a_transport_that_does_not_exist(tmp_path: Path) -> None:
    """A46: `up` ends by itself, and its last words name the setting and what to do."""
    text = PAIR.replace("transport: tcp", "transport: nixl")
    output = _failed_start(
        tmp_path, text.replace("decode:\n", "decode:\n  env: {UCX_TLS: bogus}\n")
    )
    assert "the engine of decode-0 failed" in output
    assert "UCX cannot be used with UCX_TLS=bogus" in output
    assert "leave UCX_TLS out" in output


def test_another_memory_layout_is_refused(tmp_path: Path) -> None:
    """A10 (vllm-project/vllm#43523): engines whose pages do not fit into each other never serve
    together; the words name both layouts.
    """
    output = _failed_start(
        tmp_path, PAIR.replace("max_model_len: 512", "max_model_len: 512, num_kv_heads: 4")
    )
    assert "kv_layout differs" in output
    assert "LBHNC, 2 heads of 32 bytes" in output
    assert "LBHNC, 4 heads of 32 bytes" in output


def _failed_start(folder: Path, text: str) -> str:
    """What `up` says of a cluster that cannot serve; it ends by itself and leaves nothing."""
    config = folder / "cluster.yaml"
    config.write_text(text)
    up = UpProcess(config, folder)
    try:
        assert up.wait_for_end(60) == 1, up.output()
        up.wait_until_nothing_is_left()
        return up.output()
    finally:
        up.close()


@pytest.mark.asyncio(loop_scope="session")
async def test_the_transport_is_shown(quad: Cluster) -> None:
    """A46: the status names each node's transport."""
    shown = {node["transport"] for node in (await router_status(quad))["nodes"].values()}
    assert shown in ({"local"}, {"nixl"})
