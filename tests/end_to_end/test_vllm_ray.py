"""Real vLLM engines with the tiny model on a Ray cluster of two hosts, one prefill and one decode
node: up, through the loss of an engine and of a whole host, and down.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest
from support.on_ray import OnRay
from support.ray_hosts import RayHosts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

START_LIMIT_S = 400.0
CLUSTER = """
model: {path: MODEL, served_name: m}
router: {port: 0}
prefill: &pool
  kv_cache_bytes: 100 MB
  engine_args: {dtype: float32, block_size: 32, max_model_len: 2048, enforce_eager: true,
    max_num_batched_tokens: 128}
  transfer: {transport: tcp}
decode: *pool
supervision: {drain_timeout_s: 1, restart_delay_s: 0.1}
"""
PROMPT_TOKENS, ANSWER_TOKENS = 700, 24


@pytest.fixture
def on_ray(tiny_model: Path, tmp_path: Path) -> Iterator[OnRay]:
    """The cluster, not up yet, for two hosts of one CPU each."""
    with RayHosts(2, cpus=1) as hosts:
        text = CLUSTER.replace("MODEL", str(tiny_model))
        cluster = OnRay(hosts, tmp_path, text, ("prefill-0", "decode-0"))
        try:
            yield cluster
        finally:
            cluster.close()


async def test_vllm_on_ray_lives_through_losses(on_ray: OnRay) -> None:
    """The same answer at first, after the prefill engine and the decode node's whole host have been
    killed with -9 in the middle of requests (which end, in time, with that answer or an error), and
    each split. After `down` nothing is left.
    """
    hosts = on_ray.hosts
    up = on_ray.up()
    await asyncio.to_thread(up.wait_until_serving, START_LIMIT_S)
    url = on_ray.status()["url"]
    before, places = on_ray.incarnations(), on_ray.addresses()
    assert len(set(places.values())) == 2
    prompts = [prompt_of(seed) for seed in range(3)]
    limit = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=limit) as session:
        right = [(await ask(session, url, prompt))[1] for prompt in prompts]
        assert all(len(tokens) == ANSWER_TOKENS for tokens in right)
        is_over = asyncio.Event()
        asking = [
            asyncio.create_task(keep_asking(session, url, prompt, expected, is_over))
            for prompt, expected in zip(prompts, right, strict=True)
        ]
        await on_ray.until(lambda: any(n["decode_legs"] for n in on_ray.nodes().values()))
        engine = psutil.Process(on_ray.pid(before["prefill-0"]))
        for process in [engine, *engine.children(recursive=True)]:
            process.kill()
        if places["decode-0"] != hosts.first:
            await asyncio.to_thread(hosts.kill, places["decode-0"])
            hosts.add()
        is_over.set()
        await asyncio.gather(*asking)
        await on_ray.until(lambda: on_ray.is_renewed(before, "prefill-0"), START_LIMIT_S)
        await on_ray.until(on_ray.is_whole, START_LIMIT_S)
        assert [(await ask(session, url, prompt))[1] for prompt in prompts] == right
    down = await asyncio.to_thread(on_ray.run, "down", on_ray.name)
    assert down.returncode == 0, down.stderr
    assert up.wait_for_end() == 0, up.output()
    on_ray.assert_nothing_is_left()


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> tuple[int, list[int]]:
    """(status, tokens) of one completion."""
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": ANSWER_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with session.post(f"{url}/completions", json=body) as response:
        answer = await response.json()
    return response.status, answer["choices"][0]["token_ids"] if response.status == 200 else []


async def keep_asking(
    session: aiohttp.ClientSession,
    url: str,
    prompt: list[int],
    expected: list[int],
    is_over: asyncio.Event,
) -> None:
    """Until it is over: requests are under way whenever one looks. Each ends with that answer or
    with an error.
    """
    while not is_over.is_set():
        status, tokens = await ask(session, url, prompt)
        assert status in (500, 502, 503) or tokens == expected
        if status != 200:
            await asyncio.sleep(0.05)


def prompt_of(seed: int) -> list[int]:
    """Random token ids."""
    draw = random.Random(seed)
    return [draw.randrange(4, 250) for _ in range(PROMPT_TOKENS)]
