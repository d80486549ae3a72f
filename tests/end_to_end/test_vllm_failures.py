"""Real vLLM engines with the tiny model, one prefill and two decode nodes, killed under a request:
the client has the undisturbed answer all the same.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest
from support.split_client import Split, start_split, stop_split

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

START_LIMIT_S = 600.0
CLUSTER = """
name: vllm-failures
allow_shared_devices: true
model: {{path: MODEL, served_name: m}}
router: {{port: 0}}
prefill: &pool
  cpus: [[0]]
  kv_cache_bytes: 100 MB
  env: {{VLLM_SERVER_DEV_MODE: "1", SPLITSERVE_TRANSFER_LOG: {log}}}
  engine_args: {{dtype: float32, block_size: 32, max_model_len: 4096, enforce_eager: true,
    max_num_batched_tokens: 128}}
  transfer: {{transport: nixl, lease_s: 15}}
decode:
  <<: *pool
  replicas: 2
  cpus: [[1], [1]]
"""
SEEN_TOKENS = 20
ANSWER_TOKENS = 300


@pytest.fixture(scope="module")
def split(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    """One prefill and two decode engines behind a router."""
    folder = tmp_path_factory.mktemp("failures")
    split = start_split(CLUSTER.replace("MODEL", str(tiny_model)), folder, START_LIMIT_S)
    yield split
    stop_split(split)


@pytest.fixture(autouse=True)
async def _all_nodes(split: Split) -> None:
    """Every node is there, those that a test before has killed too, and holds nothing."""
    end = asyncio.get_running_loop().time() + START_LIMIT_S
    while sum(node["is_usable"] for node in (await split.nodes()).values()) < 3:
        assert asyncio.get_running_loop().time() < end, split.up.story()
        await asyncio.sleep(0.5)
    await split.wait_until_idle()


SAMPLING: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": ANSWER_TOKENS,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.mark.parametrize("endpoint", ["completions", pytest.param("chat", marks=pytest.mark.long)])
async def test_a_stream_goes_on_when_its_engine_is_killed(split: Split, endpoint: str) -> None:
    """kill -9 of the decode engine in the middle of an answer: text, tokens, events and usage are
    those of the undisturbed one.
    """
    body = SAMPLING | {"model": "m"}
    if endpoint == "chat":
        body |= {"messages": [{"role": "user", "content": "Tell me more " * 20}]}
    else:
        body |= {"prompt": prompt_of(200, seed=1), "stop": ["no such text"]}
    async with aiohttp.ClientSession() as session:
        right = [event async for event in events(split, session, body)]
        await split.wait_until_idle()
        reading = events(split, session, body)
        found = [await anext(reading) for _ in range(SEEN_TOKENS)]
        await kill(split, await node_with(split, "decode_legs"))
        found += [event async for event in reading]
    assert found == right
    assert found[-1] == "[DONE]"
    assert found[-2]["usage"]["completion_tokens"] == ANSWER_TOKENS


@pytest.mark.long
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_an_engine_killed_before_the_first_token(split: Split, role: str) -> None:
    """The other decode engine gets the pages from the same prefill engine; without a second prefill
    engine the decode engine computes the prompt. The killed engine comes back and serves.
    """
    prompt = prompt_of(3000, seed=2 + len(role))
    async with aiohttp.ClientSession() as session:
        right = (await split.ask(session, prompt, 16))["token_ids"]
        await split.forget_prefixes(session)
        asking = asyncio.create_task(split.ask(session, prompt, 16))
        await kill(split, await node_with(split, f"{role}_legs"))
        assert (await asking)["token_ids"] == right


def prompt_of(length: int, seed: int) -> list[int]:
    """Random token ids."""
    draw = random.Random(seed)
    return [draw.randrange(4, 250) for _ in range(length)]


async def node_with(split: Split, legs: str) -> str:
    """The node that has such a leg, as soon as one has."""
    while True:
        for name, node in (await split.nodes()).items():
            if node[legs]:
                return name


async def kill(split: Split, name: str) -> None:
    """SIGKILL to every process of the node's engine."""
    for pid in split.up.pids((await split.nodes())[name]["incarnation"]):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            process.kill()


async def events(
    split: Split, session: aiohttp.ClientSession, body: dict[str, Any]
) -> AsyncIterator[Any]:
    """What every server-sent event says, but for what makes two answers two."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with session.post(split.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if data.startswith(b"{"):
                event = json.loads(data)
                assert "error" not in event, event
                yield {k: v for k, v in event.items() if k not in ("id", "created")}
            elif data:
                yield data.decode()
