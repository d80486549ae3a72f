"""A light streaming client for OpenAI completions: one connection pool, a timestamp for every
event.

Times are ``time.monotonic()``: the same clock as the engines' transfer logs, so both can be
subtracted on one host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST_DEADLINE_S = 300.0


class RequestFailedError(Exception):
    """A request ended without a complete answer: status and body, or the error event inside the
    stream.
    """


@dataclass(frozen=True)
class Streamed:
    """One streamed answer."""

    sent: float
    events: tuple[float, ...]
    """When each token event arrived."""
    text: str
    token_ids: tuple[int, ...]
    """Empty unless ``return_token_ids`` was asked for."""
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that the engine did not compute itself, as its ``usage`` says."""

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.events[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [later - earlier for earlier, later in pairwise(self.events)]

    @property
    def mean_itl(self) -> float:
        """Mean seconds per token after the first; 0 for one token. Tokens are counted, for an
        event may bring several.
        """
        tokens = max(self.completion_tokens, len(self.events))
        return (self.events[-1] - self.events[0]) / (tokens - 1) if tokens > 1 else 0.0

    @property
    def e2e(self) -> float:
        """Seconds from sending to the last token."""
        return self.events[-1] - self.sent


@dataclass(frozen=True)
class Answered:
    """One answer that was not streamed."""

    sent: float
    answered: float
    body: dict[str, Any] = field(repr=False)


def new_session() -> aiohttp.ClientSession:
    """A session whose connections stay open and whose requests all have a deadline."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=600),
        timeout=aiohttp.ClientTimeout(total=REQUEST_DEADLINE_S),
        json_serialize=lambda value: orjson.dumps(value).decode(),
        read_bufsize=2**20,
    )


async def stream_completion(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
    on_token: Callable[[float], None] | None = None,
) -> Streamed:
    """Send ``body`` as a streaming completion; ``on_token`` gets each arrival as it happens.

    Raises ``RequestFailedError``.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events: list[float] = []
    text: list[str] = []
    ids: list[int] = []
    usage: dict[str, Any] = {}
    sent = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        if response.status != 200:
            raise RequestFailedError(f"{response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            now = time.monotonic()
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                raise RequestFailedError(
                    f"error event after {len(events)} tokens: {event['error']}"
                )
            if event.get("choices"):
                events.append(now)
                if on_token:
                    on_token(now)
                text.append(event["choices"][0]["text"])
                ids.extend(event["choices"][0].get("token_ids") or ())
            usage = event.get("usage") or usage
    if not events:
        raise RequestFailedError("the stream ended without a token")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    produced = usage.get("completion_tokens", len(events))
    return Streamed(sent, tuple(events), "".join(text), tuple(ids), produced, cached)


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
) -> Answered:
    """Send ``body`` as a completion answered in one piece. Raises ``RequestFailedError``."""
    sent = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        data = await response.read()
        answered = time.monotonic()
        if response.status != 200:
            raise RequestFailedError(f"{response.status}: {data[:500]!r}")
    return Answered(sent, answered, orjson.loads(data))


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The counters and gauges of ``/metrics``, by full series name."""
    values: dict[str, float] = {}
    async with session.get(f"{url}/metrics") as response:
        for line in (await response.text()).splitlines():
            if line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                values[series] = float(value)
    return values
