"""The host's cache under real vLLM engines with the tiny model: one prefill and one decode node,
shared by all tests of this file; the last one starts everything again.

What is right is what the same engines answer without the cache: a request with a salt of its own
finds nothing. Engines' own prefix caches are emptied wherever a hit has to be the cache's.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from support.lora_adapter import write_adapter
from support.split_client import Split, start_split, stop_split

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK = 32
CHUNK = 64
ANSWER = 12
START_LIMIT_S = 400.0
STORED_LIMIT_S = 20.0
CLUSTER = """
name: vllm-cache
allow_shared_devices: true
model: {{path: MODEL, served_name: m}}
router: {{port: 0}}
prefill: &pool
  cpus: [[0]]
  kv_cache_bytes: 50 MB
  env: {{VLLM_SERVER_DEV_MODE: "1", VLLM_ALLOW_RUNTIME_LORA_UPDATING: "1",
    SPLITSERVE_TRANSFER_LOG: {log}}}
  engine_args: {{dtype: float32, block_size: 32, max_model_len: 2048, enforce_eager: true,
    max_num_batched_tokens: 256, enable_prompt_tokens_details: true, enable_lora: true}}
  transfer: {{transport: nixl, lease_s: 15}}
decode:
  <<: *pool
  cpus: [[1]]
cache:
  chunk_tokens: 64
  tiers:
    - {{type: cpu, capacity_bytes: 64 MiB}}
    - {{type: disk, capacity_bytes: 256 MiB, path: DISK}}
"""

_salts = itertools.count()
_seeds = itertools.count()


@dataclass
class CachedSplit:
    """The cluster, which a test may start again, and its disk tier."""

    config: str
    folder: Path
    split: Split

    def chunks_on_disk(self) -> set[str]:
        """Keys of the chunks that are there."""
        return {file.name for file in (self.folder / "disk" / "chunks").glob("??/*")}

    async def until_stored(self, chunks: int) -> None:
        """So many chunks are on the disk."""
        end = asyncio.get_running_loop().time() + STORED_LIMIT_S
        while len(found := self.chunks_on_disk()) < chunks:
            missing = f"{len(found)} of {chunks} chunks are on the disk"
            assert asyncio.get_running_loop().time() < end, missing
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def cached(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedSplit]:
    """One prefill and one decode engine with a cache."""
    folder = tmp_path_factory.mktemp("cache")
    config = CLUSTER.replace("MODEL", str(tiny_model)).replace("DISK", str(folder / "disk"))
    cached = CachedSplit(config, folder, start_split(config, folder, START_LIMIT_S))
    yield cached
    stop_split(cached.split)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def new_prompt(length: int) -> list[int]:
    """Tokens that no other prompt of this run begins with."""
    draw = random.Random(next(_seeds))
    return [draw.randrange(1, 250) for _ in range(length)]


def chunks_of(tokens: int) -> int:
    """Whole chunks of the KV of so many tokens, the last of which was never computed."""
    return (tokens - 1) // CHUNK


def cached_tokens(answer: dict[str, Any]) -> int:
    """Prompt tokens that nobody has computed for this answer, as its usage says."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def ids(answer: dict[str, Any]) -> list[list[int]]:
    """The tokens of every choice."""
    return [choice["token_ids"] for choice in answer["choices"]]


async def ask(
    cached: CachedSplit, session: aiohttp.ClientSession, prompt: list[int], **fields: Any
) -> dict[str, Any]:
    """A greedy completion through the router, or with ``url`` from one engine."""
    split = cached.split
    url = fields.pop("url", split.url)
    headers = {} if url == split.url else split.key_of(url)
    body = {
        "model": "m", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **fields,
    }  # fmt: skip
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
    return found


async def ask_without_hit(
    cached: CachedSplit, session: aiohttp.ClientSession, prompt: list[int], **fields: Any
) -> dict[str, Any]:
    """The right answer."""
    salt = f"nobody else's {next(_salts)}"
    answer = await ask(cached, session, prompt, cache_salt=salt, **fields)
    assert cached_tokens(answer) == 0
    return answer


async def stored(
    cached: CachedSplit, session: aiohttp.ClientSession, prompt: list[int], **fields: Any
) -> dict[str, Any]:
    """The answer to a prompt of which nothing is known; every whole chunk of both is on the disk
    afterwards, and the engines have forgotten them.
    """
    before = len(cached.chunks_on_disk())
    answer = await ask(cached, session, prompt, **fields)
    assert cached_tokens(answer) == 0
    tokens = len(prompt) + fields.get("max_tokens", ANSWER)
    await cached.until_stored(before + chunks_of(tokens))
    await cached.split.wait_until_idle()
    await cached.split.forget_prefixes(session)
    return answer


async def test_a_second_request_hits(cached: CachedSplit, session: aiohttp.ClientSession) -> None:
    """The same prompt again: whole chunks come from the cache, and the tokens are the same."""
    prompt = new_prompt(300)
    right = await ask_without_hit(cached, session, prompt)
    cold = await stored(cached, session, prompt)
    warm = await ask(cached, session, prompt)
    assert ids(right) == ids(cold) == ids(warm)
    assert cached_tokens(warm) == 300 // CHUNK * CHUNK


async def test_turn_two_hits_the_answer_of_turn_one(
    cached: CachedSplit, session: aiohttp.ClientSession
) -> None:
    """A second turn finds the chunks that the first turn's answer filled."""
    prompt = new_prompt(100)
    first = await stored(cached, session, prompt, max_tokens=60)
    turn_two = prompt + ids(first)[0] + new_prompt(40)
    second = await ask(cached, session, turn_two)
    assert cached_tokens(second) == 159 // CHUNK * CHUNK > len(prompt)
    assert ids(second) == ids(await ask_without_hit(cached, session, turn_two))


@pytest.mark.parametrize("rest", [1, BLOCK // 2, BLOCK - 1])
@pytest.mark.parametrize("blocks", [1, 8])
async def test_a_second_turn_behind_a_part_of_a_block(
    cached: CachedSplit, session: aiohttp.ClientSession, blocks: int, rest: int
) -> None:
    """A prompt that ends inside a block, then the same and 40 tokens more: the text is right, and
    what hits is whole chunks.
    """
    prompt = new_prompt(blocks * BLOCK + rest)
    longer = prompt + new_prompt(40)
    await stored(cached, session, prompt, max_tokens=1)
    answer = await ask(cached, session, longer)
    assert cached_tokens(answer) == len(prompt) // CHUNK * CHUNK
    assert ids(answer) == ids(await ask_without_hit(cached, session, longer))


@pytest.mark.parametrize(
    "length", [1, *(edge + more for edge in (32, 64, 512) for more in (-1, 0, 1))]
)
async def test_a_prompt_that_is_wholly_cached(
    cached: CachedSplit, session: aiohttp.ClientSession, length: int
) -> None:
    """Lengths around whole blocks and chunks, four times: cold, known to the engines, known to the
    cache alone, and known to the cache alone on a single engine.
    """
    prompt = new_prompt(length)
    right = await ask_without_hit(cached, session, prompt)
    cold = await ask(cached, session, prompt)
    known = await ask(cached, session, prompt)
    await cached.split.wait_until_idle()
    await cached.split.forget_prefixes(session)
    warm = await ask(cached, session, prompt)
    await cached.split.wait_until_idle()
    await cached.split.forget_prefixes(session)
    decode = (await cached.split.nodes())["decode-0"]["engine_url"]
    alone = await ask(cached, session, prompt, url=decode)
    assert ids(right) == ids(cold) == ids(known) == ids(warm) == ids(alone)


async def test_prompts_with_different_salts_are_apart(
    cached: CachedSplit, session: aiohttp.ClientSession
) -> None:
    """Nobody hits what was stored under another salt, or without one; the stored chunks are three
    sets.
    """
    prompt = new_prompt(200)
    seen: list[set[str]] = []
    for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}):
        before = cached.chunks_on_disk()
        await stored(cached, session, prompt, **salt)
        seen.append(cached.chunks_on_disk() - before)
    assert [len(keys) for keys in seen] == [chunks_of(200 + ANSWER)] * 3
    again = await ask(cached, session, prompt, cache_salt="a")
    assert cached_tokens(again) == 200 // CHUNK * CHUNK


async def test_two_choices_of_a_cached_prompt(
    cached: CachedSplit, session: aiohttp.ClientSession
) -> None:
    """``n = 2``: both greedy choices are the right answer, cold and from the cache."""
    prompt = new_prompt(200)
    right = ids(await ask_without_hit(cached, session, prompt))
    cold = await stored(cached, session, prompt, n=2)
    warm = await ask(cached, session, prompt, n=2)
    assert ids(cold) == ids(warm) == right * 2
    assert cached_tokens(warm) == 200 // CHUNK * CHUNK


async def test_adapters_do_not_share_chunks(
    cached: CachedSplit, session: aiohttp.ClientSession, tiny_model: Path
) -> None:
    """One prompt under the base model, two adapters, another adapter under an old name: each first
    use finds nothing and each answer is the one without a cache.
    """
    decode = (await cached.split.nodes())["decode-0"]["engine_url"]
    prompt = new_prompt(200)
    for number, (name, seed) in enumerate((("one", 1), ("two", 2), ("one", 3))):
        path = write_adapter(tiny_model, cached.folder / f"adapter-{number}", seed)
        load = {"lora_name": name, "lora_path": str(path), "load_inplace": number == 2}
        url, headers = f"{decode}/v1/load_lora_adapter", cached.split.key_of(decode)
        async with session.post(url, json=load, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
        for model in (name, "m") if not number else (name,):
            right = await ask_without_hit(cached, session, prompt, url=decode, model=model)
            first = await stored(cached, session, prompt, url=decode, model=model)
            again = await ask(cached, session, prompt, url=decode, model=model)
            assert ids(right) == ids(first) == ids(again)
            assert cached_tokens(again) == 200 // CHUNK * CHUNK


async def test_a_restart_of_everything_hits_the_disk(
    cached: CachedSplit, session: aiohttp.ClientSession
) -> None:
    """Engines, cache server and router are new: what the disk has is loaded from there."""
    prompt = new_prompt(300)
    cold = await stored(cached, session, prompt)
    stop_split(cached.split)
    cached.split = start_split(cached.config, cached.folder, START_LIMIT_S)
    warm = await ask(cached, session, prompt)
    assert ids(warm) == ids(cold)
    assert cached_tokens(warm) == 300 // CHUNK * CHUNK
    right = await ask_without_hit(cached, session, prompt)
    assert ids(warm) == ids(right)
