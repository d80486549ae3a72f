"""Two mock engines and no router: whatever is split gives the text of one engine, over every
transport and pair of tensor-parallel sizes.

The mock engine's text depends on every byte of KV, so equal texts mean that every page arrived in
its place; the planted faults at the end show that a wrong page would be seen.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from support.mock_engines import BLOCK_TOKENS, LAYERS, EngineOptions, Pair, pair_of, running

from splitserve.orchestrator.engines.mock.model import KvShape, MockModel, reference_answer
from splitserve.orchestrator.engines.mock.tokenizer import decode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

pytestmark = pytest.mark.asyncio(loop_scope="module")

VARIANTS = {
    "tcp": ("tcp", 1, 1),
    "local": ("local", 1, 1),
    "nixl": ("nixl", 1, 1),
    "tcp 2 to 1": ("tcp", 2, 1),
    "local 2 to 1": ("local", 2, 1),
    "nixl 1 to 2": ("nixl", 1, 2),
    "local 2 to 2": ("local", 2, 2),
}
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 257, 600)
TOKENS = 12
PLANTED = Path(__file__).parents[2] / "benchmarks" / "harness" / "engine_side"

if TYPE_CHECKING:
    GetPair = Callable[[str], Awaitable[Pair]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GetPair]:
    """The pair of a variant; its engines are started when they are asked for first."""
    folder = tmp_path_factory.mktemp("mock")
    found: dict[str, Pair] = {}
    async with AsyncExitStack() as stack:

        async def get(variant: str) -> Pair:
            if variant not in found:
                transport, p_ranks, d_ranks = VARIANTS[variant]
                env = {"SPLITSERVE_TRANSFER_LOG": str(folder / f"{variant}.jsonl")}
                pair = pair_of(
                    folder,
                    EngineOptions("prefill", transport, p_ranks, env=env),
                    EngineOptions("decode", transport, d_ranks),
                )
                await stack.enter_async_context(running(pair.prefill, pair.decode))
                found[variant] = pair
            return found[variant]

        yield get
        for pair in found.values():
            await pair.until_idle()


def prompt_of(length: int, start: int) -> list[int]:
    """A prompt that shares no block with one of another ``start``."""
    return [(start * 17 + n * 31 + n // 7) % 256 for n in range(length)]


def alone(prompt: list[int], tokens: int = TOKENS) -> str:
    """What one engine answers."""
    return decode(reference_answer(MockModel(KvShape(layers=LAYERS)), prompt, tokens))


async def computed_and_received(pair: Pair) -> tuple[float, float, float]:
    """(prompt tokens that D has computed, transfers and pages that it has received); per rank the
    last two.
    """
    counters = (await pair.decode.status()).counters
    ranks = pair.decode.options.tensor_parallel
    transfers, pages = (counters.get(f"received_{what}", 0) for what in ("transfers", "pages"))
    return counters["prompt_tokens_computed"], transfers / ranks, pages / ranks


def transfers_of(pair: Pair) -> list[dict[str, Any]]:
    """P's record of every transfer."""
    log = Path(pair.prefill.options.env["SPLITSERVE_TRANSFER_LOG"])
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("variant", VARIANTS)
async def test_lengths(pairs: GetPair, variant: str) -> None:
    """Around block multiples and over several steps: every page is sent, D computes the last prompt
    token only.

    A prompt of one token is computed by D itself.
    """
    pair = await pairs(variant)
    before = await computed_and_received(pair)
    for length in LENGTHS:
        prompt = prompt_of(length, start=length)
        text, _ = await pair.answer(prompt, TOKENS)
        assert text == alone(prompt), (length, pair.story())
    await pair.until_idle()
    computed, transfers, pages = (
        now - then for now, then in zip(await computed_and_received(pair), before, strict=True)
    )
    assert computed == len(LENGTHS)
    assert transfers == len(LENGTHS) - 1
    # a page for each rank of P that holds heads of the rank of D
    ranks = max(1, pair.prefill.options.tensor_parallel // pair.decode.options.tensor_parallel)
    blocks = sum(-(-length // BLOCK_TOKENS) for length in LENGTHS[1:])
    assert pages == blocks * LAYERS * ranks


@pytest.mark.parametrize("variant", ["tcp", "local", "nixl", "local 2 to 1", "nixl 1 to 2"])
async def test_many_at_once(pairs: GetPair, variant: str) -> None:
    """32 requests with shared and own beginnings: each gets its own answer."""
    pair = await pairs(variant)
    base = prompt_of(80, start=1000)
    prompts = [base[: 16 * (n % 6)] + prompt_of(5 + 11 * n % 90, start=n) for n in range(32)]
    answers = await asyncio.gather(*(pair.answer(prompt, 4 + n % 5) for n, prompt in
                                     enumerate(prompts)))  # fmt: skip
    for n, (prompt, (text, _)) in enumerate(zip(prompts, answers, strict=True)):
        assert text == alone(prompt, 4 + n % 5), (n, pair.story())
    await pair.until_idle()


@pytest.mark.parametrize("variant", ["tcp", "local", "nixl", "tcp 2 to 1"])
async def test_known_beginnings(pairs: GetPair, variant: str) -> None:
    """What P knows is sent and not computed again, what D knows is not sent; both may know some."""
    pair = await pairs(variant)
    ranks = pair.prefill.options.tensor_parallel
    on_p, on_d, on_both = (prompt_of(100, start=2000 + n) for n in range(3))
    for engine, prompt in (
        (pair.prefill, on_p),
        (pair.decode, on_d),
        (pair.prefill, on_both),
        (pair.decode, on_both[:70]),
    ):
        status, _ = await engine.ask({"prompt": prompt, "max_tokens": 1})
        assert status == 200
    for prompt, pages in ((on_p, 4), (on_d, 1), (on_both, 2), (on_both, 1)):
        before = (await computed_and_received(pair))[2]
        text, _ = await pair.answer(prompt, TOKENS)
        assert text == alone(prompt), pair.story()
        after = (await computed_and_received(pair))[2]
        assert after - before == pages * LAYERS * ranks


@pytest.mark.parametrize("variant", ["tcp", "local", "nixl"])
async def test_a_grant_may_come_late(pairs: GetPair, variant: str) -> None:
    """P has finished before D asks: its blocks are leased, and everything is sent at once."""
    pair = await pairs(variant)
    prompt = prompt_of(90, start=3000)
    await pair.decode.faults(hold_requests=True)
    answering = asyncio.create_task(pair.answer(prompt, TOKENS))
    status = await pair.prefill.until(lambda s: s.leased_blocks > 0, "lease")
    assert status.leased_blocks == 3
    await pair.decode.faults()
    assert (await answering)[0] == alone(prompt)
    await pair.until_idle()


@pytest.mark.parametrize("variant", ["tcp", "local", "nixl"])
async def test_a_grant_may_come_early(pairs: GetPair, variant: str) -> None:
    """D has granted before P has the request."""
    pair = await pairs(variant)
    prompt = prompt_of(90, start=3100)
    await pair.prefill.faults(hold_requests=True)
    answering = asyncio.create_task(pair.answer(prompt, TOKENS))
    await pair.decode.until(lambda s: s.open_transfers > 0, "reservation")
    await pair.prefill.faults()
    assert (await answering)[0] == alone(prompt)
    await pair.until_idle()


@pytest.mark.parametrize("variant", ["tcp", "local 2 to 1", "nixl 1 to 2"])
async def test_a_grant_may_come_while_layers_are_computed(pairs: GetPair, variant: str) -> None:
    """What P has computed by then is caught up with."""
    pair = await pairs(variant)
    prompt = prompt_of(90, start=3200)
    await pair.decode.faults(hold_requests=True)
    await pair.prefill.faults(hold_at_layer=2)
    answering = asyncio.create_task(pair.answer(prompt, TOKENS))
    await pair.prefill.until(lambda s: s.open_transfers > 0, "open transfer")
    await pair.decode.faults()
    await pair.decode.until(lambda s: s.open_transfers > 0, "reservation")
    await pair.prefill.faults()
    assert (await answering)[0] == alone(prompt)
    await pair.until_idle()


@pytest.mark.parametrize("variant", ["tcp", "local", "nixl"])
async def test_a_beginning_shared_within_one_step_is_sent_when_it_is_computed(
    pairs: GetPair, variant: str
) -> None:
    """The second of two requests finds the first one's blocks in the cache before they are filled:
    they are no old news.
    """
    pair = await pairs(variant)
    base = prompt_of(96, start=3300)
    prompts = [[*base, 1, 2, 3], [*base, 4, 5, 6]]
    await pair.prefill.faults(hold_steps=True)
    answering = [asyncio.create_task(pair.answer(prompt, TOKENS)) for prompt in prompts]
    await pair.decode.until(lambda s: s.open_transfers == 2, "two reservations")
    await pair.prefill.until(lambda s: s.waiting == 2, "two requests")
    await pair.prefill.faults(hold_at_layer=0)
    await pair.prefill.until(lambda s: s.open_transfers == 2, "both in one step")
    await pair.prefill.faults()
    for prompt, task in zip(prompts, answering, strict=True):
        assert (await task)[0] == alone(prompt)
    await pair.until_idle()


@pytest.mark.parametrize("variant", ["tcp", "local", "nixl"])
async def test_pages_leave_while_the_prompt_is_computed(pairs: GetPair, variant: str) -> None:
    """The first write is posted before P's last layer is reached."""
    pair = await pairs(variant)
    prompt = prompt_of(200, start=3400)
    transfer_id = f"streamed over {variant}"
    await pair.prefill.faults(hold_at_layer=LAYERS - 1)
    legs = pair.legs(prompt, TOKENS, transfer_id)
    asking = [
        asyncio.create_task(engine.ask(leg))
        for engine, leg in zip((pair.prefill, pair.decode), legs, strict=True)
    ]
    await pair.decode.until(lambda s: s.open_transfers > 0, "reservation")
    await pair.prefill.until(lambda s: s.open_transfers > 0, "open transfer")
    await pair.prefill.faults()
    (_, _), (_, answer) = await asyncio.gather(*asking)
    assert answer["choices"][0]["text"] == alone(prompt)
    (record,) = [r for r in transfers_of(pair) if r["transfer_id"] == transfer_id]
    assert record["first_write"] < record["last_layer"]


@pytest.mark.parametrize("variant", ["tcp", "nixl"])
async def test_streams_and_chats(pairs: GetPair, variant: str) -> None:
    """The decode leg's stream is the text in pieces, and its usage counts the whole prompt."""
    pair = await pairs(variant)
    prompt = prompt_of(70, start=3500)
    text, usage = await pair.answer(prompt, TOKENS)
    assert text == alone(prompt)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (70, TOKENS)
    messages = [{"role": "user", "content": "a" * 100}]
    legs = [
        {**{k: v for k, v in leg.items() if k != "prompt"}, "messages": messages}
        for leg in pair.legs("", TOKENS)
    ]
    path = "/v1/chat/completions"
    _, (status, answer) = await asyncio.gather(
        pair.prefill.ask(legs[0], path=path), pair.decode.ask(legs[1], path=path)
    )
    rendered = list(f"<user>{'a' * 100}\n<assistant>".encode())
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == alone(rendered)


async def test_planted_faults_are_seen(tmp_path: Path) -> None:
    """Swapped pages, a page of zeros, a page in another layer: each gives another text; without a
    fault it is right.
    """
    fault = tmp_path / "fault"
    fault.write_text("none")
    env = {
        "PYTHONPATH": str(PLANTED),
        "PLANTED_FAULT_FILE": str(fault),
        "PLANTED_FAULT_LAYERS": str(LAYERS),
    }
    pair = pair_of(
        tmp_path, EngineOptions("prefill", "local", env=env), EngineOptions("decode", "local")
    )
    async with running(pair.prefill, pair.decode):
        for number, name in enumerate(("none", "swap", "zero", "layer", "none")):
            fault.write_text(name)
            prompt = prompt_of(120, start=4000 + number)
            text, _ = await pair.answer(prompt, TOKENS)
            assert (text == alone(prompt)) == (name == "none"), name
        await pair.until_idle()
