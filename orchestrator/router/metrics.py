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

from msgspec.structs import asdict
from prometheus_client import (
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from splitserve.orchestrator.core.audit import REMEDIES
from splitserve.orchestrator.core.breaker import BreakerState
from splitserve.orchestrator.observe.own_version import own_version
from splitserve.orchestrator.router.cache_metrics import cache_families
from splitserve.orchestrator.router.connector_metrics import connector_families
from splitserve.orchestrator.router.request_parts import PARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client.metrics_core import Metric

    from splitserve.kv_transfer.cache.control_messages import Stat
    from splitserve.orchestrator.core.effects import Timeline
    from splitserve.orchestrator.core.membership import Node
    from splitserve.orchestrator.core.router_core import RouterCore
    from splitserve.orchestrator.router.record_pipe import RecordPipe
    from splitserve.orchestrator.router.request_records import Account
    from splitserve.orchestrator.router.token_counts import Tally

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_BYTES = (2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28, 2**30, 2**32, 2**34)
_ENGINE_FIGURES = {
    "running": "Requests that the engine computes",
    "waiting": "Requests that wait in the engine",
    "free_blocks": "KV blocks that nobody uses",
    "total_blocks": "KV blocks of the engine",
    "open_transfers": "Transfers that are under way at the engine",
    "leased_blocks": "KV blocks of computed prompts that wait for a peer",
    "quarantined_transfers": "Cancelled transfers whose writer has not given its word yet",
    "quarantined_blocks": "KV blocks kept back because somebody may still write into them",
}
"""Fields of the node's latest report, and the text of their gauges."""
_SIMPLE_COUNTERS = {
    "prefill_leg_failures": (
        "Prefill legs of the last attempt that were answered with an error status"
    ),
    "stream_continuations": "Streams that another decode node went on with",
    "decode_leg_retries": "Attempts beyond the first",
}
_BREAKER_VALUES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class RouterMetrics:
    """Counts what requests did; ``render`` gives the text that Prometheus reads."""

    def __init__(
        self,
        core: RouterCore,
        *,
        deaths: Mapping[str, int] | None = None,
        ttft_target_s: float | None = None,
    ) -> None:
        self._core = core
        self._deaths = {} if deaths is None else deaths
        self._ttft_target_s = ttft_target_s
        self._registry = CollectorRegistry()
        self._histograms: dict[str, list[_Histogram]] = {}
        """By name: one, or one for each value of a label."""
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._cache: Stat | None = None
        self._requests: TallyCounter[tuple[str, str, int]] = TallyCounter()
        self._decided: TallyCounter[str] = TallyCounter()
        self._expected_cached: TallyCounter[str] = TallyCounter()
        self._simple: TallyCounter[str] = TallyCounter()
        self._refused_before_core: TallyCounter[int] = TallyCounter()
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
                    self._simple["prefill_leg_failures"] += 1
            if timeline.attempts > 1:
                self._simple["decode_leg_retries"] += timeline.attempts - 1
            if timeline.continuations:
                self._simple["stream_continuations"] += timeline.continuations
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
        self._refused_before_core[status] += 1

    def count_traces(self, spans: RecordPipe) -> None:
        """What becomes of traced requests is shown, too."""

        def families() -> Iterable[Metric]:
            family = CounterMetricFamily(
                "splitserve_traced_requests",
                "Requests whose spans the collector took (exported) or not (failed), or that came "
                "faster than spans could be sent (dropped)",
                labels=("result",),
            )
            for result, count in asdict(spans.counts).items():
                family.add_metric([result], count)
            yield family

        self._registry.register(_Calls(families))

    def show_cache(self) -> None:
        """The cluster has a cache: its server's figures are shown, too."""
        self._registry.register(_Calls(lambda: cache_families(self._cache)))

    def render(self, cache: Stat | None = None) -> bytes:
        """The text exposition format; ``cache`` is what the cache server has just said."""
        self._cache = cache
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
        refused = CounterMetricFamily(
            "splitserve_requests_refused_at_the_door",
            "Requests answered before they were admitted, by status",
            labels=("status",),
        )
        for status, count in self._refused_before_core.items():
            refused.add_metric([str(status)], count)
        yield refused
        for name, text in _SIMPLE_COUNTERS.items():
            simple = CounterMetricFamily(f"splitserve_{name}", text)
            simple.add_metric([], self._simple[name])
            yield simple
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
        yield from self._surroundings()

    def _surroundings(self) -> Iterable[Metric]:
        build = GaugeMetricFamily(
            "splitserve_build_info", "1, labelled with the router's version", labels=("version",)
        )
        build.add_metric([own_version()], 1)
        yield build
        target = GaugeMetricFamily(
            "splitserve_time_to_first_token_target_seconds",
            "The target of policy.autotune.ttft_ms, where there is one",
        )
        if self._ttft_target_s is not None:
            target.add_metric([], self._ttft_target_s)
        yield target
        deaths = CounterMetricFamily(
            "splitserve_engine_deaths",
            "Engines that ended without having been asked to",
            labels=("node",),
        )
        for node in sorted(self._core.membership.nodes.keys() | self._deaths.keys()):
            deaths.add_metric([node], self._deaths.get(node, 0))
        yield deaths

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
        limit = GaugeMetricFamily(
            "splitserve_queue_limit_requests", "Requests that may wait in the router's queue"
        )
        limit.add_metric([], core.limits.queue_limit_requests)
        yield limit
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
        for field, text in _ENGINE_FIGURES.items():
            yield self._per_node(
                field,
                text,
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
        yield from connector_families(nodes)

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
