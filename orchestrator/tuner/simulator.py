"""A cluster in virtual time: the real router core, and nodes with the times of a profile.

The core decides as it does in a router: admission, placement, the index of prefixes, deadlines.
Around it are models: nodes (``node_model``), their caches (``prefix_cache_model``), and transfers.
KV leaves a prefill node while it computes, so a prompt has landed ``latency`` after the last of

* the end of the prompt's last step;
* the moment at which the bytes of that step can be through, sent from its beginning;
* the moment at which all bytes can be through, sent since the prompt and its pages were there, one
  transfer after another on each node's link.

Nodes that share a host (``profile.nodes_per_host``, in their order) slow each other as far as the
profile says; of nodes of other hosts nobody feels anything.

What it leaves out: faults, preemption, the shared cache, and what the router and its clients take
beyond the profile's ``request_s``, which passes between the core's order and the engine. Nodes say
nothing of their load, as the core counts what it has placed itself.

The same requests, settings and seed give the same outcome.
"""

from __future__ import annotations

import math
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from splitserve.orchestrator.core import effects as ef
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.membership import DECODE, PREFILL
from splitserve.orchestrator.core.router_core import RouterCore
from splitserve.orchestrator.tuner.node_model import Fact, Job, Kind, What
from splitserve.orchestrator.tuner.outcome import Outcome
from splitserve.orchestrator.tuner.prefix_cache_model import Marks
from splitserve.orchestrator.tuner.simulated_request import Computed, SimulatedRequest
from splitserve.orchestrator.tuner.simulation_settings import (
    EndedRequest,
    NodeView,
    SimulationSettings,
)
from splitserve.orchestrator.tuner.station import Station, introduce, landing_s, station

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from splitserve.orchestrator.traces import TraceRequest
    from splitserve.orchestrator.tuner.profile import Profile, TransferTime

__all__ = [
    "EndedRequest",
    "FlipError",
    "NodeView",
    "Simulation",
    "SimulationSettings",
    "run_fixed",
    "simulate",
]

PREFIX_REPORT_S = 0.25
"""Between a change of a node's prefix cache and the router's knowledge of it."""


class FlipError(Exception):
    """A node cannot take another role; the message is the core's."""


class Simulation:
    """A cluster that can be stepped. ``nodes`` gives the role of each by name."""

    def __init__(
        self,
        profile: Profile,
        nodes: Mapping[str, str],
        settings: SimulationSettings | None = None,
        seed: int = 0,
    ) -> None:
        settings = settings or SimulationSettings()
        self.now = 0.0
        self.core = RouterCore(replace(settings.limits, node_silence_limit_s=math.inf))
        self.ended: list[EndedRequest] = []
        """All that have ended, in that order."""
        self._profile = profile
        self._marks = Marks(settings.trace_block_tokens if settings.prefix_caching else 0)
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._numbers = count()
        self._coming: list[SimulatedRequest] = []
        """Offered and not arrived, the next one last."""
        self._arrived: list[SimulatedRequest] = []
        self._requests: dict[str, SimulatedRequest] = {}
        self._timer_s = math.inf
        self._transfers: dict[tuple[str, str], TransferTime] = {}
        self._seconds = {PREFILL: [0.0, 0.0], DECODE: [0.0, 0.0]}
        """By role: (busy, in all) of what nodes did before they took their present role."""
        self._performers: dict[type, Callable[[Any], None]] = {
            ef.StartPair: self._start_pair,
            ef.StartAlone: self._start_alone,
            ef.CancelLeg: self._cancel_leg,
            ef.FailTransfer: self._fail_transfer,
            ef.EndRequest: self._end_request,
        }
        self._stations: dict[str, Station] = {}
        for name, role in nodes.items():
            added = self._stations[name] = station(name, role, profile, settings, seed)
            self._tell(ev.NodeJoined(added.description, role))
            self._tell(ev.NodeReported(added.ready_state()))
        if profile.has_neighbours:
            introduce(list(self._stations.values()), profile.nodes_per_host)

    # What a caller does

    def offer(self, requests: Iterable[TraceRequest]) -> None:
        """These will arrive. Raises ``ValueError`` for one that should have come before now."""
        for request in requests:
            if request.at_s < self.now:
                raise ValueError(
                    f"a request at {request.at_s:g} s is offered at {self.now:g} s; "
                    "offer requests before the time of their arrival"
                )
            number = len(self._arrived) + len(self._coming)
            output = max(1, request.output_tokens)
            prompt = max(1, request.input_tokens)
            self._coming.append(
                SimulatedRequest(str(number), request.at_s, prompt, output, request.blocks)
            )
        self._coming.sort(key=_arrival, reverse=True)

    def run_until(self, until_s: float) -> None:
        """Everything that happens up to that time has happened."""
        events, coming = self._events, self._coming
        while True:
            at_s = events[0][0] if events else math.inf
            if coming and coming[-1].at_s <= at_s:
                if coming[-1].at_s > until_s:
                    break
                self.now = coming[-1].at_s
                self._arrive(coming.pop())
                continue
            if at_s > until_s or not events:
                break
            self.now, _, action, argument = heappop(events)
            action(self.now, argument)
        if until_s < math.inf:
            self.now = max(self.now, until_s)

    def run_to_end(self) -> None:
        """All that was offered has ended."""
        self.run_until(math.inf)

    def flip(self, node: str, role: str) -> None:
        """New work of the node is of that role. Raises ``FlipError`` when the core refuses."""
        effects = self.core.handle(ev.FlipRequested(0, node, role, is_forced=True), self.now)
        for effect in effects:
            if isinstance(effect, ef.AnswerFlip) and effect.verdict != "flipped":
                raise FlipError(effect.message)
        flipped = self._stations[node]
        self._count_role(flipped)
        flipped.role = role
        self._perform(effects)

    def nodes(self) -> list[NodeView]:
        """All nodes as they are now."""
        return [
            NodeView(
                found.name,
                found.role,
                found.model.running,
                len(found.model.waiting) + len(found.model.landed),
                found.model.parked,
                found.model.pool.free_blocks,
                found.model.busy_s,
            )
            for found in self._stations.values()
        ]

    @property
    def queued(self) -> int:
        """Requests that wait in the router."""
        return self.core.queue.size

    @property
    def arrived(self) -> int:
        """Requests that have come so far."""
        return len(self._arrived)

    def busy_shares(self) -> dict[str, float]:
        """By role, the part of its nodes' time in which they computed; without roles that no node
        has had.
        """
        for found in self._stations.values():
            self._count_role(found)
        return {role: busy / all_s for role, (busy, all_s) in self._seconds.items() if all_s}

    def outcome(self) -> Outcome:
        """Of all that have arrived; what has not ended counts as failed."""
        found = self._arrived
        models = [found.model for found in self._stations.values()]
        is_good = np.array([not (r.has_failed or math.isnan(r.ended_s)) for r in found], dtype=bool)
        first = np.array([request.ttft_s for request in found])
        return Outcome(
            np.array([request.at_s for request in found]),
            np.where(is_good, first, np.nan),
            np.array([request.itl_s for request in found]),
            np.array([request.ended_s for request in found]),
            np.array([gap for model in models for gap in model.gaps]),
            np.array([n for model in models for n in model.gap_counts], dtype=np.float64),
        )

    # Nodes

    def _count_role(self, node: Station) -> None:
        """What the node has done in its present role is in ``_seconds``."""
        seconds = self._seconds[node.role]
        seconds[0] += node.model.busy_s - node.role_busy_s
        seconds[1] += self.now - node.role_since_s
        node.role_since_s, node.role_busy_s = self.now, node.model.busy_s

    def _go_on(self, node: Station) -> None:
        """The node computes what it can, and its next event is out."""
        model = node.model
        if model.waiting:
            self._take(model.reserve(self.now))
        if model.begin(self.now):
            first_s = model.first_token_s()
            if first_s is not None:
                self._at(first_s, self._on_first_tokens, node)
        self._watch(node)
        if node.neighbours and node.is_computing is (model.end_s is None):
            self._tell_neighbours(node)
        pool = model.pool
        if (pool.added or pool.evicted) and node.reports_at_s < self.now:
            node.reports_at_s = self.now + PREFIX_REPORT_S
            self._at(node.reports_at_s, self._on_report_due, node)

    def _watch(self, node: Station) -> None:
        """The end of the node's jump is an event."""
        end_s = node.model.end_s
        if end_s is not None and end_s != node.watched_s:
            node.watched_s = end_s
            self._at(end_s, self._on_jump_end, node)

    def _tell_neighbours(self, node: Station) -> None:
        """The node has begun to compute, or rests."""
        node.is_computing = not node.is_computing
        for other in node.neighbours:
            other.model.neighbour_changed(1 if node.is_computing else -1, self.now)
            self._watch(other)

    def _on_jump_end(self, now: float, node: Station) -> None:
        if node.model.end_s == now:  # Otherwise the jump was cut short
            node.watched_s = -1.0
            self._take(node.model.finish_jump(now))
            self._go_on(node)

    def _on_first_tokens(self, now: float, node: Station) -> None:
        if node.model.first_token_s() == now:
            self._take([Fact(What.FIRST, job) for job in node.model.take_fresh()])

    def _on_report_due(self, now: float, node: Station) -> None:
        added, removed = self._marks.news(node.model.pool)
        if added or removed:
            name = node.model.name
            told = ev.NodePrefixesReported(name, name, False, added, removed)
            self._tell(told)

    def _take(self, facts: Sequence[Fact]) -> None:
        for what, job, step_s, tokens in facts:
            request = job.request
            if what is What.FIRST:
                request.first_s = self.now
                self._tell(ev.FirstDataArrived(request.id, 1))
            elif what is What.ENDED:
                self._tell(ev.DecodeEnded(request.id, 1))
            elif what is What.PROMPT:
                if request.is_over:
                    self._release_prefill(request)
                    continue
                request.computed = Computed(self.now, step_s, tokens)
                self._tell(ev.PrefillAnswered(request.id, 1, 200))
                self._send(request)
            else:
                self._send(request)

    # Transfers

    def _send(self, request: SimulatedRequest) -> None:
        """The KV lands when it can, once both sides are known."""
        decode = request.decode_job
        if request.computed is None or decode is None or decode.holding is None:
            return
        assert request.prefill_node is not None
        assert request.decode_node is not None
        sender, reader = request.prefill_node, request.decode_node
        transfer = self._transfer(sender.name, reader.name)
        landed_s = landing_s(request, sender, reader, transfer, self._profile.kv_bytes_per_token)
        self._at(max(landed_s, self.now), self._on_landed, request)

    def _transfer(self, prefill_node: str, decode_node: str) -> TransferTime:
        found = self._transfers.get((prefill_node, decode_node))
        if found is None:
            found = self._profile.transfer(prefill_node, decode_node)
            self._transfers[prefill_node, decode_node] = found
        return found

    def _on_landed(self, now: float, request: SimulatedRequest) -> None:
        self._release_prefill(request)
        if request.is_over:
            return
        assert request.decode_job is not None
        assert request.decode_node is not None
        request.decode_node.model.land(request.decode_job, now)
        self._go_on(request.decode_node)

    def _release_prefill(self, request: SimulatedRequest) -> None:
        node, job = request.prefill_node, request.prefill_job
        if node is not None and job is not None and job.is_over:
            node.model.release(job, self.now)
            self._go_on(node)

    # The core's orders

    def _arrive(self, request: SimulatedRequest) -> None:
        self._arrived.append(request)
        self._requests[request.id] = request
        marks: tuple[bytes, ...] = ()
        if self.core.wants_marks and request.blocks:
            marks = self._marks.of_prompt(request.blocks, request.prompt)
        self._tell(
            ev.RequestArrived(
                request.id,
                "completions",
                request.prompt,
                request.output,
                True,
                "",
                marks=marks,
                prompt_bytes=request.prompt * self._marks.bytes_per_token,
            )
        )
        if self._timer_s == math.inf:
            self._arm_timer()

    def _tell(self, event: ev.Event) -> None:
        self._perform(self.core.handle(event, self.now))

    def _perform(self, effects: list[ef.Effect]) -> None:
        for effect in effects:
            performer = self._performers.get(type(effect))
            if performer is not None:
                performer(effect)

    def _start_pair(self, order: ef.StartPair) -> None:
        request = self._requests[order.request_id]
        request.prefill_node = self._stations[order.prefill.node]
        request.decode_node = self._stations[order.decode.node]
        request.prefill_job = Job(request, Kind.PREFILL, request.prompt, 0)
        request.decode_job = Job(request, Kind.DECODE, request.prompt, request.output)
        self._at(self.now + self._profile.request_s, self._on_legs_there, request)

    def _start_alone(self, order: ef.StartAlone) -> None:
        request = self._requests[order.request_id]
        request.decode_node = self._stations[order.decode.node]
        request.decode_job = Job(request, Kind.ALONE, request.prompt, request.output)
        self._at(self.now + self._profile.request_s, self._on_legs_there, request)

    def _on_legs_there(self, now: float, request: SimulatedRequest) -> None:
        tokens, limits = request.prompt + request.output, self._profile.limits
        if tokens > min(limits.max_model_len, limits.total_blocks * limits.block_tokens):
            self._tell(ev.DecodeRefused(request.id, 1, 400))
        for node, job in (
            (request.decode_node, request.decode_job),
            (request.prefill_node, request.prefill_job),
        ):
            if node is None or job is None or job.is_over or request.is_over:
                continue
            node.model.arrive(job, now)
            self._go_on(node)

    def _cancel_leg(self, order: ef.CancelLeg) -> None:
        request = self._requests[order.request_id]
        is_prefill = order.leg == "prefill"
        node = request.prefill_node if is_prefill else request.decode_node
        job = request.prefill_job if is_prefill else request.decode_job
        assert node is not None
        assert job is not None
        node.model.drop(job, self.now)
        self._go_on(node)

    def _fail_transfer(self, order: ef.FailTransfer) -> None:
        request = self._requests[order.transfer_id.partition(".")[0]]
        self._release_prefill(request)

    def _end_request(self, order: ef.EndRequest) -> None:
        request = self._requests.pop(order.timeline.request_id)
        request.ended_s = self.now
        request.has_failed = order.timeline.outcome != "ok"
        if not request.has_failed:
            request.prefill_job = request.decode_job = None
        self.ended.append(
            EndedRequest(
                request.at_s,
                self.now,
                request.ttft_s,
                request.itl_s,
                request.prompt,
                request.output,
            )
        )

    # Time

    def _at(self, at_s: float, action: Callable[[float, Any], None], argument: object) -> None:
        heappush(self._events, (at_s, next(self._numbers), action, argument))

    def _arm_timer(self) -> None:
        """The core is woken in time. Deadlines that are armed until then are due after that."""
        due = self.core.next_deadline()
        self._timer_s = math.inf
        if due is not None and due < math.inf:
            self._timer_s = min(due, self.now + self.core.shortest_wait_s)
            self._at(self._timer_s, self._on_timer, None)

    def _on_timer(self, now: float, _: None) -> None:
        self._tell(ev.TimePassed())
        self._arm_timer()


def _arrival(request: SimulatedRequest) -> tuple[float, int]:
    return request.at_s, int(request.id)


def simulate(
    requests: Sequence[TraceRequest],
    profile: Profile,
    *,
    prefill: int,
    decode: int,
    settings: SimulationSettings | None = None,
    seed: int = 0,
) -> Outcome:
    """What becomes of the requests on so many nodes of each role; without prefill nodes every
    decode node computes its own prompts.
    """
    return run_fixed(requests, profile, prefill, decode, settings, seed).outcome()


def run_fixed(
    requests: Sequence[TraceRequest],
    profile: Profile,
    prefill: int,
    decode: int,
    settings: SimulationSettings | None = None,
    seed: int = 0,
) -> Simulation:
    """The simulation of ``simulate``, at its end."""
    nodes = {f"prefill-{number}": PREFILL for number in range(prefill)}
    nodes |= {f"decode-{number}": DECODE for number in range(decode)}
    simulation = Simulation(profile, nodes, settings, seed)
    simulation.offer(requests)
    simulation.run_to_end()
    return simulation
