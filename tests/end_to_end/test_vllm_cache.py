"""The host's cache under real vLLM engines with the tiny model: one prefill and one decode node,
shared by all tests of this file. Those at its end have everything started again, with blocks of
another size and with tenants.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from support.cached_split import (
    ANSWER,
    CHUNK,
    Asked,
    CachedSplit,
    ask,
    ask_without_hit,
    chunks_of,
    engine_url,
    forget,
    new_prompt,
    stored,
    whole,
)
from support.lora_adapter import write_adapter
from support.split_client import stop_split

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK, OTHER_BLOCK = 32, 64


@pytest.fixture(scope="module")
def cached(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedSplit]:
    """One prefill and one decode engine with a cache."""
    cached = CachedSplit(tiny_model, tmp_path_factory.mktemp("cache"), BLOCK)
    cached.start()
    yield cached
    stop_split(cached.split)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


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


@dataclass
class Restarted:
    """The cluster after everything was started again."""

    cached: CachedSplit
    prompt: list[int]
    """Of which the cluster before has left all chunks on the disk,"""
    cold: Asked
    """and which it has answered so."""

    async def cache(self, verb: str, *arguments: str, status: int = 0) -> dict[str, Any]:
        """What ``splitserve cache VERB`` tells."""
        up = self.cached.split.up
        done = await asyncio.to_thread(up.run, "cache", verb, *arguments, "--json")
        assert done.returncode == status, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def file(self, name: str, content: str) -> str:
        """The path of a file with that."""
        path = self.cached.folder / name
        path.write_text(content)
        return str(path)


@pytest.fixture(scope="module")
def restarted(cached: CachedSplit) -> Restarted:
    """Engines, cache server and router are new, blocks are larger, and clients need keys."""
    prompt = new_prompt(300)

    async def store() -> Asked:
        async with aiohttp.ClientSession() as session:
            return (await stored(cached, session, prompt))[0]

    cold = asyncio.run(store())
    stop_split(cached.split)
    cached.block_tokens = OTHER_BLOCK
    cached.start(has_tenants=True)
    return Restarted(cached, prompt, cold)


async def test_after_a_restart_blocks_of_another_size_are_filled_from_disk(
    restarted: Restarted, session: aiohttp.ClientSession
) -> None:
    """What engines with blocks of 32 tokens have stored is decoded from disk into blocks of 64, on
    both nodes, and the tokens are the same; what those store is found too.
    """
    cached, prompt = restarted.cached, restarted.prompt
    assert cached.codecs_on_disk() == {"bf16z"}
    for node in ("prefill-0", "decode-0"):
        alone = await ask(cached, session, prompt, url=await engine_url(cached, node))
        assert (alone.ids, alone.known_to_engine) == (restarted.cold.ids, whole(300)), node
    await forget(cached, session)
    longer, decode = prompt + new_prompt(100), await engine_url(cached, "decode-0")
    before = len(cached.chunks_on_disk())
    first = await ask(cached, session, longer, url=decode)
    assert first.known_to_engine == whole(300)
    await cached.until_stored(before + chunks_of(400 + ANSWER) - chunks_of(300))
    await forget(cached, session)
    again = await ask(cached, session, longer, url=decode)
    assert again.known_to_engine == whole(400)
    assert first.ids == again.ids == await ask_without_hit(cached, session, longer)


async def test_operators_find_and_move_what_a_tenant_has_stored(
    restarted: Restarted, session: aiohttp.ClientSession
) -> None:
    """Text and chats are looked up as engines have stored them. What was moved to the disk,
    prefetched and pinned is loaded, and its tokens are right. A tenant that is cleared has lost its
    own chunks, also the pinned ones if that is said, and nobody else's.
    """
    cached = restarted.cached
    draw = random.Random(9)
    text = "".join(draw.choices(string.ascii_letters, k=300))
    messages = [{"role": "user", "content": text[::-1]}]
    right = await ask_without_hit(cached, session, text)
    for tenant in ("alice", "bob"):
        (first,) = await stored(cached, session, text, tenant=tenant)
        assert first.ids == right
    before = len(cached.chunks_on_disk())
    chat = await ask(cached, session, "", messages=messages, tenant="alice", max_tokens=1)
    await cached.until_stored(before + chunks_of(chat.prompt_tokens + 1))
    await forget(cached, session)

    alice = ["--prompt-file", restarted.file("text", text), "--tenant", "alice"]
    bob = [*alice[:-1], "bob"]
    chat_of_alice = ["--messages", restarted.file("chat", json.dumps(messages)), *alice[2:]]
    everywhere = {"cpu": whole(300), "disk": whole(300)}
    found = await restarted.cache("lookup", *alice)
    assert (found["tokens"], found["cached_tokens"], found["tiers"]) == (300, 256, everywhere)
    found = await restarted.cache("lookup", *chat_of_alice)
    assert found["tokens"] == chat.prompt_tokens
    assert found["cached_tokens"] == whole(chat.prompt_tokens) > 0

    moved = await restarted.cache("move", *alice, "--tier", "disk")
    assert (moved["tokens"], moved["missing"]) == (256, 0)
    assert (await restarted.cache("lookup", *alice))["tiers"] == {"cpu": 0, "disk": 256}
    assert (await restarted.cache("prefetch", *alice))["tokens"] == 256
    assert (await restarted.cache("pin", *alice, "--tier", "cpu"))["tokens"] == 256
    found = await restarted.cache("lookup", *alice)
    assert (found["tiers"], found["pinned_tokens"]) == (everywhere, 256)
    warm = await ask(cached, session, text, tenant="alice")
    assert (warm.ids, warm.known_to_decode) == (right, 256)
    await forget(cached, session)

    await restarted.cache("clear", "--tenant", "alice")
    assert (await restarted.cache("lookup", *alice))["tiers"] == {"cpu": 256, "disk": 0}
    assert (await restarted.cache("lookup", *chat_of_alice))["cached_tokens"] == 0
    await restarted.cache("clear", "--tenant", "alice", "--pinned")
    assert (await restarted.cache("lookup", *alice))["cached_tokens"] == 0
    assert (await restarted.cache("lookup", *bob))["tiers"] == everywhere
    assert (await ask(cached, session, text, tenant="alice")).ids == right


async def load_adapter(
    cached: CachedSplit, session: aiohttp.ClientSession, engine: str, name: str, path: Path
) -> None:
    """The engine answers under ``name`` with that adapter, whatever it had under it before."""
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
    headers = cached.split.key_of(engine)
    url = f"{engine}/v1/load_lora_adapter"
    async with session.post(url, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
