"""One seed: a cluster, requests, faults, and the end, at which nothing may be left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.cluster import ROUTER, Cluster, random_client
from simulation.network import Weather
from simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


def run(
    seed: int,
    *,
    requests: int = 16,
    faults: int = 6,
    kinds: Sequence[Callable[[Cluster], None]] | None = None,
    begin_s: float = 0.0,
) -> Result:
    """Run a seed to its end, with faults of all kinds unless told otherwise; nothing is asked and
    no fault begins before ``begin_s``. Raises ``InvariantError``, or any assertion of the code
    under test.
    """
    kinds = kinds or FAULTS
    world = World(seed)
    random = world.random
    cluster = Cluster(world, random.randint(1, 2), random.randint(1, 2))
    for number in range(requests):
        client = random_client(cluster, number)
        world.at(begin_s + random.random() * LOAD_S, cluster.ask, client)
    for _ in range(faults):
        world.at(begin_s + random.random() * LOAD_S, random.choice(kinds), cluster)
    end = begin_s + LOAD_S + LONGEST_FAULT_S + SETTLE_S
    while world.now < end and world.step():
        if world.steps > STEP_LIMIT:
            world.fail(f"more than {STEP_LIMIT} steps")
        if world.now > begin_s + LOAD_S and is_over(cluster):
            break
    left = cluster.leftovers()
    if left:
        world.fail("left at the end: " + "; ".join(left))
    outcomes: dict[str, int] = {}
    for client in cluster.clients.values():
        outcomes[client.outcome] = outcomes.get(client.outcome, 0) + 1
    return Result(seed, world.steps, requests, faults, outcomes)


def is_over(cluster: Cluster) -> bool:
    """No fault goes on, and nothing is left of any request."""
    return not (cluster.open_faults or cluster.core.requests or cluster.leftovers())


def _for_a_while(cluster: Cluster, begin: Callable[[], None], end: Callable[[], None]) -> None:
    begin()
    cluster.open_faults += 1

    def over() -> None:
        cluster.open_faults -= 1
        end()

    seconds = min(LONGEST_FAULT_S, cluster.world.random.expovariate(1 / 3))
    cluster.world.at(seconds, over)


def kill(cluster: Cluster) -> None:
    """An engine dies."""
    cluster.kill(cluster.world.random.choice(list(cluster.nodes.values())))


def pause(cluster: Cluster) -> None:
    """An engine is stopped for a while."""
    node = cluster.world.random.choice(list(cluster.nodes.values()))
    engine = node.engine
    if engine is None:
        return
    cluster.world.note(f"{engine.incarnation} is stopped")
    process = engine.process
    _for_a_while(cluster, process.stop, process.go_on)


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


def drain(cluster: Cluster) -> None:
    """An operator restarts a node, some with little patience."""
    random = cluster.world.random
    cluster.drain(random.choice(list(cluster.nodes)), random.choice([None, 1.0, 10.0]))


def drain_patiently(cluster: Cluster) -> None:
    """An operator restarts a node, and waits for what it owes."""
    cluster.drain(cluster.world.random.choice(list(cluster.nodes)), None)


FAULTS = [kill, pause, slow, partition, weather, leave, preempt, preempt]
FAULTS_AND_DRAINS = [*FAULTS, drain, drain, drain]
DRAINS = [drain_patiently, drain_patiently, slow, preempt]
"""What fails no request."""
