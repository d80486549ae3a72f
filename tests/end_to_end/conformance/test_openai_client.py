"""The official client sees no difference either: parsed answers, streams, tools and errors."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest
from end_to_end.conformance.rows_parsing import JSON_SCHEMA, NAMED, TIME, WEATHER
from end_to_end.conformance.rows_prompts import text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from end_to_end.conformance.sides import Sides

    Ask = Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, Any]]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

PROMPT = text(80, 7000)
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": text(80, 7001)}],
    "temperature": 0,
    "max_tokens": 60,
}

CALLED: dict[str, Any] = CHAT | {
    "tools": [WEATHER, TIME], "tool_choice": NAMED, "max_tokens": 150,
}  # fmt: skip
"""Room for a whole call, of which each byte is a token."""


@asynccontextmanager
async def clients(sides: Sides) -> AsyncIterator[tuple[openai.AsyncOpenAI, openai.AsyncOpenAI]]:
    """Of the cluster and of the plain engine."""
    async with (
        openai.AsyncOpenAI(
            base_url=f"{sides.split.url}/v1", api_key="none", max_retries=0
        ) as split,
        openai.AsyncOpenAI(
            base_url=f"{sides.plain.url}/v1", api_key=sides.plain.key, max_retries=0
        ) as plain,
    ):
        yield split, plain


async def completion(client: openai.AsyncOpenAI) -> Any:
    found = await client.completions.create(
        model="m", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=2
    )
    return found.choices[0].text, found.choices[0].finish_reason, found.usage


async def streamed_completion(client: openai.AsyncOpenAI) -> Any:
    stream = await client.completions.create(
        model="m", prompt=PROMPT, max_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    words = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    return words, chunks[-1].usage


async def several_answers(client: openai.AsyncOpenAI) -> Any:
    found = await client.chat.completions.create(
        **(CHAT | {"n": 3, "temperature": 1, "seed": 3, "max_tokens": 9})
    )
    return [(c.index, c.message.content, c.finish_reason) for c in found.choices]


async def a_tool_call(client: openai.AsyncOpenAI) -> Any:
    found = await client.chat.completions.create(**CALLED)
    (choice,) = found.choices
    calls = choice.message.tool_calls
    assert calls
    return choice.finish_reason, [(c.function.name, c.function.arguments) for c in calls]


async def a_streamed_tool_call(client: openai.AsyncOpenAI) -> Any:
    async with client.chat.completions.stream(**CALLED) as stream:
        async for _ in stream:
            pass
        found = await stream.get_final_completion()
    (choice,) = found.choices
    calls = choice.message.tool_calls
    assert calls
    return choice.finish_reason, [(c.function.name, c.function.arguments) for c in calls]


async def an_answer_by_schema(client: openai.AsyncOpenAI) -> Any:
    found = await client.chat.completions.create(**CHAT, response_format=JSON_SCHEMA)
    return found.choices[0].message.content


@pytest.mark.parametrize(
    "ask",
    [
        completion,
        streamed_completion,
        several_answers,
        a_tool_call,
        a_streamed_tool_call,
        an_answer_by_schema,
    ],
    ids=lambda ask: ask.__name__,
)
async def test_the_client_reads_the_same(sides: Sides, ask: Ask) -> None:
    """What it makes of the two answers is equal."""
    async with clients(sides) as (split, plain):
        assert await ask(split) == await ask(plain)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": text(3000, 7002)}]}),
        (openai.NotFoundError, {"model": "other"}),
    ],
)
@pytest.mark.parametrize("is_streaming", [False, True])
async def test_the_client_raises_the_same(
    sides: Sides, kind: type[openai.APIStatusError], fields: dict[str, Any], is_streaming: bool
) -> None:
    """The same class of error with the same words."""
    bodies = []
    async with clients(sides) as both:
        for client in both:
            with pytest.raises(kind) as caught:
                await client.chat.completions.create(**(CHAT | fields), stream=is_streaming)
            bodies.append(caught.value.body)
    assert bodies[0] == bodies[1]
