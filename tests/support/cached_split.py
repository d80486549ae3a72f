"""A cluster of real vLLM engines with a cache, and what is asked of it: how much of each prompt was
known, and to whom.

What is right is what the same engines answer without the cache: a request with a salt of its own
finds nothing. Engines' own prefix caches are emptied wherever a hit has to be the cache's.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.cache.chunk_format import decode_header
from splitserve.kv_transfer.cache.tiers.base import HEADER_BYTES
from support.split_client import Split, start_split

if TYPE_CHECKING:
    from pathlib import Path

    import aiohttp

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
  engine_args: {{dtype: float32, block_size: BLOCK, max_model_len: 2048, enforce_eager: true,
    max_num_batched_tokens: 256, enable_prompt_tokens_details: true, enable_lora: true}}
  transfer: {{transport: nixl, lease_s: 15}}
decode:
  <<: *pool
  cpus: [[1]]
cache:
  chunk_tokens: 64
  lookup_timeout_s: 2
  tiers:
    - {{type: cpu, capacity_bytes: 64 MiB}}
    - {{type: disk, capacity_bytes: 256 MiB, path: FOLDER/disk, codec: CODEC}}
"""
TENANTS = """
security:
  secret_file: FOLDER/secret
  api_keys: [{{tenant: alice, key_file: FOLDER/alice}}, {{tenant: bob, key_file: FOLDER/bob}}]
"""

Prompt = list[int] | str
"""Token ids, or text, of which each byte is one."""

_salts = itertools.count()
_seeds = itertools.count()


@dataclass
class CachedSplit:
    """The cluster, which a test may start again, and its folder, which stays."""

    model: Path
    folder: Path
    block_tokens: int
    codec: str = "bf16z"
    """Of the disk."""
    split: Split = field(init=False)

    def start(self, *, has_tenants: bool = False) -> None:
        """It serves; with tenants alice and bob have keys (``key_of``)."""
        text = CLUSTER + (TENANTS if has_tenants else "")
        if has_tenants:
            for name, content in (("secret", "5e" * 16), ("alice", "sk-alice"), ("bob", "sk-bob")):
                (self.folder / name).write_text(content)
                (self.folder / name).chmod(0o600)
        for name, value in (
            ("MODEL", self.model), ("FOLDER", self.folder), ("BLOCK", self.block_tokens),
            ("CODEC", self.codec),
        ):  # fmt: skip
            text = text.replace(name, str(value))
        self.split = start_split(text, self.folder, START_LIMIT_S)

    def chunks_on_disk(self) -> set[str]:
        """Keys of the chunks that are there."""
        return {file.name for file in (self.folder / "disk" / "chunks").glob("??/*")}

    def codecs_on_disk(self) -> set[str]:
        """By which they are coded."""
        found = set()
        for file in (self.folder / "disk" / "chunks").glob("??/*"):
            with file.open("rb") as opened:
                header = memoryview(opened.read(HEADER_BYTES))
            found.add(decode_header(header, bytes.fromhex(file.name), None).codec)
        return found

    async def until_stored(self, chunks: int) -> None:
        """So many chunks are on the disk."""
        end = asyncio.get_running_loop().time() + STORED_LIMIT_S
        while len(found := self.chunks_on_disk()) < chunks:
            missing = f"{len(found)} of {chunks} chunks are on the disk"
            assert asyncio.get_running_loop().time() < end, missing
            await asyncio.sleep(0.02)


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

    def __init__(
        self, answer: dict[str, Any], transfers: list[dict[str, Any]], block_tokens: int
    ) -> None:
        self.ids: list[list[int]] = [choice["token_ids"] for choice in answer["choices"]]
        """The tokens of every choice."""
        self.prompt_tokens = int(answer["usage"]["prompt_tokens"])
        self._block_tokens = block_tokens
        self._usage = answer["usage"]
        self._transfers = transfers

    @property
    def known_to_decode(self) -> int:
        """Prompt tokens that the decode node did not ask the prefill node for, in whole blocks; all
        of them when it asked for nothing. What the prefill node has computed and stored a moment
        before counts too.
        """
        blocks = [transfer["first_block"] for transfer in self._transfers]
        return min(blocks) * self._block_tokens if blocks else self.prompt_tokens

    @property
    def known_to_engine(self) -> int:
        """Prompt tokens that a single engine did not compute, as its usage says."""
        return int(self._usage["prompt_tokens_details"]["cached_tokens"])


async def ask(
    cached: CachedSplit, session: aiohttp.ClientSession, prompt: Prompt, **fields: Any
) -> Asked:
    """A greedy completion through the router (with ``tenant`` by its key), or with ``url`` from one
    engine.
    """
    split = cached.split
    url, tenant = fields.pop("url", split.url), fields.pop("tenant", "")
    headers = {} if url == split.url else split.key_of(url)
    if tenant:
        headers = {"Authorization": f"Bearer sk-{tenant}"}
    body = {
        "model": "m", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **fields,
    }  # fmt: skip
    path = "/v1/completions"
    if "messages" in fields:
        path = "/v1/chat/completions"
        del body["prompt"]
    before = len(split.transfers("receive"))
    async with session.post(url + path, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
    return Asked(found, split.transfers("receive")[before:], cached.block_tokens)


async def ask_without_hit(
    cached: CachedSplit, session: aiohttp.ClientSession, prompt: Prompt, **fields: Any
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
    cached: CachedSplit, session: aiohttp.ClientSession, *prompts: Prompt, **fields: Any
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
