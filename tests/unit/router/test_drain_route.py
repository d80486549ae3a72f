"""The operators' way to drain a node: who may, what is told, and what the agents hear."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from router_stubs.cluster import SECRET, StubCluster, stub_cluster, until

from splitserve.orchestrator.agent.auth import agent_token, operator_token
from splitserve.orchestrator.agent.messages import Dismiss, Drain, EngineDied

if TYPE_CHECKING:
    import aiohttp

OPERATOR = {"Authorization": f"Bearer {operator_token(SECRET)}"}


async def drain(
    cluster: StubCluster, node: str, headers: dict[str, str] | None = None, **body: Any
) -> aiohttp.ClientResponse:
    """An operator's request."""
    url = f"{cluster.url}/internal/nodes/{node}/drain"
    return await cluster.session.post(url, json=body, headers=headers or OPERATOR)


async def test_a_node_is_drained() -> None:
    """202, the agent is told, the status shows it, and new requests go elsewhere."""
    async with stub_cluster("p0", "d0", "d1") as cluster:
        response = await drain(cluster, "d0", restart=True, timeout_s=1000)
        assert response.status == 202
        told = await response.json()
        assert told == {"verdict": "draining", "message": "d0 gets no new work"}
        agent = cluster.agents["d0"]
        expected = [
            Drain(incarnation="d0-1", restarts=True),
            Dismiss(incarnation="d0-1", at_once=False),
        ]
        await until(lambda: agent.frames[1:] == expected)
        status = await (await cluster.session.get(cluster.url + "/internal/status")).json()
        assert status["nodes"]["d0"]["is_draining"]
        assert not status["nodes"]["d0"]["is_usable"]
        assert not status["nodes"]["d1"]["is_draining"]
        assert status["returning"] == ["d0"]
        assert (await cluster.post()).status == 200
        assert not cluster.engines["d0"].asked


async def test_a_drain_ends_with_its_deadline() -> None:
    """Sooner than any deadline that the router has armed by itself."""
    async with stub_cluster("p0", "d0", "d1") as cluster:
        cluster.router.core.membership.nodes["d0"].decode_legs = 1
        assert (await drain(cluster, "d0", timeout_s=0.05)).status == 202
        last = Dismiss(incarnation="d0-1", at_once=True)
        await until(lambda: last in cluster.agents["d0"].frames)
        cluster.router.core.membership.nodes["d0"].decode_legs = 0


async def test_a_drained_nodes_end_is_no_fault() -> None:
    """Nothing of the prompts that it computed is asked for again."""
    async with stub_cluster("p0", "d0") as cluster:
        assert (await drain(cluster, "p0")).status == 202
        death = EngineDied(
            node="p0",
            incarnation="p0-1",
            exit_status=0,
            likely_cause="drained",
            last_lines=(),
            was_ordered=True,
            owed_nothing=True,
        )
        await cluster.agents["p0"].say(death)
        await until(lambda: "p0" not in cluster.router.core.membership.nodes)
        assert (await cluster.post()).status == 200


@pytest.mark.parametrize(
    ("node", "status", "words"),
    [("d9", 404, "known: d0, p0"), ("d0", 409, "the last decode node")],
)
async def test_what_is_refused(node: str, status: int, words: str) -> None:
    """With the reason; nothing has changed."""
    async with stub_cluster("p0", "d0") as cluster:
        response = await drain(cluster, node)
        assert response.status == status
        assert words in (await response.json())["message"]
        assert not any(n.drain for n in cluster.router.core.membership.nodes.values())
        assert (await drain(cluster, "d0", force=True)).status == 202


@pytest.mark.parametrize(
    "body", [{"restart": 1}, {"timeout_s": -1}, {"timeout_s": 1e9}, {"forced": True}, []]
)
async def test_a_wrong_body_is_400(body: Any) -> None:
    """Wrong types, impossible times, unknown keys."""
    async with stub_cluster("p0", "d0") as cluster:
        url = f"{cluster.url}/internal/nodes/p0/drain"
        response = await cluster.session.post(url, json=body, headers=OPERATOR)
        assert response.status == 400
        assert cluster.router.core.membership.nodes["p0"].drain is None


@pytest.mark.parametrize(
    "token", [None, "Bearer sk-1", f"Bearer {agent_token(SECRET)}", "Bearer ", "é"]
)
@pytest.mark.parametrize("keys", [{}, {"sk-1": "a"}], ids=["open", "keys"])
async def test_only_operators_may(token: str | None, keys: dict[str, str]) -> None:
    """Also where everybody may send requests, and not with a tenant's key or an agent's token."""
    async with stub_cluster("p0", "d0", keys=keys) as cluster:
        headers = {"Authorization": token} if token else {"X-Nothing": "1"}
        response = await drain(cluster, "p0", headers)
        assert response.status == 401
        assert "operators" in (await response.json())["error"]["message"]
        assert cluster.router.core.membership.nodes["p0"].drain is None


async def test_operators_see_the_status_where_keys_are_needed() -> None:
    """But their token makes nobody an agent."""
    async with stub_cluster("p0", keys={"sk-1": "a"}) as cluster:
        url = cluster.url + "/internal/status"
        assert (await cluster.session.get(url)).status == 401
        assert (await cluster.session.get(url, headers=OPERATOR)).status == 200
        agents = await cluster.session.get(f"{cluster.url}/internal/agents", headers=OPERATOR)
        assert agents.status == 401


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "p0/drain", 405), ("POST", "p0", 404), ("POST", "/drain", 404)],
)
async def test_other_paths_do_not_exist(method: str, path: str, status: int) -> None:
    """Below the path of nodes."""
    async with stub_cluster("p0") as cluster:
        url = f"{cluster.url}/internal/nodes/{path}"
        response = await cluster.session.request(method, url, headers=OPERATOR)
        assert response.status == status


async def test_a_node_that_has_gone_is_forgotten() -> None:
    """409 while it takes part; then nothing is told of it any more. Only operators may."""
    async with stub_cluster("p0", "d0", "d1") as cluster:
        url = f"{cluster.url}/internal/nodes/d1/forget"
        assert (await cluster.session.post(url)).status == 401
        kept = await cluster.session.post(url, headers=OPERATOR)
        assert (kept.status, (await kept.json())["verdict"]) == (409, "takes_part")
        death = EngineDied(
            node="d1", incarnation="d1-1", exit_status=9, likely_cause="killed", last_lines=()
        )
        await cluster.agents["d1"].say(death)
        await until(lambda: "d1" in cluster.router.agents.last_death)
        assert (await cluster.session.post(url, json={"now": 1}, headers=OPERATOR)).status == 400
        response = await cluster.session.post(url, headers=OPERATOR)
        assert (response.status, await response.json()) == (
            200,
            {"verdict": "forgotten", "message": "d1 is no part of the cluster"},
        )
        status = await (await cluster.session.get(cluster.url + "/internal/status")).json()
        assert "d1" not in status["last_death"]
