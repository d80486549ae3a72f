"""Two mock engines and what goes wrong between them: a right answer or a clear error, and both
sides' blocks back.

No test waits for a time: an engine is held at a place by ``/mock/faults`` and released when the
other side has been seen where the test wants it.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
from support.bank_client import LONG
from support.mock_engines import (
    LAYERS,
    SECRET,
    EngineOptions,
    MockProcess,
    Pair,
    pair_of,
    running,
)

from splitserve.kv_transfer.holdings import WAITS_FOR_GRANT
from splitserve.kv_transfer.transfer_params import TransferParams, seal
from splitserve.orchestrator.engines.mock.model import KvShape, MockModel, reference_answer
from splitserve.orchestrator.engines.mock.tokenizer import decode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRANSPORTS = ("tcp", "local", "nixl")
TOKENS = 12
LEASE_S = 3.0

if TYPE_CHECKING:
    GetPair = Callable[[str], Awaitable[Pair]]
    GetSpare = Callable[[str], Awaitable[MockProcess]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GetPair]:
    """The pair of a transport, for tests after which it serves again."""
    folder = tmp_path_factory.mktemp("mock")
    found: dict[str, Pair] = {}
    async with AsyncExitStack() as stack:

        async def get(transport: str) -> Pair:
            if transport not in found:
                pair = pair_of(
                    folder,
                    EngineOptions("prefill", transport, lease_s=LEASE_S),
                    EngineOptions("decode", transport),
                )
                await stack.enter_async_context(running(pair.prefill, pair.decode))
                found[transport] = pair
            return found[transport]

        yield get
        for pair in found.values():
            await pair.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spare(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GetSpare]:
    """One more prefill engine of a transport, for tests that stop or kill it; another one when it
    is dead.
    """
    folder = tmp_path_factory.mktemp("spare")
    found: dict[str, MockProcess] = {}
    async with AsyncExitStack() as stack:

        async def get(transport: str) -> MockProcess:
            engine = found.get(transport)
            if engine is None or not engine.is_alive:
                engine = MockProcess("spare", EngineOptions("prefill", transport), folder)
                await stack.enter_async_context(running(engine))
                found[transport] = engine
            return engine

        yield get


def each_once(cases: list[Any], transports: tuple[str, ...]) -> list[Any]:
    """Every case with every transport; `make test` has each case once, over one of them in turn:
    these tests wait for a lease to end.
    """
    return [
        pytest.param(case, name, marks=() if number % len(transports) == place else LONG)
        for number, case in enumerate(cases)
        for place, name in enumerate(transports)
    ]


def prompt_of(length: int, start: int) -> list[int]:
    """A prompt that shares no block with one of another ``start``."""
    return [(start * 17 + n * 31 + n // 7) % 256 for n in range(length)]


def alone(prompt: list[int], tokens: int = TOKENS) -> str:
    """What one engine answers."""
    return decode(reference_answer(MockModel(KvShape(layers=LAYERS)), prompt, tokens))


async def gone(*tasks: asyncio.Task[Any]) -> None:
    """The clients have closed their connections."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Legs:
    """Both legs of one request on their way."""

    pair: Pair
    prompt: list[int]
    transfer_id: str
    prefill: asyncio.Task[tuple[int, dict[str, Any]]]
    decode: asyncio.Task[tuple[int, dict[str, Any]]]

    async def text(self) -> str:
        """D's answer."""
        status, answer = await self.decode
        assert status == 200, answer
        return str(answer["choices"][0]["text"])


def start(pair: Pair, length: int, number: int, tokens: int = TOKENS) -> Legs:
    """Send both legs of a new prompt."""
    prompt = prompt_of(length, start=number)
    transfer_id = f"failure-{pair.prefill.incarnation}-{number}"
    prefill, decode_leg = pair.legs(prompt, tokens, transfer_id)
    return Legs(
        pair,
        prompt,
        transfer_id,
        asyncio.create_task(pair.prefill.ask(prefill)),
        asyncio.create_task(pair.decode.ask(decode_leg)),
    )


async def held_in_the_middle(pair: Pair, number: int) -> Legs:
    """A new prompt whose pages are granted, and P stands before layer 2; the two know each other
    from another one.
    """
    known = prompt_of(40, start=number + 1)
    assert (await pair.answer(known, TOKENS))[0] == alone(known)
    await pair.until_idle()
    await pair.prefill.faults(hold_at_layer=2)
    legs = start(pair, 200, number)
    await pair.decode.until(lambda s: s.open_transfers == 1, "reservation")
    await pair.prefill.until(
        lambda s: bool(s.holdings) and s.holdings[0].state != WAITS_FOR_GRANT, "grant"
    )
    return legs


@pytest.mark.parametrize(
    ("layer", "transport"),
    each_once([0, 1, LAYERS - 1], TRANSPORTS),
)
async def test_a_client_that_leaves_during_prefill(
    pairs: GetPair, transport: str, layer: int
) -> None:
    """Some layers are sent, others not: D's blocks come back while P is still held, P's when it
    goes on.
    """
    pair = await pairs(transport)
    await pair.prefill.faults(hold_at_layer=layer)
    legs = start(pair, 120, 100 + layer)
    await pair.decode.until(lambda s: s.open_transfers == 1, "reservation")
    await pair.prefill.until(lambda s: s.open_transfers == 1, "open transfer")
    await gone(legs.prefill, legs.decode)
    await pair.decode.until_idle()
    await pair.prefill.faults()
    await pair.until_idle()


@pytest.mark.parametrize(
    ("place", "transport"),
    [
        *itertools.product(["before prefill", "before decode", "decode"], TRANSPORTS),
        *each_once(["D's queue"], TRANSPORTS),
    ],
)
async def test_a_client_that_leaves_at_another_moment(
    pairs: GetPair, transport: str, place: str
) -> None:
    """Before P has begun, when everything has arrived, in the middle of the answer, before D has
    granted.
    """
    pair = await pairs(transport)
    held, faults = {
        "before prefill": (pair.prefill, {"hold_steps": True}),
        "before decode": (pair.decode, {"hold_after_tokens": 1}),
        "decode": (pair.decode, {"hold_after_tokens": 5}),
        "D's queue": (pair.decode, {"hold_steps": True}),
    }[place]
    await held.faults(**faults)
    legs = start(pair, 120, 200 + len(place))
    if place == "before prefill":
        await pair.prefill.until(lambda s: s.waiting == 1, "request")
        await pair.decode.until(lambda s: s.open_transfers == 1, "reservation")
    elif place == "D's queue":
        await pair.decode.until(lambda s: s.waiting == 1, "request")
        await pair.prefill.until(lambda s: s.leased_blocks > 0, "lease")
    else:
        await legs.prefill
        await pair.decode.until(lambda s: s.running == 1, "first token")
    await gone(legs.prefill, legs.decode)
    await held.faults()
    await pair.until_idle()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_clients_that_leave_at_random_moments(pairs: GetPair, transport: str) -> None:
    """Of 24 requests every other one leaves, at the moment when another one is answered: the rest
    is right.
    """
    pair = await pairs(transport)
    all_legs = [start(pair, 30 + 13 * n, 300 + n) for n in range(24)]
    for leaving, staying in zip(all_legs[::2], all_legs[1::2], strict=True):
        assert await staying.text() == alone(staying.prompt), pair.story()
        await gone(leaving.prefill, leaving.decode)
    await pair.until_idle()


@pytest.mark.parametrize("transport", ["local", "nixl"])
async def test_a_stopped_writer_keeps_the_pages(
    pairs: GetPair, spare: GetSpare, transport: str
) -> None:
    """SIGSTOP of P in the middle of a transfer whose client leaves: P could still write, so D keeps
    the blocks.

    They come back after SIGCONT, with P's fence; meanwhile D serves others.
    """
    decode_engine, stopped = (await pairs(transport)).decode, await spare(transport)
    pair = Pair(stopped, decode_engine)
    legs = await held_in_the_middle(pair, 600)
    stopped.signal(signal.SIGSTOP)
    await gone(legs.prefill, legs.decode)
    held = await decode_engine.until(lambda s: s.waiting == 0, "abort")
    assert held.free_blocks == decode_engine.idle_blocks - 7
    prompt = prompt_of(500, start=602)
    _, answer = await decode_engine.ask({"prompt": prompt, "max_tokens": 200, "ignore_eos": True})
    assert answer["choices"][0]["text"] == alone(prompt, 200)
    held = await decode_engine.until(lambda s: s.running == 0, "end")
    assert (held.open_transfers, held.free_blocks) == (1, decode_engine.idle_blocks - 7)
    stopped.signal(signal.SIGCONT)
    await decode_engine.until_idle()
    await stopped.endpoint.fail_transfer(legs.transfer_id, "the client is gone")
    await stopped.faults()
    await stopped.until_idle()


async def test_a_stopped_writer_over_tcp_is_shut_out(pairs: GetPair, spare: GetSpare) -> None:
    """D places the bytes itself: its blocks come back at once, and what P sends later lands
    nowhere.
    """
    decode_engine, stopped = (await pairs("tcp")).decode, await spare("tcp")
    pair = Pair(stopped, decode_engine)
    legs = await held_in_the_middle(pair, 610)
    stopped.signal(signal.SIGSTOP)
    await gone(legs.prefill, legs.decode)
    await decode_engine.until_idle()
    others = [prompt_of(150, start=620 + n) for n in range(4)]
    bodies = [{"prompt": prompt, "max_tokens": 40, "ignore_eos": True} for prompt in others]
    asking = [asyncio.create_task(decode_engine.ask(body)) for body in bodies]
    await decode_engine.until(lambda s: s.running > 0, "start")
    stopped.signal(signal.SIGCONT)
    await stopped.endpoint.fail_transfer(legs.transfer_id, "the client is gone")
    await stopped.faults()
    for prompt, (_, answer) in zip(others, await asyncio.gather(*asking), strict=True):
        assert answer["choices"][0]["text"] == alone(prompt, 40)
    await stopped.until_idle()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_killed_prefill_engine(pairs: GetPair, spare: GetSpare, transport: str) -> None:
    """SIGKILL after some layers: D sees the process go, computes the prompt itself, and the answer
    is right.

    The next request that names the dead engine does not wait for it at all.
    """
    decode_engine, prefill = (await pairs(transport)).decode, await spare(transport)
    pair = Pair(prefill, decode_engine)
    legs = await held_in_the_middle(pair, 400)
    prefill.kill()
    with pytest.raises(aiohttp.ClientConnectionError):
        await legs.prefill
    assert await legs.text() == alone(legs.prompt), decode_engine.story()
    await decode_engine.until_idle()
    prompt = prompt_of(90, start=402)
    _, answer = await decode_engine.ask(pair.legs(prompt, TOKENS)[1])
    assert answer["choices"][0]["text"] == alone(prompt)
    await decode_engine.until_idle()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_killed_decode_engine(pairs: GetPair, transport: str, tmp_path: Path) -> None:
    """SIGKILL in the middle of a transfer: the client sees it, P answers its leg, and its blocks
    come back.
    """
    prefill = (await pairs(transport)).prefill
    doomed = MockProcess("doomed", EngineOptions("decode", transport), tmp_path)
    async with running(doomed):
        legs = await held_in_the_middle(Pair(prefill, doomed), 500)
        doomed.kill()
        with pytest.raises(aiohttp.ClientConnectionError):
            await legs.decode
        await prefill.faults()
        assert (await legs.prefill)[0] == 200
        await prefill.until_idle()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_prompts_that_differ_are_refused(pairs: GetPair, transport: str) -> None:
    """P has tokenised the text differently: nothing is written, the refusal is counted, D computes
    the prompt itself.
    """
    pair = await pairs(transport)
    before = (await pair.prefill.status()).counters
    await pair.prefill.faults(tokenise_differently=True)
    text = "the two engines read this in two ways " * 3
    answer, _ = await pair.answer(text, TOKENS)
    await pair.prefill.faults()
    assert answer == alone(list(text.encode()))
    await pair.until_idle()
    after = (await pair.prefill.status()).counters
    assert after["refused_grants"] == before.get("refused_grants", 0) + 1
    assert after["sent_transfers"] == before.get("sent_transfers", 0)


async def test_other_weights_turn_away(pairs: GetPair, tmp_path: Path) -> None:
    """A P with another fingerprint says so to D, which computes by itself; P keeps nothing."""
    decode_engine = (await pairs("tcp")).decode
    other = MockProcess(
        "other", EngineOptions("prefill", "tcp", arguments=("--seed", "1")), tmp_path
    )
    async with running(other):
        pair = Pair(other, decode_engine)
        prompt = prompt_of(90, start=700)
        text, _ = await pair.answer(prompt, TOKENS)
        assert text == alone(prompt)
        assert "weights: seed 1 here, seed 0 at the peer" in other.story()
        await decode_engine.until_idle()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_refused_leg(pairs: GetPair, transport: str) -> None:
    """The other side is told by the router, through the agent: D computes by itself, P lets go."""
    pair = await pairs(transport)
    await pair.prefill.faults(refuse_requests=1)
    legs = start(pair, 90, 800)
    assert (await legs.prefill)[0] == 500
    await pair.decode.until(lambda s: s.open_transfers == 1, "reservation")
    await pair.decode.endpoint.fail_transfer(legs.transfer_id, "the prefill engine refused it")
    assert await legs.text() == alone(legs.prompt)
    await pair.decode.faults(refuse_requests=1)
    legs = start(pair, 90, 801)
    assert (await legs.decode)[0] == 500
    assert (await legs.prefill)[0] == 200
    await pair.prefill.endpoint.fail_transfer(legs.transfer_id, "the decode engine refused it")
    await pair.until_idle()


async def test_a_lease_ends(pairs: GetPair, tmp_path: Path) -> None:
    """A D that never asks: P's blocks come back when ``lease_s`` is over, and that is counted."""
    decode_engine = (await pairs("tcp")).decode
    prefill = MockProcess("lender", EngineOptions("prefill", "tcp", lease_s=0.3), tmp_path)
    async with running(prefill):
        pair = Pair(prefill, decode_engine)
        status, _ = await prefill.ask(pair.legs(prompt_of(90, start=900), 1)[0])
        assert status == 200
        after = await prefill.until_idle()
        assert after.counters["expired_leases"] == 1


async def test_a_transfer_that_never_comes_ends(pairs: GetPair, tmp_path: Path) -> None:
    """P never gets its leg: D waits ``transfer_deadline_s`` and computes the prompt itself."""
    prefill = (await pairs("tcp")).prefill
    patient = MockProcess("patient", EngineOptions("decode", "tcp", deadline_s=0.3), tmp_path)
    async with running(patient):
        pair = Pair(prefill, patient)
        prompt = prompt_of(90, start=910)
        _, answer = await patient.ask(pair.legs(prompt, TOKENS)[1])
        assert answer["choices"][0]["text"] == alone(prompt)
        assert (await patient.until_idle()).counters["expired_receives"] == 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_parameters_of_strangers_are_ignored(pairs: GetPair, side: str) -> None:
    """A wrong MAC or nonsense: the request is served without a transfer, and counted."""
    pair = await pairs("tcp")
    engine = getattr(pair, side)
    params = TransferParams(transfer_id="x", role=side, peer_incarnation="y")  # type: ignore[arg-type]
    before = (await engine.status()).counters["ignored_transfer_params"]
    for number, bad in enumerate((seal(params, SECRET[::-1]), {"splitserve": 3})):
        prompt = prompt_of(40, start=1000 + number)
        body = {"prompt": prompt, "max_tokens": TOKENS, "kv_transfer_params": bad}
        status, answer = await engine.ask({**body, "ignore_eos": True})
        assert status == 200
        assert answer["choices"][0]["text"] == alone(prompt)
    after = await engine.until_idle()
    assert after.counters["ignored_transfer_params"] == before + 2
