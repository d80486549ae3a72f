"""What the router tells a controller, and what it does with its decisions."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from router_stubs.cluster import StubCluster, completion, stub_cluster, until
from router_stubs.engine import send
from support.tuner_profile import FAST

from splitserve.orchestrator.agent.messages import OtherRouter, RouterLoad, SetRole
from splitserve.orchestrator.config import AutotuneConfig
from splitserve.orchestrator.core.membership import Drain
from splitserve.orchestrator.router.autotune import Autotune
from splitserve.orchestrator.tuner.controller import Decision, Finished, NodeSeen
from splitserve.orchestrator.tuner.profile import write_profile

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence
    from pathlib import Path

    import pytest
    from router_stubs.engine import Asked

NODES = ("p0", "d0", "d1")
LOAD = RouterLoad(decode_legs=3, committed_blocks=9)
PROMPT = [1] * 40


class Scripted:
    """A controller that says what a test wants, and remembers what it was told."""

    def __init__(self) -> None:
        self.arrivals: list[int] = []
        self.ends: list[tuple[Finished, float | None, float | None]] = []
        self.failures = 0
        self.changes = 0
        self.seen: dict[str, NodeSeen] = {}
        self.waiting = -1
        self.next = Decision(0.0, "keeps 1:2", 0.0)

    def begin(self, now: float) -> None:
        """Does nothing."""

    def arrived(self, now: float, prompt_tokens: int) -> None:
        """Counts."""
        self.arrivals.append(prompt_tokens)

    def served(
        self, now: float, request: Finished, ttft_s: float | None, itl_s: float | None
    ) -> None:
        """Remembers."""
        self.ends.append((request, ttft_s, itl_s))

    def failed(self, now: float) -> None:
        """Counts."""
        self.failures += 1

    def changed(self, now: float) -> None:
        """Counts."""
        self.changes += 1

    def decide(self, now: float, nodes: Sequence[NodeSeen], waiting: int = 0) -> Decision:
        """What the test has put there."""
        self.seen, self.waiting = {node.name: node for node in nodes}, waiting
        return self.next


def autotune_with(cluster: StubCluster, controller: Scripted, mode: str = "on") -> Autotune:
    """In that router, started; it decides when the test says so."""
    settings = AutotuneConfig.model_validate(
        {"mode": mode, "ttft_ms": 500.0, "window_s": 600.0, "change_interval_s": 900.0}
    )
    scripted: Any = controller
    autotune = Autotune(settings, FAST, scripted, cluster.router.driver)
    autotune.start()
    cluster.router.driver._on_end = autotune.ended
    return autotune


async def test_it_is_told_what_comes_and_what_becomes_of_it() -> None:
    """Lengths and times of streamed answers, lengths alone of others; failures; and nothing of
    mistakes of clients.
    """
    async with stub_cluster(*NODES) as cluster:
        controller = Scripted()
        autotune = autotune_with(cluster, controller)
        await (await cluster.post(json=completion(prompt=PROMPT))).read()
        whole = {
            "choices": [{"text": "0123"}],
            "usage": {"prompt_tokens": 40, "completion_tokens": 4},
        }
        for engine in cluster.engines.values():
            engine.answer = _answering(200, whole)
        await (await cluster.post(json=completion(prompt=PROMPT, stream=False))).read()
        await cluster.idle()
        assert controller.arrivals == [40, 40]
        (streamed, ttft_s, itl_s), (other, *times) = controller.ends
        assert streamed == other == Finished(40, 0, 4, 40)
        assert ttft_s is not None
        assert itl_s is not None
        assert 0 < ttft_s < 5
        assert 0 <= itl_s < 5
        assert times == [None, None]
        for status, failures in ((400, 0), (500, 1)):
            for engine in cluster.engines.values():
                engine.answer = _answering(status, {"error": {"message": "no"}})
            assert (await cluster.post(json=completion(prompt=PROMPT))).status >= status
            await cluster.idle()
            assert controller.failures == failures
        assert len(controller.ends) == 2
        autotune.stop()


def _answering(status: int, body: dict[str, Any]) -> Any:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await send(writer, status, json.dumps(body, separators=(",", ":")).encode())

    return answer


async def test_on_changes_roles(caplog: pytest.LogCaptureFixture) -> None:
    """The agent is told, the line is in the log and in the status, and the controller hears of the
    change.
    """
    caplog.set_level(logging.INFO)
    async with stub_cluster(*NODES) as cluster:
        controller = Scripted()
        autotune = autotune_with(cluster, controller)
        autotune.decide()
        controller.next = Decision(1.0, "d0 becomes prefill: ...", 0.25, None, "d0", "prefill")
        autotune.decide()
        assert cluster.router.core.membership.nodes["d0"].role == "prefill"
        await until(lambda: cluster.agents["d0"].frames[1:] == [SetRole(role="prefill", epoch=1)])
        assert "autotune: d0 becomes prefill: ..." in caplog.messages
        newest, older = autotune.status()["decisions"]
        assert (newest["node"], newest["role"], newest["missed_share"]) == ("d0", "prefill", 0.25)
        assert older["why"] == "keeps 1:2"
        controller.next = Decision(2.0, "keeps 2:1", 0.0)
        assert controller.changes == 0
        autotune.decide()
        assert controller.changes == 1
        autotune.decide()
        assert controller.changes == 1
        autotune.stop()


async def test_advise_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The line says that it is advice; a change that an operator then makes is heard of."""
    caplog.set_level(logging.INFO)
    async with stub_cluster(*NODES) as cluster:
        controller = Scripted()
        autotune = autotune_with(cluster, controller, "advise")
        controller.next = Decision(1.0, "d0 becomes prefill: ...", 0.0, None, "d0", "prefill")
        autotune.decide()
        assert cluster.router.core.flips == 0
        assert "autotune advises: d0 becomes prefill: ..." in caplog.messages
        cluster.router.driver.flip("d0", "prefill", answer=lambda _: None)
        autotune.decide()
        assert controller.changes == 1
        autotune.stop()


async def test_a_change_that_is_refused_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The core has the last word, and the router goes on."""
    async with stub_cluster("p0", "d0") as cluster:
        controller = Scripted()
        autotune = autotune_with(cluster, controller)
        controller.next = Decision(1.0, "d0 becomes prefill: ...", 0.0, None, "d0", "prefill")
        autotune.decide()
        assert "autotune could not change a role: d0 is the last decode node" in caplog.text
        autotune.stop()


async def test_what_is_seen_of_nodes() -> None:
    """Draining, failing and fixed nodes, what they owe and how many legs they have."""
    async with stub_cluster(*NODES) as cluster:
        await cluster.add_node("d2", flip_obstacle="it is another engine")
        nodes = cluster.router.core.membership.nodes
        nodes["d0"].drain = Drain(restarts=False, due=1e9)
        nodes["p0"].has_flipped = True
        nodes["p0"].decode_legs = 2
        limits = cluster.router.core.limits.breaker
        for number in range(limits.failures):
            nodes["d1"].decode_breaker.fault(f"r{number}", 0.0, "500", limits)
        controller = Scripted()
        autotune = autotune_with(cluster, controller)
        autotune.decide()
        assert controller.waiting == 0
        assert controller.seen == {
            "p0": NodeSeen("p0", "prefill", owes=True, legs=2),
            "d0": NodeSeen("d0", "decode", is_usable=False),
            "d1": NodeSeen("d1", "decode", is_slow=True),
            "d2": NodeSeen("d2", "decode", can_flip=False),
        }
        autotune.stop()


def policy(profile: Path) -> dict[str, Any]:
    """Of a router that decides every 20 ms, by the real controller."""
    return {
        "autotune": {
            "mode": "advise",
            "profile": str(profile),
            "ttft_ms": 500.0,
            "window_s": 0.02,
            "change_interval_s": 1.0,
            "missed_interval_s": 1.0,
            "warm_up_s": 600.0,
        }
    }


async def test_it_decides_by_itself(tmp_path: Path) -> None:
    """Once per window, and the router's status tells."""
    profile = tmp_path / "profile.json"
    profile.write_bytes(write_profile(FAST))
    async with stub_cluster(*NODES, policy=policy(profile)) as cluster:
        url = f"{cluster.url}/internal/status"

        async def told() -> dict[str, Any]:
            status: dict[str, Any] = await (await cluster.session.get(url)).json()
            return status["autotune"]

        first = await told()
        assert (first["mode"], first["ttft_ms"], first["itl_ms"]) == ("advise", 500.0, None)
        tuner = cluster.router._autotune
        assert tuner is not None
        await until(lambda: len(tuner.status()["decisions"]) >= 3)
        latest = (await told())["decisions"][0]
        assert latest["why"].startswith("watches for 600 s before it decides; 0 s have passed")


async def test_a_profile_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The router serves without, and says so."""
    async with stub_cluster(*NODES, policy=policy(tmp_path / "none.json")) as cluster:
        assert "autotune is off: policy.autotune.profile cannot be used" in caplog.text
        assert (await cluster.post()).status == 200
        status = await (await cluster.session.get(f"{cluster.url}/internal/status")).json()
        assert "autotune" not in status


async def test_of_several_routers_the_lowest_decides() -> None:
    """It takes what comes to each other one to be as much as what comes to itself; the others leave
    it alone, and say so.
    """
    async with stub_cluster(*NODES) as cluster:
        core = cluster.router.core
        core.peers.index = 1
        controller = Scripted()
        autotune = autotune_with(cluster, controller)

        def hear(*others: int) -> None:
            routers = tuple(OtherRouter(name=f"r{n}", index=n, load=LOAD) for n in others)
            core.peers.hear(core.membership.nodes["d0"], routers, RouterLoad())

        hear(0)
        autotune.decide()
        assert controller.waiting == -1
        assert autotune.status()["is_left_to_another"]
        hear(2, 3)
        autotune.decide()
        assert controller.waiting == 0
        assert controller.seen["d0"].legs == 2 * LOAD.decode_legs
        assert not autotune.status()["is_left_to_another"]
        await (await cluster.post(json=completion(prompt=PROMPT))).read()
        assert controller.arrivals == [40] * 3
        autotune.stop()
