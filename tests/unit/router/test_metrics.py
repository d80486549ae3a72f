"""The metrics: their names, their bounds, what of them comes from connectors and the cache."""

from __future__ import annotations

import asyncio
import random
import string
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families
from router_stubs.cache_server import cache_server_stub
from router_stubs.cluster import SECRET, StubCluster, stub_cluster, until

from splitserve.orchestrator.agent.auth import agent_token
from splitserve.orchestrator.agent.messages import NodeState
from splitserve.orchestrator.router.connector_metrics import OTHER_COUNTERS_LIMIT

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from prometheus_client.metrics_core import Metric

OPERATOR = {"Authorization": f"Bearer {agent_token(SECRET)}"}
RANDOM_REQUESTS = 5000
SERIES_LIMIT = 1000


async def families(cluster: StubCluster) -> dict[str, Metric]:
    """What a scrape gives, by name."""
    response = await cluster.session.get(cluster.url + "/metrics")
    found = list(text_string_to_metric_families(await response.text()))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def sample(found: dict[str, Metric], name: str, **labels: str) -> float:
    """The one sample with those labels."""
    family = name.removesuffix("_total")
    (value,) = (
        s.value
        for s in found[family].samples
        if s.name == name and labels.items() <= s.labels.items()
    )
    return value


async def say_counters(cluster: StubCluster, node: str, counters: dict[str, float]) -> None:
    """The agent of ``node`` reports them."""
    member = cluster.router.core.membership.nodes[node]
    await cluster.agents[node].say(
        NodeState(
            node=node,
            incarnation=member.description.incarnation,
            phase="ready",
            free_blocks=1,
            total_blocks=10_000,
            counters=counters,
        )
    )
    await until(lambda: member.state is not None and member.state.counters == counters)


async def test_names_follow_the_habits_of_prometheus(tmp_path: Path) -> None:
    """Prefix, base units, ``_total`` for counters and for nothing else, a text, known labels."""
    known = {"node", "role", "leg", "endpoint", "outcome", "status", "decision_type", "result"}
    known |= {"engine", "kind", "tier", "counter", "le", "version", "part"}
    with cache_server_stub(tmp_path / "cache.sock") as stub:
        async with stub_cluster("p0", "d0", cache=stub.section) as cluster:
            await (await cluster.post()).read()
            await cluster.idle()
            found = await families(cluster)
    for name, family in found.items():
        assert family.documentation, name
        if name.startswith(("process_", "python_")):
            continue
        assert name.startswith("splitserve_"), name
        words = name.split("_")
        assert not {"ms", "milliseconds", "kb", "mb", "s", "per", "time"} & set(words) - (
            {"per"} if name.endswith("per_second") else set()
        ) - ({"time"} if "time_to_first_token" in name else set()), name
        assert family.type in ("counter", "gauge", "histogram"), name
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_bytes")), name
        for one in family.samples:
            assert one.name.endswith("_total") == (family.type == "counter"), one.name
            assert one.labels.keys() <= known, one.labels


async def test_a_connectors_figures_are_metrics() -> None:
    """Known ones have families of their own; others are bounded, whatever an engine says."""
    async with stub_cluster("p0", "d0") as cluster:
        odd = {f"odd_{number:03}": 1.0 for number in range(3 * OTHER_COUNTERS_LIMIT)}
        told = {"sent_bytes": 7.0, "cache_connected": 2.0, "cache_load_chunks_tier_1": 3.0}
        await say_counters(cluster, "p0", told | odd)
        found = await families(cluster)
        labels = {"node": "p0", "role": "prefill"}
        assert sample(found, "splitserve_transfer_sent_bytes_total", **labels) == 7
        assert sample(found, "splitserve_cache_client_connections_open", **labels) == 2
        assert sample(found, "splitserve_cache_client_tier_chunks_total", tier="1", **labels) == 3
        others = found["splitserve_connector"].samples
        assert len(others) == OTHER_COUNTERS_LIMIT + 1
        assert sum(one.value for one in others) == len(odd)


async def test_the_caches_figures_come_with_a_scrape(tmp_path: Path) -> None:
    """One family per figure and a label per tier; a server that is gone or silent is down, and the
    rest is there all the same.
    """
    with cache_server_stub(tmp_path / "cache.sock") as stub:
        async with stub_cluster("p0", "d0", cache=stub.section) as cluster:
            found = await families(cluster)
            assert sample(found, "splitserve_cache_up") == 1
            assert sample(found, "splitserve_cache_tier_up", tier="cpu") == 1
            assert sample(found, "splitserve_cache_tier_capacity_bytes", tier="cpu") > 0
            stub.raw_answer = lambda wish: None
            found = await families(cluster)
            assert sample(found, "splitserve_cache_up") == 0
            assert not found["splitserve_cache_tier_up"].samples
            assert sample(found, "splitserve_node_ready", node="d0") == 1


def noise(generator: random.Random) -> str:
    """A word that nobody has said before."""
    return "".join(generator.choices(string.ascii_letters + string.digits, k=16))


def random_request(generator: random.Random) -> bytes:
    """A path, a method, a model, a key, a request id and a trace, all made up."""
    method = generator.choice(["GET", "POST", "PUT", "DELETE", "PATCH"])
    path = generator.choice(
        [
            f"/{noise(generator)}",
            f"/v1/{noise(generator)}",
            "/v1/completions",
            f"/internal/timeline/{noise(generator)}",
            f"/internal/nodes/{noise(generator)}/drain",
        ]
    )
    key = generator.choice(["sk-right", noise(generator)])
    body = b'{"model":"%b","prompt":"%b"}' % (
        generator.choice(["m", noise(generator)]).encode(),
        noise(generator).encode(),
    )
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: {noise(generator)}\r\ncontent-length: {len(body)}\r\n"
        f"content-type: application/json\r\nauthorization: Bearer {key}\r\n"
        f"x-request-id: {noise(generator)}\r\nuser-agent: {noise(generator)}\r\n\r\n"
    )
    return head.encode() + body


async def ask_all(port: int, requests: list[bytes]) -> None:
    """One after the other on one connection, or on another one where the router has closed it."""
    reader = writer = None
    for request in requests:
        if writer is None or reader is None or reader.at_eof():
            if writer is not None:
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")),
            None,
        )
        if length is not None:
            await reader.readexactly(length)
        if length is None or b"connection: close" in head:
            await reader.read()
    if writer is not None:
        writer.close()


async def test_series_are_bounded_whatever_clients_send(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """5,000 random paths, methods, models, keys and request ids make no new series."""
    generator = random.Random(5)
    async with stub_cluster("p0", "d0", keys={"sk-right": "acme"}) as cluster:
        requests = [random_request(generator) for _ in range(RANDOM_REQUESTS)]
        tenth = RANDOM_REQUESTS // 10
        await ask_all(cluster.router.port, requests[:tenth])
        counts = [await series(cluster)]
        await asyncio.gather(
            *(
                ask_all(cluster.router.port, requests[start : start + tenth])
                for start in range(tenth, RANDOM_REQUESTS, tenth)
            )
        )
        await cluster.idle()
        counts.append(await series(cluster))
    with capsys.disabled():
        print(f" [{counts[1]} series after {RANDOM_REQUESTS} random requests]", end="")
    assert counts[0] == counts[1] < SERIES_LIMIT


async def series(cluster: StubCluster) -> int:
    """How many time series a scrape has."""
    return sum(len(family.samples) for family in (await families(cluster)).values())


async def test_prometheus_finds_router_and_engines() -> None:
    """In the form of http_sd, each with its role; with keys on, for operators."""
    async with stub_cluster("p0", "d0", keys={"sk-1": "a"}) as cluster:
        url = f"{cluster.url}/internal/http_sd"
        assert (await cluster.session.get(url)).status == 401
        assert (
            await cluster.session.get(url, headers={"Authorization": "Bearer sk-1"})
        ).status == 401
        response = await cluster.session.get(url, headers=OPERATOR)
        assert response.content_type == "application/json"
        groups: list[dict[str, Any]] = await response.json()
        own = cluster.url.removeprefix("http://")
        assert groups[0] == {
            "targets": [own],
            "labels": {"component": "router"},
        }
        assert groups[1:] == [
            {
                "targets": [f"127.0.0.1:{cluster.engines[name].port}"],
                "labels": {"component": "engine", "role": role, "node": name, "pool": role},
            }
            for name, role in (("d0", "decode"), ("p0", "prefill"))
        ]
