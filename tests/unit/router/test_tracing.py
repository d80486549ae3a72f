"""Traces of requests, as the collector gets them from a router."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import pytest_asyncio
from msgspec.structs import astuple
from prometheus_client.parser import text_string_to_metric_families
from router_stubs.cluster import StubCluster, completion, stub_cluster, until
from support.otlp_receiver import OtlpReceiver, Span, otlp_receiver

from splitserve.orchestrator.observe.trace_context import parse_traceparent

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator

    from router_stubs.engine import Asked

CALLER = "b7ad6b7169203331"
SERVER_KIND, CLIENT_KIND, ERROR_STATUS = 2, 3, 2


class Traced(NamedTuple):
    """A cluster and its collector."""

    cluster: StubCluster
    receiver: OtlpReceiver

    async def spans(self, count: int) -> dict[str, Span]:
        """The spans of the latest request, which are so many, by name."""
        self.cluster.router.log.flush()
        trace_id = traceparent_of(self.cluster, "d0").split("-")[1]

        def of_it(spans: list[Span]) -> list[Span]:
            return [span for span in spans if span.trace_id == trace_id]

        found = await self.receiver.wait_for(lambda spans: len(of_it(spans)) >= count)
        assert len(of_it(found)) == count
        return {span.name: span for span in of_it(found)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced() -> AsyncIterator[Traced]:
    """The same for all: every request that brings no trace is traced."""
    async with (
        otlp_receiver() as receiver,
        stub_cluster("p0", "d0", tracing={"otlp_endpoint": receiver.url}) as cluster,
    ):
        yield Traced(cluster, receiver)


@pytest.fixture
def trace_id() -> str:
    """Of a caller's trace."""
    return f"{next(_numbers):032x}"


_numbers = itertools.count(0x0AF7651916CD43DD8448EB211C80319C)
on_module_loop = pytest.mark.asyncio(loop_scope="module")


def traceparent_of(cluster: StubCluster, node: str) -> str:
    """That of the last request that the engine of ``node`` has got."""
    return cluster.engines[node].asked[-1].headers["traceparent"]


async def counts(cluster: StubCluster) -> dict[str, float]:
    """What became of traced requests."""
    text = await (await cluster.session.get(cluster.url + "/metrics")).text()
    return {
        sample.labels["result"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "splitserve_traced_requests_total"
    }


@on_module_loop
async def test_a_request_is_one_trace(traced: Traced, trace_id: str) -> None:
    """The caller's trace goes on: the request's span below the caller's, queue and legs below that,
    the engines' headers name their legs; times fit into each other; no prompt anywhere.
    """
    cluster = traced.cluster
    headers = {"traceparent": f"00-{trace_id}-{CALLER}-01", "tracestate": "vendor=1"}
    body = completion(prompt="private words")
    await (await cluster.post(json=body, headers=headers)).read()
    await cluster.idle()
    spans = await traced.spans(4)
    whole, queue = spans["text_completion m"], spans["queue"]
    prefill, decode = spans["prefill leg"], spans["decode leg"]
    assert {span.trace_id for span in spans.values()} == {trace_id}
    assert whole.parent_id == CALLER
    assert {span.parent_id for span in (queue, prefill, decode)} == {whole.span_id}
    assert traceparent_of(cluster, "p0") == f"00-{trace_id}-{prefill.span_id}-01"
    assert traceparent_of(cluster, "d0") == f"00-{trace_id}-{decode.span_id}-01"
    assert cluster.engines["d0"].asked[-1].headers["tracestate"] == "vendor=1"
    assert (whole.kind, prefill.kind, decode.kind) == (SERVER_KIND, CLIENT_KIND, CLIENT_KIND)
    assert whole.start == queue.start <= queue.end == prefill.start == decode.start
    assert decode.start <= decode.events["first_token"] <= decode.end == whole.end
    assert whole.attributes["gen_ai.operation.name"] == "text_completion"
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["splitserve.decode_node"] == "d0"
    assert whole.service == "splitserve-router"
    assert "private" not in repr(spans)
    line = (await log_of(cluster))[-1]
    assert line["traceparent"] == f"00-{trace_id}-{whole.span_id}-01"
    assert line["parent_span_id"] == CALLER


async def log_of(cluster: StubCluster) -> list[dict[str, Any]]:
    """The latest records."""
    status = await cluster.session.get(cluster.url + "/internal/status")
    found: list[dict[str, Any]] = (await status.json())["timelines"]
    return found


@on_module_loop
async def test_a_request_without_a_trace_begins_one(traced: Traced) -> None:
    """What the client sent as tracestate goes nowhere; the trace is counted."""
    cluster = traced.cluster
    before = (await counts(cluster))["exported"]
    headers = {"traceparent": "nonsense", "tracestate": "vendor=1"}
    await (await cluster.post(json=completion(n=2), headers=headers)).read()
    await cluster.idle()
    spans = await traced.spans(3)
    assert "prefill leg" not in spans
    assert spans["text_completion m"].parent_id == ""
    asked = cluster.engines["d0"].asked[-1].headers
    leg = spans["decode leg"]
    assert asked["traceparent"] == f"00-{leg.trace_id}-{leg.span_id}-01"
    assert "tracestate" not in asked
    pipe = cluster.router._spans
    assert pipe is not None
    await until(lambda: pipe.counts.exported > before)
    assert (await counts(cluster))["exported"] > before


@on_module_loop
async def test_what_is_not_sampled_is_not_sampled_by_engines(traced: Traced, trace_id: str) -> None:
    """Their header says so, and no span is sent for it; the log has its trace all the same."""
    cluster = traced.cluster
    unsampled = {"traceparent": f"00-{trace_id}-{CALLER}-00"}
    await (await cluster.post(headers=unsampled)).read()
    found = parse_traceparent(traceparent_of(cluster, "d0").encode())
    assert found is not None
    assert (found[0], found[2]) == (trace_id, False)
    await cluster.idle()
    assert (await log_of(cluster))[-1]["traceparent"].startswith(f"00-{trace_id}")
    await (await cluster.post()).read()
    await cluster.idle()
    await traced.spans(4)
    assert trace_id not in {span.trace_id for span in traced.receiver.spans}


@on_module_loop
async def test_a_forwarded_request_is_traced_too(traced: Traced, trace_id: str) -> None:
    """An endpoint that only a decode node answers: its one leg is below its span."""
    headers = {"traceparent": f"00-{trace_id}-{CALLER}-01"}
    url = f"{traced.cluster.url}/tokenize"
    await (await traced.cluster.session.post(url, json={"prompt": "x"}, headers=headers)).read()
    await traced.cluster.idle()
    spans = await traced.spans(3)
    leg = spans["decode leg"]
    assert leg.parent_id == spans["tokenize m"].span_id
    assert traceparent_of(traced.cluster, "d0") == f"00-{trace_id}-{leg.span_id}-01"


async def test_without_tracing_the_clients_header_goes_through(trace_id: str) -> None:
    """As every other header does."""
    async with stub_cluster("p0", "d0") as cluster:
        given = f"00-{trace_id}-{CALLER}-01"
        await (await cluster.post(headers={"traceparent": given})).read()
        assert traceparent_of(cluster, "p0") == traceparent_of(cluster, "d0") == given
        assert (await log_of(cluster))[0]["traceparent"] is None


@on_module_loop
async def test_an_error_is_an_error_in_its_trace(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode leg that breaks: the request's span has the status."""

    async def break_off(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    monkeypatch.setattr(traced.cluster.engines["d0"], "answer", break_off)
    response = await traced.cluster.post()
    await traced.cluster.idle()
    whole = (await traced.spans(4))["text_completion m"]
    assert whole.attributes["http.response.status_code"] == response.status >= 500
    assert whole.attributes["error.type"] == str(response.status)
    assert whole.status == ERROR_STATUS


async def test_a_collector_that_takes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Requests are served as before; it is said once each way, and what was lost is counted."""
    async with (
        otlp_receiver() as receiver,
        stub_cluster("p0", "d0", tracing={"otlp_endpoint": receiver.url}) as cluster,
    ):
        pipe = cluster.router._spans
        assert pipe is not None

        async def ask(status: int, then: tuple[int, int, int]) -> None:
            receiver.status = status
            assert (await cluster.post()).status == 200
            await cluster.idle()
            cluster.router.log.flush()
            await until(lambda: astuple(pipe.counts) == then, 20)

        await ask(400, (0, 1, 0))
        await ask(400, (0, 2, 0))
        await ask(200, (1, 2, 0))
    told = capfd.readouterr().err
    assert told.count("takes no spans") == 1
    assert told.count("takes spans again") == 1
    assert f"{receiver.url}/v1/traces" in told


async def test_a_process_of_spans_that_dies_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What comes meanwhile is counted as dropped; then traces are sent again."""
    monkeypatch.setattr("splitserve.orchestrator.router.record_pipe.RESTART_DELAY_S", 0.05)
    async with (
        otlp_receiver() as receiver,
        stub_cluster("p0", "d0", tracing={"otlp_endpoint": receiver.url}) as cluster,
    ):
        pipe = cluster.router._spans
        assert pipe is not None
        await until(lambda: pipe._process is not None)
        first = pipe._process
        assert first is not None
        first.kill()
        await until(lambda: pipe._process not in (None, first), 20)
        await (await cluster.post()).read()
        await cluster.idle()
        cluster.router.log.flush()
        await receiver.wait_for(lambda spans: len(spans) == 4)
