"""Texts under load and at every edge of length and of prefix caches: always those of one engine."""

from __future__ import annotations

import asyncio

import pytest
from support.bank_client import LONG, Answer, ask, completion, gone, prompt_of, stream, text_of
from support.mock_cluster import Cluster, alone
from support.mock_engines import BLOCK_TOKENS

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("requests", [192, pytest.param(2000, marks=LONG)])
async def test_nobody_gets_somebody_elses_answer(quad: Cluster, requests: int) -> None:
    """A11 (sgl-project/sglang#17259): prompts that no other resembles, 64 at a time, a third of the
    clients gone when another one is answered; every text belongs to its prompt.
    """
    slots = asyncio.Semaphore(64)

    async def one(number: int) -> Answer:
        prompt = prompt_of(40 + number * 7 % 230, number=8000 + number)
        async with slots:
            answer = await stream(quad, prompt)
        assert text_of(answer.raw) == alone(prompt)
        return answer

    asking = [asyncio.create_task(one(number)) for number in range(requests)]
    for number in range(0, requests - 2, 3):
        await asking[number]
        await gone(asking[number + 1])
    staying = [task for number, task in enumerate(asking) if number % 3 != 1]
    assert len(await asyncio.gather(*staying)) == len(staying)


@pytest.mark.parametrize("rest", [1, BLOCK_TOKENS // 2, BLOCK_TOKENS - 1])
@pytest.mark.parametrize("blocks", [1, 8])
async def test_a_second_turn_after_a_part_of_a_block(pair: Cluster, blocks: int, rest: int) -> None:
    """A12 (vllm-project/vllm PR#34616): what is known of the first turn ends neither on a block's
    edge nor with the prompt; the second turn is right, and nothing is counted as known that is not.
    """
    first = prompt_of(blocks * BLOCK_TOKENS + rest, number=8100 + blocks * 40 + rest)
    second = [*first, *prompt_of(40, number=rest)]
    for prompt in (first, second, second):
        answer = await ask(pair.url, completion(prompt))
        assert answer.text == alone(prompt)
        assert answer.body["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize("blocks", [0, 1, 2, 15])
async def test_a_prompt_that_is_wholly_known(pair: Cluster, blocks: int) -> None:
    """A13 (LMCache/LMCache PR#3322): exact multiples of a block and one token to either side, each
    three times: no engine dies of having nothing left to compute.
    """
    for length in {max(1, blocks * BLOCK_TOKENS + more) for more in (-1, 0, 1)}:
        prompt = prompt_of(length, number=8500 + length)
        for _ in range(3):
            assert (await ask(pair.url, completion(prompt))).text == alone(prompt)
