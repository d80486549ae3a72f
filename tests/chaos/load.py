"""So many requests in flight, of every kind, and what became of each.

Every request has a deadline of its own on the client's side: the router's bound and a margin. Past
it the request hangs, whatever comes later.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from splitserve.orchestrator.engines.mock.model import KvShape, MockModel, reference_answer
from splitserve.orchestrator.engines.mock.tokenizer import decode

if TYPE_CHECKING:
    from random import Random

MARGIN_S = 15.0
"""Beyond the router's own deadline: for a loaded machine."""
TIMELINE_TRIES = 4
TIMELINE_POLL_S = 0.1
REFUSED_PAUSE_S = 0.5
"""What a client waits after it was refused, so that a dead cluster is not asked in a circle."""
BLOCK_TOKENS = 32
LONGEST_TOKENS = 64
ERROR_TEXT_LIMIT = 2_000


@dataclass(frozen=True)
class Prompt:
    """What is asked, and the right text of an answer of each length."""

    endpoint: str
    body: dict[str, Any]
    length: int
    answers: dict[int, str]


@dataclass
class Story:
    """One request: what was asked, when what came, and what the router says of it. Times are of
    the monotonic clock.
    """

    id: str
    endpoint: str
    streamed: bool
    tokens: int
    prompt_tokens: int
    right: str
    started: float
    leaves_after_s: float | None = None
    first_data: float | None = None
    ended: float = 0.0
    status: int | None = None
    retry_after: str | None = None
    text: str = ""
    error: Any = None
    """The parsed body or event that says so."""
    said_done: bool = False
    """``[DONE]``, or a whole body."""
    end: str = "complete"
    """``complete``, ``left``, ``reset`` (the connection broke), ``deadline`` or ``unreadable``."""
    detail: str = ""
    timeline: dict[str, Any] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where its last attempt was."""
        names = (self.timeline.get("prefill_node"), self.timeline.get("decode_node"))
        return tuple(name for name in names if name)


class Load:
    """Keeps ``in_flight`` requests open until it is told to stop."""

    def __init__(
        self,
        url: str,
        prompts: list[Prompt],
        rng: Random,
        in_flight: int,
        deadline_s: float,
        *,
        salted_share: float = 0.5,
    ) -> None:
        self.stories: list[Story] = []
        self._url = url
        self._prompts = prompts
        self._rng = rng
        self._in_flight = in_flight
        self._deadline_s = deadline_s + MARGIN_S
        self._salted_share = salted_share
        self._numbers = itertools.count(1)

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop``, and then until the last request has ended."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self._in_flight):
                group.create_task(self._client(session, stop))

    async def _client(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        while not stop.is_set():
            story, body = self._draw()
            await self._ask(session, story, body)
            self.stories.append(story)
            story.timeline = await self._timeline(session, story)
            if story.end == "reset" or (story.status or 0) >= 400:
                await asyncio.sleep(REFUSED_PAUSE_S)

    def _draw(self) -> tuple[Story, dict[str, Any]]:
        rng = self._rng
        prompt = rng.choice(self._prompts)
        tokens = rng.choice(sorted(prompt.answers))
        streamed = rng.random() < 0.6
        body = {**prompt.body, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        if streamed:
            body["stream"] = True
        if rng.random() < self._salted_share:
            body["cache_salt"] = f"{rng.randrange(2**32):x}"  # Nothing of it is cached anywhere
        story = Story(
            f"chaos-{next(self._numbers)}",
            prompt.endpoint,
            streamed,
            tokens,
            prompt.length,
            prompt.answers[tokens],
            0.0,
            rng.uniform(0.0, 0.6) if rng.random() < 0.15 else None,
        )
        return story, body

    async def _ask(
        self, session: aiohttp.ClientSession, story: Story, body: dict[str, Any]
    ) -> None:
        story.started = time.monotonic()
        limit = self._deadline_s if story.leaves_after_s is None else story.leaves_after_s
        try:
            async with asyncio.timeout(limit):
                await self._exchange(session, story, body)
        except TimeoutError:
            story.end = "deadline" if story.leaves_after_s is None else "left"
        except (aiohttp.ClientError, OSError) as error:
            story.end, story.detail = "reset", repr(error)
        except (ValueError, LookupError, TypeError) as error:
            story.end, story.detail = "unreadable", repr(error)
        story.ended = time.monotonic()

    async def _exchange(
        self, session: aiohttp.ClientSession, story: Story, body: dict[str, Any]
    ) -> None:
        url = f"{self._url}/v1/{story.endpoint}"
        async with session.post(url, json=body, headers={"X-Request-Id": story.id}) as answer:
            story.status = answer.status
            story.retry_after = answer.headers.get("Retry-After")
            if answer.status >= 400:
                text = await answer.text()
                story.detail = text[:ERROR_TEXT_LIMIT]
                story.error = json.loads(text)
            elif story.streamed:
                await _read_stream(story, answer)
            else:
                choice = (await answer.json())["choices"][0]
                story.text = _text_of(choice, "message")
                story.first_data, story.said_done = time.monotonic(), True

    async def _timeline(self, session: aiohttp.ClientSession, story: Story) -> dict[str, Any]:
        """What the router says of it; {} when it does not know (it was restarted)."""
        for _ in range(TIMELINE_TRIES):
            try:
                async with (
                    asyncio.timeout(self._deadline_s),
                    session.get(f"{self._url}/internal/timeline/{story.id}") as answer,
                ):
                    if answer.status == 200:
                        found: dict[str, Any] = await answer.json()
                        return found
            except (aiohttp.ClientError, OSError, TimeoutError):
                return {}
            await asyncio.sleep(TIMELINE_POLL_S)  # The router has not seen its end yet
        return {}


async def _read_stream(story: Story, answer: aiohttp.ClientResponse) -> None:
    async for raw in answer.content:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            story.said_done = True
            continue
        if story.first_data is None:
            story.first_data = time.monotonic()
        event = json.loads(data)
        if "error" in event:
            story.error, story.detail = event, data.decode()[:ERROR_TEXT_LIMIT]
            continue
        for choice in event["choices"]:
            story.text += _text_of(choice, "delta")


def _text_of(choice: dict[str, Any], key: str) -> str:
    return str((choice[key].get("content") if key in choice else choice["text"]) or "")


def mock_prompts(rng: Random, count: int) -> list[Prompt]:
    """Prompts of the mock engine's model: lengths around block multiples, some with a common
    beginning, as token ids, as text and as chats.
    """
    model = MockModel(KvShape())
    stems = [bytes(rng.randrange(97, 123) for _ in range(16 * BLOCK_TOKENS)) for _ in range(6)]
    found = []
    for number in range(count):
        length = max(1, rng.randrange(1, 16) * BLOCK_TOKENS + rng.choice((-1, 0, 0, 1, 7)))
        shared = rng.choice((0, 0, BLOCK_TOKENS, 3 * BLOCK_TOKENS, length))
        own = bytes(rng.randrange(97, 123) for _ in range(length))
        text = (rng.choice(stems)[: min(shared, length)] + own)[:length]
        endpoint, body, ids = _asked(number, text)
        answer = reference_answer(model, ids, LONGEST_TOKENS)
        lengths = {1, 2, 31, 32, 33, LONGEST_TOKENS, rng.randrange(3, LONGEST_TOKENS)}
        answers = {tokens: decode(answer[:tokens]) for tokens in lengths}
        found.append(Prompt(endpoint, {"model": "m", **body}, len(ids), answers))
    return found


def _asked(number: int, text: bytes) -> tuple[str, dict[str, Any], list[int]]:
    """Endpoint, body and the tokens that the engine makes of it."""
    if number % 3 == 0:
        return "completions", {"prompt": list(text)}, list(text)
    if number % 3 == 1:
        return "completions", {"prompt": text.decode()}, list(text)
    messages = [{"role": "user", "content": text.decode()}]
    rendered = b"<user>" + text + b"\n<assistant>"
    return "chat/completions", {"messages": messages}, list(rendered)


def chat_prompts(rng: Random, count: int) -> list[Prompt]:
    """Turns of conversations as token ids: each turn begins with all of the turn before, its answer
    included, and many conversations have one beginning in common.
    """
    model = MockModel(KvShape())
    stems = [[rng.randrange(97, 123) for _ in range(6 * BLOCK_TOKENS)] for _ in range(4)]
    found: list[Prompt] = []
    while len(found) < count:
        ids = list(rng.choice(stems))
        for _ in range(rng.randrange(1, 5)):
            ids += [rng.randrange(97, 123) for _ in range(rng.randrange(20, 5 * BLOCK_TOKENS))]
            answer = reference_answer(model, ids, LONGEST_TOKENS)
            lengths = {1, 31, LONGEST_TOKENS, rng.randrange(3, LONGEST_TOKENS)}
            answers = {tokens: decode(answer[:tokens]) for tokens in lengths}
            body = {"model": "m", "prompt": list(ids)}
            found.append(Prompt("completions", body, len(ids), answers))
            ids += answer
    return found[:count]


async def asked_prompts(url: str, rng: Random, count: int, longest: int) -> list[Prompt]:
    """Prompts whose right texts are what the healthy cluster answers, one at a time: for engines
    whose model is no formula.
    """
    found = []
    async with aiohttp.ClientSession() as session:
        for _ in range(count):
            length = max(2, rng.randrange(1, longest // BLOCK_TOKENS) * BLOCK_TOKENS)
            ids = [rng.randrange(32, 120) for _ in range(length + rng.choice((-1, 0, 1)))]
            body = {"model": "m", "prompt": ids}
            answers = {}
            for tokens in (1, 8, 33):
                asked = {**body, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
                async with session.post(f"{url}/v1/completions", json=asked) as answer:
                    assert answer.status == 200, await answer.text()
                    answers[tokens] = (await answer.json())["choices"][0]["text"]
            found.append(Prompt("completions", body, len(ids), answers))
    return found
