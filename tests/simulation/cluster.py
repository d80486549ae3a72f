"""Nodes with their agents, between a router and memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulation.engine import Engine
from simulation.memory import BLOCK_TOKENS
from simulation.network import Network
from simulation.plan import ROUTER
from simulation.router import Client, Router
from splitserve.orchestrator.agent.messages import NodeDescription, NodeState
from splitserve.orchestrator.core import events as ev

if TYPE_CHECKING:
    from simulation.plan import Ask, Plan
    from simulation.world import World
    from splitserve.kv_transfer.engine_endpoint import Order

REPORT_S = 0.5
RESTART_S = 2.0
CUT_LINK_S = 3.0
"""After this long an agent's connection over a cut network is broken for the router."""


@dataclass
class Node:
    """A place for engines, and its agent."""

    name: str
    role: str
    blocks: int
    engine: Engine | None = None
    lives: int = 0
    router_life: int = 0
    """The life of the router to which the agent's connection stands; 0 for none."""
    deaths: list[str] = field(default_factory=list)
    """Incarnations that died."""
    told_deaths: int = 0
    """How many of them were told on the present connection."""


class Cluster:
    """Everything between clients and memory."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.network = Network(world)
        self.can_revoke = plan.can_revoke
        self.write_s = plan.write_s
        self.is_one_host = plan.is_one_host
        self.nodes: dict[str, Node] = {}
        self.open_faults = 0
        """Faults that have begun and not ended."""
        self._numbers = 0
        self.router = Router(self)
        blocks = (*plan.prefill_blocks, *plan.decode_blocks)
        for name, count in zip(plan.nodes, blocks, strict=True):
            node = self.nodes[name] = Node(name, name.partition("-")[0], count)
            self._start_engine(node)
            world.at(world.random.random() * REPORT_S, self._report, node)

    def new_number(self) -> int:
        """Unique in this run."""
        self._numbers += 1
        return self._numbers

    def ask(self, ask: Ask) -> None:
        """A client asks for something."""
        prompt = tuple(self.world.random.randrange(100) for _ in range(ask.prompt_tokens))
        client = Client(f"r{ask.number}", prompt, ask.max_tokens, ask.streaming)
        client.is_misfit = ask.is_misfit
        self.router.ask(client)

    # -- the router ----------------------------------------------------------------------------

    def kill_router(self) -> None:
        """SIGKILL; the agents notice."""
        self.world.note("the router is killed")
        self.router.kill()
        for node in self.nodes.values():
            node.router_life = 0

    def start_router(self) -> None:
        """Another router, to which the agents come with their next reports."""
        self.world.note("the router starts")
        self.router.start()

    # -- agents --------------------------------------------------------------------------------

    def order(self, name: str, order: Order) -> None:
        """To the node's agent, and through it to its engine."""
        node = self.nodes[name]
        if not node.router_life:
            return
        if not self.network.send(ROUTER, name, self._relay, node, order):
            self._lose_link(node, CUT_LINK_S)

    def _relay(self, node: Node, order: Order) -> None:
        if node.engine is not None:
            node.engine.process.at(0.0, node.engine.order, order)

    def break_agent(self, node: Node) -> None:
        """The agent's connection breaks, and both its ends know."""
        if node.router_life:
            self._lose_link(node, 0.0)

    def _lose_link(self, node: Node, after_s: float) -> None:
        life, node.router_life = node.router_life, 0
        if node.engine is not None:
            gone = ev.NodeDisconnected(node.name, node.engine.incarnation)
            self.world.at(after_s, self._link_lost, node, life, gone)

    def _link_lost(self, node: Node, life: int, gone: ev.NodeDisconnected) -> None:
        if not node.router_life:  # Else a newer connection speaks for the node.
            self.router.hear(life, gone)

    def _tell(self, node: Node, event: ev.Event) -> bool:
        return self.network.send(node.name, ROUTER, self.router.hear, node.router_life, event)

    def _join(self, node: Node) -> None:
        """The agent says what there is: on a new connection everything, else what is new."""
        if not node.router_life:
            if not self.router.is_up or self.network.is_cut(node.name, ROUTER):
                return
            node.router_life, node.told_deaths = self.router.life, 0
            is_new = True
        else:
            is_new = False
        for incarnation in node.deaths[node.told_deaths :]:
            self._tell(node, ev.NodeDied(node.name, incarnation, "killed"))
        node.told_deaths = len(node.deaths)
        if is_new and node.engine is not None:
            self._hello(node, node.engine)

    def _hello(self, node: Node, engine: Engine) -> None:
        description = NodeDescription(
            node=node.name,
            pool=node.role,
            incarnation=engine.incarnation,
            engine_url="http://modelled",
            engine_api_key="",
            control_addresses=(node.name,),
            model="m",
            max_model_len=1_000,
            block_tokens=BLOCK_TOKENS,
            total_blocks=node.blocks,
            tensor_parallel=1,
            transport="modelled",
            fingerprint={},
        )
        self._tell(node, ev.NodeJoined(description, node.role))

    def _report(self, node: Node) -> None:
        """The agent's state, twice a second; it also reconnects."""
        self.world.at(REPORT_S, self._report, node)
        if node.router_life and self.network.is_cut(node.name, ROUTER):
            self._lose_link(node, CUT_LINK_S)
        self._join(node)
        engine = node.engine
        if engine is None or engine.process.is_stopped or not node.router_life:
            return
        status = engine.legs.status()
        state = NodeState(
            node=node.name,
            incarnation=engine.incarnation,
            phase="ready",
            running=status.running,
            waiting=status.waiting,
            free_blocks=status.free_blocks,
            total_blocks=status.total_blocks,
            leased_blocks=status.leased_blocks,
        )
        self._tell(node, ev.NodeReported(state))

    # -- engines -------------------------------------------------------------------------------

    def host_of(self, address: str) -> str:
        """Each node is a host of its own for the network."""
        return address

    def deliver_control(self, address: str, source: Engine, number: int, message: Any) -> None:
        """A control message reaches the engine that listens at an address, if one does."""
        engine = self.nodes[address].engine
        if engine is not None:
            take = engine.transfers.take_from_decode
            engine.process.at(0.0, take, source, number, message)

    def _start_engine(self, node: Node) -> None:
        node.lives += 1
        node.engine = Engine(self, node.name, node.lives, node.blocks)
        self.world.note("{} starts with {} blocks", node.engine.incarnation, node.blocks)
        if node.router_life:
            self._hello(node, node.engine)
        self._join(node)

    def kill(self, node: Node) -> None:
        """The engine is killed with -9; its agent starts another one."""
        engine = node.engine
        if engine is None:
            return
        self.world.note("{} is killed", engine.incarnation)
        engine.process.kill()
        node.engine = None
        node.deaths.append(engine.incarnation)
        self.router.broken(engine)
        for other in self.nodes.values():
            peer = other.engine
            if peer is None:
                continue
            if self.is_one_host:
                gone = peer.transfers.peer_process_gone
                peer.process.at(0.01, self._notice_death, peer, engine.incarnation, gone, node.name)
            if not self.network.is_cut(other.name, node.name):
                peer.process.at(0.02, peer.transfers.connection_lost, node.name)
        self.world.at(RESTART_S, self._start_engine, node)

    def _notice_death(self, peer: Engine, incarnation: str, gone: Any, address: str) -> None:
        peer.known_dead.add(incarnation)
        gone(incarnation, address)

    # -- audits --------------------------------------------------------------------------------

    def check(self) -> None:
        """What is true at every moment, beside what each change checks for itself."""
        self.router.check()
        for node in self.nodes.values():
            if node.engine is not None:
                node.engine.memory.check()

    def leftovers(self) -> list[str]:
        """What an idle cluster must not hold."""
        found = self.router.leftovers()
        for node in self.nodes.values():
            if node.engine is not None:
                found += node.engine.leftovers()
        return found
