"""Which nodes there are, what each reports, and what the core has promised on it.

A node is one life of an engine: the object belongs to an incarnation, and a restarted engine is a
new object, so what was still counted on the old one cannot disturb the new one.

Free blocks are known with a delay of up to half a second, and the engines' own figures do not
include what a request will still grow by. The core therefore counts *committed* blocks (the
estimate for everything it has placed and that has not ended), and takes from the reports only what
it did not place itself: leases, quarantined pages, other users, and estimates that were too low.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from splitserve.kv_transfer.holdings import RECEIVES, SENDS
from splitserve.orchestrator.core.breaker import Breaker
from splitserve.orchestrator.core.pool import Pool

if TYPE_CHECKING:
    from splitserve.orchestrator.agent.messages import (
        AdapterDescription,
        NodeDescription,
        NodeState,
    )
    from splitserve.orchestrator.core.effects import Leg
    from splitserve.orchestrator.core.peers import Others

PREFILL = "prefill"
DECODE = "decode"


@dataclass(slots=True)
class Drain:
    """Why a node gets no new work, and how far its leaving is."""

    restarts: bool
    due: float
    """Then it goes, whatever it owes."""
    is_dismissed: bool = False
    """The core has nothing out on it; what its engine holds for peers is its agent's to know."""
    is_overdue: bool = False
    is_inherited: bool = False
    """This router did not order it: whether the node restarts its agent knows better."""


@dataclass(frozen=True, slots=True)
class Returning:
    """A node that will be back as another incarnation."""

    role: str
    old_incarnation: str


class OrderedRole(NamedTuple):
    """A role that a node was told to take."""

    role: str
    epoch: int
    """Number of the order, one more than that of the order before it."""


class Owed(NamedTuple):
    """What a node still owes of the role that it had before."""

    legs: int = 0
    """Legs of that role that are out to it."""
    transfers: int = 0
    """Open transfers of that role, as of its latest report, which names a bounded number."""
    leased_blocks: int = 0
    """Blocks that it holds for decode nodes, as of that report."""


@dataclass(eq=False, slots=True)
class Node:
    """One life of an engine. Only ``RouterCore`` changes it."""

    description: NodeDescription
    role: str
    """What new work is for. Legs of the other role may still be out: where a leg is counts, not
    this.
    """
    role_epoch: int = 0
    """Number of the order that gave it the role."""
    has_flipped: bool = False
    """In this life of its engine, as far as this router knows."""
    phase: str = "loading"
    is_connected: bool = True
    is_silent: bool = False
    state: NodeState | None = None
    prefill_legs: int = 0
    prefill_tokens: int = 0
    """Estimated prompt tokens of those legs that have to be computed."""
    decode_legs: int = 0
    placed_at_once: int = 0
    """Those of the decode legs that need no KV."""
    own_prompt_tokens: int = 0
    """Estimated prompt tokens that decode legs compute here themselves."""
    committed_blocks: int = 0
    foreign_blocks: int = 0
    """Blocks that the core did not place: as of the last report those in use that no router has
    placed, and what other routers have placed.
    """
    unplaced_blocks: int = 0
    """The former alone."""
    others: Others | None = None
    """What other routers have there; None where this one is alone."""
    prefill_breaker: Breaker = field(default_factory=Breaker)
    decode_breaker: Breaker = field(default_factory=Breaker)
    chosen_at: int = 0
    """Number of the latest choice; the node chosen longest ago wins a tie."""
    placed_legs: int = 0
    """All legs that were ever sent to it."""
    drain: Drain | None = None

    @property
    def name(self) -> str:
        """The node's name, the same in all its lives."""
        return self.description.node

    @property
    def is_usable(self) -> bool:
        """Whether new work may go there."""
        is_heard = self.is_connected and not self.is_silent
        return self.phase == "ready" and is_heard and self.drain is None

    @property
    def is_reachable(self) -> bool:
        """Whether it answers, if only for what it holds already: it may be draining."""
        is_heard = self.is_connected and not self.is_silent
        return is_heard and self.phase in ("ready", "draining")

    @property
    def owed(self) -> Owed:
        """What is left of the role that it had before its last flip."""
        if not self.has_flipped:
            return Owed()
        is_decode = self.role == DECODE
        legs = self.prefill_legs if is_decode else self.decode_legs
        if self.state is None:
            return Owed(legs)
        side = SENDS if is_decode else RECEIVES
        transfers = sum(holding.side == side for holding in self.state.holdings)
        return Owed(legs, transfers, self.state.leased_blocks if is_decode else 0)

    @property
    def is_flipping(self) -> bool:
        """Whether it still owes something of the role that it had before."""
        return any(self.owed)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody uses and nobody was promised."""
        return self.description.total_blocks - self.foreign_blocks - self.committed_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens take here; never more than the engine could use for one
        request.
        """
        description = self.description
        size = description.block_tokens
        if tokens > description.max_model_len:
            tokens = description.max_model_len
        blocks = -(-tokens // size)
        return blocks if blocks < description.total_blocks else description.total_blocks

    def breaker(self, leg: Leg) -> Breaker:
        """The breaker of that kind of leg."""
        return self.decode_breaker if leg == "decode" else self.prefill_breaker

    def note_report(self, state: NodeState) -> None:
        """Takes over what the engine says of itself."""
        self.state = state
        self.phase = state.phase
        total = state.total_blocks or self.description.total_blocks
        used = max(0, total - state.free_blocks)
        placed = self.committed_blocks + (self.others.blocks if self.others is not None else 0)
        self.unplaced_blocks = max(state.leased_blocks, used - placed, 0)
        self.note_others(self.others)

    def note_others(self, others: Others | None) -> None:
        """Takes over what is known of other routers."""
        self.others = others
        self.foreign_blocks = self.unplaced_blocks + (others.blocks if others is not None else 0)


class Membership:
    """The known nodes by name; holds the fingerprint that all of them share."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.refused: dict[str, str] = {}
        """Reason of the latest refusal by node name."""
        self.returning: dict[str, Returning] = {}
        """Nodes that restart because they were told to, by name, until they are usable again."""
        self.ordered_roles: dict[str, OrderedRole] = {}
        """Roles that nodes were told to take, by name: they outlast engines and connections."""
        self._pools: dict[str, Pool] = {}
        self._adapters: dict[str, AdapterDescription] | None = None

    @property
    def adapters(self) -> dict[str, AdapterDescription]:
        """The adapters of the decode nodes that are there, whether they are usable now or not; of
        different ones under one name any.
        """
        if self._adapters is None:
            self._adapters = {
                name: adapter
                for node in self.nodes.values()
                if node.role == DECODE
                for name, adapter in node.description.adapters.items()
            }
        return self._adapters

    def usable(self, role: str) -> list[Node]:
        """Nodes to which new work of that role may go."""
        return self.pool(role).nodes

    def pool(self, role: str) -> Pool:
        """The same, as what a choice is made from."""
        found = self._pools.get(role)
        if found is None:
            nodes = [n for n in self.nodes.values() if n.role == role and n.is_usable]
            found = self._pools[role] = Pool(role, nodes)
        return found

    def touched(self, node: Node) -> None:
        """To be called after what is counted on a node, its room or a breaker has changed."""
        for pool in self._pools.values():
            pool.touch(node)

    def awaits(self, role: str) -> bool:
        """Whether a node of that role restarts and is expected back."""
        return any(node.role == role for node in self.returning.values())

    def changed(self) -> None:
        """To be called after a node came, went, or became usable or not."""
        self._pools.clear()
        self._adapters = None

    def find(self, name: str, incarnation: str) -> Node | None:
        """The node if it still lives that life."""
        node = self.nodes.get(name)
        return node if node and node.description.incarnation == incarnation else None

    def lives_as(self, incarnation: str) -> Node | None:
        """The node whose engine lives that life."""
        for node in self.nodes.values():
            if node.description.incarnation == incarnation:
                return node
        return None

    def why_refuse(self, description: NodeDescription, role: str) -> str:
        """What keeps a node from taking part, naming both values; empty when nothing does. All that
        take part are equal, so one of them says it for all.
        """
        if role not in (PREFILL, DECODE):
            return f"role {role!r} is neither {PREFILL!r} nor {DECODE!r}"
        for other in self.nodes.values():
            if other.name == description.node or other.phase == "dead":
                continue
            ours, theirs = description, other.description
            for key, mine, its in (
                ("model", ours.model, theirs.model),
                ("block_tokens", ours.block_tokens, theirs.block_tokens),
                ("transport", ours.transport, theirs.transport),
            ):
                if mine != its:
                    return _difference(key, ours.node, mine, theirs.node, its)
            for key in sorted(ours.fingerprint.keys() | theirs.fingerprint.keys()):
                mine = ours.fingerprint.get(key, "(none)")
                its = theirs.fingerprint.get(key, "(none)")
                if mine != its:
                    return _difference(f"fingerprint {key}", ours.node, mine, theirs.node, its)
            return ""
        return ""


def _difference(key: str, node: str, mine: object, other: str, its: object) -> str:
    return (
        f"{key} differs: {node} has {mine}, {other} has {its};"
        " KV can only be shared between equal nodes"
    )
