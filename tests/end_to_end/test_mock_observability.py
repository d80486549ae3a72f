"""A cluster of mock engines with everything on that can be seen of it: traces through router and
agents, and metrics of router, cache server and engines as Prometheus finds them.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from support.mock_cluster import Cluster, alone, prompt_of, running_cluster
from support.otlp_receiver import OtlpReceiver, Span, otlp_receiver
from support.promtool import OBSERVABILITY, metrics_in, samples_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALLER = "b7ad6b7169203331"
LAYERS = 4
CLUSTER = """
name: mock-observability
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 1024}
  transfer: {transport: tcp, stream_min_bytes: 1}
decode: *pool
cache: {chunk_tokens: 64, tiers: [{type: cpu, capacity_bytes: 4 MiB}]}
observability: {tracing: {otlp_endpoint: URL, sample_ratio: 0, service_name: mine}}
supervision: {drain_timeout_s: 2, stop_timeout_s: 3}
"""


class Observed(NamedTuple):
    """The cluster and the collector of its traces."""

    cluster: Cluster
    receiver: OtlpReceiver

    async def text_of(self, path: str) -> str:
        """What the router answers."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.cluster.url}{path}") as response,
        ):
            assert response.status == 200
            return await response.text()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def observed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Observed]:
    """One prefill and one decode node, a cache, and a collector."""
    folder = tmp_path_factory.mktemp("observed")
    async with (
        otlp_receiver() as receiver,
        running_cluster(folder, CLUSTER.replace("URL", receiver.url)) as cluster,
    ):
        yield Observed(cluster, receiver)


async def ask(observed: Observed, trace_id: str, flags: str, start: int) -> list[int]:
    """A streamed request of that trace; returns its prompt."""
    prompt = prompt_of(200, start=start)
    stream = await observed.cluster.client.completions.create(
        model="mock",
        prompt=prompt,
        max_tokens=12,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"traceparent": f"00-{trace_id}-{CALLER}-{flags}"},
    )
    text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
    assert text == alone(prompt)
    return prompt


async def test_one_trace_through_router_and_agents(observed: Observed) -> None:
    """The transfer's two sides are below the legs that they belong to; all layers are in it, and
    its times fit into the request's. A request that is not sampled gives no span.
    """
    untraced, traced = "0" * 31 + "1", "0" * 31 + "2"
    await ask(observed, untraced, "00", start=3)
    await ask(observed, traced, "01", start=5)
    spans = await observed.receiver.wait_for(lambda spans: len(spans) >= 6)
    assert {span.trace_id for span in spans} == {traced}
    by_name: dict[str, Span] = {span.name: span for span in spans}
    whole = by_name["text_completion mock"]
    send, receive = by_name["transfer send"], by_name["transfer receive"]
    assert whole.parent_id == CALLER
    assert send.parent_id == by_name["prefill leg"].span_id
    assert receive.parent_id == by_name["decode leg"].span_id
    assert {(span.service, span.instance) for span in (send, receive)} == {
        ("mine-agent", "prefill-0"),
        ("mine-agent", "decode-0"),
    }
    assert whole.service == "mine-router"
    assert send.attributes["splitserve.transfer.outcome"] == "delivered"
    assert receive.attributes["splitserve.transfer.outcome"] == "landed"
    assert (
        send.attributes["splitserve.transfer.bytes"]
        == (receive.attributes["splitserve.transfer.bytes"])
    )
    assert receive.events.keys() == {"pages_reserved", "pages_granted", "pages_landed"}
    assert {"layers_written", "prompt_computed"} == send.events.keys()
    assert whole.start <= receive.start <= receive.end <= whole.end
    assert whole.start <= send.start <= send.end <= receive.end
    assert len(spans) == 6


async def test_prometheus_finds_what_dashboard_and_alerts_ask_for(observed: Observed) -> None:
    """Every target of http_sd can be scraped without a key, and together they have every metric
    that the dashboard and the alerts name.
    """
    targets = json.loads(await observed.text_of("/internal/http_sd"))
    assert [target["labels"].get("role") for target in targets] == [None, "decode", "prefill"]
    exposed = {"up"}
    async with aiohttp.ClientSession() as session:
        for target in targets:
            for address in target["targets"]:
                async with session.get(f"http://{address}/metrics") as response:
                    assert response.status == 200
                    for family in text_string_to_metric_families(await response.text()):
                        exposed |= samples_of(family.name, family.type)
    files = [
        (OBSERVABILITY / name).read_text() for name in ("alerts.yaml", "grafana-dashboard.json")
    ]
    asked = re.sub(r"label_values\((\w+), \w+\)", r"\1", "".join(files))
    assert metrics_in(asked) - exposed == set()


async def test_the_caches_figures_are_real(observed: Observed) -> None:
    """The router asks the cache server of its host."""
    text = await observed.text_of("/metrics")
    assert "splitserve_cache_up 1.0" in text
    assert 'splitserve_cache_tier_capacity_bytes{tier="cpu"}' in text
