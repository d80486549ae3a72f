"""One run: a cluster, requests, faults, and the end, at which nothing may be left."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulation import faults
from simulation.cluster import REPORT_S, Cluster
from simulation.plan import LOAD_S, LONGEST_FAULT_S, Plan, drain_plan, random_plan
from simulation.world import InvariantError, World

if TYPE_CHECKING:
    from collections.abc import Iterable

SETTLE_S = 45.0
"""After the last fault: longer than every deadline, lease and silence together."""
STEP_LIMIT = 100_000
LOOK_STEPS = 16
"""Between looks whether everything is over."""


@dataclass
class Result:
    """What runs were: a sum of them is one, too."""

    runs: int = 0
    steps: int = 0
    requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """By kind."""
    outcomes: Counter[str] = field(default_factory=Counter)
    continuations: int = 0
    """Streams that another node went on with."""
    flips: int = 0
    """Changes of a node's role."""
    ended_engines: int = 0
    """Engines that were to end because of a fence that did not come."""

    def add(self, other: Result) -> None:
        """Count another one in."""
        self.runs += other.runs
        self.steps += other.steps
        self.requests += other.requests
        self.faults += other.faults
        self.outcomes += other.outcomes
        self.continuations += other.continuations
        self.flips += other.flips
        self.ended_engines += other.ended_engines

    def lines(self) -> list[str]:
        """The counts, for people."""
        shares = [f"{count:,} {what}" for what, count in sorted(self.outcomes.items())]
        kinds = [f"{count:,} {kind}" for kind, count in sorted(self.faults.items())]
        return [
            f"{self.runs:,} seeds, {self.steps:,} steps (delivered events), no invariant violated",
            f"{self.requests:,} requests: {', '.join(shares)}",
            f"{self.faults.total():,} faults: {', '.join(kinds)}",
            f"{self.continuations:,} streams continued elsewhere, {self.flips:,} roles changed, "
            f"{self.ended_engines:,} orders to end an engine that owed a fence",
        ]


def run(seed: int) -> Result:
    """Run a seed's plan."""
    return run_plan(random_plan(seed))


def run_many(seeds: Iterable[int]) -> Result:
    """Run several seeds after each other."""
    total = Result()
    for seed in seeds:
        total.add(run(seed))
    return total


def drain_many(seeds: Iterable[int]) -> Result:
    """Run several seeds in which nodes only drain, restart and change roles: no request fails."""
    total = Result()
    for seed in seeds:
        result = run_plan(drain_plan(seed))
        if result.outcomes != {"ok": result.requests}:
            raise InvariantError(f"drains of seed {seed}: {result.outcomes}")
        total.add(result)
    return total


def run_plan(plan: Plan) -> Result:
    """Run a plan to its end. Raises ``InvariantError``, for any error of the code under test too:
    it travels between processes.
    """
    world = World(plan.seed)
    cluster = Cluster(world, plan)
    for ask in plan.asks:
        world.at(ask.at, cluster.ask, ask)
    for fault in plan.faults:
        world.at(fault.at, faults.begin, cluster, fault)
    last = max([LOAD_S, *(ask.at for ask in plan.asks), *(fault.at for fault in plan.faults)])
    try:
        settle(cluster, load_s=last)
    except InvariantError:
        raise
    except Exception as error:
        raise InvariantError(f"seed {plan.seed}: {error!r}\n{world.story()}") from error
    router = cluster.router
    return Result(
        1,
        world.steps,
        len(plan.asks),
        Counter(fault.kind for fault in plan.faults),
        Counter(client.outcome for client in router.clients.values()),
        router.continuations,
        router.flips,
        router.ended_engines,
    )


def settle(cluster: Cluster, *, load_s: float = LOAD_S) -> None:
    """Let everything come and go; afterwards nothing may be left."""
    world = cluster.world
    end = world.now + load_s + LONGEST_FAULT_S + SETTLE_S
    first, limit = world.now + load_s, world.steps + STEP_LIMIT
    while world.now < end and world.step():
        if world.steps > limit:
            world.fail(f"more than {STEP_LIMIT} steps")
        if world.now > first and not world.steps % LOOK_STEPS and is_over(cluster):
            break
    left = cluster.leftovers()
    if left:
        world.fail("left at the end: " + "; ".join(left))
    world.run_for(2 * REPORT_S)
    cluster.router.look_at_audit()


def is_over(cluster: Cluster) -> bool:
    """Every request and every fault has come and gone, and nothing is left."""
    return not (
        cluster.open_faults
        or (cluster.router.is_up and cluster.router.core.requests)
        or cluster.leftovers()
    )
