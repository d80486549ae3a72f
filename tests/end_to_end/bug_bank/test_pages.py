"""Pages whose writer or owner is not what it was: two engines and no router, so that each step is
the test's own.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from support.bank_client import LONG, completion, gone, prompt_of
from support.idle_check import TRACEBACK
from support.mock_cluster import alone
from support.mock_engines import EngineOptions, MockProcess, Pair, pair_of, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    GetPair = Callable[[str], Awaitable[Pair]]

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRANSPORTS = ("tcp", "local", "nixl")
DECODE_BLOCKS = 40
OTHERS = 8
SMALL = ("--max-model-len", "1024")
BLOCK_BYTES = 4 * 2 * 32 * 32  # layers, heads, tokens, bytes of a head


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pairs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GetPair]:
    """The pair of a transport; the decode engine has few blocks. Idle at the end, without a
    traceback in a log.
    """
    folder = tmp_path_factory.mktemp("pages")
    found: dict[str, Pair] = {}
    async with AsyncExitStack() as stack:

        async def get(transport: str) -> Pair:
            if transport not in found:
                few = DECODE_BLOCKS * BLOCK_BYTES
                pair = pair_of(
                    folder,
                    EngineOptions("prefill", transport, arguments=SMALL),
                    EngineOptions("decode", transport, kv_cache_bytes=few, arguments=SMALL),
                )
                await stack.enter_async_context(running(pair.prefill, pair.decode))
                found[transport] = pair
            elif not found[transport].prefill.is_alive:
                old = found[transport].prefill
                new = MockProcess("prefill", old.options, folder, first_port=old.port)
                await stack.enter_async_context(running(new))
                found[transport] = Pair(new, found[transport].decode)
            return found[transport]

        yield get
        for pair in found.values():
            await pair.until_idle()
        for log in folder.glob("*.log"):
            assert TRACEBACK not in log.read_bytes(), log.read_text()


def _ask(engine: MockProcess, body: dict[str, Any]) -> asyncio.Task[tuple[int, dict[str, Any]]]:
    return asyncio.create_task(engine.ask(body))


def _text(answer: tuple[int, dict[str, Any]]) -> str:
    status, body = answer
    assert status == 200, body
    return str(body["choices"][0]["text"])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("rounds", [1, pytest.param(100, marks=LONG)])
async def test_a_late_write_meets_nobody_elses_pages(
    pairs: GetPair, transport: str, rounds: int
) -> None:
    """A03 (sgl-project/sglang#24527): P stands still in the middle of a transfer, its client
    leaves, and others take all of D's memory; then P goes on. Their texts are right.
    """
    pair = await pairs(transport)
    prefill, decode = pair.prefill, pair.decode
    for number in range(rounds):
        transfer_id = f"late-{transport}-{number}"
        await prefill.faults(hold_at_layer=2)
        legs = pair.legs(prompt_of(200, number=9000 + number), 12, transfer_id)
        asking = [_ask(prefill, legs[0]), _ask(decode, legs[1])]
        await decode.until(lambda s: s.open_transfers == 1, "reservation")
        await prefill.until(lambda s: s.open_transfers == 1, "open transfer")
        prefill.signal(signal.SIGSTOP)
        await gone(*asking)
        await decode.until(lambda s: s.waiting == 0, "abort")
        await decode.faults(hold_steps=True)
        prompts = [prompt_of(150, number=9100 + OTHERS * number + n) for n in range(OTHERS)]
        others = [_ask(decode, completion(prompt, 20)) for prompt in prompts]
        await decode.until(lambda s: s.waiting == OTHERS, "requests of others")
        await decode.faults(hold_after_tokens=8)
        await decode.until(lambda s: s.free_blocks < 5 and s.running >= 6, "full memory")
        prefill.signal(signal.SIGCONT)
        await prefill.faults()
        await prefill.endpoint.fail_transfer(transfer_id, "the client is gone")
        await prefill.until_idle()
        await decode.faults()
        for prompt, answer in zip(prompts, await asyncio.gather(*others), strict=True):
            assert _text(answer) == alone(prompt, 20)
        await decode.until_idle()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_preempted_request_does_not_wait_for_pages_again(
    pairs: GetPair, transport: str
) -> None:
    """A14 (vllm-project/vllm PR#53250): D's memory holds the prompts but not the answers, so
    requests whose pages have arrived lose them again. All end, and every text is right.
    """
    pair = await pairs(transport)
    before = (await pair.decode.status()).counters
    arrived = before.get("received_transfers", 0) + OTHERS
    await pair.prefill.faults(hold_steps=True)
    prompts = [prompt_of(100 + n, number=9500 + n) for n in range(OTHERS)]
    asking = [asyncio.create_task(pair.answer(prompt, 100)) for prompt in prompts]
    await pair.decode.until(lambda s: s.open_transfers == OTHERS, "reservations")
    await pair.decode.faults(hold_after_tokens=20)
    await pair.prefill.faults()
    await pair.decode.until(lambda s: s.counters.get("received_transfers") == arrived, "all pages")
    await pair.decode.faults()
    for prompt, (text, _) in zip(prompts, await asyncio.gather(*asking), strict=True):
        assert text == alone(prompt, 100)
    await pair.until_idle()
    after = (await pair.decode.status()).counters
    assert after["preemptions"] > before["preemptions"]
    assert after["received_transfers"] == arrived


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_peers_former_life_is_not_asked(pairs: GetPair, transport: str) -> None:
    """A47 (ai-dynamo/nixl PR#2051): D stands still right after P has answered; P is killed and
    another life takes its name and its ports, with something else in the same blocks; D goes on.
    It computes the prompt itself: the text is right.
    """
    pair = await pairs(transport)
    known = prompt_of(90, number=9700)
    assert (await pair.answer(known))[0] == alone(known, 16)
    await pair.until_idle()
    await pair.decode.faults(hold_requests=True)
    prompt = prompt_of(200, number=9701)
    legs = pair.legs(prompt, 12)
    answering = _ask(pair.decode, legs[1])
    assert (await pair.prefill.ask(legs[0]))[0] == 200
    pair.decode.signal(signal.SIGSTOP)
    pair.prefill.kill()
    successor = (await pairs(transport)).prefill
    assert successor.control_addresses == pair.prefill.control_addresses
    foreign = prompt_of(500, number=9702)
    assert _text(await successor.ask(completion(foreign))) == alone(foreign)
    pair.decode.signal(signal.SIGCONT)
    await pair.decode.faults()
    async with asyncio.timeout(20):
        assert _text(await answering) == alone(prompt)
    new = await pairs(transport)
    assert (await new.answer(known[::-1]))[0] == alone(known[::-1], 16)
    await new.until_idle()
