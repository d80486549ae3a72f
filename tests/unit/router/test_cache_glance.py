"""What those who watch the router see of the cache."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from router_stubs.cluster import until

from splitserve.orchestrator.router import cache_glance
from splitserve.orchestrator.router.cache_control import CacheRefusalError, CacheSilentError
from splitserve.orchestrator.router.cache_glance import CacheGlance

if TYPE_CHECKING:
    import pytest

STAT = {"chunk_tokens": 64, "arena": {}, "tiers": [], "counters": {}, "tenants": ["secret"]}


class Server:
    """Answers with what is told, and counts who asks."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: dict[str, Any] | Exception = STAT
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def stat(self) -> dict[str, Any]:
        self.asked += 1
        await self.may_answer.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_it_is_asked_now_and_then() -> None:
    """Once at a time, not before the figures are old, and never without anybody who looks; what is
    a tenant's is not shown.
    """
    server = Server()
    glance = CacheGlance(server.stat)
    assert server.asked == 0
    assert glance.look() is None
    await until(lambda: glance.look() is not None)
    shown = glance.look()
    assert shown is not None
    assert shown.keys() == {"chunk_tokens", "arena", "tiers", "counters", "trouble"}
    assert server.asked == 1
    glance.close()


async def test_what_is_the_trouble(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that is silent or refuses is shown; a fault of ours is logged; it is asked again."""
    monkeypatch.setattr(cache_glance, "REFRESH_S", 0.0)
    server = Server()
    glance = CacheGlance(server.stat)
    for error in (CacheSilentError("no answer"), CacheRefusalError("not now")):
        server.answer = error
        await until(lambda error=error: glance.look() == {"trouble": str(error)})  # type: ignore[misc]
    server.answer = KeyError("tiers")
    with caplog.at_level(logging.ERROR):
        await until(lambda: bool(glance.look()) and "cannot be shown" in caplog.text)
    server.answer = STAT
    await until(lambda: (glance.look() or {}).get("chunk_tokens") == 64)
    glance.close()


async def test_a_router_that_stops_waits_for_no_cache() -> None:
    """What was asked is given up."""
    server = Server()
    server.may_answer.clear()
    glance = CacheGlance(server.stat)
    glance.look()
    task = glance._asking
    assert task is not None
    await until(lambda: server.asked == 1)
    glance.close()
    await asyncio.wait([task], timeout=20)
    assert task.cancelled()
