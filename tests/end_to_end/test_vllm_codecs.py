"""Lossy chunks under real vLLM engines: what comes from a coded disk is used, and nearly right.
(That ``bf16z`` gives equal tokens is in ``test_vllm_cache.py``, whose disk is coded so.)
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest
from support.cached_split import (
    CachedSplit,
    ask,
    ask_without_hit,
    engine_url,
    forget,
    new_prompt,
    stored,
    whole,
)
from support.split_client import stop_split

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

LEAST_EQUAL = 0.5
"""Of the answers' first tokens: a random model has many that are nearly as likely."""


@pytest.mark.parametrize("codec", ["int8", "int5z"])
async def test_hits_from_a_lossy_disk_are_answered(
    tiny_model: Path, tmp_path: Path, codec: str
) -> None:
    """Chunks that are in memory give equal tokens; once they are on the disk alone they are found,
    loaded and answered from, and most answers begin as they should.
    """
    cached = CachedSplit(tiny_model, tmp_path, 32, codec=codec)
    cached.start()
    try:
        async with aiohttp.ClientSession() as session:
            prompts = [new_prompt(300) for _ in range(6)]
            right = [await ask_without_hit(cached, session, prompt) for prompt in prompts]
            cold = await stored(cached, session, *prompts)
            assert [answer.ids for answer in cold] == right
            assert codec in cached.codecs_on_disk()
            await forget(cached, session)
            await asyncio.to_thread(cached.split.up.run, "cache", "clear", "--tier", "cpu")
            decode = await engine_url(cached, "decode-0")
            same = 0
            for prompt, expected in zip(prompts, right, strict=True):
                found = await ask(cached, session, prompt, url=decode)
                assert found.known_to_engine == whole(300)
                assert len(found.ids[0]) == len(expected[0])
                same += found.ids[0][0] == expected[0][0]
            assert same >= LEAST_EQUAL * len(prompts)
    finally:
        stop_split(cached.split)
