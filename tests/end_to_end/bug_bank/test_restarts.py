"""Engines that die and come back under the same name and ports, and engines that are asked to
leave: the survivors keep their processes, and nobody is sent to a former life.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from typing import TYPE_CHECKING

import aiohttp
import pytest
from end_to_end.bug_bank.conftest import PAIR
from support.bank_client import LONG, ask, completion, prompt_of, stopped, stream, text_of
from support.idle_check import until_idle, until_usable
from support.mock_cluster import Cluster, alone, running_cluster

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAIRS = set(itertools.product(("prefill-0", "prefill-1"), ("decode-0", "decode-1")))


async def _pair_of(cluster: Cluster, request_id: str) -> tuple[str, str]:
    """The nodes that a request was split over; the first is "" when it was not."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{cluster.url}/internal/timeline/{request_id}") as response,
    ):
        assert response.status == 200, await response.text()
        timeline = await response.json()
    return timeline["prefill_node"], timeline["decode_node"]


async def _serves_over_every_pair(cluster: Cluster, requests: int, start: int) -> None:
    """So many requests in waves of eight: each is right, and every pair of nodes had some.

    Every third has two answers, so it goes to a decode node alone: else the two pools would take
    turns in step, and a prefill node would meet one decode node only.
    """
    seen = set()
    for first in range(0, requests, 8):
        prompts = {
            f"over-pairs-{start + n}": prompt_of(60 + n % 100, number=start + n)
            for n in range(first, min(first + 8, requests))
        }
        answers = await asyncio.gather(
            *(
                ask(cluster.url, completion(prompt, n=1 + (n % 3 == 0)), {"X-Request-Id": name})
                for n, (name, prompt) in enumerate(prompts.items())
            )
        )
        for (request_id, prompt), answer in zip(prompts.items(), answers, strict=True):
            assert answer.text == alone(prompt)
            seen.add(await _pair_of(cluster, request_id))
    assert seen >= PAIRS


@pytest.mark.parametrize("requests", [32, pytest.param(100, marks=LONG)])
async def test_a_decode_node_comes_back_on_its_ports(quad: Cluster, requests: int) -> None:
    """A07 (smg-project/smg#2382): SIGKILL of D under load. What it had is answered rightly or is
    an error; its next life is written to by every P that knew the former one.
    """
    await _serves_over_every_pair(quad, requests, start=5000)
    before = quad.up.node("decode-0")
    victim = await quad.engine("decode-0")
    await victim.faults(hold_after_tokens=2)
    prompts = [prompt_of(100 + n, number=5200 + n) for n in range(16)]
    load = [asyncio.create_task(ask(quad.url, completion(prompt))) for prompt in prompts]
    await victim.until(lambda s: s.running > 0, "an answer")
    await quad.kill_engine("decode-0")
    for prompt, answer in zip(prompts, await asyncio.gather(*load), strict=True):
        if answer.status == 200:
            assert answer.text == alone(prompt)
        else:
            answer.check_error()
            assert answer.status >= 500
    await quad.engine("decode-0")
    await until_usable(quad, "decode-0")
    after = quad.up.node("decode-0")
    assert after["engine_url"] == before["engine_url"]
    assert after["incarnation"] != before["incarnation"]
    await _serves_over_every_pair(quad, requests, start=5400)


@pytest.mark.parametrize("moment", ["idle", "in mid transfer"])
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=LONG)])
async def test_a_prefill_node_comes_back_on_its_ports(
    quad: Cluster, rounds: int, moment: str
) -> None:
    """A08 (vllm-project/vllm#49238): SIGKILL of P and a request to its next life, again and again.
    D keeps its process (looked at afterwards), and every text is right.
    """
    start = 6000 + 500 * (moment == "idle")
    for number in range(rounds):
        victim = await quad.engine("prefill-0")
        if moment == "idle":
            await quad.kill_engine("prefill-0")
        else:
            prompts = [prompt_of(150, number=start + 10 * number + n) for n in range(2)]
            await victim.faults(hold_at_layer=2)
            asking = [asyncio.create_task(stream(quad, prompt)) for prompt in prompts]
            await victim.until(lambda s: s.open_transfers > 0, "open transfer")
            await quad.kill_engine("prefill-0")
            for prompt, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
                assert text_of(answer.raw) == alone(prompt)
        reborn = await quad.engine("prefill-0")
        await until_usable(quad, "prefill-0")
        prompts = [prompt_of(150, number=start + 10 * number + 3 + n) for n in range(6)]
        answers = await asyncio.gather(*(stream(quad, prompt) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert text_of(answer.raw) == alone(prompt)
        assert (await reborn.status()).counters["sent_transfers"] > 0


async def test_a_prefill_node_that_is_asked_to_leave(tmp_path: Path) -> None:
    """A09 (ai-dynamo/dynamo#4917): SIGTERM to P's agent while twenty finished prompts wait for D to
    fetch them. All twenty are answered rightly; P is gone within its limits.
    """
    async with running_cluster(tmp_path, PAIR.replace("bank-pair", "bank-leave")) as cluster:
        await until_idle(cluster)
        prefill = await cluster.engine("prefill-0")
        engine = cluster.process("prefill-0")
        agent = cluster.up.node("prefill-0")["agent_pid"]
        prompts = [prompt_of(100 + n, number=7000 + n) for n in range(20)]
        with stopped(cluster.process("decode-0")):
            asking = [asyncio.create_task(stream(cluster, prompt)) for prompt in prompts]
            await prefill.until(lambda s: s.leased_blocks == 20 * 4, "held prompts")
            os.kill(agent, signal.SIGTERM)
        for prompt, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
            assert text_of(answer.raw) == alone(prompt)
        await asyncio.to_thread(engine.wait, 15)
        await (await cluster.engine("decode-0")).until_idle()
