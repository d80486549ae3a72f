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


def whole(tokens: int) -> int:
    """Tokens of the whole chunks of so many."""
    return tokens // CHUNK * CHUNK


def chunks_of(tokens: int) -> int:
    """Whole chunks of the KV of so many tokens, the last of which was never computed."""
    return (tokens - 1) // CHUNK


class Asked:
    """An answer and how much of its prompt was known."""

    def __init__(self, answer: dict[str, Any], transfers: list[dict[str, Any]]) -> None:
        self.ids: list[list[int]] = [choice["token_ids"] for choice in answer["choices"]]
        """The tokens of every choice."""
        self._usage = answer["usage"]
        self._transfers = transfers

    @property
    def known_to_decode(self) -> int:
        """Prompt tokens that the decode node did not ask the prefill node for, in whole blocks; all
        of them when it asked for nothing. What the prefill node has computed and stored a moment
        before counts too.
        """
        blocks = [transfer["first_block"] for transfer in self._transfers]
        return min(blocks) * BLOCK if blocks else int(self._usage["prompt_tokens"])

    @property
    def known_to_engine(self) -> int:
        """Prompt tokens that a single engine did not compute, as its usage says."""
        return int(self._usage["prompt_tokens_details"]["cached_tokens"])


async def ask(
    cached: CachedSplit, session: aiohttp.ClientSession, prompt: list[int], **fields: Any
) -> Asked:
    """A greedy completion through the router, or with ``url`` from one engine."""
    split = cached.split
    url = fields.pop("url", split.url)
    headers = {} if url == split.url else split.key_of(url)
    body = {
        "model": "m", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **fields,
    }  # fmt: skip
    before = len(split.transfers("receive"))
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
    return Asked(found, split.transfers("receive")[before:])


async def ask_without_hit(
    cached: CachedSplit, session: aiohttp.ClientSession, prompt: list[int], **fields: Any
) -> list[list[int]]:
    """The right tokens: what one engine answers that knows nothing of the prompt."""
    url = await engine_url(cached, "decode-0")
    salt = f"nobody else's {next(_salts)}"
    answer = await ask(cached, session, prompt, cache_salt=salt, url=url, **fields)
    assert answer.known_to_engine == 0
    return answer.ids


async def engine_url(cached: CachedSplit, node: str) -> str:
    """Where a node's engine listens."""
    return str((await cached.split.nodes())[node]["engine_url"])


async def forget(cached: CachedSplit, session: aiohttp.ClientSession) -> None:
    """The engines are idle and know no prefix; the cache does."""
    await cached.split.wait_until_idle()
    await cached.split.forget_prefixes(session)


async def stored(
    cached: CachedSplit, session: aiohttp.ClientSession, *prompts: list[int], **fields: Any
) -> list[Asked]:
    """The answers to prompts of which nothing is known; every whole chunk of them and of their
    answers is on the disk afterwards, and the engines have forgotten them.
    """
    until = len(cached.chunks_on_disk())
    answers = []
    for prompt in prompts:
        answers.append(await ask(cached, session, prompt, **fields))
        until += chunks_of(len(prompt) + fields.get("max_tokens", ANSWER))
    await cached.until_stored(until)
    await forget(cached, session)
    return answers


async def test_a_second_request_hits(cached: CachedSplit, session: aiohttp.ClientSession) -> None:
    """The same prompt again: whole chunks come from the cache, on both nodes, and the tokens are
    the same.
    """
    prompt = new_prompt(300)
    right = await ask_without_hit(cached, session, prompt)
    (cold,) = await stored(cached, session, prompt)
    warm = await ask(cached, session, prompt)
    assert warm.known_to_decode == whole(300)
    assert right == cold.ids == warm.ids
    for node in ("prefill-0", "decode-0"):
        await forget(cached, session)
        alone = await ask(cached, session, prompt, url=await engine_url(cached, node))
        assert (alone.ids, alone.known_to_engine) == (right, whole(300)), node


async def test_turn_two_hits_the_answer_of_turn_one(
    cached: CachedSplit, session: aiohttp.ClientSession
) -> None:
    """A second turn finds the chunks that the first turn's answer filled, also on the node that has
    not written it.
    """
    prompt = new_prompt(100)
    (first,) = await stored(cached, session, prompt, max_tokens=60)
    turn_two = prompt + first.ids[0] + new_prompt(40)
    alone = await ask(cached, session, turn_two, url=await engine_url(cached, "prefill-0"))
    assert alone.known_to_engine == whole(159) > len(prompt)
    await forget(cached, session)
    second = await ask(cached, session, turn_two)
    assert second.known_to_decode >= whole(159)
    assert alone.ids == second.ids == await ask_without_hit(cached, session, turn_two)


async def test_second_turns_behind_a_part_of_a_block(
    cached: CachedSplit, session: aiohttp.ClientSession
) -> None:
    """Prompts that end inside a block, then the same and 40 tokens more, on one engine and split:
    the text is right, and what hits is whole chunks.
    """
    lengths = [blocks * BLOCK + rest for blocks in (1, 8) for rest in (1, BLOCK // 2, BLOCK - 1)]
    prompts = [new_prompt(length) for length in lengths]
    await stored(cached, session, *prompts, max_tokens=1)
    longer = [prompt + new_prompt(40) for prompt in prompts]
    decode = await engine_url(cached, "decode-0")
    alone = [await ask(cached, session, prompt, url=decode) for prompt in longer]
    assert [answer.known_to_engine for answer in alone] == [whole(length) for length in lengths]
    await forget(cached, session)
    split = [await ask(cached, session, prompt) for prompt in longer]
    for length, prompt, one, two in zip(lengths, longer, alone, split, strict=True):
        assert two.known_to_decode >= whole(length)
        right = await ask_without_hit(cached, session, prompt)
        assert right == one.ids == two.ids, f"{length} tokens and 40 more"


async def test_prompts_that_are_wholly_cached(
    cached: CachedSplit, session: aiohttp.ClientSession
) -> None:
    """Lengths around whole blocks and chunks, four times: cold, known to the cache alone, known to
    the engines, and known to the cache alone on a single engine.
    """
    lengths = [1, *(edge + more for edge in (BLOCK, CHUNK, 8 * CHUNK) for more in (-1, 0, 1))]
    prompts = [new_prompt(length) for length in lengths]
    cold = await stored(cached, session, *prompts)
    warm = [await ask(cached, session, prompt) for prompt in prompts]
    known = [await ask(cached, session, prompt) for prompt in prompts]
    await forget(cached, session)
    decode = await engine_url(cached, "decode-0")
    alone = [await ask(cached, session, prompt, url=decode) for prompt in prompts]
    rows = zip(lengths, prompts, cold, warm, known, alone, strict=True)
    for length, prompt, first, second, third, fourth in rows:
        right = await ask_without_hit(cached, session, prompt)
        assert right == first.ids == second.ids == third.ids == fourth.ids, f"{length} tokens"
        assert second.known_to_decode in (whole(length), length)
        assert fourth.known_to_engine in (whole(length), length - 1)


async def test_prompts_with_different_salts_are_apart(
    cached: CachedSplit, session: aiohttp.ClientSession
) -> None:
    """Nobody hits what was stored under another salt, or without one; the stored chunks are three
    sets, and each finds its own.
    """
    prompt = new_prompt(200)
    decode = await engine_url(cached, "decode-0")
    seen: list[set[str]] = []
    salts: tuple[dict[str, str], ...] = ({"cache_salt": "a"}, {"cache_salt": "b"}, {})
    for salt in salts:
        before = cached.chunks_on_disk()
        (first,) = await stored(cached, session, prompt, url=decode, **salt)
        assert first.known_to_engine == 0
        seen.append(cached.chunks_on_disk() - before)
    assert [len(keys) for keys in seen] == [chunks_of(200 + ANSWER)] * 3
    for salt in salts:
        again = await ask(cached, session, prompt, **salt)
        assert again.known_to_decode == whole(200)


async def test_two_choices_of_a_cached_prompt(
    cached: CachedSplit, session: aiohttp.ClientSession
) -> None:
    """``n = 2``, sampled: both choices are the same cold, from the cache, and without it."""
    prompt = new_prompt(200)
    two: dict[str, Any] = {"n": 2, "temperature": 0.5, "seed": 5}
    decode = await engine_url(cached, "decode-0")
    right = (await ask(cached, session, prompt, url=decode, cache_salt="of two", **two)).ids
    (cold,) = await stored(cached, session, prompt, **two)
    warm = await ask(cached, session, prompt, **two)
    assert right == cold.ids == warm.ids
    assert right[0] != right[1]
    assert warm.known_to_decode >= whole(200)


async def test_adapters_do_not_share_chunks(
    cached: CachedSplit, session: aiohttp.ClientSession, tiny_model: Path
) -> None:
    """One prompt under two adapters, the base model, and another adapter under an old name: each
    first use finds nothing, and each answer is the one without a cache.
    """
    decode = await engine_url(cached, "decode-0")
    prompt = new_prompt(200)
    answers = []
    for number, (name, seed) in enumerate((("one", 1), ("two", 2), ("m", 0), ("one", 3))):
        if seed:
            path = write_adapter(tiny_model, cached.folder / f"adapter-{number}", seed)
            await load_adapter(cached, session, decode, name, path)
        right = await ask_without_hit(cached, session, prompt, model=name)
        (first,) = await stored(cached, session, prompt, url=decode, model=name)
        again = await ask(cached, session, prompt, url=decode, model=name)
        assert (first.known_to_engine, again.known_to_engine) == (0, whole(200))
        assert right == first.ids == again.ids
        answers.append(right)
        await forget(cached, session)
    assert all(one != other for one, other in itertools.combinations(answers, 2))


async def test_a_restart_of_everything_hits_the_disk(
    cached: CachedSplit, session: aiohttp.ClientSession
) -> None:
    """Engines, cache server and router are new: what the disk has is loaded from there."""
    prompt = new_prompt(300)
    (cold,) = await stored(cached, session, prompt)
    stop_split(cached.split)
    cached.split = start_split(cached.config, cached.folder, START_LIMIT_S)
    warm = await ask(cached, session, prompt)
    assert (warm.ids, warm.known_to_decode) == (cold.ids, whole(300))
    assert warm.ids == await ask_without_hit(cached, session, prompt)


async def load_adapter(
    cached: CachedSplit, session: aiohttp.ClientSession, engine: str, name: str, path: Path
) -> None:
    """The engine answers under ``name`` with that adapter, whatever it had under it before."""
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
    headers = cached.split.key_of(engine)
    url = f"{engine}/v1/load_lora_adapter"
    async with session.post(url, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
