"""Real vLLM engines of different tensor-parallel sizes exchange pages by heads, with the tiny
model.

`make test` has one pair of sizes, `make test-all` the others too.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import aiohttp
import pytest
from support.split_client import start_split, stop_split
from support.timelines import assert_whole_timeline, streamed_record

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LAYERS = 8
BLOCK = 32
START_LIMIT_S = 600.0
CLUSTER = """
name: vllm-tp
allow_shared_devices: true
model: {{path: MODEL, served_name: m}}
router: {{port: 0}}
prefill: &pool
  cpus: [PREFILL_CPUS]
  kv_cache_bytes: 100 MB
  env: &env {{VLLM_SERVER_DEV_MODE: "1", SPLITSERVE_TRANSFER_LOG: {log}}}
  engine_args: &args {{dtype: float32, block_size: 32, max_model_len: 2048, enforce_eager: true,
    max_num_batched_tokens: 128, tensor_parallel_size: PREFILL_SIZE}}
  transfer: {{transport: TRANSPORT}}
decode:
  <<: *pool
  cpus: [DECODE_CPUS]
  engine_args: {{dtype: float32, block_size: 32, max_model_len: 2048, enforce_eager: true,
    max_num_batched_tokens: 128, tensor_parallel_size: DECODE_SIZE}}
"""
CPUS = {1: "[0]", 2: "[0, 1]"}


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [
        (2, 1, "nixl"),
        pytest.param(1, 2, "nixl", marks=pytest.mark.long),
        pytest.param(2, 2, "local", marks=pytest.mark.long),
        pytest.param(2, 1, "tcp", marks=pytest.mark.long),
    ],
)
async def test_text_equals_one_engine(
    tiny_model: Path, tmp_path: Path, prefill: int, decode: int, transport: str
) -> None:
    """Greedy tokens equal those of the prefill engine alone, one at a time and eight at a time;
    every rank received the pages of its heads, and a request's timeline counts those of all.
    """
    config = (
        CLUSTER.replace("MODEL", str(tiny_model))
        .replace("PREFILL_CPUS", CPUS[prefill])
        .replace("DECODE_CPUS", CPUS[decode])
        .replace("PREFILL_SIZE", str(prefill))
        .replace("DECODE_SIZE", str(decode))
        .replace("TRANSPORT", transport)
    )
    split = start_split(config, tmp_path, START_LIMIT_S)
    try:
        draw = random.Random(7)
        lengths = [2, 31, 32, 33, 64, 129, 300]
        asked = [[draw.randrange(1, 250) for _ in range(length)] for length in lengths]
        async with aiohttp.ClientSession() as session:
            alone = [await split.ask(session, prompt, 12) for prompt in asked]
            records = split.transfers("receive")
            await split.forget_prefixes(session)
            together = await asyncio.gather(*(split.ask(session, p, 12) for p in asked))
            for prompt, first, second in zip(asked, alone, together, strict=True):
                await split.forget_prefixes(session)
                plain = await split.ask_one_engine(session, "prefill-0", prompt, 12)
                assert first["token_ids"] == plain["token_ids"], f"{len(prompt)} tokens"
                assert second["token_ids"] == plain["token_ids"], f"{len(prompt)} tokens, at once"
            await split.forget_prefixes(session)
        sources = max(1, prefill // decode)
        whole = [draw.randrange(1, 250) for _ in range(500)]
        pages_sent = sources * decode * LAYERS * -(-500 // BLOCK)
        bytes_per_token = (await split.nodes())["decode-0"]["kv_bytes_per_token"]
        assert_whole_timeline(
            await streamed_record(split.url, whole, 4),
            layers=LAYERS,
            pages=pages_sent,
            page_bytes=bytes_per_token * BLOCK // (sources * decode * LAYERS),
        )
        expected = sorted(sources * LAYERS * -(-n // BLOCK) for n in lengths for _ in range(decode))
        pages = sorted(record["pages"] for record in records)
        assert pages == expected, "\n".join(map(str, records))
    finally:
        stop_split(split)
