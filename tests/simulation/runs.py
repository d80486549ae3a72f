"""One seed: a cluster, requests, faults, and the end, at which nothing may be left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.cluster import ROUTER, Cluster, random_client
from simulation.network import Weather
from simulation.world import World
from splitserve.orchestrator.core.lifecycle import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.cluster import Node

LOAD_S = 4.0
"""Requests arrive and faults begin within this time."""
LONGEST_FAULT_S = 15.0
SETTLE_S = 60.0
"""After the last fault: longer than every deadline, lease and silence together."""
SLOWNESS = 20.0
STEP_LIMIT = 200_000


@dataclass
class Result:
    """What one seed was."""

    seed: int
    steps: int
    requests: int
    faults: int
    outcomes: dict[str, int]
    ended_engines: int


def run(seed: int, *, requests: int = 16, faults: int = 6) -> Result:
    """Run a seed to its end. Raises ``InvariantError``, or any assertion of the code under test."""
    world = World(seed)
    random = world.random
    cluster = Cluster(world, random.randint(1, 2), random.randint(1, 3))
    for number in range(requests):
        client = random_client(cluster, number)
        world.at(random.random() * LOAD_S, cluster.ask, client)
    for _ in range(faults):
        world.at(random.random() * LOAD_S, random.choice(FAULTS), cluster)
    end = LOAD_S + LONGEST_FAULT_S + SETTLE_S
    while world.now < end and world.step():
        if world.steps > STEP_LIMIT:
            world.fail(f"more than {STEP_LIMIT} steps")
        if is_over(cluster):
            break
    left = cluster.leftovers()
    if left:
        world.fail("left at the end: " + "; ".join(left))
    outcomes: dict[str, int] = {}
    for client in cluster.clients.values():
        outcomes[client.outcome] = outcomes.get(client.outcome, 0) + 1
    return Result(seed, world.steps, requests, faults, outcomes, cluster.ended_engines)


def is_over(cluster: Cluster) -> bool:
    """Every request and every fault has come and gone, and nothing is left."""
    world = cluster.world
    return world.now > LOAD_S and not (
        cluster.open_faults or cluster.core.requests or cluster.leftovers()
    )


def _for_a_while(
    cluster: Cluster,
    begin: Callable[[], None],
    end: Callable[[], None],
    seconds: float | None = None,
) -> None:
    begin()
    cluster.open_faults += 1

    def over() -> None:
        cluster.open_faults -= 1
        cluster.calm_since = cluster.world.now
        end()

    if seconds is None:
        seconds = min(LONGEST_FAULT_S, cluster.world.random.expovariate(1 / 3))
    cluster.world.at(seconds, over)


def kill(cluster: Cluster) -> None:
    """An engine dies."""
    cluster.kill(cluster.world.random.choice(list(cluster.nodes.values())))


def strike_stream(cluster: Cluster) -> None:
    """The engine of a stream dies or stops, if there is a stream."""
    streams = [r for r in cluster.core.requests.values() if r.phase is Phase.STREAMING]
    random = cluster.world.random
    for request in random.sample(streams, min(1, len(streams))):
        assert request.choice is not None
        node = cluster.nodes[request.choice.decode.name]
        if random.random() < 0.5:
            cluster.kill(node)
        else:
            _pause(cluster, node)


def pause(cluster: Cluster) -> None:
    """An engine is stopped for a while."""
    _pause(cluster, cluster.world.random.choice(list(cluster.nodes.values())))


def _pause(cluster: Cluster, node: Node) -> None:
    engine = node.engine
    if engine is None:
        return
    cluster.world.note(f"{engine.incarnation} is stopped")
    process = engine.process
    _for_a_while(cluster, process.stop, process.go_on)


def hang(cluster: Cluster) -> None:
    """A prefill engine is stopped for long in the middle of its work, and nobody waits for it."""
    busy = [
        node
        for node in cluster.core.membership.nodes.values()
        if node.prefill_legs and cluster.nodes[node.name].engine is not None
    ]
    if not busy:
        return
    node = cluster.world.random.choice(busy)
    engine = cluster.nodes[node.name].engine
    assert engine is not None
    cluster.world.note(f"{engine.incarnation} is stopped, and its clients leave")
    process = engine.process
    _for_a_while(cluster, process.stop, process.go_on, LONGEST_FAULT_S)
    for request in list(cluster.core.requests.values()):
        if request.choice is not None and request.choice.prefill is node:
            cluster.leave(request.id)


def slow(cluster: Cluster) -> None:
    """An engine is slow for a while."""
    engine = cluster.world.random.choice(list(cluster.nodes.values())).engine
    if engine is None:
        return
    process = engine.process
    cluster.world.note(f"{engine.incarnation} is slow")

    def begin() -> None:
        process.slowness = SLOWNESS

    def end() -> None:
        process.slowness = 1.0

    _for_a_while(cluster, begin, end)


def partition(cluster: Cluster) -> None:
    """Two hosts do not reach each other for a while."""
    a, b = cluster.world.random.sample([ROUTER, *cluster.nodes], 2)
    cluster.world.note(f"{a} and {b} are cut apart")
    network = cluster.network
    _for_a_while(cluster, lambda: network.cut(a, b), lambda: network.mend(a, b))


def weather(cluster: Cluster) -> None:
    """The control channel loses, repeats, delays and shuffles for a while."""
    random, network = cluster.world.random, cluster.network
    bad = Weather(
        drop=random.choice([0, 0.1, 0.5]),
        duplicate=random.choice([0, 0.3]),
        reorder=random.choice([0, 0.3]),
        delay_s=random.choice([0, 0.01, 0.5]),
    )
    cluster.world.note(f"the control channel is bad: {bad}")

    def begin() -> None:
        network.weather = bad

    def end() -> None:
        network.weather = Weather()

    _for_a_while(cluster, begin, end)


def leave(cluster: Cluster) -> None:
    """A client closes its connection."""
    if cluster.core.requests:
        cluster.leave(cluster.world.random.choice(list(cluster.core.requests)))


def preempt(cluster: Cluster) -> None:
    """An engine takes a running request's blocks back."""
    random = cluster.world.random
    engine = random.choice(list(cluster.nodes.values())).engine
    for _ in range(10 if engine is not None else 0):
        engine.process.at(random.random(), engine.preempt)


FAULTS = [kill, pause, hang, slow, partition, weather, leave, preempt, preempt, strike_stream]
