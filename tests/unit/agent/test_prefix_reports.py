"""What an engine has cached, on its way through the agent: nothing is lost, nothing is flooded."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from router_stubs.cluster import until

from splitserve.kv_transfer.held_prefixes import PrefixReport
from splitserve.orchestrator.agent import prefix_reports as subject
from splitserve.orchestrator.agent.messages import NodePrefixes
from splitserve.orchestrator.agent.prefix_reports import PrefixReports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class FakeLink:
    """A connection to the router that takes what it has room for."""

    def __init__(self) -> None:
        self.is_up = True
        self.looks = 0
        """How often somebody wanted to know."""
        self.room = 100
        self.frames: list[NodePrefixes] = []

    @property
    def connected(self) -> bool:
        self.looks += 1
        return self.is_up

    @property
    def can_take_prefixes(self) -> bool:
        return self.connected and self.room > 0

    def prefixes(self, frame: NodePrefixes) -> None:
        self.room -= 1
        self.frames.append(frame)


class FakeEndpoint:
    """An engine that says as many things as are left, and remembers how it was asked."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.left = 0
        self.error: Exception | None = None

    async def prefixes(self, *, from_start: bool) -> PrefixReport:
        self.asked.append(from_start)
        if self.error is not None:
            raise self.error
        if not self.left and not from_start:
            return PrefixReport()
        self.left = max(0, self.left - 1)
        return PrefixReport(
            is_first=from_start, added=b"12345678", tokens=(5,), has_more=self.left > 0
        )


class Rig:
    """Reports of a node that a router has welcomed."""

    def __init__(self) -> None:
        self.link, self.endpoint = FakeLink(), FakeEndpoint()
        self.reports = PrefixReports("n", self.link)  # type: ignore[arg-type]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        endpoint: Any = self.endpoint
        task = asyncio.create_task(self.reports.run(endpoint, "n-1"))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def looks(self, count: int) -> None:
        """The agent has looked at its connection so often again."""
        goal = self.link.looks + count
        await until(lambda: self.link.looks >= goal)

    async def turns(self, count: int) -> None:
        """The engine was asked so often again."""
        goal = len(self.endpoint.asked) + count
        await until(lambda: len(self.endpoint.asked) >= goal)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Asks often."""
    monkeypatch.setattr(subject, "ASK_INTERVAL_S", 0.001)
    return Rig()


async def test_nothing_is_asked_before_a_router_has_welcomed_the_node(rig: Rig) -> None:
    """Then everything, and after that what is new, as frames of that life."""
    async with rig.running():
        await rig.looks(5)
        assert rig.endpoint.asked == []
        rig.reports.welcome()
        await rig.turns(3)
        assert rig.endpoint.asked[:3] == [True, False, False]
        assert rig.link.frames == [
            NodePrefixes(node="n", incarnation="n-1", is_first=True, added=b"12345678", tokens=(5,))
        ]
        rig.endpoint.left = 1
        await until(lambda: len(rig.link.frames) == 2)
        assert rig.link.frames[1].is_first is False


async def test_another_router_is_told_everything(rig: Rig) -> None:
    """Its welcome says so; without a connection the engine is not asked."""
    rig.reports.welcome()
    async with rig.running():
        await rig.turns(2)
        rig.link.is_up = False
        await until(lambda: not rig.reports._is_welcome)
        asked = len(rig.endpoint.asked)
        rig.link.is_up = True
        await rig.looks(5)
        assert len(rig.endpoint.asked) == asked
        rig.reports.welcome()
        await rig.turns(2)
        assert rig.endpoint.asked[asked : asked + 2] == [True, False]


async def test_a_lost_answer_makes_the_engine_begin_again(rig: Rig) -> None:
    """Until one arrives."""
    rig.reports.welcome()
    async with rig.running():
        await rig.turns(2)
        rig.endpoint.error = TimeoutError()
        await rig.turns(3)
        assert rig.endpoint.asked[-2:] == [True, True]
        rig.endpoint.error = None
        await until(lambda: len(rig.link.frames) == 2)
        assert rig.link.frames[1].is_first


async def test_no_more_is_asked_than_the_connection_takes(rig: Rig) -> None:
    """What is left stays in the engine."""
    rig.endpoint.left, rig.link.room = 10, 4
    rig.reports.welcome()
    async with rig.running():
        await until(lambda: rig.link.room == 0)
        await rig.looks(5)
        assert rig.endpoint.left == 6
        rig.link.room = 100
        await until(lambda: rig.endpoint.left == 0)
        assert len(rig.link.frames) == 10
