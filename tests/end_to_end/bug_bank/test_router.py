"""The router between clients and engines: errors as they are, one bad node or client is nobody
else's trouble, and work is shared out evenly.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from support.bank_client import (
    LONG,
    Answer,
    ask,
    completion,
    prompt_of,
    received,
    stopped,
    stream,
    text_of,
)
from support.idle_check import router_status, until_usable
from support.mock_cluster import Cluster, alone
from support.mock_engines import POLL_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="session")

DECODE = ("decode-0", "decode-1")
PREFILL = ("prefill-0", "prefill-1")

INVALID: dict[str, dict[str, Any] | bytes] = {
    "too long": completion(prompt_of(1500, number=1)),
    "too many tokens": completion(prompt_of(1000, number=2), 2000),
    "unknown model": completion(prompt_of(40, number=3)) | {"model": "other"},
    "bad JSON": b'{"model": "mock", "prompt": [1, 2',
    "bad stop": completion(prompt_of(40, number=4), stop={"not": "a list"}),
    "bad limit": completion(prompt_of(40, number=5), -1),
}


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("what", INVALID)
async def test_an_engines_refusal_is_passed_on(
    quad: Cluster, what: str, is_streaming: bool
) -> None:
    """A35 (vllm-project/vllm-ascend#12166): a 4xx with an OpenAI-shaped body, streamed or not;
    never a 200.
    """
    body = INVALID[what]
    if isinstance(body, dict):
        body = {**body, "stream": is_streaming}
    answer = await ask(quad.url, body)
    assert answer.status == (404 if what == "unknown model" else 400), answer.raw
    answer.check_error()


@pytest.mark.parametrize(
    ("size_bytes", "is_chunked"), [(900_000, False), (3_000_000, True), (30_000_000, False)]
)
async def test_large_bodies(pair: Cluster, size_bytes: int, is_chunked: bool) -> None:
    """A41 (sgl-project/sglang PR#2444): the engine judges a body of any size up to
    ``router.max_body_bytes``, and its words reach the client.
    """
    chat = "/v1/chat/completions"
    content = "x" * size_bytes
    body = {"model": "mock", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    raw = json.dumps(body).encode()
    answer = await ask(pair.url, _pieces(raw) if is_chunked else raw, path=chat)
    status, told = await (await pair.engine("decode-0")).ask(body, path=chat)
    assert (answer.status, answer.body) == (status, told)
    assert status == 400
    answer.check_error()


async def _pieces(raw: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(raw), 2**16):
        yield raw[start : start + 2**16]


async def test_a_body_above_the_limit(pair: Cluster) -> None:
    """A41: a 413 that says so, and the next request is served."""
    answer = await ask(pair.url, b" " * (33 * 2**20))
    assert answer.status == 413
    answer.check_error()
    prompt = prompt_of(100, number=3350)
    assert text_of((await stream(pair, prompt)).raw) == alone(prompt)


async def test_a_stream_whose_engine_dies_has_no_clean_end(quad: Cluster) -> None:
    """A35: SIGKILL of D after some tokens: the client gets the rest from elsewhere, or an error
    event behind what it has; [DONE] only behind the whole text.
    """
    for name in DECODE:
        await (await quad.engine(name)).faults(hold_after_tokens=4)
    prompt = prompt_of(150, number=3000)
    asking = asyncio.create_task(stream(quad, prompt))
    victim = await _running(quad)
    await quad.kill_engine(victim)
    (spare,) = set(DECODE) - {victim}
    await (await quad.engine(spare)).faults()
    answer = await asking
    assert answer.status == 200
    if answer.raw.endswith(b"data: [DONE]\n\n"):
        assert text_of(answer.raw) == alone(prompt)
    else:
        *chunks, last = answer.raw.strip().split(b"\n\n")
        texts = [json.loads(c.removeprefix(b"data: "))["choices"][0]["text"] for c in chunks]
        assert alone(prompt).startswith("".join(texts))
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] >= 500


async def _running(cluster: Cluster) -> str:
    """The decode node that has sent tokens."""
    async with asyncio.timeout(30):
        while True:
            for name in DECODE:
                if (await (await cluster.engine(name)).status()).running:
                    return name
            await asyncio.sleep(POLL_S)


@pytest.mark.parametrize("node", ["decode-0", "prefill-0"])
async def test_a_node_that_hangs_is_left_out(quad: Cluster, node: str) -> None:
    """A36 (vllm-project/production-stack#749): what it holds ends within its limit, with a right
    answer or an error; everybody else is served by the others, and it comes back.
    """
    prompts = [prompt_of(100, number=3100 + n) for n in range(24)]
    with stopped(quad.process(node)):
        early = [asyncio.create_task(stream(quad, prompt)) for prompt in prompts[:8]]
        await until_usable(quad, node, usable=False)
        late = await asyncio.gather(*(stream(quad, prompt) for prompt in prompts[8:]))
        for prompt, answer in zip(prompts[8:], late, strict=True):
            assert text_of(answer.raw) == alone(prompt)
    await until_usable(quad, node)
    async with asyncio.timeout(30):
        for prompt, answer in zip(prompts[:8], await asyncio.gather(*early), strict=True):
            _right_or_error(prompt, answer)
    await _until_works(quad, node)


def _right_or_error(prompt: list[int], answer: Answer) -> None:
    if answer.status == 200:
        assert text_of(answer.raw) == alone(prompt)
    else:
        answer.check_error()
        assert answer.status >= 500


async def _until_works(cluster: Cluster, node: str) -> None:
    """The node has part in an answer again."""
    counter = "received_transfers" if node.startswith("decode") else "sent_transfers"
    engine = await cluster.engine(node)
    before = (await engine.status()).counters.get(counter, 0)
    for number in range(20):
        prompt = prompt_of(100, number=3200 + number)
        assert text_of((await stream(cluster, prompt)).raw) == alone(prompt)
        if (await engine.status()).counters.get(counter, 0) > before:
            return
    raise AssertionError(f"{node} got no work in 20 requests")


async def test_clients_mistakes_are_not_the_nodes(pair: Cluster) -> None:
    """A38 (sgl-project/sglang#25811): fifty bad requests in a row, then a good one is served at
    once; no node is thought worse of.
    """

    def view(status: dict[str, Any]) -> dict[str, Any]:
        keys = ("phase", "is_usable", "is_connected", "is_silent", "incarnation")
        return {name: [node[key] for key in keys] for name, node in status["nodes"].items()}

    before = view(await router_status(pair))
    bad = list(INVALID.values())
    for number in range(50):
        answer = await ask(pair.url, bad[number % len(bad)])
        assert answer.status in (400, 404)
    prompt = prompt_of(100, number=3300)
    count = await received(await pair.engine("decode-0"))
    assert text_of((await stream(pair, prompt)).raw) == alone(prompt)
    assert await received(await pair.engine("decode-0")) == count + 1
    assert view(await router_status(pair)) == before


@pytest.mark.parametrize("prompts", [100, pytest.param(400, marks=LONG)])
async def test_equal_nodes_do_equal_work(quad: Cluster, prompts: int) -> None:
    """A39 (vllm-project/router PR#198): 32 at a time over two nodes of each pool: none has less
    than 40 % or more than 60 %.
    """
    before = {name: await _legs_of(quad, name) for name in quad.nodes}
    slots = asyncio.Semaphore(32)

    async def one(number: int) -> None:
        prompt = prompt_of(40 + number % 90, number=4000 + number)
        async with slots:
            assert text_of((await stream(quad, prompt)).raw) == alone(prompt)

    await asyncio.gather(*map(one, range(prompts)))
    for name in quad.nodes:
        share = (await _legs_of(quad, name) - before[name]) / prompts
        assert 0.4 <= share <= 0.6, (name, share)


async def _legs_of(cluster: Cluster, node: str) -> float:
    """Transfers that the node has sent or received."""
    counters = (await (await cluster.engine(node)).status()).counters
    return counters["sent_transfers" if node.startswith("prefill") else "received_transfers"]
