"""1,000 nodes and 20,000 requests in flight, in virtual time, with the real core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.fleet import Asked, Fleet
from simulation.world import World
from splitserve.orchestrator.core.limits import CoreLimits

if TYPE_CHECKING:
    from collections.abc import Callable

PREFILL_NODES, DECODE_NODES = 300, 700
REQUESTS, IN_FLIGHT = 22_000, 20_000
ARRIVE_S = 10.0
BLOCKS = 2_400
TOPICS = 300
END_S = 120.0
LOOKS_S = 5.0


def test_twenty_thousand_requests_on_a_thousand_nodes(summary: Callable[[str], None]) -> None:
    """While engines die, nodes restart, change their roles and fall silent, and clients leave, no
    engine gets more than it has room for, what the core counts is what engines have, every request
    ends once, only those fail whose decode engine died, and in the end nothing is promised.
    """
    world = World(7)
    limits = CoreLimits(queue_limit_requests=REQUESTS, queue_timeout_s=60.0)
    roles = {f"prefill-{n}": "prefill" for n in range(PREFILL_NODES)}
    roles |= {f"decode-{n}": "decode" for n in range(DECODE_NODES)}
    fleet = Fleet(world, limits, roles, BLOCKS)
    world.run_for(1.0)
    leaving = plan_requests(world, fleet)
    killed = plan_faults(world, fleet, list(roles))
    for _ in range(int(END_S / LOOKS_S)):
        world.run_for(LOOKS_S)
        fleet.check()
        if len(fleet.ended) == REQUESTS:
            break
    summary(
        f"{len(roles):,} nodes, {fleet.most_in_flight:,} requests in flight, {fleet.placed:,} "
        f"placements, {world.steps:,} events, {world.now:.0f} s: {dict(fleet.outcomes)}"
    )
    assert len(fleet.ended) == REQUESTS
    assert fleet.most_in_flight >= IN_FLIGHT
    assert fleet.outcomes["cancelled"] <= leaving
    assert set(fleet.outcomes) <= {"ok", "cancelled", "error"}
    assert fleet.outcomes["error"] <= killed * 2 * REQUESTS / DECODE_NODES
    core = fleet.core
    assert not core.requests
    assert not core.queue.size
    assert not any(core.deadlines.values())
    for node in core.membership.nodes.values():
        assert (node.prefill_legs, node.decode_legs, node.committed_blocks) == (0, 0, 0)


def plan_requests(world: World, fleet: Fleet) -> int:
    """Clients come, and some leave; returns how many."""
    random = world.random
    leaving = 0
    for number in range(REQUESTS):
        at = random.random() * ARRIVE_S
        asked = Asked(
            prompt_tokens=random.randint(200, 1_600),
            output_tokens=random.randint(16, 512),
            topic=random.randrange(TOPICS),
            streams_s=random.uniform(12.0, 25.0),
            can_continue=random.random() < 0.5,
        )
        world.at(at, fleet.ask, f"r{number}", asked)
        if random.random() < 0.01:
            leaving += 1
            world.at(at + random.random() * 20.0, fleet.leave, f"r{number}")
    return leaving


def plan_faults(world: World, fleet: Fleet, names: list[str]) -> int:
    """All within the time in which requests come and are served; returns how many engines die."""
    random = world.random
    killed = random.sample(names, 20)
    for name in killed:
        world.at(random.uniform(2.0, 25.0), fleet.kill, name)
    for name in random.sample(names, 20):
        world.at(random.uniform(2.0, 25.0), fleet.restart, name)
    for name in random.sample(names, 40):
        world.at(random.uniform(2.0, 25.0), fleet.flip, name)
    for name in random.sample(names, 10):
        world.at(random.uniform(2.0, 25.0), fleet.silence, name, 7.0)
    return len(killed)
