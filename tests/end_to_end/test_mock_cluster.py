"""A whole cluster of mock engines, as `splitserve up` starts it: what an OpenAI client sees while
engines die and clients leave.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import openai
import pytest
import pytest_asyncio
from support.mock_cluster import TOKENS, Cluster, alone, prompt_of, running_cluster
from support.mock_engines import DEADLINE_S, POLL_S
from support.timelines import assert_whole_timeline, complete_record

from splitserve.orchestrator.engines.mock.model import KvShape

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLUSTER = """
name: mock-test
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 1024, enable_faults: true}
  transfer: {transport: tcp, stream_min_bytes: 4096, lease_s: 3}
decode: *pool
supervision: {restart_delay_s: 0.1, drain_timeout_s: 2, stop_timeout_s: 3}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One prefill and one decode node behind a router."""
    async with running_cluster(tmp_path_factory.mktemp("cluster"), CLUSTER) as cluster:
        yield cluster


async def test_answers_are_those_of_one_engine(cluster: Cluster) -> None:
    """Completions and chats, streamed and not; every prompt was received, and D computed one token
    of each.
    """
    engine = await cluster.engine("decode-0")
    before = (await engine.status()).counters
    for length in (31, 32, 33, 200):
        prompt = prompt_of(length, start=length)
        assert await cluster.text(prompt) == alone(prompt)
    messages: Any = [{"role": "user", "content": "Tell me of the sea."}]
    rendered = list(b"<user>Tell me of the sea.\n<assistant>")
    chat = await cluster.client.chat.completions.create(
        model="mock", messages=messages, max_tokens=TOKENS, extra_body={"ignore_eos": True}
    )
    assert chat.choices[0].message.content == alone(rendered)
    stream = await cluster.client.chat.completions.create(
        model="mock",
        messages=messages,
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == alone(rendered)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == TOKENS
    after = (await engine.until_idle()).counters
    assert after["prompt_tokens_computed"] - before["prompt_tokens_computed"] <= 6 + 5
    assert after["received_transfers"] - before.get("received_transfers", 0) >= 5


async def test_a_timeline_has_every_part(cluster: Cluster) -> None:
    """A streamed split request: its moments in order, parts that add up to the time to the first
    data, writes of every layer and page; and in the log as one line.
    """
    await cluster.engine("prefill-0")
    name, prompt = "all-of-it", prompt_of(200, start=700)
    stream = await cluster.client.completions.create(
        model="mock",
        prompt=prompt,
        max_tokens=TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"X-Request-Id": name, "X-Splitserve-Timing": "1"},
    )
    assert "ttft;dur=" in stream.response.headers["server-timing"]
    assert "".join([chunk.choices[0].text async for chunk in stream]) == alone(prompt)
    record = await complete_record(cluster.url, name)
    shape = KvShape()
    assert_whole_timeline(
        record,
        layers=shape.layers,
        pages=shape.layers * -(-200 // 32),
        page_bytes=shape.page_bytes(shape.heads),
    )


async def test_many_clients(cluster: Cluster) -> None:
    """32 at once, more than a prefill node takes: they wait in the router, and each gets its own
    answer.
    """
    prompts = [prompt_of(20 + 9 * n, start=1000 + n) for n in range(32)]
    answers = await asyncio.gather(*map(cluster.text, prompts))
    assert answers == [alone(prompt) for prompt in prompts]


async def test_engines_refusals_reach_the_client(cluster: Cluster) -> None:
    """Too long prompts, unknown models: the engine's own status and words; nothing stays behind."""
    prefill, engine = await cluster.engine("prefill-0"), await cluster.engine("decode-0")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens"):
        await cluster.text(prompt_of(1100, start=2000))
    with pytest.raises(openai.NotFoundError):
        await cluster.client.completions.create(model="other", prompt="x")
    for handle in (prefill, engine):
        await handle.until_idle()


@pytest.mark.parametrize("place", ["prefill", "answer"])
async def test_a_client_that_leaves(cluster: Cluster, place: str) -> None:
    """While P computes, and in the middle of the answer: both engines are idle again."""
    prefill, engine = await cluster.engine("prefill-0"), await cluster.engine("decode-0")
    held, faults = {
        "prefill": (prefill, {"hold_at_layer": 1}),
        "answer": (engine, {"hold_after_tokens": 3}),
    }[place]
    await held.faults(**faults)
    asking = asyncio.create_task(cluster.text(prompt_of(150, start=3000 + len(place))))
    if place == "prefill":
        await engine.until(lambda s: s.open_transfers == 1, "reservation")
        await prefill.until(lambda s: s.running == 1, "prefill")
    else:
        await engine.until(lambda s: s.running == 1, "answer")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    if place == "prefill":
        await engine.until(lambda s: s.running + s.waiting == 0, "abort")
    await held.faults()
    for handle in (prefill, engine):
        await handle.until_idle()


async def test_a_killed_prefill_engine(cluster: Cluster) -> None:
    """SIGKILL in the middle of a prefill: the client gets the right answer all the same, and the
    next one a split one.
    """
    prefill = await cluster.engine("prefill-0")
    engine = await cluster.engine("decode-0")
    await prefill.faults(hold_at_layer=2)
    prompt = prompt_of(150, start=4000)
    asking = asyncio.create_task(cluster.text(prompt))
    await engine.until(lambda s: s.open_transfers == 1, "reservation")
    await prefill.until(lambda s: s.running == 1, "prefill")
    await cluster.kill_engine("prefill-0")
    async with asyncio.timeout(20):
        assert await asking == alone(prompt)
    await engine.until_idle()
    await cluster.engine("prefill-0")
    await _until_split(cluster)


async def test_a_killed_decode_engine(cluster: Cluster) -> None:
    """SIGKILL before the first token: an error status within the deadline, P's blocks come back,
    and D serves again.
    """
    prefill, engine = await cluster.engine("prefill-0"), await cluster.engine("decode-0")
    await prefill.faults(hold_at_layer=2)
    asking = asyncio.create_task(cluster.text(prompt_of(150, start=5000)))
    await engine.until(lambda s: s.open_transfers == 1, "reservation")
    await prefill.until(lambda s: s.running == 1, "prefill")
    await cluster.kill_engine("decode-0")
    async with asyncio.timeout(20):
        with pytest.raises(openai.InternalServerError, match="decode node"):
            await asking
    await prefill.faults()
    await prefill.until_idle()
    await _until_split(cluster)


async def _until_split(cluster: Cluster) -> None:
    """Answers are right, and soon they are split again."""
    engine = await cluster.engine("decode-0")
    end = time.monotonic() + DEADLINE_S
    number = 0
    received = (await engine.status()).counters.get("received_transfers", 0)
    while (await engine.status()).counters.get("received_transfers", 0) == received:
        assert time.monotonic() < end, f"nothing is split\n{cluster.up.story()}"
        number += 1
        prompt = prompt_of(70, start=6000 + number)
        try:
            assert await cluster.text(prompt) == alone(prompt)
        except openai.InternalServerError:
            await asyncio.sleep(POLL_S)  # the router has not heard of the new engine yet
