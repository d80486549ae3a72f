"""What an agent does with the router's orders and with its engine's answers; no process is
started.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.kv_transfer.engine_endpoint import EngineStatus
from splitserve.kv_transfer.orders import Retarget
from splitserve.orchestrator.agent import agent as subject
from splitserve.orchestrator.agent.agent import Agent
from splitserve.orchestrator.agent.life import Life
from splitserve.orchestrator.agent.messages import (
    Dismiss,
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
from splitserve.orchestrator.agent.status_file import NodeStatus, read_status, status_path
from splitserve.orchestrator.config import nodes, parse

CONFIG = parse("engine: mock\nmodel: {path: m}\n")


class FakeEndpoint:
    """An engine's endpoint that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.state = EngineStatus(running=1)
        self.error: Exception | None = None
        self.questions = asyncio.Semaphore(0)
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def asked(self, times: int) -> None:
        """It has been asked so often again."""
        for _ in range(times):
            await self.questions.acquire()

    async def status(self) -> EngineStatus:
        self.questions.release()
        state = self.state
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return state

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

    def __init__(self, folder: Path, routers: int = 1) -> None:
        self.folder = folder
        self.endpoint = FakeEndpoint()
        self.agent = Agent(
            CONFIG,
            nodes(CONFIG)[1],
            model="m",
            secret=bytes(32),
            router_urls=[f"http://127.0.0.1:{1 + n}" for n in range(routers)],
            run_dir=folder,
            log_dir=folder,
            connect_endpoint=lambda address, secret: self.endpoint,  # type: ignore[arg-type, return-value]
        )
        engine: Any = SimpleNamespace(log=SimpleNamespace(stage="starting server"))
        endpoint: Any = self.endpoint
        self.life = Life(
            "decode-0", "decode-0-x", "key", time.monotonic(), engine, endpoint, was_ready=True
        )
        self.agent._life = self.life
        self.agent.phase = "ready"

    def status(self) -> NodeStatus:
        """What `splitserve status` would read."""
        found = read_status(self.folder, "decode-0")
        assert found is not None
        return found

    async def hear(self, message: ToAgent, router: int = 0) -> None:
        """A router says something."""
        await self.agent._on_message(self.agent._routers.all[router], message)

    def report(self) -> None:
        """The engine has answered, and the agent tells."""
        self.life.latest = self.endpoint.state
        self.agent._report()

    def connect(self, router: int = 0) -> None:
        """There is that router."""
        self.agent._routers.all[router].link._connection_lost.clear()

    def disconnect(self, router: int = 0) -> None:
        """It is gone."""
        seen = self.agent._routers.all[router]
        seen.link._connection_lost.set()
        self.agent._routers._lost(seen)

    async def obey(self, message: ToAgent) -> None:
        """The router orders something, and the engine has been told of it."""
        await self.hear(message)
        relay = asyncio.create_task(self.agent.relay.run())
        async with asyncio.timeout(20):
            await self.agent.relay.empty()
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
    await rig.hear(FailTransfer(transfer_id="t", reason="x"))
    await rig.hear(EndEngine(incarnation="decode-0-older", reason="late"))
    assert not rig.life.end.done()
    await rig.hear(EndEngine(incarnation="decode-0-x", reason="it owes a fence"))
    await rig.hear(EndEngine(incarnation="decode-0-x", reason="said again"))
    assert rig.life.end.result() == "it owes a fence"
    rig.life.endpoint = None
    await rig.obey(PeerDied(incarnation="P"))
    assert rig.endpoint.told == []


async def test_a_role_is_taken_over_and_a_refusal_shown(rig: Rig) -> None:
    """What the router says of the node is in its status; a welcome ends a refusal."""
    await rig.hear(SetRole(role="prefill", epoch=1))
    await rig.hear(RefuseNode(reason="another model"))
    rig.report()
    assert (rig.status().role, rig.status().refused) == ("prefill", "another model")
    await rig.hear(Welcome(router="r"))
    rig.report()
    assert rig.status().refused == ""


@pytest.mark.parametrize(
    ("answer", "refused"),
    [(Welcome(router="r"), ""), (RefuseNode(reason="another layout"), "another layout")],
)
async def test_a_node_is_known_when_the_router_has_answered(
    rig: Rig, answer: ToAgent, refused: str
) -> None:
    """A connection alone says nothing: a refusal may be on its way. Nor does an answer about the
    engine before this one, or over a connection that is lost.
    """
    rig.connect()
    rig.report()
    assert not rig.status().router_connected
    assert rig.agent.health().obstacle == "no connection to the router"
    await rig.hear(answer)
    rig.report()
    assert (rig.status().router_connected, rig.status().refused) == (True, refused)
    assert rig.agent.health().obstacle == refused
    rig.life.incarnation = "decode-0-y"
    rig.report()
    assert not rig.status().router_connected
    rig.life.incarnation = "decode-0-x"
    rig.disconnect()
    rig.report()
    rig.connect()
    rig.report()
    assert not rig.status().router_connected


async def test_a_role_is_reported_and_outlasts_the_agent(rig: Rig) -> None:
    """At once and with every state; the agent after this one, of the same run, begins with it."""
    states: list[Any] = []
    rig.agent._routers.fresh = states.append  # type: ignore[method-assign]
    await rig.hear(SetRole(role="prefill", epoch=1))
    assert [(state.role, state.role_epoch) for state in states] == [("prefill", 1)]
    status = rig.status()
    assert (status.role, status.pool, status.flip_obstacle) == ("prefill", "decode", "")
    assert (Rig(rig.folder).agent.role, Rig(rig.folder).agent.role_epoch) == ("prefill", 1)
    status_path(rig.folder, "decode-0").unlink()
    assert Rig(rig.folder).agent.role == "decode"


async def test_the_first_of_two_orders_counts(rig: Rig) -> None:
    """Two routers order at once, by the same number: the second is told what the first has got; an
    order that knows of the first is obeyed.
    """
    states: list[Any] = []
    rig.agent._routers.fresh = states.append  # type: ignore[method-assign]
    await rig.hear(SetRole(role="prefill", epoch=2))
    await rig.hear(SetRole(role="decode", epoch=2))
    await rig.hear(SetRole(role="decode", epoch=1))
    assert [(s.role, s.role_epoch) for s in states] == [("prefill", 2)] * 3
    await rig.hear(SetRole(role="decode", epoch=3))
    assert (rig.agent.role, rig.agent.role_epoch) == ("decode", 3)


DISMISS = Dismiss(incarnation="decode-0-x", at_once=False)


async def test_a_draining_engine_runs_on_until_its_node_is_dismissed(rig: Rig) -> None:
    """An engine that owes nothing may be about to get a leg that was sent before the drain; what it
    says counts from the dismissal on.
    """
    rig.endpoint.state = EngineStatus()
    await rig.hear(Drain(incarnation="decode-0-x", restarts=False))
    assert rig.agent.phase == "draining"
    watching = asyncio.create_task(rig.watch())
    await rig.endpoint.asked(3)
    assert not watching.done()
    await rig.hear(DISMISS)
    assert await watching == ""
    assert rig.life.owed_nothing


@pytest.mark.parametrize("owed", ["running", "waiting", "open_transfers", "leased_blocks"])
async def test_a_dismissed_engine_ends_when_it_owes_nothing(rig: Rig, owed: str) -> None:
    """Not before: requests, transfers and pages that a peer may still fetch."""
    rig.endpoint.state = EngineStatus(**{owed: 1})
    await rig.hear(DISMISS)
    watching = asyncio.create_task(rig.watch())
    await rig.endpoint.asked(3)
    assert not watching.done()
    rig.endpoint.state = EngineStatus()
    assert await watching == ""
    assert rig.life.is_dismissed


async def test_an_answer_to_an_earlier_question_does_not_end_the_engine(rig: Rig) -> None:
    """The agent was dismissed while the engine answered: it may have got its last leg since."""
    rig.endpoint.state = EngineStatus()
    rig.endpoint.may_answer.clear()
    watching = asyncio.create_task(rig.watch())
    await rig.endpoint.asked(1)
    await rig.hear(DISMISS)
    rig.endpoint.state = EngineStatus(leased_blocks=1)
    rig.endpoint.may_answer.set()
    await rig.endpoint.asked(3)
    assert not watching.done()
    rig.endpoint.state = EngineStatus()
    assert await watching == ""


@pytest.mark.parametrize("error", [None, TimeoutError()], ids=["owing", "silent"])
async def test_a_drain_ends_with_its_deadline(rig: Rig, error: Exception | None) -> None:
    """Whatever the engine owes, and whether it speaks or not."""
    rig.endpoint.error = error
    await rig.hear(Dismiss(incarnation="decode-0-x", at_once=True))
    assert await rig.watch() == ""
    assert not rig.life.owed_nothing


async def test_orders_for_an_earlier_engine_do_not_end_this_one(rig: Rig) -> None:
    """The engine died while it drained, and this is another one."""
    rig.endpoint.state = EngineStatus()
    await rig.hear(Drain(incarnation="decode-0-w", restarts=False))
    await rig.hear(Dismiss(incarnation="decode-0-w", at_once=True))
    assert rig.agent.phase == "ready"
    watching = asyncio.create_task(rig.watch())
    await rig.endpoint.asked(3)
    assert not watching.done()
    watching.cancel()


class Lives:
    """Stands in for the lives of an agent's engines: each ends as told."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, *ends: dict[str, Any]) -> None:
        self.begun = 0
        self._rig = rig
        self._ends = list(ends)
        monkeypatch.setattr(rig.agent, "_live", self._live)
        monkeypatch.setattr(rig.agent, "_sleep", self._sleep)
        self.slept: list[float] = []

    async def _live(self) -> Life:
        self.begun += 1
        self._rig.agent._life = None
        engine: Any = SimpleNamespace(log=SimpleNamespace(stage=""))
        if not self._ends:
            self._rig.agent.stop()
            return Life("decode-0", "decode-0-z", "key", 0.0, engine, was_ready=True)
        return Life(
            "decode-0", "decode-0-y", "key", 0.0, engine, was_ready=True, **self._ends.pop(0)
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


async def test_a_drained_node_leaves(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent ends well, and its status says `left`; also when the engine died while draining."""
    drain = Drain(incarnation="decode-0-y", restarts=False)
    for is_dismissed in (True, False):
        lives = Lives(rig, monkeypatch, {"drain": drain, "is_dismissed": is_dismissed})
        assert await rig.agent.run() == subject.EXIT_STOPPED
        assert lives.begun == 1
        assert rig.status().phase == "left"


async def test_a_stopped_node_has_left(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started it does not start it again: only then can `splitserve restart` do so."""
    Lives(rig, monkeypatch)
    assert await rig.agent.run() == subject.EXIT_STOPPED
    assert rig.status().phase == "left"


async def test_a_drained_node_restarts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, as often as it is told to, and without a restart being counted; an engine that died
    by itself is restarted as always.
    """
    drain = Drain(incarnation="decode-0-y", restarts=True)
    drained = {"drain": drain, "is_dismissed": True}
    limit = CONFIG.supervision.restart_limit
    lives = Lives(rig, monkeypatch, *[drained] * (limit + 2), {"drain": drain})
    assert await rig.agent.run() == subject.EXIT_STOPPED
    assert lives.begun == limit + 4
    assert lives.slept == [CONFIG.supervision.restart_delay_s]
    assert rig.agent._restarts == 1


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
        rig.report()
    assert caplog.text.count("cannot write the status") == 1
    full = False
    rig.report()
    assert rig.status().running == 1


async def test_a_full_disk_does_not_keep_a_node_away(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The note of its incarnation is not written, not half of it either, and its engine starts."""

    def full(path: Path, text: str) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    rig.agent._last_life.begin("decode-0-z")
    assert "No space left" in caplog.text
    assert not list(rig.folder.glob("*.incarnation"))
