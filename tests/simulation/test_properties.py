"""Hypothesis chooses what happens to a cluster, and makes what fails smaller."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from simulation import faults
from simulation.cluster import Cluster
from simulation.memory import BLOCK_TOKENS
from simulation.plan import HEAVY, LONGEST_FAULT_S, ROUTER, Ask, Fault, Plan
from simulation.runs import settle
from simulation.world import World

BLOCKS = st.lists(st.integers(12, 40), min_size=1, max_size=2).map(tuple)
SECONDS = st.floats(0.01, LONGEST_FAULT_S)
SHORT_S = st.sampled_from([0.001, 0.01, 0.1, 1.0, 3.0])
REQUEST_LIMIT = 30
PLACE = st.integers(0, 3)
"""Which node, counted round."""
PROBABILITIES = {"drop": 0.5, "duplicate": 0.3, "reorder": 0.3, "delay": 0.5}


class Clusters(RuleBasedStateMachine):
    """Requests and faults in any order, with time between them."""

    @initialize(
        prefill=BLOCKS,
        decode=BLOCKS,
        write_s=st.sampled_from([0.002, 0.5]),
        can_revoke=st.booleans(),
        is_one_host=st.booleans(),
        queue_limit_requests=st.sampled_from([2, 8]),
        fence_timeout_s=st.sampled_from([1.0, 12.0]),
    )
    def begin(
        self,
        prefill: tuple[int, ...],
        decode: tuple[int, ...],
        write_s: float,
        can_revoke: bool,
        is_one_host: bool,
        queue_limit_requests: int,
        fence_timeout_s: float,
    ) -> None:
        """A cluster that has just started."""
        self.plan = Plan(
            seed=0,
            prefill_blocks=prefill,
            decode_blocks=decode,
            write_s=write_s,
            can_revoke=can_revoke,
            is_one_host=is_one_host and not can_revoke,
            asks=(),
            faults=(),
            queue_limit_requests=queue_limit_requests,
            fence_timeout_s=fence_timeout_s,
        )
        self.world = World(0)
        self.cluster = Cluster(self.world, self.plan)
        self.requests = 0
        self.world.run_for(1.0)

    @rule(
        tokens=st.integers(1, 6 * BLOCK_TOKENS - 6),
        answer=st.integers(1, 6),
        is_misfit=st.sampled_from([False, False, False, True]),
        can_continue=st.booleans(),
        tenant=st.sampled_from(["", "light", HEAVY]),
    )
    def ask(
        self, tokens: int, answer: int, is_misfit: bool, can_continue: bool, tenant: str
    ) -> None:
        """A client asks."""
        if self.requests < REQUEST_LIMIT:
            ask = Ask(
                self.requests,
                0.0,
                tokens,
                answer,
                is_misfit=is_misfit,
                can_continue=can_continue,
                tenant=tenant,
            )
            self.cluster.ask(ask)
            self.requests += 1

    @rule(kind=st.sampled_from(["kill", "preempt", "agent reconnects"]), place=PLACE)
    def strike(self, kind: str, place: int) -> None:
        """Something happens to a node at once."""
        self.go_wrong(Fault(0.0, kind, node=self.node(place)))

    @rule(
        kind=st.sampled_from(["pause", "slow"]),
        place=PLACE,
        seconds=SECONDS,
        strength=st.sampled_from([3.0, 200.0]),
    )
    def hinder(self, kind: str, place: int, seconds: float, strength: float) -> None:
        """A node stands still or is slow for a while."""
        self.go_wrong(Fault(0.0, kind, node=self.node(place), seconds=seconds, strength=strength))

    @rule(first=st.integers(0, 4), second=st.integers(1, 4), seconds=SECONDS)
    def partition(self, first: int, second: int, seconds: float) -> None:
        """Two hosts do not reach each other for a while."""
        hosts = [ROUTER, *self.plan.nodes]
        node, other = hosts[first % len(hosts)], hosts[(first + second) % len(hosts)]
        if node != other:
            self.go_wrong(Fault(0.0, "partition", node=node, other=other, seconds=seconds))

    @rule(kind=st.sampled_from(sorted(PROBABILITIES)), seconds=SECONDS)
    def spoil(self, kind: str, seconds: float) -> None:
        """The control channel is bad for a while."""
        self.go_wrong(Fault(0.0, kind, seconds=seconds, strength=PROBABILITIES[kind]))

    @rule(
        kind=st.sampled_from(["leave", "prefill leg broken", "decode leg broken"]),
        request=st.integers(0, REQUEST_LIMIT),
    )
    def hang_up(self, kind: str, request: int) -> None:
        """A client leaves, or a leg's connection breaks."""
        self.go_wrong(Fault(0.0, kind, request=request))

    @rule(request=st.integers(0, REQUEST_LIMIT), seconds=SECONDS, stops=st.booleans())
    def strike_stream(self, request: int, seconds: float, stops: bool) -> None:
        """The engine of a stream dies, or stops for a while."""
        strength = 1.0 if stops else 0.0
        fault = Fault(0.0, "stream struck", request=request, seconds=seconds, strength=strength)
        self.go_wrong(fault)

    @rule(place=PLACE, seconds=st.sampled_from([0.0, 1.0, 10.0]))
    def drain(self, place: int, seconds: float) -> None:
        """An operator restarts a node."""
        self.go_wrong(Fault(0.0, "drain", node=self.node(place), seconds=seconds))

    @rule(place=PLACE, forces=st.booleans())
    def flip(self, place: int, forces: bool) -> None:
        """Somebody changes a node's role."""
        self.go_wrong(Fault(0.0, "flip", node=self.node(place), strength=float(forces)))

    @rule(seconds=st.floats(0.2, 3.0), really=st.sampled_from([True, False, False]))
    def kill_router(self, seconds: float, really: bool) -> None:
        """The router dies, and another one starts."""
        if really:
            self.go_wrong(Fault(0.0, "router killed", seconds=seconds))

    @rule(seconds=SHORT_S)
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.world.run_for(seconds)

    @invariant()
    def nothing_is_wrong(self) -> None:
        """Every block has one owner, promises add up, tokens are right."""
        if hasattr(self, "cluster"):
            self.cluster.check()

    def teardown(self) -> None:
        """Whatever has happened, everything ends and nothing is held."""
        if hasattr(self, "cluster"):
            settle(self.cluster, load_s=0.0)

    def node(self, place: int) -> str:
        return self.plan.nodes[place % len(self.plan.nodes)]

    def go_wrong(self, fault: Fault) -> None:
        faults.begin(self.cluster, fault)


TestClusters = Clusters.TestCase
TestClusters.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, derandomize=True
)
