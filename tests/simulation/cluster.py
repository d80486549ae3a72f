"""Nodes with their agents, between a router and memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from simulation import prefixes
from simulation.clients import Client
from simulation.engine import Engine
from simulation.memory import BLOCK_TOKENS
from simulation.network import Network
from simulation.plan import ROUTER
from simulation.prefixes import marks_of
from simulation.router import Router, limits_of
from splitserve.orchestrator.agent.messages import NodeDescription, NodeState
from splitserve.orchestrator.core import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.plan import Ask, Plan
    from simulation.world import World
    from splitserve.kv_transfer.engine_endpoint import Order

REPORT_S = 0.5
START_S = 0.1
"""All agents report for the first time within this."""
RESTART_S = 2.0
CUT_LINK_S = 3.0
"""After this long an agent's connection over a cut network is broken for the router."""


@dataclass
class Node:
    """A place for engines, and its agent."""

    name: str
    pool: str
    blocks: int
    role: str
    """As its agent was told last."""
    role_epoch: int = 0
    engine: Engine | None = None
    lives: int = 0
    router_life: int = 0
    """The life of the router to which the agent's connection stands; 0 for none."""
    deaths: list[ev.NodeDied] = field(default_factory=list)
    """Of all its engines."""
    told_deaths: int = 0
    """How many of them were told on the present connection."""
    draining: str = ""
    """The incarnation that gets no new work."""
    dismissed: str = ""
    """The incarnation that may end."""
    is_overdue: bool = False
    """It ends whatever it owes."""
    is_welcome: bool = False
    """The router of the present connection has said so."""
    begins_anew: bool = True
    """All prefixes are to be told again."""


class Cluster:
    """Everything between clients and memory."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.network = Network(world)
        self.can_revoke = plan.can_revoke
        self.write_s = plan.write_s
        self.is_one_host = plan.is_one_host
        self.step_s = plan.step_s
        self.fence_timeout_s = plan.fence_timeout_s
        self.has_prefixes = plan.has_prefixes
        self.nodes: dict[str, Node] = {}
        self.open_faults = 0
        """Faults that have begun and not ended."""
        self.calm_since = 0.0
        """When the latest fault ended, or an engine died."""
        self._numbers = 0
        self.router = Router(self, limits_of(plan))
        blocks = (*plan.prefill_blocks, *plan.decode_blocks)
        for name, count in zip(plan.nodes, blocks, strict=True):
            pool = name.partition("-")[0]
            node = self.nodes[name] = Node(name, pool, count, pool)
            self._start_engine(node)
            world.at(world.random.random() * START_S, self._report, node)

    def new_number(self) -> int:
        """Unique in this run."""
        self._numbers += 1
        return self._numbers

    def ask(self, ask: Ask) -> None:
        """A client asks for something."""
        prompt = tuple(self.world.random.randrange(100) for _ in range(ask.prompt_tokens))
        client = Client(f"r{ask.number}", prompt, ask.max_tokens, ask.streaming)
        client.is_misfit, client.can_continue = ask.is_misfit, ask.can_continue
        client.tenant = ask.tenant
        if self.has_prefixes:
            client.marks = marks_of(ask.number)
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
        self._send_agent(name, self._relay, order)

    def end_engine(self, name: str, incarnation: str) -> None:
        """The agent kills its engine, if it is still that one."""
        self._send_agent(name, self._end_engine, incarnation)

    def drain(self, name: str, timeout_s: float | None) -> None:
        """An operator restarts a node."""
        asked = ev.DrainRequested(0, name, restarts=True, is_forced=True, timeout_s=timeout_s)
        self.router.hear(self.router.life, asked)

    def flip(self, name: str, *, is_forced: bool) -> None:
        """Somebody wants a node to have its other role."""
        known = self.router.core.membership.nodes.get(name)
        role = known.role if known is not None else self.nodes[name].role
        other = "decode" if role == "prefill" else "prefill"
        self.router.hear(self.router.life, ev.FlipRequested(0, name, other, is_forced))

    def set_role(self, name: str, role: str, epoch: int) -> None:
        """The agent says from now on that its node has that role."""
        self._send_agent(name, self._set_role, role, epoch)

    def begin_drain(self, name: str, incarnation: str) -> None:
        """The agent reports its node as draining from now on."""
        self._send_agent(name, self._begin_drain, incarnation)

    def dismiss(self, name: str, incarnation: str, *, at_once: bool) -> None:
        """The agent's engine ends when it owes nothing, or at once."""
        self._send_agent(name, self._dismiss, incarnation, at_once)

    def _send_agent(self, name: str, call: Callable[..., None], *args: Any) -> None:
        node = self.nodes[name]
        if node.router_life and not self.network.send(ROUTER, name, call, node, *args):
            self._lose_link(node, CUT_LINK_S)

    def welcome(self, name: str) -> None:
        """The agent tells all prefixes from now on."""
        self._send_agent(name, self._welcome)

    def _welcome(self, node: Node) -> None:
        node.is_welcome = node.begins_anew = True

    def _relay(self, node: Node, order: Order) -> None:
        if node.engine is not None:
            node.engine.process.at(0.0, node.engine.order, order)

    def _end_engine(self, node: Node, incarnation: str) -> None:
        if node.engine is not None and node.engine.incarnation == incarnation:
            self.kill(node)

    def _set_role(self, node: Node, role: str, epoch: int) -> None:
        if epoch > node.role_epoch:
            node.role, node.role_epoch = role, epoch

    def _begin_drain(self, node: Node, incarnation: str) -> None:
        node.draining = incarnation

    def _dismiss(self, node: Node, incarnation: str, at_once: bool) -> None:
        node.dismissed, node.is_overdue = incarnation, at_once

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

    def tell(self, node: Node, event: ev.Event) -> bool:
        """The agent tells the router something; False when it cannot."""
        return self.network.send(node.name, ROUTER, self.router.hear, node.router_life, event)

    def _join(self, node: Node) -> None:
        """The agent says what there is: on a new connection everything, else what is new."""
        if not node.router_life:
            if not self.router.is_up or self.network.is_cut(node.name, ROUTER):
                return
            node.router_life, node.told_deaths = self.router.life, 0
            node.is_welcome = False
            is_new = True
        else:
            is_new = False
        for died in node.deaths[node.told_deaths :]:
            self.tell(node, died)
        node.told_deaths = len(node.deaths)
        if is_new and node.engine is not None:
            self._hello(node, node.engine)

    def _hello(self, node: Node, engine: Engine) -> None:
        description = NodeDescription(
            node=node.name,
            pool=node.pool,
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
            reports_prefixes=self.has_prefixes,
        )
        self.tell(node, ev.NodeJoined(description, node.role, node.role_epoch))

    def _report(self, node: Node) -> None:
        """The agent's state, twice a second; it also reconnects."""
        self.world.at(REPORT_S, self._report, node)
        if node.router_life and self.network.is_cut(node.name, ROUTER):
            self._lose_link(node, CUT_LINK_S)
        self._join(node)
        engine = node.engine
        if engine is None:
            return
        is_dismissed = node.dismissed == engine.incarnation
        if engine.process.is_stopped:
            if is_dismissed and node.is_overdue:
                self.kill(node)
            return
        status = engine.legs.status()
        phase = "draining" if node.draining == engine.incarnation else "ready"
        if node.router_life:
            state = NodeState(
                node=node.name,
                incarnation=engine.incarnation,
                phase=phase,
                role=node.role,
                role_epoch=node.role_epoch,
                **asdict(status),
            )
            self.tell(node, ev.NodeReported(state))
        prefixes.report(self, node)
        owed = status.running + status.waiting + status.open_transfers + status.leased_blocks
        if is_dismissed and (node.is_overdue or not owed):
            self.kill(node, owed_nothing=not owed)

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

    def kill(self, node: Node, *, owed_nothing: bool = False) -> None:
        """The engine is killed with -9, or has drained; its agent starts another one."""
        engine = node.engine
        if engine is None:
            return
        self.world.note("{} {}", engine.incarnation, "drained" if owed_nothing else "is killed")
        engine.process.kill()
        self.calm_since = self.world.now
        node.engine = None
        node.deaths.append(ev.NodeDied(node.name, engine.incarnation, "killed", owed_nothing))
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
