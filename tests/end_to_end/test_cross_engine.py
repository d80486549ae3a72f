"""A vLLM and a transformers engine in one cluster with a cache: each computes on with KV of the
other, sent by it or stored by it.

The cluster is shared by all tests of a direction. Float32: the two engines' own answers to the tiny
model differ by less than what decides between two tokens, so tokens are compared; how near they are
is measured by ``benchmarks/cross_engine.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from support.split_client import Split, start_split, stop_split

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK, CHUNK, LAYERS, ANSWER = 32, 64, 8, 8
START_LIMIT_S = 400.0
STORED_LIMIT_S = 20.0
CLUSTER = """
name: cross-engine
model: {{path: MODEL, served_name: m}}
router: {{port: 0}}
prefill: &pool
  engine: PREFILL
  cpus: [[0]]
  kv_cache_bytes: 32 MiB
  env: {{VLLM_SERVER_DEV_MODE: "1", SPLITSERVE_TRANSFER_LOG: {log}}}
  engine_args: {{dtype: float32, block_size: 32, max_model_len: 1024, enforce_eager: true}}
  transfer: {{transport: tcp, lease_s: 15}}
decode:
  <<: *pool
  engine: DECODE
  cpus: [[1]]
cache:
  chunk_tokens: 64
  lookup_timeout_s: 2
  tiers:
    - {{type: cpu, capacity_bytes: 64 MiB}}
    - {{type: disk, capacity_bytes: 256 MiB, path: FOLDER/disk}}
"""

_seeds = itertools.count()


@dataclass
class Mixed:
    """The cluster and where its cache's disk is."""

    split: Split
    folder: Path

    async def ask(self, prompt: list[int], node: str = "", **fields: Any) -> dict[str, Any]:
        """A greedy completion of the cluster, or of one engine that takes part in no split."""
        url = self.split.url
        if node:
            url = (await self.split.nodes())[node]["engine_url"]
        headers = self.split.key_of(url) if node else {}
        body = {"model": "m", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True, **fields}  # fmt: skip
        async with aiohttp.ClientSession() as session:
            url += "/v1/completions"
            async with session.post(url, json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                found: dict[str, Any] = await answer.json()
        return found

    async def cold(self, prompt: list[int], node: str) -> list[int]:
        """The tokens of an engine that knows nothing of the prompt."""
        salt = f"nobody else's {next(_seeds)}"
        return ids(await self.ask(prompt, node, cache_salt=salt))

    async def forget(self) -> None:
        """The engines know no prefix; the cache does."""
        await self.split.wait_until_idle()
        async with aiohttp.ClientSession() as session:
            await self.split.forget_prefixes(session)

    def chunks(self) -> int:
        """On the disk."""
        return len(list((self.folder / "disk" / "chunks").glob("??/*")))


def ids(answer: dict[str, Any]) -> list[int]:
    """Of the first choice."""
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def new_prompt(length: int) -> list[int]:
    """Tokens that no other prompt of this run begins with."""
    draw = random.Random(f"cross {next(_seeds)}")
    return [draw.randrange(1, 250) for _ in range(length)]


def started(model: Path, folder: Path, prefill: str, decode: str) -> Iterator[Mixed]:
    """The cluster with these engines."""
    text = CLUSTER
    for name, value in (
        ("MODEL", model), ("FOLDER", folder), ("PREFILL", prefill), ("DECODE", decode)
    ):  # fmt: skip
        text = text.replace(name, str(value))
    split = start_split(text, folder, START_LIMIT_S)
    yield Mixed(split, folder)
    stop_split(split)


@pytest.fixture(
    scope="module",
    params=[
        ("vllm", "transformers"),
        pytest.param(("transformers", "vllm"), marks=pytest.mark.long),
    ],
    ids="-to-".join,
)
def mixed(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mixed]:
    """Both directions; CI has the one."""
    yield from started(tiny_model, tmp_path_factory.mktemp("cross"), *request.param)


@pytest.fixture
async def asked(mixed: Mixed) -> Mixed:
    """Engines without prefixes."""
    await mixed.forget()
    return mixed


async def test_the_two_say_the_same_of_their_kv(asked: Mixed) -> None:
    """Name by name, of the same model; what they are they tell apart."""
    nodes = await asked.split.nodes()
    prefill, decode = nodes["prefill-0"], nodes["decode-0"]
    assert prefill["fingerprint"] == decode["fingerprint"]
    assert prefill["engine"].split()[0] != decode["engine"].split()[0]


async def test_sent_pages_are_computed_on_with(asked: Mixed) -> None:
    """All pages of each prompt travel from the one engine to the other, which computes the last
    token only; the tokens are those of either engine alone, for requests one at a time and all at
    once.
    """
    lengths = [33, 64, 100, 129, 500]
    prompts = [new_prompt(length) for length in lengths]
    right = [await asked.cold(prompt, "decode-0") for prompt in prompts]
    assert right == [await asked.cold(prompt, "prefill-0") for prompt in prompts]
    before = len(asked.split.transfers("receive"))
    alone = [ids(await asked.ask(prompt)) for prompt in prompts]
    records = asked.split.transfers("receive")[before:]
    assert alone == right
    assert {r["prompt_tokens"]: r["pages"] for r in records} == {
        length: LAYERS * -(-length // BLOCK) for length in lengths
    }
    assert {r["outcome"] for r in records} == {"landed"}
    await asked.forget()
    others = [new_prompt(length) for length in lengths * 2]
    expected = [await asked.cold(prompt, "decode-0") for prompt in others]
    together = await asyncio.gather(*(asked.ask(prompt) for prompt in others))
    assert [ids(answer) for answer in together] == expected


@pytest.mark.parametrize(
    ("writer", "reader"), [("prefill-0", "decode-0"), ("decode-0", "prefill-0")]
)
async def test_stored_chunks_are_computed_on_with(asked: Mixed, writer: str, reader: str) -> None:
    """What the one engine has stored the other finds: every whole chunk, with the same tokens; and
    nothing under another salt.
    """
    prompt = new_prompt(300)
    until = asked.chunks() + (300 + ANSWER - 1) // CHUNK
    right = ids(await asked.ask(prompt, writer))
    end = asyncio.get_running_loop().time() + STORED_LIMIT_S
    while asked.chunks() < until:
        assert asyncio.get_running_loop().time() < end, f"{asked.chunks()} of {until} chunks"
        await asyncio.sleep(0.02)
    await asked.forget()
    before = await loaded(asked.split, reader)
    found = await asked.ask(prompt, reader)
    assert ids(found) == right
    deadline = asyncio.get_running_loop().time() + STORED_LIMIT_S
    while (more := await loaded(asked.split, reader) - before) < 300 // CHUNK:
        assert asyncio.get_running_loop().time() < deadline, more
        await asyncio.sleep(0.05)
    other = await asked.ask(prompt, reader, cache_salt="another tenant's")
    assert ids(other) == right
    assert await loaded(asked.split, reader) - before == 300 // CHUNK


async def loaded(split: Split, node: str) -> int:
    """Chunks that the engine has loaded so far, as it says twice a second."""
    return int((await split.nodes())[node]["counters"].get("cache_loaded_chunks", 0))
