"""The router's prefix index in the virtual cluster: filled by reports, and by them alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.cluster import REPORT_S, Cluster
from simulation.plan import READY_S, Ask, Plan
from simulation.prefixes import MARKS, TOPICS, differences
from simulation.router import limits_of
from simulation.world import World
from splitserve.kv_transfer.prefix_marks import split_digests
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.router_core import RouterCore

if TYPE_CHECKING:
    from splitserve.orchestrator.core.prefix_index import PrefixIndex

SETTLED_S = 3.0
PLAN = Plan(
    seed=1,
    prefill_blocks=(40, 40),
    decode_blocks=(40, 40),
    write_s=0.002,
    can_revoke=False,
    is_one_host=False,
    asks=tuple(Ask(number, 0.0, 24, 4) for number in range(2 * TOPICS)),
    faults=(),
    has_prefixes=True,
)


class Story:
    """A cluster without faults."""

    def __init__(self) -> None:
        self.world = World(PLAN.seed)
        self.cluster = Cluster(self.world, PLAN)
        self.world.run_for(READY_S)
        self.placed: dict[str, str] = {}

    @property
    def index(self) -> PrefixIndex:
        return self.cluster.router.core.prefixes

    def say_all(self) -> None:
        """All prompts one after the other, until every report is in."""
        for ask in PLAN.asks:
            self.cluster.ask(ask)
            self.world.run_for(2 * REPORT_S)

    def turn(self, number: int) -> str:
        """Where another prompt of that topic is computed."""
        self.cluster.ask(Ask(number, 0.0, 24, 4))
        request = self.cluster.router.core.requests[f"r{number}"]
        assert request.choice is not None
        assert request.choice.prefill is not None
        node = request.choice.prefill.name
        self.world.run_for(2 * REPORT_S)
        assert self.cluster.router.clients[f"r{number}"].outcome == "ok"
        return node


def test_the_index_is_what_engines_hold() -> None:
    """Each topic's marks are known after its first prompt, and its next prompts go to that node."""
    story = Story()
    story.say_all()
    assert len(story.index) > 0
    assert differences(story.cluster) == []
    nodes = [story.turn(10 * TOPICS + 1 + TOPICS * n) for n in range(4)]
    assert len(set(nodes)) == 1


def test_a_restarted_router_is_filled_by_its_agents() -> None:
    """Without any request it knows what the one before knew, and decides the same."""
    story = Story()
    story.say_all()
    node = story.turn(10 * TOPICS + 1)
    before = story.index._holders
    assert before
    story.cluster.kill_router()
    story.cluster.start_router()
    assert len(story.index) == 0
    story.world.run_for(SETTLED_S)
    assert story.index._holders == before
    assert differences(story.cluster) == []
    assert story.turn(11 * TOPICS + 1) == node


def test_a_second_router_is_filled_likewise() -> None:
    """Whoever asks the engines from the start knows what the first router knows by increments."""
    story = Story()
    story.say_all()
    second = RouterCore(limits_of(PLAN))
    for name, member in story.cluster.router.core.membership.nodes.items():
        engine = story.cluster.nodes[name].engine
        assert engine is not None
        second.handle(ev.NodeJoined(member.description, member.role), story.world.now)
        report = engine.legs._prefixes(True)
        assert report.is_first
        assert len(report.tokens) <= MARKS * TOPICS
        added = tuple(zip(split_digests(report.added), report.tokens, strict=True))
        life = engine.incarnation
        second.handle(ev.NodePrefixesReported(name, life, True, added, ()), story.world.now)
    assert second.prefixes._holders == story.index._holders
