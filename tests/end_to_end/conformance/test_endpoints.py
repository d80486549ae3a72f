"""Endpoints other than chat and completions, and adapters: the answers of one engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from typing import TYPE_CHECKING, Any

import openai
import pytest
from end_to_end.conformance.rows_endpoints import (
    BY_ROUTER,
    RESPONSES,
    ROWS,
    SPLIT,
    STREAMED,
    WORDS,
    EndpointRow,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from end_to_end.conformance.sides import Sides

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

WAIT_S = 20.0
TIMES = {"created", "created_at", "completed_at"}
NEW_IN_EVERY_ANSWER = TIMES | {"id", "item_id", "call_id", "system_fingerprint"}
TOLERANCE = 2e-3
_numbers = itertools.count()


async def call(
    sides: Sides, url: str, headers: dict[str, str], row: EndpointRow, **fields: Any
) -> tuple[int, str, bytes]:
    """Status, content type and body of one answer."""
    body: Any = row.body
    if not isinstance(body, bytes):
        body = json.dumps(body | fields).encode()
    told = headers | {"Content-Type": "application/json"}
    async with sides.session.request(row.method, url + row.path, data=body, headers=told) as answer:
        return answer.status, answer.headers.get("content-type", ""), await answer.read()


async def ask(sides: Sides, row: EndpointRow, **fields: Any) -> tuple[Any, Any, str]:
    """The cluster's answer, the plain engine's, and the X-Request-Id of the first."""
    request_id = f"endpoint-{next(_numbers)}"
    found = await call(sides, sides.split.url, {"X-Request-Id": request_id}, row, **fields)
    right = await call(sides, sides.plain.url, sides.plain.headers, row, **fields)
    return found, right, request_id


def differences(found: Any, right: Any, at: str = "") -> Iterator[str]:
    """One sentence for each; what is new in every answer needs to be of the same type."""
    key = at.rpartition(".")[2]
    if key in NEW_IN_EVERY_ANSWER:
        found, right = type(found).__name__, type(right).__name__
    if isinstance(found, dict) and isinstance(right, dict):
        for name in [*right, *(name for name in found if name not in right)]:
            if name not in found or name not in right:
                yield f"{at}.{name} is {'missing' if name in right else 'too much'}"
            else:
                yield from differences(found[name], right[name], f"{at}.{name}")
    elif isinstance(found, list) and isinstance(right, list) and len(found) == len(right):
        for number, (one, other) in enumerate(zip(found, right, strict=True)):
            yield from differences(one, other, f"{at}[{number}]")
    elif isinstance(found, float) and isinstance(right, float):
        if not math.isclose(found, right, abs_tol=TOLERANCE, rel_tol=1e-3):
            yield f"{at} is {found}, not {right}"
    elif found != right:
        yield f"{at} is {found!r}, not {right!r}"


def events(raw: bytes) -> list[list[Any]]:
    """[name, object] of a stream's events; deltas that follow each other are one."""
    found: list[list[Any]] = []
    for event in raw.decode().strip().split("\n\n"):
        head, _, data = event.partition("\ndata: ")
        name, told = head.removeprefix("event: "), json.loads(data)
        told.pop("sequence_number", None)
        if "delta" in name and found and found[-1][0] == name and name != "message_delta":
            _join(found[-1][1], told)
        else:
            found.append([name, told])
    return found


def _join(before: dict[str, Any], after: dict[str, Any]) -> None:
    if isinstance(before["delta"], str):
        before["delta"] += after["delta"]
        before.get("logprobs", []).extend(after.get("logprobs", ()))
    else:
        for name in ("text", "partial_json", "thinking"):
            if name in before["delta"]:
                before["delta"][name] += after["delta"].get(name, "")


async def decision_of(sides: Sides, request_id: str) -> str:
    """What the router decided for that request; empty for what it answered itself."""
    end = asyncio.get_running_loop().time() + WAIT_S
    while not (timeline := await sides.timeline(request_id)):
        assert asyncio.get_running_loop().time() < end, "the router knows nothing of it"
        await asyncio.sleep(0.01)
    return str(timeline["decision"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
async def test_the_answer_is_that_of_one_engine(sides: Sides, row: EndpointRow) -> None:
    """Status and body, and where it was served."""
    found, right, request_id = await ask(sides, row)
    assert found[0] == right[0] == row.status, (found, right)
    assert found[1] == right[1]
    body, expected = json.loads(found[2]), json.loads(right[2])
    if row.status == 404 and row.path == "/v1/messages":
        body, expected = body["error"]["message"], expected["error"]["message"]
    problems = list(differences(body, expected))
    assert not problems, problems
    if row.decision is BY_ROUTER:
        assert not await sides.timeline(request_id)
    elif row.status == 200:
        assert await decision_of(sides, request_id) == row.decision
        if row.decision == SPLIT:
            names = tuple(f"{body['id']}{end}" for end in "-_")
            received = sides.split.transfers("receive")
            outcomes = [t["outcome"] for t in received if t["request_id"].startswith(names)]
            assert outcomes == ["landed"]


@pytest.mark.parametrize("row", STREAMED, ids=lambda row: row.key)
async def test_the_stream_is_that_of_one_engine(sides: Sides, row: EndpointRow) -> None:
    """Every event, but for how texts are cut into deltas."""
    found, right, request_id = await ask(sides, row, stream=True)
    assert found[0] == right[0] == 200, (found, right)
    assert found[1] == right[1]
    problems = list(differences(events(found[2]), events(right[2])))
    assert not problems, problems
    assert await decision_of(sides, request_id) == row.decision


async def test_models(sides: Sides) -> None:
    """The model and the adapters that decode nodes have; what prefill nodes alone have is 404."""
    async with sides.session.get(f"{sides.split.url}/v1/models") as answer:
        models = {model["id"]: model for model in (await answer.json())["data"]}
    async with sides.session.get(
        f"{sides.plain.url}/v1/models", headers=sides.plain.headers
    ) as answer:
        right = {model["id"]: model for model in (await answer.json())["data"]}
    assert models.keys() == {"m", "both", "on-decode"}
    for name in ("both", "on-decode"):
        for key in ("root", "parent", "max_model_len", "object"):
            assert models[name][key] == right[name][key]
    body = {"model": "on-prefill", "prompt": "x"}
    async with sides.session.post(f"{sides.split.url}/v1/completions", json=body) as answer:
        assert answer.status == 404
        error = (await answer.json())["error"]
    assert error["message"] == "The model `on-prefill` does not exist. Valid aliases: m."


async def test_stored_responses(sides: Sides) -> None:
    """The next turn, retrieval, background work and its end are those of one engine."""
    body = {"model": "m", "temperature": 0, "max_output_tokens": 8}
    told = []
    for url, key in (
        (sides.split.url, "none"),
        (sides.plain.url, sides.plain.key),
    ):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
            first = await client.responses.create(input=f"[stored] {WORDS}", **body)  # type: ignore[call-overload]
            again = await client.responses.retrieve(first.id)
            second = await client.responses.create(
                input="And then?", previous_response_id=first.id, **body
            )  # type: ignore[call-overload]
            late = await client.responses.create(input=f"[late] {WORDS}", background=True, **body)  # type: ignore[call-overload]
            assert late.status in ("queued", "in_progress")
            end = asyncio.get_running_loop().time() + WAIT_S
            while (done := await client.responses.retrieve(late.id)).status in (
                "queued",
                "in_progress",
            ):
                assert asyncio.get_running_loop().time() < end, done
                await asyncio.sleep(0.01)
            endless = await client.responses.create(
                input=f"[endless] {WORDS}",
                background=True,
                extra_body={"ignore_eos": True},
                **body | {"max_output_tokens": 1500},
            )  # type: ignore[call-overload]
            ended = await client.responses.cancel(endless.id)
            with pytest.raises(openai.BadRequestError) as refusal:
                await client.responses.cancel(first.id)
            with pytest.raises(openai.NotFoundError) as missing:
                await client.responses.retrieve("resp_unknown")
            stream = await client.responses.create(
                input=f"[stream] {WORDS}", background=True, stream=True, **body
            )  # type: ignore[call-overload]
            kinds = [event async for event in stream]
            replayed = await client.responses.retrieve(
                kinds[0].response.id, stream=True, starting_after=0
            )
            kinds_again = [event.type async for event in replayed]
        assert again.output_text == first.output_text
        told.append((
            first.output_text, second.output_text, second.usage.input_tokens, done.output_text,
            done.status, ended.status, refusal.value.message, missing.value.message,
            kinds[-1].type, kinds_again[-1],
        ))  # fmt: skip
    assert told[0] == told[1]


async def test_one_request_id_for_a_hundred(sides: Sides) -> None:
    """At once, at several endpoints: everybody gets the answer to their own question."""
    headers = {"X-Request-Id": "the-same", "Content-Type": "application/json"}

    async def one(number: int) -> None:
        text = f"number {number}"
        path, body = (
            ("/tokenize", {"model": "m", "prompt": text}),
            ("/v1/completions", {"model": "m", "prompt": text, "max_tokens": 1, "echo": True}),
            (RESPONSES, {"model": "m", "input": text, "max_output_tokens": 1, "user": text}),
            ("/v1/completions", {"model": "m", "prompt": text, "max_tokens": 2}),
        )[number % 4]
        url = sides.split.url + path
        async with sides.session.post(url, json=body, headers=headers) as answer:
            told = await answer.json()
            assert answer.status == 200, told
            assert answer.headers["x-request-id"] == "the-same"
        if path == "/tokenize":
            assert told["tokens"][-len(text) :] == list(text.encode())
        elif "echo" in body:
            assert told["choices"][0]["text"].startswith(text)
        elif path == RESPONSES:
            assert told["user"] == text
        else:
            assert told["usage"]["completion_tokens"] in (1, 2)

    await asyncio.gather(*(one(number) for number in range(100)))
    await sides.split.wait_until_idle()
