"""Nodes with their agents, a router around the real ``RouterCore``, and clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from simulation.engine import WRONG, Engine, EngineRequest, token
from simulation.memory import BLOCK_TOKENS, blocks_for
from simulation.network import Network
from splitserve.kv_transfer.engine_endpoint import GiveUpTransfer, Order, PeerIsDead
from splitserve.kv_transfer.orders import Retarget
from splitserve.kv_transfer.transfer_params import TransferParams
from splitserve.orchestrator.agent.messages import NodeDescription, NodeState
from splitserve.orchestrator.core import effects as ef
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.core.placement import PlacementLimits
from splitserve.orchestrator.core.router_core import RouterCore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulation.world import World

ROUTER = "router"
REPORT_S = 0.5
RESTART_S = 2.0
CUT_LEG_S = 3.0
"""After this long a leg over a cut connection is broken for both its ends."""
LIMITS = CoreLimits(
    queue_timeout_s=20.0,
    first_token_deadline_s=40.0,
    request_deadline_s=60.0,
    node_silence_limit_s=3.0,
    placement=PlacementLimits(default_output_tokens=8),
)


@dataclass
class Node:
    """A place for engines, and its agent."""

    name: str
    role: str
    blocks: int
    engine: Engine | None = None
    lives: int = 0
    is_known: bool = False
    """The agent's connection to the router stands."""
    deaths: list[tuple[str, bool]] = field(default_factory=list)
    """Incarnations whose death the router has not been told, and whether they owed nothing."""
    draining: str = ""
    """The incarnation that gets no new work."""
    dismissed: str = ""
    """The incarnation that may end."""
    is_overdue: bool = False


@dataclass
class Leg:
    """One request of the router to an engine."""

    request_id: str
    attempt: int
    kind: str
    node: str
    engine: Engine | None = None
    is_over: bool = False
    has_lost_bytes: bool = False
    """The connection was cut in the middle of an answer: nothing more comes on it."""
    has_data: bool = False


@dataclass
class Client:
    """What a client asked and got."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    outcome: str = ""


class Cluster:
    """Everything between clients and memory."""

    def __init__(self, world: World, prefill: int, decode: int) -> None:
        self.world = world
        self.network = Network(world)
        self.can_revoke = world.random.random() < 0.3
        """The transport's bytes are placed by the receiver."""
        self.write_s = world.random.choice([0.002, 0.05, 0.5])
        """Longest time that a page takes to land."""
        self.is_one_host = not self.can_revoke and world.random.random() < 0.5
        """Engines watch each other's processes."""
        self.core = RouterCore(LIMITS)
        self.nodes: dict[str, Node] = {}
        self.clients: dict[str, Client] = {}
        self.legs: dict[tuple[str, int, str], Leg] = {}
        self._facts: list[ev.Event] = []
        self._is_busy = False
        self.open_faults = 0
        """Faults that have begun and not ended."""
        self._numbers = 0
        self._timer_at: float | None = None
        for role, count in (("prefill", prefill), ("decode", decode)):
            for index in range(count):
                node = Node(f"{role}-{index}", role, world.random.randint(12, 40))
                self.nodes[node.name] = node
                self._start_engine(node)
                world.at(world.random.random() * REPORT_S, self._report, node)

    def new_number(self) -> int:
        """Unique in this run."""
        self._numbers += 1
        return self._numbers

    # -- the router ----------------------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        """A fact for the core; its orders are carried out, as ``CoreDriver`` does it."""
        self._facts.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._facts:
                fact = self._facts.pop(0)
                if not isinstance(fact, ev.NodeReported | ev.TimePassed):
                    self.world.note(f"router: {fact}")
                for effect in self.core.handle(fact, self.world.now):
                    self._perform(effect)
        finally:
            self._is_busy = False
        self._arm_timer()

    def _arm_timer(self) -> None:
        due = self.core.next_deadline()
        if due is not None and (self._timer_at is None or due < self._timer_at):
            self._timer_at = due
            self.world.at(max(0.0, due - self.world.now), self._time_passed, due)

    def _time_passed(self, due: float) -> None:
        if self._timer_at == due:
            self._timer_at = None
            self.tell(ev.TimePassed())

    def _perform(self, effect: ef.Effect) -> None:
        match effect:
            case ef.StartPair():
                self._start_leg(effect, "prefill")
                self._start_leg(effect, "decode")
            case ef.StartPrefill():
                self._start_leg(effect, "prefill")
            case ef.StartDecode():
                self._start_leg(effect, "decode")
            case ef.RetargetTransfer(node, transfer_id, attempt, prefill, reason):
                order = Retarget(
                    transfer_id, attempt, prefill.incarnation, prefill.control_addresses, reason
                )
                self._order(self.nodes[node], order)
            case ef.StartAlone(request_id, attempt, decode):
                self._send_leg(request_id, attempt, "decode", decode.node, None)
            case ef.CancelLeg(request_id, attempt, kind):
                self._close_leg(self.legs[request_id, attempt, kind])
            case ef.FailTransfer(node, transfer_id, reason):
                self._order(self.nodes[node], GiveUpTransfer(transfer_id, reason))
            case ef.AnnounceDeath(incarnation, only):
                for node in self.nodes.values():
                    if only in ("", node.name):
                        self._order(node, PeerIsDead(incarnation))
            case ef.AnswerError(request_id, status, message):
                self.clients[request_id].ends.append(f"{status} {message}")
            case ef.EndRequest(timeline):
                self._end(timeline)
            case ef.DrainNode(node, incarnation):
                self.network.send(ROUTER, node, self._drain, self.nodes[node], incarnation)
            case ef.DismissNode(node, incarnation, at_once):
                self.network.send(
                    ROUTER, node, self._dismiss, self.nodes[node], incarnation, at_once
                )
            case ef.AnswerDrain(verdict=verdict, message=message):
                self.world.note(f"drain: {verdict}: {message}")
            case ef.AcceptNode() | ef.RefuseNode() | ef.PassRefusal():
                pass

    def _order(self, node: Node, order: Order) -> None:
        """To the node's agent, and through it to its engine."""
        self.network.send(ROUTER, node.name, self._relay, node, order)

    def _relay(self, node: Node, order: Order) -> None:
        if node.engine is not None:
            node.engine.process.at(0.0, node.engine.order, order)

    def _end(self, timeline: ef.Timeline) -> None:
        client = self.clients[timeline.request_id]
        if client.outcome:
            self.world.fail(f"{client.request_id} ends twice")
        client.outcome = timeline.outcome
        self.world.note(f"{client.request_id} ends: {timeline.outcome} {timeline.reason}")
        if timeline.outcome == "ok":
            right = [token(client.prompt, n) for n in range(client.max_tokens)]
            if client.tokens != right or client.ends:
                self.world.fail(f"{client.request_id}: {client.tokens} is not {right}")
        elif timeline.outcome == "error" and len(client.ends) != 1:
            self.world.fail(f"{client.request_id} was told {client.ends}")

    # -- legs ----------------------------------------------------------------------------------

    def _start_leg(
        self,
        order: ef.StartPair | ef.StartPrefill | ef.StartDecode,
        role: Literal["prefill", "decode"],
    ) -> None:
        node = order.prefill if role == "prefill" else order.decode
        self._send_leg(order.request_id, order.attempt, role, node.node, _leg(order, role))

    def _send_leg(
        self, request_id: str, attempt: int, kind: str, node: str, params: TransferParams | None
    ) -> None:
        leg = self.legs[request_id, attempt, kind] = Leg(request_id, attempt, kind, node)
        if not self.network.send(ROUTER, node, self._arrive, leg, params):
            self.world.at(CUT_LEG_S, self._break, leg, "the connection timed out")

    def _arrive(self, leg: Leg, params: TransferParams | None) -> None:
        engine = self.nodes[leg.node].engine
        if engine is None:
            self._answer(leg, self._break, leg, "connection refused")
            return
        leg.engine = engine
        client = self.clients[leg.request_id]
        request = EngineRequest(
            id=f"{leg.request_id}.{leg.attempt}.{leg.kind}",
            prompt=client.prompt,
            max_tokens=1 if leg.kind == "prefill" else client.max_tokens,
            params=params,
            answer=lambda token: self._answer(leg, self._hear, leg, token),
        )
        engine.process.at(0.0, self._add, leg, engine, request)

    def _add(self, leg: Leg, engine: Engine, request: EngineRequest) -> None:
        if not leg.is_over:
            engine.add(request)

    def _answer(self, leg: Leg, call: Any, *args: Any) -> None:
        if leg.has_lost_bytes:
            return
        if not self.network.send(leg.node, ROUTER, call, *args):
            leg.has_lost_bytes = True
            self.world.at(CUT_LEG_S, self._break, leg, "the connection timed out")

    def _hear(self, leg: Leg, heard: int | None) -> None:
        if leg.is_over:
            return
        if leg.kind == "prefill":
            if heard is None:
                leg.is_over = True
                self.tell(ev.PrefillAnswered(leg.request_id, leg.attempt, 200))
            return
        client = self.clients[leg.request_id]
        if heard is None:
            leg.is_over = True
            self.tell(ev.DecodeEnded(leg.request_id, leg.attempt))
            return
        if heard == WRONG:
            self.world.fail(f"{leg.request_id} gets a token that was computed from wrong pages")
        if not leg.has_data:
            leg.has_data = True
            self.tell(ev.FirstDataArrived(leg.request_id, leg.attempt))
        if client.outcome:
            self.world.fail(f"{leg.request_id} gets a token after its end")
        client.tokens.append(heard)

    def _break(self, leg: Leg, reason: str) -> None:
        if leg.is_over:
            return
        self._end_leg(leg)
        event = ev.PrefillFailed if leg.kind == "prefill" else ev.DecodeFailed
        self.tell(event(leg.request_id, leg.attempt, reason))

    def _close_leg(self, leg: Leg) -> None:
        if not leg.is_over:
            self._end_leg(leg)

    def _end_leg(self, leg: Leg) -> None:
        """The router's end is closed; the engine hears of it, if late."""
        leg.is_over = True
        if not self.network.send(ROUTER, leg.node, self._hang_up, leg):
            self.world.at(CUT_LEG_S * 2, self._hang_up, leg)

    def _hang_up(self, leg: Leg) -> None:
        engine = leg.engine
        if engine is not None:
            request_id = f"{leg.request_id}.{leg.attempt}.{leg.kind}"
            engine.process.at(0.0, engine.abort, request_id)

    # -- clients -------------------------------------------------------------------------------

    def ask(self, client: Client) -> None:
        """A client's request reaches the router."""
        self.clients[client.request_id] = client
        self.tell(
            ev.RequestArrived(
                request_id=client.request_id,
                endpoint="completions",
                prompt_tokens=len(client.prompt),
                output_tokens=client.max_tokens,
                streaming=True,
                alone_because="",
            )
        )

    def leave(self, request_id: str) -> None:
        """A client closes its connection."""
        if request_id in self.core.requests:
            self.tell(ev.ClientGone(request_id))

    # -- nodes ---------------------------------------------------------------------------------

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
        self.world.note(f"{node.engine.incarnation} starts with {node.blocks} blocks")
        self._join(node)

    def _join(self, node: Node) -> None:
        engine = node.engine
        if engine is None:
            return
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
        event = ev.NodeJoined(description, node.role)
        node.is_known = self.network.send(node.name, ROUTER, self.tell, event)

    def _report(self, node: Node) -> None:
        """The agent's state, twice a second; it also reconnects."""
        self.world.at(REPORT_S, self._report, node)
        if self.network.is_cut(node.name, ROUTER):
            if node.is_known:
                node.is_known = False
                if node.engine is not None:
                    incarnation = node.engine.incarnation
                    self.world.at(CUT_LEG_S, self.tell, ev.NodeDisconnected(node.name, incarnation))
            return
        while node.deaths:
            incarnation, owed_nothing = node.deaths.pop(0)
            died = ev.NodeDied(node.name, incarnation, "killed", owed_nothing)
            self.network.send(node.name, ROUTER, self.tell, died)
        engine = node.engine
        if engine is None:
            return
        if not node.is_known:
            self._join(node)
        if engine.process.is_stopped:
            if node.is_overdue and node.dismissed == engine.incarnation:
                self.kill(node)
            return
        status = engine.legs.status()
        state = NodeState(
            node=node.name,
            incarnation=engine.incarnation,
            phase="draining" if node.draining == engine.incarnation else "ready",
            running=status.running,
            waiting=status.waiting,
            free_blocks=status.free_blocks,
            total_blocks=status.total_blocks,
            open_transfers=engine.transfers.open_transfers,
            leased_blocks=status.leased_blocks,
        )
        self.network.send(node.name, ROUTER, self.tell, ev.NodeReported(state))
        if node.dismissed == engine.incarnation:
            owed = state.running + state.waiting + state.open_transfers + state.leased_blocks
            if node.is_overdue or not owed:
                self.kill(node, owed_nothing=not owed)

    def drain(self, name: str, timeout_s: float | None) -> None:
        """An operator restarts a node."""
        self.tell(ev.DrainRequested(0, name, restarts=True, is_forced=True, timeout_s=timeout_s))

    def _drain(self, node: Node, incarnation: str) -> None:
        node.draining = incarnation

    def _dismiss(self, node: Node, incarnation: str, at_once: bool) -> None:
        node.dismissed, node.is_overdue = incarnation, at_once

    def kill(self, node: Node, *, owed_nothing: bool = False) -> None:
        """The engine is killed with -9, or has drained; its agent starts another one."""
        engine = node.engine
        if engine is None:
            return
        self.world.note(f"{engine.incarnation} {'has drained' if owed_nothing else 'is killed'}")
        engine.process.kill()
        node.engine = None
        node.deaths.append((engine.incarnation, owed_nothing))
        for leg in list(self.legs.values()):
            if leg.engine is engine and not leg.is_over:
                self._answer(leg, self._break, leg, "the connection was reset")
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

    def leftovers(self) -> Sequence[str]:
        """What an idle cluster must not hold."""
        found = [f"router: {request_id}" for request_id in self.core.requests]
        for node in self.nodes.values():
            if node.engine is not None:
                found += node.engine.leftovers()
        for known in self.core.membership.nodes.values():
            promised = (known.prefill_legs, known.decode_legs, known.committed_blocks)
            if any(promised):
                found.append(f"router: {known.name} has legs and blocks {promised}")
        found += [f"{c.request_id} has no end" for c in self.clients.values() if not c.outcome]
        return found


def _leg(
    order: ef.StartPair | ef.StartPrefill | ef.StartDecode, role: Literal["prefill", "decode"]
) -> TransferParams:
    """The parameters of one leg, as ``Exchange`` seals them."""
    is_decode = role == "decode"
    return TransferParams(
        transfer_id=order.transfer_id,
        role=role,
        attempt=order.attempt,
        peer_incarnation=(order.prefill if is_decode else order.decode).incarnation,
        peer_addresses=order.prefill.control_addresses if is_decode else (),
    )


def smallest_node(cluster: Cluster) -> int:
    """Blocks of the node with the fewest."""
    return min(node.blocks for node in cluster.nodes.values())


def random_client(cluster: Cluster, number: int) -> Client:
    """A client whose request fits on every node."""
    random = cluster.world.random
    most = smallest_node(cluster) * BLOCK_TOKENS // 2
    length = random.choice([1, 3, 4, 5, 8, 9, random.randint(1, most)])
    length = min(length, most)
    max_tokens = random.randint(1, 6)
    assert blocks_for(length + max_tokens) <= smallest_node(cluster)
    prompt = tuple(random.randrange(100) for _ in range(length))
    return Client(f"r{number}", prompt, max_tokens)
