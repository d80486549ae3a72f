"""Clients that leave: whatever they leave behind is given back at once, and others' answers stay
right.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from support.bank_client import LONG, gone, prompt_of, received, stopped, stream, text_of
from support.idle_check import until_idle
from support.mock_cluster import Cluster, alone
from support.mock_engines import LAYERS

if TYPE_CHECKING:
    from support.mock_engines import EngineHandle

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def engines_of(cluster: Cluster) -> tuple[EngineHandle, EngineHandle]:
    """The prefill and the decode engine of the pair."""
    return await cluster.engine("prefill-0"), await cluster.engine("decode-0")


async def is_split(cluster: Cluster, start: int) -> None:
    """What others have left is cleared away, and a fresh request gets the right answer, over both
    engines.
    """
    _, decode = await engines_of(cluster)
    await until_idle(cluster)
    before = await received(decode)
    prompt = prompt_of(150, number=start)
    assert text_of((await stream(cluster, prompt)).raw) == alone(prompt)
    assert await received(decode) == before + 1


@pytest.mark.parametrize("clients", [16, pytest.param(200, marks=LONG)])
async def test_prefill_is_free_while_decode_has_not_even_heard(pair: Cluster, clients: int) -> None:
    """A01 (vllm-project/vllm#50425): clients leave after P has computed and before D has taken
    their requests. P is idle while D still stands, long before any lease ends.
    """
    prefill, _ = await engines_of(pair)
    with stopped(pair.process("decode-0")):
        asking = [
            asyncio.create_task(stream(pair, prompt_of(400, number=100 + n)))
            for n in range(clients)
        ]
        await prefill.until(lambda s: s.leased_blocks >= 13 * min(clients, 20), "held prompts")
        await gone(*asking)
        await prefill.until_idle()
    await is_split(pair, 99)


@pytest.mark.parametrize("clients", [24, pytest.param(200, marks=LONG)])
async def test_clients_that_leave_at_every_stage(pair: Cluster, clients: int) -> None:
    """A01: every other client leaves at the moment when another one is answered; the rest is
    right.
    """
    prompts = [prompt_of(30 + 37 * n % 440, number=400 + n) for n in range(clients)]
    asking = [asyncio.create_task(stream(pair, prompt)) for prompt in prompts]
    for n in range(0, clients, 2):
        assert text_of((await asking[n]).raw) == alone(prompts[n])
        await gone(asking[n + 1])
    await is_split(pair, 399)


@pytest.mark.parametrize("clients", [48, pytest.param(240, marks=LONG)])
async def test_an_overload_of_clients_that_give_up(pair: Cluster, clients: int) -> None:
    """A02 (sgl-project/sglang#8177): no first token comes, and more clients than P takes give up.

    Some wait in the router, some in P, some in D; when the load is gone the next client is served
    as if nothing had been.
    """
    prefill, decode = await engines_of(pair)
    await prefill.faults(hold_steps=True)
    asking = [
        asyncio.create_task(stream(pair, prompt_of(10 + 41 * n % 470, number=700 + n)))
        for n in range(clients)
    ]
    await prefill.until(lambda s: s.waiting > 2, "a full prefill engine")
    await decode.until(lambda s: s.open_transfers > 1, "reservations")
    await gone(*asking[: clients // 2])
    await decode.faults(hold_after_tokens=1)
    await prefill.faults()
    await decode.until(lambda s: s.running > 0, "an answer")
    await gone(*asking[clients // 2 :])
    await decode.faults()
    await is_split(pair, 699)


@pytest.mark.parametrize("rounds", [20, pytest.param(500, marks=LONG)])
async def test_an_abort_that_lands_as_the_prefill_ends(pair: Cluster, rounds: int) -> None:
    """A04 (vllm-project/vllm PR#25067): the client leaves in the step in which its prompt is
    finished and begins to be held. No engine dies, nothing is held.
    """
    prefill, _ = await engines_of(pair)
    for number in range(rounds):
        await prefill.faults(hold_at_layer=LAYERS - 1)
        asking = asyncio.create_task(stream(pair, prompt_of(100, number=1000 + number)))
        await prefill.until(lambda s: s.running == 1, "prefill")
        going = asyncio.create_task(prefill.faults())
        for _ in range(number % 20):
            await asyncio.sleep(0)
        await gone(asking)
        await going
    await is_split(pair, 999)
