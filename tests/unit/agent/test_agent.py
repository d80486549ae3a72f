"""What an agent does with the router's orders and with its engine's answers; no process is
started.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from splitserve.kv_transfer.engine_endpoint import EngineStatus
from splitserve.kv_transfer.orders import Retarget
from splitserve.orchestrator.agent import agent as subject
from splitserve.orchestrator.agent.agent import Agent, Life
from splitserve.orchestrator.agent.messages import (
    Drain,
    EndEngine,
    FailTransfer,
    PeerDied,
    RefuseNode,
    RetargetTransfer,
    SetRole,
    ToAgent,
    Welcome,
)
from splitserve.orchestrator.agent.status_file import NodeStatus, read_status
from splitserve.orchestrator.config import nodes, parse

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = parse("engine: mock\nmodel: {path: m}\n")


class FakeEndpoint:
    """An engine's endpoint that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.state = EngineStatus(running=1)
        self.error: Exception | None = None
        self.was_asked = asyncio.Event()

    async def status(self) -> EngineStatus:
        self.was_asked.set()
        if self.error is not None:
            raise self.error
        return self.state

    async def fail_transfer(self, transfer_id: str, reason: str) -> None:
        self.told.append(("fail", transfer_id, reason))
        if self.error is not None:
            raise self.error

    async def peer_died(self, incarnation: str) -> None:
        self.told.append(("died", incarnation))

    async def retarget(self, order: Retarget) -> None:
        self.told.append(("retarget", order))


class Rig:
    """An agent whose engine is ready."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoint = FakeEndpoint()
        self.agent = Agent(
            CONFIG,
            nodes(CONFIG)[1],
            model="m",
            secret=bytes(32),
            router_url="http://127.0.0.1:1",
            run_dir=folder,
            log_dir=folder,
            connect_endpoint=lambda address, secret: self.endpoint,  # type: ignore[arg-type, return-value]
        )
        engine: Any = SimpleNamespace(log=SimpleNamespace(stage="starting server"))
        endpoint: Any = self.endpoint
        self.life = Life("decode-0-x", "key", time.monotonic(), engine, endpoint, was_ready=True)
        self.agent._life = self.life
        self.agent.phase = "ready"

    def status(self) -> NodeStatus:
        """What `splitserve status` would read."""
        found = read_status(self.folder, "decode-0")
        assert found is not None
        return found

    async def obey(self, message: ToAgent) -> None:
        """The router orders something, and the engine has been told of it."""
        await self.agent._on_message(message)
        relay = asyncio.create_task(self.agent.relay_orders())
        async with asyncio.timeout(20):
            await self.agent._relays.join()
        relay.cancel()

    async def watch(self) -> str:
        """Report states until the agent has a reason to end."""
        endpoint: Any = self.endpoint
        async with asyncio.timeout(20):
            return await self.agent._report_states(self.life, endpoint)


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """With short intervals."""
    monkeypatch.setattr(subject, "STATE_INTERVAL_S", 0.002)
    return Rig(tmp_path)


async def test_orders_are_relayed_to_the_engine(rig: Rig) -> None:
    """Each as the endpoint knows it."""
    await rig.obey(FailTransfer(transfer_id="t", reason="refused"))
    await rig.obey(PeerDied(incarnation="P"))
    await rig.obey(
        RetargetTransfer(
            transfer_id="t",
            attempt=2,
            peer_incarnation="Q",
            peer_addresses=("tcp://q",),
            reason="P is gone",
        )
    )
    assert rig.endpoint.told == [
        ("fail", "t", "refused"),
        ("died", "P"),
        ("retarget", Retarget("t", 2, "Q", ("tcp://q",), "P is gone")),
    ]


async def test_an_order_that_the_engine_does_not_take_is_said(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection to the router lives on."""
    rig.endpoint.error = OSError("10,000 orders wait")
    await rig.obey(FailTransfer(transfer_id="t", reason="x"))
    assert "the engine did not take FailTransfer(transfer_id='t'" in caplog.text
    rig.life.endpoint = None
    await rig.obey(PeerDied(incarnation="P"))
    assert rig.endpoint.told == [("fail", "t", "x")]


async def test_an_engine_that_does_not_answer_holds_up_no_other_order(rig: Rig) -> None:
    """Orders for the engine wait; the order to end it does not. Both are for one life only."""
    await rig.agent._on_message(FailTransfer(transfer_id="t", reason="x"))
    await rig.agent._on_message(EndEngine(incarnation="decode-0-older", reason="late"))
    assert not rig.life.end.done()
    await rig.agent._on_message(EndEngine(incarnation="decode-0-x", reason="it owes a fence"))
    await rig.agent._on_message(EndEngine(incarnation="decode-0-x", reason="said again"))
    assert rig.life.end.result() == "it owes a fence"
    rig.life.endpoint = None
    await rig.obey(PeerDied(incarnation="P"))
    assert rig.endpoint.told == []


async def test_a_role_is_taken_over_and_a_refusal_shown(rig: Rig) -> None:
    """What the router says of the node is in its status; a welcome ends a refusal."""
    await rig.agent._on_message(SetRole(role="prefill"))
    await rig.agent._on_message(RefuseNode(reason="another model"))
    rig.agent._report(rig.endpoint.state)
    assert (rig.status().role, rig.status().refused) == ("prefill", "another model")
    await rig.agent._on_message(Welcome(router="r"))
    rig.agent._report(rig.endpoint.state)
    assert rig.status().refused == ""


@pytest.mark.parametrize("owed", ["running", "waiting", "open_transfers", "leased_blocks"])
async def test_a_drained_node_leaves_when_it_owes_nothing(rig: Rig, owed: str) -> None:
    """Not before: requests, transfers and pages that a peer may still fetch."""
    rig.endpoint.state = EngineStatus(**{owed: 1})
    await rig.agent._on_message(Drain(deadline_s=1000))
    assert rig.agent.phase == "draining"
    watching = asyncio.create_task(rig.watch())
    await rig.endpoint.was_asked.wait()
    assert not rig.agent._stop.is_set()
    rig.endpoint.state = EngineStatus()
    assert await watching == ""
    assert rig.agent._stop.is_set()


async def test_a_drain_ends_with_its_deadline(rig: Rig) -> None:
    """Whatever is owed then."""
    await rig.agent._on_message(Drain(deadline_s=0))
    assert await rig.watch() == ""


async def test_an_engine_whose_endpoint_is_silent_is_ended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the limit, with the reason."""
    supervision = CONFIG.supervision.model_copy(update={"engine_silence_limit_s": 0.01})
    rig.agent._config = CONFIG.model_copy(update={"supervision": supervision})
    rig.endpoint.error = TimeoutError()
    assert "was silent for engine_silence_limit_s" in await rig.watch()


async def test_a_full_disk_does_not_end_the_watch(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once; the status is right again when there is room."""
    full = True

    def write_status(folder: Path, status: NodeStatus) -> None:
        if full:
            raise OSError(28, "No space left on device")
        real(folder, status)

    real = subject.write_status
    monkeypatch.setattr(subject, "write_status", write_status)
    for _ in range(3):
        rig.agent._report(rig.endpoint.state)
    assert caplog.text.count("cannot write the status") == 1
    full = False
    rig.agent._report(rig.endpoint.state)
    assert rig.status().running == 1
