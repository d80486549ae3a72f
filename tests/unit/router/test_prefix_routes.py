"""Prefixes in a running router: marks on the legs, agents' reports, and what people are told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from router_stubs.cluster import SECRET, StubCluster, completion, stub_cluster, until
from router_stubs.core_story import description

from splitserve.kv_transfer.prefix_marks import split_digests
from splitserve.kv_transfer.transfer_params import TransferParams, unseal
from splitserve.orchestrator.agent.messages import AgentHello, NodePrefixes

if TYPE_CHECKING:
    from router_stubs.engine import Asked

PROMPT = "A sentence of some length that goes on and on. " * 50
NODES = {"reports_prefixes": True, "uses_cache": True}
KEYS = {"sk-1": "acme", "sk-2": "other"}


def leg(asked: Asked) -> TransferParams:
    """The sealed parameters of a request that reached an engine."""
    found = unseal(asked.body["kv_transfer_params"], SECRET)
    assert found is not None
    return found


async def ask(cluster: StubCluster, key: str = "", **changes: Any) -> dict[str, Any]:
    """The timeline of a request."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = await cluster.post(
        json=completion(**({"prompt": PROMPT} | changes)), headers=headers
    )
    await response.read()
    assert response.status == 200
    await cluster.idle()
    return cluster.router.log.latest(1)[0]


async def test_all_legs_of_a_prompt_carry_its_marks() -> None:
    """Both of a split one, and the one of a request that is served alone."""
    async with stub_cluster() as cluster:
        engines = [await cluster.add_node(name, **NODES) for name in ("p0", "d0")]
        await ask(cluster)
        legs = [leg(engine.asked[0]) for engine in engines]
        await ask(cluster, n=2)
        legs.append(leg(engines[1].asked[1]))
        assert [params.role for params in legs] == ["prefill", "decode", "alone"]
        assert len({params.marks for params in legs}) == 1
        assert len(split_digests(legs[0].marks)) == len(PROMPT) // 512
        assert {params.prompt_bytes for params in legs} == {len(PROMPT)}


@pytest.mark.parametrize("why", ["off", "no use", "short"])
async def test_no_marks_are_made_where_nobody_could_use_them(why: str) -> None:
    """Routing by prefixes is off, there is nothing to choose, or the prompt is short."""
    policy = {"prefix_routing": why != "off"}
    async with stub_cluster(policy=policy) as cluster:
        engine = await cluster.add_node("d0", **(NODES | {"uses_cache": why != "no use"}))
        await ask(cluster, **({"prompt": PROMPT[:500]} if why == "short" else {}))
        assert "kv_transfer_params" not in engine.asked[0].body


async def test_what_a_node_says_decides_and_is_shown() -> None:
    """In the timeline, the status and the metrics."""
    async with stub_cluster() as cluster:
        for name in ("p0", "p1", "d0"):
            await cluster.add_node(name, **NODES)
        await ask(cluster)
        asked = cluster.engines["p0"].asked or cluster.engines["p1"].asked
        marks = split_digests(leg(asked[0]).marks)
        for holder, other in (("p0", "p1"), ("p1", "p0")):
            await say(cluster, other, [])
            await say(cluster, holder, marks)
            for _ in range(2):
                turn = await ask(cluster)
                assert turn["prefill_node"] == holder
                assert turn["expected_cached_tokens"] == 100 * len(marks)
        status = await (await cluster.session.get(cluster.url + "/internal/status")).json()
        assert status["prefix_index_marks"] == len(marks)
        assert status["nodes"]["p1"]["cached_prefixes"] == len(marks)
        text = await (await cluster.session.get(cluster.url + "/metrics")).text()
        labels, tokens = '{decision_type="split"}', 400.0 * len(marks)
        assert f"splitserve_expected_cached_tokens_total{labels} {tokens}" in text
        assert f"splitserve_prefix_index_marks {float(len(marks))}" in text
        labels = '{node="p1",role="prefill"}'
        assert f"splitserve_node_cached_prefixes{labels} {float(len(marks))}" in text


async def test_tenants_share_no_mark() -> None:
    """Nor do two salts of one tenant; one tenant's own requests do."""
    async with stub_cluster(keys=KEYS) as cluster:
        engine = await cluster.add_node("d0", **NODES)
        for key, salt in (("sk-1", None), ("sk-2", None), ("sk-1", "s"), ("sk-1", None)):
            await ask(cluster, key=key, **({"cache_salt": salt} if salt else {}))
        marks = [set(split_digests(leg(asked).marks)) for asked in engine.asked]
        assert marks[0] == marks[3]
        assert len(marks[0] | marks[1] | marks[2]) == 3 * len(marks[0])


async def test_a_frame_that_does_not_fit_ends_the_connection() -> None:
    """As any other that cannot be read."""
    async with stub_cluster("d0") as cluster:
        frame = {"type": "prefixes", "node": "d0", "incarnation": "d0-1", "tokens": [1, 2]}
        await cluster.agents["d0"].socket.send_str(json.dumps(frame))
        nodes = cluster.router.core.membership.nodes
        await until(lambda: not nodes["d0"].is_usable)


async def test_every_hello_is_welcomed() -> None:
    """The welcome is what makes an agent begin again: also on a connection that stands."""
    async with stub_cluster("d0") as cluster:
        agent = cluster.agents["d0"]
        for count in (1, 2):
            await until(lambda goal=count: len(agent.frames) == goal)  # type: ignore[misc]
            port = cluster.engines["d0"].port
            node = description("d0", engine_url=f"http://127.0.0.1:{port}")
            await agent.say(AgentHello(description=node, role="decode"))


async def say(cluster: StubCluster, node: str, found: list[bytes]) -> None:
    """The node's agent reports that it has these marks, 100 tokens apart, and the router knows."""
    frame = NodePrefixes(
        node=node,
        incarnation=f"{node}-1",
        is_first=True,
        added=b"".join(found),
        tokens=tuple(100 * (n + 1) for n in range(len(found))),
    )
    assert msgspec.json.decode(msgspec.json.encode(frame), type=NodePrefixes) == frame
    await cluster.agents[node].say(frame)
    prefixes = cluster.router.core.prefixes
    await until(lambda: prefixes.size_of(f"{node}-1") == len(found))
