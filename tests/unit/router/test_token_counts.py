"""How long prompts and answers were, as the router's log and a recording tell it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from router_stubs.cluster import StubCluster, completion, stub_cluster
from router_stubs.engine import DONE, Asked, send, start_stream, stream

from splitserve.orchestrator.router.token_counts import AnswerCounter, TokenCounts, usage_in

USAGE = b'"usage":{"prompt_tokens":300,"total_tokens":312,"completion_tokens":12}'
EVENT = b'data: {"choices":[{"text":"x"}]}\n\n'


async def logged(cluster: StubCluster, **request: Any) -> dict[str, Any]:
    """The log's line of one request that was served."""
    await (await cluster.post(**request)).read()
    await cluster.idle()
    cluster.router.log.flush()
    record: dict[str, Any] = json.loads(cluster.log.getvalue().splitlines()[-1])
    return {key: record[f"{key}_tokens"] for key in ("prompt", "output", "output_limit")}


def test_figures_are_read() -> None:
    """The last ones; those in a text, cut off or absurd ones are none."""
    assert usage_in(b'{"a":1,' + USAGE + b"}") == TokenCounts(300, 12)
    assert usage_in(USAGE + USAGE.replace(b"12}", b"13}")) == TokenCounts(300, 13)
    text = json.dumps({"text": '"completion_tokens":5'}).encode()
    for other in (b"", text, b'"completion_tokens":', b'"completion_tokens":' + b"9" * 20):
        assert usage_in(other).answer is None


@pytest.mark.parametrize("piece_bytes", [1, 40, 10_000])
def test_a_streams_figures_come_before_its_events(piece_bytes: int) -> None:
    """However it is cut, as long as the usage comes in one piece; without them events count."""
    data = EVENT * 4
    counter = AnswerCounter()
    for at in range(0, len(data), piece_bytes):
        counter.feed(data[at : at + piece_bytes])
    counter.feed(DONE)
    whole = piece_bytes > 1
    expected = TokenCounts(None, 4 if whole else 0)
    assert counter.counts(is_stream=True, other_events=1) == expected
    assert counter.counts(is_stream=False, other_events=1) == TokenCounts()
    counter.feed(b"data: {" + USAGE + b"}\n\n")
    counter.feed(DONE)
    assert counter.counts(is_stream=True, other_events=1) == TokenCounts(300, 12)


async def test_an_unstreamed_answer_is_counted_by_its_engine() -> None:
    """Prompt and answer; the client's limit stands beside."""

    async def answer(asked: Asked, writer: Any) -> None:
        await send(writer, 200, b'{"choices":[{"text":"x"}],' + USAGE + b"}")

    async with stub_cluster("p0", "d0") as cluster:
        cluster.engines["d0"].answer = answer
        seen = await logged(cluster, json=completion(stream=False, max_tokens=20))
        assert seen == {"prompt": 300, "output": 12, "output_limit": 20}


async def test_a_stream_without_usage_is_counted_by_events() -> None:
    """The prompt as the prefill engine counts it."""

    async def prefill(asked: Asked, writer: Any) -> None:
        await send(writer, 200, b'{"choices":[],' + USAGE + b"}")

    async with stub_cluster("p0", "d0") as cluster:
        cluster.engines["p0"].answer = prefill
        seen = await logged(cluster, json=completion(seed=1))
        assert seen == {"prompt": 300, "output": 4, "output_limit": 8}


async def test_a_stream_with_token_ids_is_counted_by_them() -> None:
    """Two in one event; the prompt by its ids."""
    first = (
        b'data: {"id":"a","object":"o","created":1,"model":"m","choices":[{"text":"x",'
        b'"prompt_token_ids":[1,2,3],"token_ids":[4,5]}]}\n\n'
    )
    more = b'data: {"choices":[{"text":"x","token_ids":[6],"finish_reason":"length"}]}\n\n'

    async def answer(asked: Asked, writer: Any) -> None:
        assert asked.body["return_token_ids"]
        await stream(writer, first + more + DONE)

    async with stub_cluster("p0", "d0") as cluster:
        cluster.engines["d0"].answer = answer
        seen = await logged(cluster)
        assert seen == {"prompt": 3, "output": 3, "output_limit": 8}


async def test_without_an_answer_nothing_is_counted() -> None:
    """An engine's refusal has no tokens; a stream that breaks off has those that were sent."""

    async def refuse(asked: Asked, writer: Any) -> None:
        await send(writer, 400, b'{"error":{"message":"no","code":400}}')

    async def break_off(asked: Asked, writer: Any) -> None:
        await start_stream(writer)
        writer.write(b"%x\r\n%b\r\n" % (2 * len(EVENT), EVENT * 2))
        await writer.drain()
        writer.close()

    async with stub_cluster("p0", "d0") as cluster:
        cluster.engines["d0"].answer = refuse
        seen = await logged(cluster, json=completion(max_tokens=20))
        assert seen == {"prompt": None, "output": None, "output_limit": 20}
        cluster.engines["d0"].answer = break_off
        seen = await logged(cluster, json=completion(seed=1))
        assert seen["output"] in (1, 2)
