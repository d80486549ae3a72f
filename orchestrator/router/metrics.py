"""The router's Prometheus metrics. Every label has a small fixed set of values, or one value per
node.

Durations are in seconds. Gauges of nodes and of the queue are read from the core when they are
scraped, so requests do not pay for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as TallyCounter
from itertools import accumulate
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from splitserve.kv_transfer.cache.engine_cache import GAUGES
from splitserve.orchestrator.core.audit import REMEDIES
from splitserve.orchestrator.core.breaker import BreakerState
from splitserve.orchestrator.router.request_parts import PARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.metrics_core import Metric

    from splitserve.orchestrator.core.effects import Timeline
    from splitserve.orchestrator.core.membership import Node
    from splitserve.orchestrator.core.router_core import RouterCore
    from splitserve.orchestrator.router.request_log import Account
    from splitserve.orchestrator.router.token_counts import Tally

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_BYTES = (2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28, 2**30, 2**32, 2**34)
_ENGINE_FIGURES = (
    "running",
    "waiting",
    "free_blocks",
    "open_transfers",
    "leased_blocks",
    "quarantined_transfers",
    "quarantined_blocks",
)
_BREAKER_VALUES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
_NODE_COUNTERS_LIMIT = 64
"""Different counters of connectors that are shown; the sum of all others is ``other``."""


class RouterMetrics:
    """Counts what requests did; ``render`` gives the text that Prometheus reads."""

    def __init__(self, core: RouterCore) -> None:
        self._registry = CollectorRegistry()
        self._histograms: dict[str, list[_Histogram]] = {}
        """By name: one, or one for each value of a label."""
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._requests: TallyCounter[tuple[str, str, int]] = TallyCounter()
        self._decided: TallyCounter[str] = TallyCounter()
        self._expected_cached: TallyCounter[str] = TallyCounter()
        self._prefill_failures = Counter(
            "splitserve_prefill_leg_failures",
            "Prefill legs of the last attempt that were answered with an error status",
            registry=self._registry,
        )
        self._continuations = Counter(
            "splitserve_stream_continuations",
            "Streams that another decode node went on with",
            registry=self._registry,
        )
        self._retries = Counter(
            "splitserve_decode_leg_retries",
            "Attempts beyond the first",
            registry=self._registry,
        )
        self._refused_before_core = Counter(
            "splitserve_requests_refused_at_the_door",
            "Requests answered before they were admitted, by status",
            ("status",),
            registry=self._registry,
        )
        self._first_data = self._histogram(
            "splitserve_time_to_first_token_seconds",
            "From arrival to the first data event of a streamed answer",
        )
        self._duration = self._histogram(
            "splitserve_request_duration_seconds", "From arrival to the last byte"
        )
        self._queue_wait = self._histogram(
            "splitserve_queue_wait_seconds", "From arrival to dispatch"
        )
        self._prefill_leg = self._histogram(
            "splitserve_prefill_leg_seconds", "From dispatch to the prefill engine's answer"
        )
        self._parts = {
            part: self._histogram(
                "splitserve_request_part_seconds",
                "Where the time of requests went; the parts of a request add up to its duration",
                ("part", part),
            )
            for part in PARTS
        }
        self._hidden = self._histogram(
            "splitserve_transfer_hidden_seconds",
            "How long pages travelled while their prompt was still being computed",
        )
        self._exposed = self._histogram(
            "splitserve_transfer_exposed_seconds",
            "From the last computed layer of a prompt until its pages had landed",
        )
        self._transfer_bytes = self._histogram(
            "splitserve_transfer_bytes", "Size of transfers that landed", bounds=_BYTES
        )
        self._registry.register(_Calls(self._families))
        self._registry.register(_CoreCollector(core))

    def observe(self, timeline: Timeline) -> None:
        """One request ended."""
        self._requests[timeline.endpoint, timeline.outcome, timeline.status] += 1
        received, dispatched = timeline.received, timeline.dispatched
        if dispatched is not None:
            self._decided[timeline.decision] += 1
            if timeline.expected_cached_tokens:
                self._expected_cached[timeline.decision] += timeline.expected_cached_tokens
            self._queue_wait.observe((timeline.first_dispatched or dispatched) - received)
            if timeline.prefill_answered is not None:
                self._prefill_leg.observe(timeline.prefill_answered - dispatched)
                if (timeline.prefill_status or 0) >= 400:
                    self._prefill_failures.inc()
            if timeline.attempts > 1:
                self._retries.inc(timeline.attempts - 1)
            if timeline.continuations:
                self._continuations.inc(timeline.continuations)
        if timeline.streaming and timeline.first_data is not None:
            self._first_data.observe(timeline.first_data - received)
        if timeline.last_data is not None:
            self._duration.observe(timeline.last_data - received)

    def account_for(self, timeline: Timeline, tally: Tally, account: Account) -> None:
        """It is known where the time of a request went."""
        if timeline.first_dispatched is None and timeline.queued is None:
            return  # Refused at once.
        for part, ms in account.parts.items():
            self._parts[part].observe(ms / 1000)
        if account.exposed_ms is not None:
            self._exposed.observe(account.exposed_ms / 1000)
        if account.hidden_ms is not None:
            self._hidden.observe(account.hidden_ms / 1000)
        if account.transfer.landed is not None and account.transfer.bytes is not None:
            self._transfer_bytes.observe(account.transfer.bytes)

    def refused(self, status: int) -> None:
        """One request was answered before it was admitted."""
        self._refused_before_core.labels(str(status)).inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    def _families(self) -> Iterable[Metric]:
        """What is counted for every request."""
        requests = CounterMetricFamily(
            "splitserve_requests",
            "Requests that ended, by endpoint, outcome and status told to the client",
            labels=("endpoint", "outcome", "status"),
        )
        for (endpoint, outcome, status), count in self._requests.items():
            requests.add_metric([endpoint, outcome, str(status)], count)
        yield requests
        decisions = CounterMetricFamily(
            "splitserve_disaggregation_decisions",
            "Where requests were placed",
            labels=("decision_type",),
        )
        for decision, count in self._decided.items():
            decisions.add_metric([decision], count)
        yield decisions
        expected = CounterMetricFamily(
            "splitserve_expected_cached_tokens",
            "Prompt tokens that the chosen nodes were expected to have cached",
            labels=("decision_type",),
        )
        for decision, count in self._expected_cached.items():
            expected.add_metric([decision], count)
        yield expected
        for histograms in self._histograms.values():
            family = HistogramMetricFamily(
                histograms[0].name, histograms[0].text, labels=histograms[0].label[:1]
            )
            for histogram in histograms:
                histogram.add_to(family)
            yield family

    def _histogram(
        self,
        name: str,
        text: str,
        label: tuple[str, str] | tuple[()] = (),
        bounds: tuple[float, ...] = _FAST,
    ) -> _Histogram:
        histogram = _Histogram(name, text, label, bounds)
        self._histograms.setdefault(name, []).append(histogram)
        return histogram


class _Histogram:
    """Counts in a list. The library's own histogram takes two locks and a linear search for each
    sample, which for three samples per request was a twentieth of the router's CPU time.
    """

    def __init__(
        self,
        name: str,
        text: str,
        label: tuple[str, str] | tuple[()] = (),
        bounds: tuple[float, ...] = _FAST,
    ) -> None:
        """``label`` is its name and value, empty for a histogram without one."""
        self.name = name
        self.text = text
        self.label = label
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One sample."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily) -> None:
        """For the exposition: buckets are cumulative."""
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(list(self.label[1:]), buckets, self._sum)


class _Calls(Collector):
    """A collector that asks a function."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


class _CoreCollector(Collector):
    """Gauges read from the core when they are scraped."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    def collect(self) -> Iterable[Metric]:
        core = self._core
        waiting = GaugeMetricFamily("splitserve_requests_waiting", "Requests in the router's queue")
        waiting.add_metric([], len(core.queue))
        running = GaugeMetricFamily("splitserve_requests_running", "Requests with legs out")
        running.add_metric([], len(core.requests) - len(core.queue))
        yield waiting
        yield running
        nodes = list(core.membership.nodes.values())
        yield self._per_node("ready", "1 when the node gets new work", nodes, lambda n: n.is_usable)
        yield self._per_node("prefill_legs", "Prefill legs out", nodes, lambda n: n.prefill_legs)
        yield self._per_node("decode_legs", "Decode legs out", nodes, lambda n: n.decode_legs)
        yield self._per_node(
            "committed_blocks", "Blocks promised by the router", nodes, lambda n: n.committed_blocks
        )
        yield self._per_node(
            "flipping",
            "1 while the node owes something of the role that it had before",
            nodes,
            lambda n: n.is_flipping,
        )
        flips = CounterMetricFamily("splitserve_role_flips", "Changes of a node's role")
        flips.add_metric([], core.flips)
        yield flips
        yield from self._breakers(nodes)
        for field in _ENGINE_FIGURES:
            yield self._per_node(
                field,
                f"The engine's own figure: {field.replace('_', ' ')}",
                [node for node in nodes if node.state is not None],
                attrgetter(f"state.{field}"),
            )
        yield self._per_node(
            "cached_prefixes",
            "Marks of prompts that the node's prefix cache has, as far as the router knows",
            nodes,
            lambda n: core.prefixes.size_of(n.description.incarnation),
        )
        index = GaugeMetricFamily(
            "splitserve_prefix_index_marks", "Marks of prompts in the router's prefix index"
        )
        index.add_metric([], len(core.prefixes))
        yield index
        yield self._differences(nodes)
        ended = CounterMetricFamily(
            "splitserve_unfenced_engines_ended",
            "Engines whose end was ordered because pages waited too long for a fence: the writer, "
            "or the decode node where the writer's death could not be had",
            labels=("engine",),
        )
        for what, count in core.fencing.ended.items():
            ended.add_metric([what], count)
        yield ended
        counters = CounterMetricFamily(
            "splitserve_connector", "Counters of the connectors", labels=("node", "counter")
        )
        gauges = GaugeMetricFamily(
            "splitserve_cache_client",
            "What an engine holds for the shared cache now, and what it measures",
            labels=("node", "figure"),
        )
        for node in nodes:
            reported = node.state.counters if node.state else {}
            for name in sorted(GAUGES & reported.keys()):
                gauges.add_metric([node.name, name], reported[name])
            values = sorted((n, v) for n, v in reported.items() if n not in GAUGES)
            shown, rest = values[:_NODE_COUNTERS_LIMIT], values[_NODE_COUNTERS_LIMIT:]
            if rest:
                shown.append(("other", sum(value for _, value in rest)))
            for name, value in shown:
                counters.add_metric([node.name, name], value)
        yield counters
        yield gauges

    def _differences(self, nodes: list[Node]) -> Metric:
        """One value per node and kind, also where nothing differs."""
        found = TallyCounter((d.node, d.kind) for d in self._core.differences(monotonic()))
        family = GaugeMetricFamily(
            "splitserve_audit_differences",
            "Things that an engine holds and the router does not know of, or the other way round",
            labels=("node", "kind"),
        )
        for node in nodes:
            for kind in REMEDIES:
                family.add_metric([node.name, kind], found[node.name, kind])
        return family

    @staticmethod
    def _breakers(nodes: list[Node]) -> Iterable[Metric]:
        labels = ("node", "leg")
        state = GaugeMetricFamily(
            "splitserve_node_breaker_state",
            "Circuit breaker: 0 closed, 1 half open (one leg tries the node), 2 open",
            labels=labels,
        )
        openings = CounterMetricFamily(
            "splitserve_node_breaker_openings", "How often the breaker has opened", labels=labels
        )
        for node in nodes:
            for leg, breaker in (
                ("prefill", node.prefill_breaker),
                ("decode", node.decode_breaker),
            ):
                state.add_metric([node.name, leg], _BREAKER_VALUES[breaker.state])
                openings.add_metric([node.name, leg], breaker.openings)
        yield state
        yield openings

    def _per_node(
        self, name: str, text: str, nodes: list[Node], value: Callable[[Node], float]
    ) -> Metric:
        family = GaugeMetricFamily(f"splitserve_node_{name}", text, labels=("node", "role"))
        for node in nodes:
            family.add_metric([node.name, node.role], float(value(node)))
        return family
