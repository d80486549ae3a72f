"""A prompt is computed, or is to be, and the other half of the request never asks for it or never
comes: nobody waits for what will not happen.
"""

from __future__ import annotations

import asyncio

import pytest
from support.bank_client import LONG, ask, completion, prompt_of, received, stopped, stream, text_of
from support.idle_check import until_usable
from support.mock_cluster import Cluster, alone

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOO_LONG_FOR_DECODE = 600


async def _refused(cluster: Cluster, start: int) -> None:
    """D's refusal of a prompt that P takes reaches the client: status and words."""
    prompt = prompt_of(TOO_LONG_FOR_DECODE, number=start)
    answer = await ask(cluster.url, completion(prompt, stream=start % 2 == 0))
    assert answer.status == 400
    answer.check_error()
    assert "maximum context length is 512 tokens" in answer.body["error"]["message"]


@pytest.mark.parametrize("requests", [20, pytest.param(100, marks=LONG)])
async def test_decode_refuses_before_admission(pair: Cluster, requests: int) -> None:
    """A05 (vllm-project/vllm PR#41269): only D refuses. The client sees why, and P, whose lease is
    five minutes, is idle at once.
    """
    await asyncio.gather(*(_refused(pair, 2000 + n) for n in range(requests)))


async def test_decode_refuses_what_prefill_holds_already(pair: Cluster) -> None:
    """A05: P has computed and holds the prompts when D says no."""
    prefill = await pair.engine("prefill-0")
    with stopped(pair.process("decode-0")):
        asking = [asyncio.create_task(_refused(pair, 2200 + n)) for n in range(4)]
        await prefill.until(lambda s: s.leased_blocks == 4 * 19, "held prompts")
    await asyncio.gather(*asking)


async def test_a_prompt_that_only_prefill_refuses(pair: Cluster) -> None:
    """A06 (vllm-project/aibrix#2289): P's error is no end and no wait: D computes the prompt, and
    takes new work at once.
    """
    prefill, decode = await pair.engine("prefill-0"), await pair.engine("decode-0")
    await prefill.faults(refuse_requests=3)
    before = await received(decode)
    prompts = [prompt_of(150, number=2300 + n) for n in range(4)]
    for prompt in prompts:
        assert text_of((await stream(pair, prompt)).raw) == alone(prompt)
    assert await received(decode) == before + 1


async def test_a_prefill_node_that_stands_still(pair: Cluster) -> None:
    """A06 (sgl-project/sglang#9726): P takes the request and never answers. The client has the
    right answer within the transfer's deadline; others do not meet the silent node at all.
    """
    prompts = [prompt_of(150, number=2400 + n) for n in range(6)]
    with stopped(pair.process("prefill-0")):
        async with asyncio.timeout(15):
            answers = await asyncio.gather(*(stream(pair, prompt) for prompt in prompts[:2]))
            await until_usable(pair, "prefill-0", usable=False)
            answers += await asyncio.gather(*(stream(pair, prompt) for prompt in prompts[2:]))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert text_of(answer.raw) == alone(prompt)
