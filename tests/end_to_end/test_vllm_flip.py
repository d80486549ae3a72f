"""Real vLLM engines with the tiny model change their roles while clients ask: the texts are those
of a cluster that is left alone, and no engine restarts.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from support.split_client import Split, start_split, stop_split

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

START_LIMIT_S = 600.0
CLUSTER = """
name: vllm-flip
allow_shared_devices: true
model: {{path: MODEL, served_name: m}}
router: {{port: 0}}
prefill: &pool
  cpus: [[0]]
  kv_cache_bytes: 100 MB
  env: {{VLLM_SERVER_DEV_MODE: "1", SPLITSERVE_TRANSFER_LOG: {log}}}
  engine_args: {{dtype: float32, block_size: 32, max_model_len: 1024, enforce_eager: true,
    max_num_batched_tokens: 128, enable_prefix_caching: false}}
  transfer: {{transport: nixl, lease_s: 15}}
decode:
  <<: *pool
  replicas: 2
  cpus: [[1], [1]]
"""
NODES = ("prefill-0", "decode-0", "decode-1")
IN_FLIGHT = 4
PROMPTS = 8


@pytest.fixture(scope="module")
def split(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    """One prefill and two decode engines behind a router."""
    folder = tmp_path_factory.mktemp("flip")
    split = start_split(CLUSTER.replace("MODEL", str(tiny_model)), folder, START_LIMIT_S)
    yield split
    stop_split(split)


async def test_flips_under_load(split: Split) -> None:
    """Four requests at a time while nodes change their roles, until pages have gone from an engine
    of the decode pool to one of the prefill pool: every token is right, no request fails, and every
    engine is the process that it was.
    """
    draw = random.Random(5)
    asked = [
        [draw.randrange(4, 250) for _ in range(draw.randrange(20, 600))] for _ in range(PROMPTS)
    ]
    async with aiohttp.ClientSession() as session:
        right = [(await split.ask(session, prompt, 16))["token_ids"] for prompt in asked]
        before = await split.nodes()
        clients = Clients(split, session, asked, right)
        async with asyncio.TaskGroup() as load:
            for _ in range(IN_FLIGHT):
                load.create_task(clients.keep_asking())
            for node, role in (("decode-1", "prefill"), ("prefill-0", "decode")):
                await flip(split, session, node, role)
                await clients.answers(PROMPTS)
            swapped = await split.nodes()
            for node, role in (("prefill-0", "prefill"), ("decode-1", "decode")):
                await flip(split, session, node, role)
                await clients.answers(PROMPTS)
            clients.is_over = True
    roles = {name: swapped[name]["role"] for name in NODES}
    assert roles == {"prefill-0": "decode", "decode-0": "decode", "decode-1": "prefill"}
    await split.wait_until_idle()
    after = await split.nodes()
    for name in NODES:
        assert after[name]["incarnation"] == before[name]["incarnation"]
        assert not after[name]["is_flipping"]
    assert pages(after, "decode-1", "sent") > pages(before, "decode-1", "sent")
    assert pages(after, "prefill-0", "received") > pages(before, "prefill-0", "received")


class Clients:
    """Ask for the same prompts again and again, and look at every answer."""

    def __init__(
        self,
        split: Split,
        session: aiohttp.ClientSession,
        asked: list[list[int]],
        right: list[list[int]],
    ) -> None:
        self.is_over = False
        self.answered = 0
        self._split = split
        self._session = session
        self._cases = list(zip(asked, right, strict=True))
        self._next = 0

    async def keep_asking(self) -> None:
        """Until it is over. Fails with the first wrong answer."""
        while not self.is_over:
            prompt, right = self._cases[self._next % len(self._cases)]
            self._next += 1
            answer = await self._split.ask(self._session, prompt, 16)
            assert answer["token_ids"] == right, self._split.up.story()
            self.answered += 1

    async def answers(self, number: int) -> None:
        """So many more have come."""
        goal = self.answered + number
        async with asyncio.timeout(120):
            while True:
                if self.answered >= goal:
                    return
                await asyncio.sleep(0.05)


async def flip(split: Split, session: aiohttp.ClientSession, node: str, role: str) -> None:
    """Ask the router, as `splitserve flip` does."""
    url = f"{split.url}/internal/nodes/{node}/flip"
    async with session.post(url, json={"role": role}, headers=split.up.operator()) as response:
        assert response.status == 202, await response.text()


def pages(nodes: dict[str, Any], name: str, verb: str) -> float:
    """How many pages an engine has sent or received."""
    count: float = nodes[name]["counters"].get(f"{verb}_pages", 0)
    return count
