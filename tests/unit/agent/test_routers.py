"""Several routers, as one agent deals with them: who is told what, and whose word counts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.kv_transfer.transfer_facts import SendFacts
from splitserve.orchestrator.agent.life import Life
from splitserve.orchestrator.agent.messages import (
    Dismiss,
    NodePrefixes,
    NodeTransfers,
    OtherRouter,
    OtherRouters,
    RefuseNode,
    RouterLoad,
    TellLoad,
    ToAgent,
    Welcome,
)
from splitserve.orchestrator.agent.routers import NO_LOAD, Routers, SeenRouter

LOAD = RouterLoad(prefill_legs=1, committed_blocks=7, waiting_tokens=48)
DISMISS = Dismiss(incarnation="d-1", at_once=False)


class FakeLink:
    """A connection that remembers what was sent on it."""

    def __init__(self) -> None:
        self.connected = True
        self.can_take_prefixes = True
        self.frames: list[Any] = []
        self.is_gone = asyncio.Event()
        self.others = self.prefixes = self.transfers = self.frames.append

    async def lost(self) -> None:
        await self.is_gone.wait()


class Rig:
    """An agent's engine and three routers, the first two of which use it."""

    def __init__(self) -> None:
        async def on_message(router: SeenRouter, message: ToAgent) -> None:
            raise AssertionError("no frame can come")

        self.routers = Routers(["http://a", "http://b", "http://c"], bytes(32), on_message)
        self.links = [FakeLink() for _ in self.routers.all]
        for router, link in zip(self.routers.all, self.links, strict=True):
            router.link = link  # type: ignore[assignment]
        engine: Any = SimpleNamespace()
        self.life = Life("d", "d-1", "key", 0.0, engine)
        self.links[2].connected = False
        for number in range(2):
            self.welcome(number)

    def welcome(self, number: int) -> None:
        """That router takes the node, over a connection that has come up."""
        self.links[number].connected = True
        message = Welcome(router=f"name{number}", index=number)
        self.routers.heard(self.routers.all[number], message, self.life)

    def lose(self, number: int) -> None:
        """The connection to it ends."""
        self.links[number].connected = False
        self.links[number].is_gone.set()
        self.routers._lost(self.routers.all[number])

    def told(self, number: int) -> list[Any]:
        """What it was told since the last look."""
        frames = list(self.links[number].frames)
        self.links[number].frames.clear()
        return frames


@pytest.fixture
async def rig() -> Rig:
    """Nothing has been told beside who is there."""
    rig = Rig()
    for number in range(3):
        rig.told(number)
    return rig


def others(seen: RouterLoad, *known: OtherRouter) -> OtherRouters:
    return OtherRouters(node="d", incarnation="d-1", others=known, seen=seen)


async def test_what_a_router_tells_is_passed_on(rig: Rig) -> None:
    """The others hear of it, and it hears what they have, as an answer; one that has not taken the
    node hears nothing. What was told of another life is not taken.
    """
    rig.routers.load(rig.routers.all[0], TellLoad(incarnation="d-1", load=LOAD), rig.life)
    (answer,), (news,) = rig.told(0), rig.told(1)
    assert answer == others(LOAD, OtherRouter(name="name1", index=1, load=NO_LOAD))
    assert news == others(NO_LOAD, OtherRouter(name="name0", index=0, load=LOAD))
    assert rig.told(2) == []
    rig.routers.load(rig.routers.all[0], TellLoad(incarnation="d-0", load=NO_LOAD), rig.life)
    assert rig.told(1) == []


async def test_a_router_that_is_gone_holds_nothing(rig: Rig) -> None:
    """The others hear at once that it is gone, and that it is back, as one that has nothing."""
    rig.routers.load(rig.routers.all[0], TellLoad(incarnation="d-1", load=LOAD), rig.life)
    rig.told(1)
    rig.lose(0)
    assert rig.told(1) == [others(NO_LOAD)]
    rig.welcome(0)
    assert rig.told(1) == [others(NO_LOAD, OtherRouter(name="name0", index=0, load=NO_LOAD))]


async def test_all_that_use_the_node_have_to_dismiss_it(rig: Rig) -> None:
    """One that has gone has nothing out that anybody could wait for, one that refused the node
    never had, one that has just come may.
    """
    life, routers = rig.life, rig.routers
    assert routers.dismissal(life) is None
    life.dismissals[0] = DISMISS
    assert routers.dismissal(life) is None
    rig.lose(1)
    assert routers.dismissal(life) == DISMISS
    rig.links[2].connected = True
    assert routers.dismissal(life) is None
    routers.heard(routers.all[2], RefuseNode(reason="another version"), life)
    assert routers.dismissal(life) == DISMISS


async def test_a_drain_that_is_overdue_is_over_for_all(rig: Rig) -> None:
    """Whatever the other routers still have there."""
    at_once = Dismiss(incarnation="d-1", at_once=True)
    rig.life.dismissals[1] = at_once
    assert rig.routers.dismissal(rig.life) == at_once


async def test_who_knows_the_node(rig: Rig) -> None:
    """Every router for `up`, any for a probe; a refusal of one is shown, and keeps no other from
    using the node.
    """
    routers, life = rig.routers, rig.life
    assert routers.any_uses(life)
    assert not routers.all_know(life)
    rig.links[2].connected = True
    routers.heard(routers.all[2], RefuseNode(reason="another version"), life)
    assert routers.all_know(life)
    assert routers.refused == "another version"
    rig.lose(0)
    rig.lose(1)
    assert not routers.any_uses(life)
    assert not routers.all_know(life)


async def test_facts_of_transfers_go_to_their_router(rig: Rig) -> None:
    """What is nobody's goes to all: its router may have been started anew."""
    ended = tuple(
        SendFacts(transfer_id=name, attempt=1, rank=0, outcome="delivered", ended=1.0)
        for name in ("name0-5.1", "probe-name1-3.1", "older-7.1")
    )
    rig.routers.transfers(
        NodeTransfers(node="d", incarnation="d-1", clock="c", sent=1.0, ended=ended)
    )
    for number, own in ((0, ended[0]), (1, ended[1])):
        (frame,) = rig.told(number)
        assert frame.ended == tuple(facts for facts in ended if facts in (own, ended[2]))


async def test_prefixes_go_to_all_that_are_there(rig: Rig) -> None:
    """They are taken from the engine while each of those has room."""
    frame = NodePrefixes(node="d", incarnation="d-1", removed=b"12345678")
    assert rig.routers.can_take_prefixes
    rig.routers.prefixes(frame)
    assert [rig.told(number) for number in range(3)] == [[frame], [frame], []]
    rig.links[1].can_take_prefixes = False
    assert not rig.routers.can_take_prefixes
    rig.lose(1)
    assert rig.routers.can_take_prefixes
    rig.lose(0)
    assert not rig.routers.can_take_prefixes


async def test_an_agent_without_any_router_is_alone(rig: Rig) -> None:
    """Not before the last of them has gone."""
    waiting = asyncio.create_task(rig.routers.lost())
    rig.lose(0)
    await asyncio.wait({waiting}, timeout=0.05)
    assert not waiting.done()
    rig.lose(1)
    rig.links[2].is_gone.set()
    async with asyncio.timeout(20):
        await waiting
