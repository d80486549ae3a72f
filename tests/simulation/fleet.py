"""Very many nodes as the router's core sees them: no pages and no transfers, only who has which
leg.

An engine computes prompts one after the other, holds blocks for each leg, and answers after a
while. It never gets more legs than it has blocks for; nothing happens that the core has not
ordered.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from splitserve.orchestrator.agent.messages import NodeDescription, NodeState
from splitserve.orchestrator.core import effects as ef
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.audit import PROMISES, find
from splitserve.orchestrator.core.router_core import RouterCore

if TYPE_CHECKING:
    from simulation.world import World
    from splitserve.orchestrator.core.limits import CoreLimits

REPORT_S = 0.5
TIMER_S = 0.25
RESTART_S = 1.0
BLOCK_TOKENS = 16
TOKEN_S = 1e-4
"""What a prompt's token takes to compute."""
FIRST_DATA_S = 0.02
MARKS = 8
MARK_BYTES = 512


@dataclass(eq=False)
class Place:
    """A node with its engine and its agent."""

    name: str
    role: str
    blocks: int
    lives: int = 1
    is_alive: bool = True
    is_draining: bool = False
    silent_until: float = 0.0
    busy_until: float = 0.0
    legs: dict[tuple[str, str], Leg] = field(default_factory=dict)
    used: int = 0
    told: set[int] = field(default_factory=set)
    """Topics whose marks this life has reported."""

    @property
    def incarnation(self) -> str:
        return f"{self.name}-{self.lives}"


@dataclass(eq=False)
class Leg:
    """One leg at an engine."""

    request_id: str
    attempt: int
    kind: str
    place: Place
    blocks: int
    has_begun: bool = False
    """A decode leg that gives or has given its first data."""


@dataclass(frozen=True)
class Asked:
    """A client's request."""

    prompt_tokens: int
    output_tokens: int
    topic: int
    streams_s: float
    """From the first data to the last."""
    can_continue: bool


class Fleet:
    """The core, its nodes, and what clients have asked."""

    def __init__(
        self, world: World, limits: CoreLimits, roles: dict[str, str], blocks: int
    ) -> None:
        self.world = world
        self.core = RouterCore(limits)
        self.places = {name: Place(name, role, blocks) for name, role in roles.items()}
        self.asked: dict[str, Asked] = {}
        self.answered: set[str] = set()
        """Requests whose prompt was computed on a prefill node, in their latest attempt."""
        self.outcomes: Counter[str] = Counter()
        self.ended: set[str] = set()
        self.most_in_flight = 0
        self.placed = 0
        self._legs: dict[tuple[str, str], dict[int, Leg]] = {}
        """Open ones by request, kind and attempt."""
        self._facts: deque[ev.Event] = deque()
        self._is_busy = False
        for place in self.places.values():
            self._join(place)
            world.at(world.random.random() * REPORT_S, self._report, place)
        world.at(TIMER_S, self._tick)

    # What happens

    def ask(self, request_id: str, asked: Asked) -> None:
        """A client asks."""
        self.asked[request_id] = asked
        self.tell(
            ev.RequestArrived(
                request_id=request_id,
                endpoint="completions",
                prompt_tokens=asked.prompt_tokens,
                output_tokens=asked.output_tokens,
                streaming=True,
                alone_because="",
                can_continue=asked.can_continue,
                marks=marks_of(asked.topic),
                prompt_bytes=MARKS * MARK_BYTES,
            )
        )
        self.most_in_flight = max(self.most_in_flight, len(self.core.requests))

    def leave(self, request_id: str) -> None:
        """A client goes away."""
        if request_id in self.core.requests:
            self.tell(ev.ClientGone(request_id))

    def kill(self, name: str) -> None:
        """An engine dies with all that it has; its agent starts another one."""
        place = self.places[name]
        if place.is_alive:
            self._end(place, "killed", owed_nothing=False)

    def restart(self, name: str) -> None:
        """An operator restarts a node."""
        self.tell(ev.DrainRequested(0, name, restarts=True))

    def flip(self, name: str) -> None:
        """An operator changes a node's role."""
        known = self.core.membership.nodes.get(name)
        if known is not None:
            role = "decode" if known.role == "prefill" else "prefill"
            self.tell(ev.FlipRequested(0, name, role))

    def silence(self, name: str, seconds: float) -> None:
        """An agent reports nothing, though its engine serves."""
        self.places[name].silent_until = self.world.now + seconds

    def tell(self, event: ev.Event) -> None:
        """A fact and what follows, as ``CoreDriver`` does it."""
        self._facts.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        while self._facts:
            for effect in self.core.handle(self._facts.popleft(), self.world.now):
                self._perform(effect)
        self._is_busy = False

    def check(self) -> None:
        """What the core counts on its nodes is what its requests, and the engines, have there."""
        core = self.core
        wrong = find(core.membership.nodes.values(), core.requests, core.ended, 0.0, self.world.now)
        promises = [finding.explanation for finding in wrong if finding.kind == PROMISES]
        if promises:
            self.world.fail(promises[0])
        for node in core.membership.nodes.values():
            place = self.places[node.name]
            kinds = Counter(leg.kind for leg in place.legs.values())
            if (node.prefill_legs, node.decode_legs) != (kinds["prefill"], kinds["decode"]):
                self.world.fail(f"{node.name} has {kinds}, the core counts {node}")

    # Nodes

    def _join(self, place: Place) -> None:
        self.tell(ev.NodeJoined(_described(place), place.role))

    def _report(self, place: Place) -> None:
        self.world.at(REPORT_S, self._report, place)
        if not place.is_alive or self.world.now < place.silent_until:
            return
        self.tell(
            ev.NodeReported(
                NodeState(
                    node=place.name,
                    incarnation=place.incarnation,
                    phase="draining" if place.is_draining else "ready",
                    role=place.role,
                    running=len(place.legs),
                    free_blocks=place.blocks - place.used,
                    total_blocks=place.blocks,
                )
            )
        )

    def _end(self, place: Place, cause: str, *, owed_nothing: bool) -> None:
        for leg in list(place.legs.values()):
            self._close(leg)
        place.is_alive = False
        self.tell(ev.NodeDied(place.name, place.incarnation, cause, owed_nothing))
        self.world.at(RESTART_S, self._come_back, place)

    def _come_back(self, place: Place) -> None:
        place.lives += 1
        place.is_alive, place.is_draining, place.busy_until = True, False, 0.0
        place.told.clear()
        self._join(place)

    def _dismissed(self, order: ef.DismissNode) -> None:
        place = self.places[order.node]
        if place.incarnation != order.incarnation or not place.is_alive:
            return
        if place.legs and not order.at_once:
            self.world.fail(f"{place.name} is dismissed with {len(place.legs)} legs")
        self._end(place, "it restarts", owed_nothing=not place.legs)

    def _tick(self) -> None:
        self.world.at(TIMER_S, self._tick)
        self.tell(ev.TimePassed())

    # Legs

    def _perform(self, effect: ef.Effect) -> None:
        match effect:
            case ef.StartPair(request_id=name, attempt=attempt):
                self.placed += 1
                self.answered.discard(name)
                self._open(name, attempt, "decode", effect.decode)
                self._prefill(name, attempt, effect.prefill)
            case ef.StartPrefill(request_id=name, attempt=attempt):
                self._prefill(name, attempt, effect.prefill)
            case ef.StartDecode(request_id=name, attempt=attempt):
                leg = self._open(name, attempt, "decode", effect.decode)
                if name in self.answered:
                    self.world.at(FIRST_DATA_S, self._first_data, leg)
            case ef.StartAlone(request_id=name, attempt=attempt):
                self.placed += 1
                self._compute(self._open(name, attempt, "decode", effect.decode))
            case ef.CancelLeg(request_id=name, attempt=attempt, leg=kind):
                if (leg := self._legs.get((name, kind), {}).get(attempt)) is not None:
                    self._close(leg)
            case ef.FailTransfer(node=node, transfer_id=transfer_id):
                # To a decode node: it computes the prompt itself
                leg = self.places[node].legs.get((transfer_id.rpartition(".")[0], "decode"))
                if leg is not None and not leg.has_begun:
                    self._compute(leg)
            case ef.SetRole(node=node, role=role):
                self.places[node].role = role
            case ef.DrainNode(node=node):
                self.places[node].is_draining = True
            case ef.DismissNode():
                self._dismissed(effect)
            case ef.EndRequest(timeline=timeline):
                self._request_ended(timeline)

    def _prefill(self, name: str, attempt: int, node: NodeDescription) -> None:
        leg = self._open(name, attempt, "prefill", node)
        self.world.at(self._seconds(leg), self._prefilled, leg)

    def _compute(self, leg: Leg) -> None:
        leg.has_begun = True
        self.world.at(self._seconds(leg), self._first_data, leg)

    def _seconds(self, leg: Leg) -> float:
        """Until the leg's prompt is computed, behind the engine's others."""
        now, place = self.world.now, leg.place
        seconds = self.asked[leg.request_id].prompt_tokens * TOKEN_S
        place.busy_until = max(now, place.busy_until) + seconds
        return place.busy_until - now

    def _prefilled(self, leg: Leg) -> None:
        if not self._is_open(leg):
            return
        self._close(leg)
        name = leg.request_id
        self.answered.add(name)
        topic = self.asked[name].topic
        if topic not in leg.place.told:
            leg.place.told.add(topic)
            added = tuple((mark, 64 * n) for n, mark in enumerate(marks_of(topic), 1))
            place = leg.place
            self.tell(ev.NodePrefixesReported(place.name, place.incarnation, False, added, ()))
        self.tell(ev.PrefillAnswered(name, leg.attempt, 200))
        decode = self._latest(name, "decode")
        if decode is not None:
            self.world.at(FIRST_DATA_S, self._first_data, decode)

    def _first_data(self, leg: Leg) -> None:
        if not self._is_open(leg):
            return
        leg.has_begun = True
        self.tell(ev.FirstDataArrived(leg.request_id, leg.attempt))
        self.world.at(self.asked[leg.request_id].streams_s, self._last_data, leg)

    def _last_data(self, leg: Leg) -> None:
        if self._is_open(leg):
            self._close(leg)
            self.tell(ev.DecodeEnded(leg.request_id, leg.attempt))

    def _request_ended(self, timeline: ef.Timeline) -> None:
        name = timeline.request_id
        if name in self.ended:
            self.world.fail(f"{name} has ended twice")
        for kind in ("prefill", "decode"):
            if self._latest(name, kind) is not None:
                self.world.fail(f"{name} has ended, and its {kind} leg has not")
        self.ended.add(name)
        self.outcomes[timeline.outcome] += 1

    def _latest(self, name: str, kind: str) -> Leg | None:
        legs = self._legs.get((name, kind))
        return legs[max(legs)] if legs else None

    def _open(self, name: str, attempt: int, kind: str, node: NodeDescription) -> Leg:
        place, asked = self.places[node.node], self.asked[name]
        if place.incarnation != node.incarnation or not place.is_alive:
            self.world.fail(f"{name} is sent to {node.incarnation}, which is gone")
        tokens = asked.prompt_tokens + (asked.output_tokens if kind == "decode" else 0)
        leg = Leg(name, attempt, kind, place, -(-tokens // BLOCK_TOKENS))
        if place.used + leg.blocks > place.blocks:
            self.world.fail(f"{name}: {place.name} has {place.used} of {place.blocks} blocks used")
        if (name, kind) in place.legs:
            self.world.fail(f"{name} is on {place.name} already")
        place.legs[name, kind] = self._legs.setdefault((name, kind), {})[attempt] = leg
        place.used += leg.blocks
        return leg

    def _is_open(self, leg: Leg) -> bool:
        return leg.place.legs.get((leg.request_id, leg.kind)) is leg

    def _close(self, leg: Leg) -> None:
        key = leg.request_id, leg.kind
        del leg.place.legs[key]
        leg.place.used -= leg.blocks
        del self._legs[key][leg.attempt]
        if not self._legs[key]:
            del self._legs[key]


def marks_of(topic: int) -> tuple[bytes, ...]:
    """All prompts begin alike, and those of a topic go on alike."""
    shared = [number.to_bytes(8, "big") for number in range(MARKS // 2)]
    own = [(1_000 * (topic + 1) + number).to_bytes(8, "big") for number in range(MARKS // 2)]
    return (*shared, *own)


def _described(place: Place) -> NodeDescription:
    fields: dict[str, Any] = {"fingerprint": {"weights": "w"}, "control_addresses": ("tcp://x",)}
    return NodeDescription(
        node=place.name,
        pool=place.role,
        incarnation=place.incarnation,
        engine_url=f"http://127.0.0.1:1/{place.name}",
        engine_api_key="k",
        model="m",
        max_model_len=16_384,
        block_tokens=BLOCK_TOKENS,
        total_blocks=place.blocks,
        tensor_parallel=1,
        transport="tcp",
        host=f"host-{hash(place.name) % 7}",
        reports_prefixes=True,
        **fields,
    )
