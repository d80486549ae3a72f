"""Two routers of the same nodes: what they leave each other, and what they agree on."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from router_stubs.core_story import Driver, ended, names

from splitserve.kv_transfer.holdings import LEASED, SENDS, Holding
from splitserve.orchestrator.agent.messages import OtherRouter, OtherRouters, RouterLoad
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.audit import GRACE_S
from splitserve.orchestrator.core.effects import (
    AnswerFlip,
    DismissNode,
    Effect,
    LearnRole,
    SetRole,
    StartPair,
    TellLoad,
)

NOTHING = RouterLoad()


class Router(Driver):
    """One of several routers; what it tells the agents is kept until they take it."""

    def __init__(self, index: int, *nodes: str, **more: Any) -> None:
        self.told: deque[TellLoad] = deque()
        super().__init__(*nodes, **more)
        self.core.peers.index = index
        self.name = f"router{index}"
        self.pairs: list[str] = []
        """Requests whose legs have left and that have not ended, the oldest first."""

    def do(self, event: ev.Event) -> list[Effect]:
        effects = super().do(event)
        self.told.extend(e for e in effects if isinstance(e, TellLoad))
        if hasattr(self, "pairs"):
            self.pairs += [e.request_id for e in effects if isinstance(e, StartPair)]
        return [e for e in effects if not isinstance(e, TellLoad)]

    def serve_oldest(self) -> None:
        """Both legs of its oldest pair end well."""
        request_id = self.pairs.pop(0)
        self.do(ev.PrefillAnswered(request_id, 1, 200))
        self.do(ev.FirstDataArrived(request_id, 1))
        assert ended(self.do(ev.DecodeEnded(request_id, 1))).outcome == "ok"

    def hear(self, node: str, seen: RouterLoad, **others: RouterLoad) -> list[Effect]:
        """The node's agent says what other routers have there; ``r1`` is the router 1."""
        routers = tuple(
            OtherRouter(name=f"router{name[1:]}", index=int(name[1:]), load=load)
            for name, load in others.items()
        )
        told = OtherRouters(node=node, incarnation=f"{node}-1", others=routers, seen=seen)
        return self.do(ev.OtherRoutersReported(told))


class Agents:
    """The agents of all nodes: they pass on what routers tell, when they are asked to."""

    def __init__(self, *routers: Router) -> None:
        self.routers = routers
        self.loads = {
            (router.name, node): NOTHING
            for router in routers
            for node in router.core.membership.nodes
        }
        for node in routers[0].core.membership.nodes:
            self._tell(node)

    def relay(self) -> None:
        """Until nobody has anything to tell."""
        while any(router.told for router in self.routers):
            for router in self.routers:
                while router.told:
                    order = router.told.popleft()
                    self.loads[router.name, order.node] = order.load
                    self._tell(order.node)

    def _tell(self, node: str) -> None:
        for reader in self.routers:
            others = {
                f"r{other.core.peers.index}": self.loads[other.name, node]
                for other in self.routers
                if other is not reader
            }
            reader.hear(node, self.loads[reader.name, node], **others)


def test_what_another_has_placed_is_not_free() -> None:
    """Its blocks count from the moment that it is known, and its end gives them back."""
    router = Router(0, "p0", "d0", placement={"prefill_ahead_requests": 9})
    router.hear("d0", NOTHING, r1=RouterLoad(decode_legs=1, committed_blocks=95))
    assert router.node("d0").free_blocks == 5
    assert names(router.request("r1", output_tokens=80)) == []
    assert names(router.hear("d0", NOTHING, r1=NOTHING)) == ["StartPair"]
    assert router.node("d0").foreign_blocks == 0


def test_a_report_does_not_count_twice_what_another_has_placed() -> None:
    """What the engine uses is the others' as far as they have told; the rest is nobody's."""
    router = Router(0, "p0", "d0")
    router.hear("d0", NOTHING, r1=RouterLoad(decode_legs=2, committed_blocks=30))
    router.report("d0", free_blocks=60)
    assert router.node("d0").free_blocks == 60
    router.report("d0", free_blocks=80)
    assert router.node("d0").free_blocks == 70


def test_the_others_hear_of_every_change_one_at_a_time() -> None:
    """The first is told at once, what changes until the agent answers is told together."""
    router = Router(0, "p0", "d0", placement={"prefill_ahead_requests": 9})
    router.hear("d0", NOTHING, r1=NOTHING)
    for number in range(3):
        router.request(f"r{number}", output_tokens=32)
    (first,) = router.told
    assert (first.node, first.load.decode_legs, first.load.committed_blocks) == ("d0", 1, 4)
    router.hear("d0", first.load, r1=NOTHING)
    second = router.told[-1].load
    assert (len(router.told), second.decode_legs, second.committed_blocks) == (2, 3, 12)
    router.hear("d0", second, r1=NOTHING)
    assert len(router.told) == 2


def test_a_small_change_is_told_with_the_next_report() -> None:
    """A few blocks of ten thousand not before; a thirty-second of all blocks, slots, and anything
    while somebody waits at once.
    """
    router = Router(0, placement={"prefill_ahead_requests": 9})
    for node in ("p0", "d0"):
        router.join(node, total_blocks=10_000)
        router.report(node, free_blocks=10_000, total_blocks=10_000)
        router.hear(node, NOTHING, r1=NOTHING)
    router.request("r0")
    assert [order.node for order in router.told] == ["p0"]
    router.report("d0", free_blocks=10_000, total_blocks=10_000)
    assert [order.node for order in router.told] == ["p0", "d0"]
    told = router.told[-1].load
    router.hear("d0", told, r1=NOTHING)
    router.request("r1")
    assert len(router.told) == 2
    router.hear("d0", told, r1=RouterLoad(waiting_tokens=48))
    assert [order.node for order in router.told] == ["p0", "d0", "d0"]
    router.hear("d0", router.told[-1].load, r1=NOTHING)
    router.request("r2", prompt_tokens=1024)
    router.request("r3", prompt_tokens=1024)
    assert len(router.told) == 3
    for number in range(4, 10):
        router.request(f"r{number}", prompt_tokens=1024)
    assert len(router.told) == 4


def test_a_router_that_is_alone_tells_nothing() -> None:
    """And one whose others have gone tells no more."""
    router = Router(0, "p0", "d0", placement={"prefill_ahead_requests": 9})
    router.request("r0", output_tokens=32)
    router.hear("d0", NOTHING, r1=NOTHING)
    assert len(router.told) == 1
    router.hear("d0", NOTHING)
    router.request("r1", output_tokens=32)
    assert len(router.told) == 1
    assert router.node("d0").others is None


def test_of_free_room_a_router_takes_its_part_until_the_others_know() -> None:
    """Half of a hundred blocks at once; the rest bit by bit, as it is heard of."""
    router = Router(0, "p0", "d0", placement={"prefill_ahead_requests": 99})
    router.hear("d0", NOTHING, r1=NOTHING)
    for number in range(30):
        router.request(f"r{number}")
    assert router.node("d0").committed_blocks == 48
    router.hear("d0", router.told[-1].load, r1=NOTHING)
    router.hear("d0", router.told[-1].load, r1=NOTHING)
    assert router.node("d0").committed_blocks > 70


def test_who_waits_and_has_less_goes_first() -> None:
    """A router that fills every gap leaves what its first request needs; who has less itself does
    not.
    """
    greedy, modest = (
        Router(index, "p0", "d0", placement={"prefill_ahead_requests": 99}) for index in range(2)
    )
    other = RouterLoad(decode_legs=9, committed_blocks=20, waiting_tokens=160)
    for router, own in ((greedy, 60), (modest, 10)):
        router.node("d0").committed_blocks = own
        seen = RouterLoad(committed_blocks=own)
        router.hear("d0", seen, r7=other)
        router.report("d0", free_blocks=20)
    assert greedy.node("d0").free_blocks == 20
    assert greedy.request("r1", prompt_tokens=160) == []
    assert names(greedy.request("r2", alone_because="n > 1")) == []
    modest.report("d0", free_blocks=80 - 10 - 20)
    assert names(modest.request("r1", prompt_tokens=160)) == ["StartPair"]


def test_slots_of_prefill_nodes_are_shared() -> None:
    """Legs of other routers fill them; a slot that comes free is left to who waits and has less."""
    router = Router(1, "p0", "d0", placement={"prefill_ahead_requests": 1})
    router.hear("p0", NOTHING, r0=RouterLoad(prefill_legs=2, prefill_tokens=64))
    assert router.request("r1") == []
    waits = RouterLoad(prefill_legs=1, prefill_tokens=32, waiting_tokens=160)
    assert names(router.hear("p0", NOTHING, r0=waits)) == ["StartPair"]
    router.do(ev.PrefillAnswered("r1", 1, 200))
    router.do(ev.FirstDataArrived("r1", 1))
    less = RouterLoad(waiting_tokens=160)
    router.hear("p0", NOTHING, r0=less)
    assert names(router.request("r2")) == ["StartPair"]
    assert router.request("r3") == []
    taken = RouterLoad(prefill_legs=1, prefill_tokens=32, waiting_tokens=160)
    router.do(ev.PrefillAnswered("r2", 1, 200))
    assert names(router.hear("p0", NOTHING, r0=taken)) == []


@pytest.mark.parametrize("block_tokens", [16, 256])
def test_two_routers_never_promise_much_more_than_there_is(block_tokens: int) -> None:
    """A hundred requests each at once for room for a few: no router starves, all are served, and
    together they are beyond the memory by one request at most, which the first of them to end
    makes good.
    """
    routers = [
        Router(index, placement={"prefill_ahead_requests": 99}, queue_limit_requests=200)
        for index in range(2)
    ]
    for router in routers:
        for node in ("p0", "d0"):
            router.join(node, block_tokens=block_tokens)
            router.report(node)
    agents = Agents(*routers)
    size = 10 * block_tokens
    for number in range(100):
        for router in routers:
            router.request(f"{router.name}-{number}", prompt_tokens=size, output_tokens=size)
        if number % 3 == 0:
            agents.relay()
    agents.relay()
    promised = []
    while any(router.pairs for router in routers):
        held = [router.node("d0").committed_blocks for router in routers]
        promised.append(sum(held))
        if all(router.core.queue.size for router in routers):
            assert min(held) > 0
        for router in routers:
            if router.pairs:
                router.serve_oldest()
        agents.relay()
    assert promised[0] <= 120
    assert max(promised[1:]) <= 100
    assert sum(promised[1:50]) > 0.75 * 100 * 49
    assert all(router.is_idle() for router in routers)


def test_a_large_request_does_not_starve_beside_small_ones() -> None:
    """One router serves small requests without end, the other waits with one that needs nearly the
    whole node: room for it comes together, as it would in one router's queue.
    """
    busy, large = (
        Router(index, "p0", "d0", placement={"prefill_ahead_requests": 99}) for index in range(2)
    )
    agents = Agents(busy, large)
    for number in range(40):
        busy.request(f"small-{number}", prompt_tokens=100, output_tokens=60)
        agents.relay()
    assert busy.core.queue.size
    large.request("large", prompt_tokens=1000, output_tokens=24)
    agents.relay()
    served = 0
    while not large.pairs:
        assert served < 20, "it starves"
        large.report("d0", free_blocks=100 - busy.node("d0").committed_blocks)
        agents.relay()
        busy.serve_oldest()
        busy.request(f"next-{served}", prompt_tokens=100, output_tokens=60)
        agents.relay()
        served += 1
    large.serve_oldest()
    agents.relay()
    while busy.pairs:
        busy.serve_oldest()
        agents.relay()
    assert busy.is_idle()
    assert large.is_idle()


def test_an_agent_that_obeyed_another_router_is_believed() -> None:
    """The role is taken over with the report, said to people, and not ordered back."""
    router = Router(0, "p0", "d0", "d1")
    effects = router.report("d1", role="prefill", role_epoch=1)
    assert effects == [LearnRole("d1", "prefill")]
    assert router.node("d1").role == "prefill"
    assert router.report("d1", role="prefill", role_epoch=1) == []
    (_, order) = router.do(ev.FlipRequested(7, "d1", "decode", False))
    assert order == SetRole("d1", "decode", 2)


def test_an_order_that_came_too_late_is_given_up() -> None:
    """Two routers order at once: the agent has obeyed the other's, with a higher number."""
    router = Router(0, "p0", "d0", "d1")
    answer, order = router.do(ev.FlipRequested(7, "d1", "prefill", False))
    assert isinstance(answer, AnswerFlip)
    assert order == SetRole("d1", "prefill", 1)
    assert router.report("d1", role="decode", role_epoch=0) == [order]
    assert router.report("d1", role="decode", role_epoch=2) == [LearnRole("d1", "decode")]
    assert router.join("d1", role="decode") != []
    assert router.node("d1").role == "decode"


@pytest.mark.parametrize("restarts", [False, True])
def test_a_drain_of_another_router_is_seen(restarts: bool) -> None:
    """The node gets no new work from this one either, and hears when nothing of it is left; one
    that restarts is waited for.
    """
    router = Router(1, "p0", "d0", "d1")
    router.request("r1")
    node = router.core.requests["r1"].choice.decode.name  # type: ignore[union-attr]
    assert router.report(node, phase="draining", restarts=restarts) == []
    assert (node in router.core.membership.returning) is restarts
    router.do(ev.PrefillAnswered("r1", 1, 200))
    router.do(ev.FirstDataArrived("r1", 1))
    router.do(ev.DecodeEnded("r1", 1))
    dismissed = router.report(node, phase="draining", restarts=restarts)
    assert dismissed == [DismissNode(node, f"{node}-1")]


def test_what_engines_hold_for_another_router_is_no_difference() -> None:
    """As long as that one is there; what it leaves behind is."""
    router = Router(0, "p0", "d0")
    held = Holding("router1-5.1", "x", SENDS, LEASED, 4, 0.0, "d0-1")

    def differences() -> list[str]:
        for _ in range(2):
            router.report("p0", free_blocks=96, leased_blocks=4, holdings=(held,), running=1)
            router.now += GRACE_S + router.core.limits.lease_s + 1
        return [found.owner for found in router.core.differences(router.now)]

    router.hear("p0", NOTHING, r1=RouterLoad(prefill_legs=1))
    assert differences() == []
    router.hear("p0", NOTHING)
    assert "router1-5" in differences()


def test_a_probe_waits_for_the_requests_of_other_routers() -> None:
    """Times of a node that is busy would say nothing."""
    router = Router(0, "p0", "d0")
    router.hear("d0", NOTHING, r1=RouterLoad(decode_legs=1, committed_blocks=3))
    effects = router.request("probe-1", pinned=ev.Pinned("d0", "p0"))
    assert "1 requests of clients are on d0" in effects[0].message  # type: ignore[union-attr]
