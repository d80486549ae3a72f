"""What operators see of an audit: the route, the metric, and the order that follows from a fence
that does not come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families
from router_stubs.cluster import SECRET, StubCluster, stub_cluster, until

from splitserve.kv_transfer.holdings import QUARANTINED, RECEIVES, Holding
from splitserve.orchestrator.agent.auth import agent_token
from splitserve.orchestrator.agent.messages import EndEngine, NodeState
from splitserve.orchestrator.core import audit

if TYPE_CHECKING:
    import pytest

OPERATOR = {"Authorization": f"Bearer {agent_token(SECRET)}"}
STRAY = Holding("older-1.1", "cmpl-1", RECEIVES, QUARANTINED, 4, 9.0, "p0-1")


async def report(cluster: StubCluster, **fields: Any) -> None:
    """The decode node's agent speaks, and the router has heard it."""
    common = {"node": "d0", "incarnation": "d0-1", "phase": "ready"}
    state = NodeState(**common, free_blocks=9_995, total_blocks=10_000, **fields)
    await cluster.agents["d0"].say(state)
    node = cluster.router.core.membership.nodes["d0"]
    await until(lambda: node.state == state)


async def metric(cluster: StubCluster, name: str, **labels: str) -> float:
    """One sample."""
    text = await (await cluster.session.get(cluster.url + "/metrics")).text()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    raise AssertionError(f"no {name} {labels}")


async def differences(cluster: StubCluster) -> list[dict[str, Any]]:
    """What the route tells an operator."""
    response = await cluster.session.get(f"{cluster.url}/internal/audit", headers=OPERATOR)
    assert response.status == 200
    answer = await response.json()
    assert answer["nodes"] == ["d0", "p0"]
    found: list[dict[str, Any]] = answer["differences"]
    return found


async def test_differences_are_told_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the route with everything, by the metric per node and kind; gone when they are gone."""
    monkeypatch.setattr(audit, "QUARANTINE_GRACE_S", -1.0)
    async with stub_cluster("p0", "d0") as cluster:
        name = "splitserve_audit_differences"
        assert await differences(cluster) == []
        assert await metric(cluster, name, node="d0", kind="quarantined") == 0
        await report(cluster, quarantined_blocks=4, quarantined_transfers=1, holdings=(STRAY,))
        (found,) = await differences(cluster)
        assert (found["node"], found["kind"], found["owner"]) == ("d0", "quarantined", "older-1")
        assert found["blocks"] == 4
        assert "p0-1 has not fenced transfer older-1.1" in found["explanation"]
        assert found["remedy"] == audit.REMEDIES["quarantined"]
        assert await metric(cluster, name, node="d0", kind="quarantined") == 1
        assert (
            await metric(cluster, "splitserve_node_quarantined_blocks", node="d0", role="decode")
            == 4
        )
        await report(cluster)
        assert await differences(cluster) == []
        assert await metric(cluster, name, node="d0", kind="quarantined") == 0


async def test_the_agent_of_an_overdue_writer_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the incarnation; the decision is one line of the log, and counted."""
    async with stub_cluster("p0", "d0") as cluster:
        await report(cluster, quarantined_blocks=4, overdue_writers=("p0-1",))
        frames = cluster.agents["p0"].frames
        await until(lambda: any(isinstance(frame, EndEngine) for frame in frames))
        (order,) = [frame for frame in frames if isinstance(frame, EndEngine)]
        assert order.incarnation == "p0-1"
        assert caplog.text.count("the engine p0-1 of p0 is to end: it owes d0 a fence") == 1
        name = "splitserve_unfenced_engines_ended_total"
        assert await metric(cluster, name, engine="writer") == 1
        assert await metric(cluster, name, engine="decode_node") == 0


async def test_with_keys_the_audit_is_for_operators() -> None:
    """Others get 401, with a key or without."""
    async with stub_cluster("p0", "d0", keys={"sk-1": "a"}) as cluster:
        url = f"{cluster.url}/internal/audit"
        get = cluster.session.get
        assert (await get(url)).status == 401
        assert (await get(url, headers={"Authorization": "Bearer sk-1"})).status == 401
        assert (await get(url, headers=OPERATOR)).status == 200
