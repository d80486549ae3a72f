"""What the tests of the bug bank do to a cluster: ask, leave early, stop a process for a while."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from support import mock_cluster
from support.mock_cluster import TOKENS
from support.standing_still import stand_still

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    import psutil

    from support.mock_cluster import Cluster
    from support.mock_engines import EngineHandle, MockProcess

LONG = (pytest.mark.long, pytest.mark.timeout(1800))
"""Marks of a recipe in its full size."""
CLIENT_LIMIT_S = 60.0
"""Longer than every limit of the clusters: a client that waits so long has met a hang."""


@dataclass(frozen=True)
class Answer:
    """One HTTP answer."""

    status: int
    raw: bytes
    headers: Mapping[str, str]

    @property
    def body(self) -> dict[str, Any]:
        """Its JSON."""
        found: dict[str, Any] = json.loads(self.raw)
        return found

    @property
    def text(self) -> str:
        """The completion's text."""
        assert self.status == 200, self.raw
        return str(self.body["choices"][0]["text"])

    def check_error(self) -> None:
        """It is an error status with an OpenAI-shaped body."""
        assert self.status >= 400, self.raw
        error = self.body["error"]
        assert error["message"]
        assert error["code"] == self.status
        assert error.keys() >= {"message", "type", "param", "code"}


def prompt_of(length: int, number: int) -> list[int]:
    """A prompt that shares no block with one of another ``number`` below 65,536."""
    return [number % 256, number // 256, *mock_cluster.prompt_of(length, number)][:length]


def completion(prompt: list[int], tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    """The body of a completion of exactly so many tokens."""
    return {"model": "mock", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **fields}


async def ask(
    url: str,
    body: dict[str, Any] | bytes | AsyncIterator[bytes],
    headers: Mapping[str, str] | None = None,
    path: str = "/v1/completions",
) -> Answer:
    """One request on a connection of its own; cancelling it closes the connection. Pieces are sent
    chunked.
    """
    raw = json.dumps(body).encode() if isinstance(body, dict) else body
    data = io.BytesIO(raw) if isinstance(raw, bytes) else raw  # aiohttp warns of large bytes
    limit = aiohttp.ClientTimeout(total=CLIENT_LIMIT_S)
    sent = {"Content-Type": "application/json", **(headers or {})}
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(f"{url}{path}", data=data, headers=sent) as response,
    ):
        return Answer(response.status, await response.read(), response.headers)


async def stream(cluster: Cluster, prompt: list[int], tokens: int = TOKENS) -> Answer:
    """A streamed answer, read to its end; cancelling it closes the connection."""
    return await ask(cluster.url, completion(prompt, tokens, stream=True))


def text_of(events: bytes) -> str:
    """The text of a whole and clean stream."""
    *chunks, done = [event.removeprefix(b"data: ") for event in events.strip().split(b"\n\n")]
    assert done == b"[DONE]", events
    return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)


async def gone(*tasks: asyncio.Task[Any]) -> None:
    """The clients have closed their connections."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    """The processes stand still inside (SIGSTOP, then SIGCONT)."""
    try:
        for process in processes:
            stand_still(process.pid)
        yield
    finally:
        for process in processes:
            if process.is_running():
                process.send_signal(signal.SIGCONT)


async def received(*engines: EngineHandle | MockProcess) -> float:
    """Transfers that these decode engines have received so far."""
    statuses = [await engine.status() for engine in engines]
    return sum(status.counters.get("received_transfers", 0) for status in statuses)
