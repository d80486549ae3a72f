"""Two transformers engines with the tiny model behind a router, started by `splitserve up`, as the
built-in configuration has them. One cluster is shared by all tests of this file.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import torch
import transformers
from support.small_models import plain_answer
from support.split_client import Split, start_split, stop_split

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)

BLOCK, LAYERS = 32, 8
START_LIMIT_S = 200.0
CLUSTER = """
name: transformers-split
engine: transformers
model: {{path: MODEL, served_name: m}}
router: {{port: 0}}
prefill: &pool
  kv_cache_bytes: 32 MiB
  env: {{VLLM_SERVER_DEV_MODE: "1", SPLITSERVE_TRANSFER_LOG: {log}}}
  engine_args: {{dtype: float32, block_size: 32, max_model_len: 1024, threads: 1,
    max_num_batched_tokens: 128}}
  transfer: {{transport: tcp, lease_s: 15, stream_min_bytes: 4096}}
decode: *pool
"""


@pytest.fixture(scope="module")
def split(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    """One prefill and one decode engine."""
    text = CLUSTER.replace("MODEL", str(tiny_model))
    split = start_split(text, tmp_path_factory.mktemp("transformers"), START_LIMIT_S)
    yield split
    stop_split(split)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    """The same weights, computed by transformers alone."""
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(1, 250) for _ in range(length)]


async def test_answers_are_the_models(split: Split, model: Any) -> None:
    """Lengths around whole blocks, one at a time and all at once: the tokens are those of the plain
    model; exactly the pages of each prompt travelled, and the first ones of a long prompt before
    the prompt was computed.
    """
    lengths = [1, 2, 31, 32, 33, 64, 65, 300, 700]
    expected = {n: plain_answer(model, prompt(n), 6) for n in lengths}
    async with aiohttp.ClientSession() as session:
        alone = [await split.ask(session, prompt(n), 6) for n in lengths]
        records = split.transfers("receive")
        await split.wait_until_idle()
        await split.forget_prefixes(session)
        together = await asyncio.gather(*(split.ask(session, prompt(n), 6) for n in lengths))
    for n, one, two in zip(lengths, alone, together, strict=True):
        assert one["token_ids"] == two["token_ids"] == expected[n], f"{n} tokens"
    assert {r["prompt_tokens"]: r["pages"] for r in records} == {
        n: LAYERS * -(-n // BLOCK) for n in lengths if n > 1
    }
    assert {r["outcome"] for r in records} == {"landed"}
    long = next(r for r in split.transfers("send") if r["prompt_tokens"] == 700)
    assert long["first_write"] < long["last_layer"]


async def test_a_client_that_leaves_frees_its_blocks(split: Split) -> None:
    """In the middle of a stream: both engines have all blocks back."""
    body = {"model": "m", "prompt": prompt(200, 1), "max_tokens": 700, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        url = split.url + "/v1/completions"
        async with session.post(url, json=body | {"stream": True}) as answer:
            assert await answer.content.readline()
    await split.wait_until_idle()


async def test_what_the_engine_cannot_do_reaches_the_client_in_words(split: Split) -> None:
    """Status 400 through the router, with the field's name; nothing stays reserved."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 100}]}
    async with aiohttp.ClientSession() as session:
        url = split.url + "/v1/chat/completions"
        form = {"response_format": {"type": "json_object"}}
        async with session.post(url, json=body | form) as answer:
            assert answer.status == 400
            assert "response_format" in (await answer.json())["error"]["message"]
    await split.wait_until_idle()
