"""The facts of ended transfers on their way through the agent."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any

from router_stubs.cluster import until

from splitserve.kv_transfer.process_identity import boot_id
from splitserve.kv_transfer.transfer_facts import SendFacts, TransferFacts
from splitserve.orchestrator.agent import transfer_reports as subject
from splitserve.orchestrator.agent.transfer_reports import TransferReports

if TYPE_CHECKING:
    import pytest

    from splitserve.orchestrator.agent.messages import NodeTransfers

FACTS = SendFacts(transfer_id="t", attempt=1, rank=0, outcome="delivered", ended=1.0)


class FakeEndpoint:
    """An engine that tells what it is given, and remembers how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers: asyncio.Queue[tuple[TransferFacts, ...] | Exception] = asyncio.Queue()

    async def ended_transfers(self) -> tuple[TransferFacts, ...]:
        self.asked += 1
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


class FakeLink:
    """A connection to the router."""

    def __init__(self) -> None:
        self.frames: list[NodeTransfers] = []

    def transfers(self, frame: NodeTransfers) -> None:
        self.frames.append(frame)


async def test_facts_are_passed_on_and_nothing_is_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    """One frame for each answer with facts, with this host's clock; a question that fails is asked
    again.
    """
    monkeypatch.setattr(subject, "PAUSE_S", 0.0)
    monkeypatch.setattr(subject, "RETRY_S", 0.0)
    endpoint, link = FakeEndpoint(), FakeLink()
    reports: Any = TransferReports("n", link)  # type: ignore[arg-type]
    task = asyncio.create_task(reports.run(endpoint, "n-1"))
    before = monotonic()
    for answer in ((), TimeoutError(), (FACTS,), (FACTS, FACTS)):
        endpoint.answers.put_nowait(answer)
    await until(lambda: endpoint.asked == 5)
    assert [len(frame.ended) for frame in link.frames] == [1, 2]
    frame = link.frames[0]
    assert (frame.node, frame.incarnation, frame.clock) == ("n", "n-1", boot_id())
    assert before <= frame.sent <= monotonic()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
