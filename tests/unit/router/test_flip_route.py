"""The operators' way to change a node's role: who may, what is told, and what the agents hear."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from router_stubs.cluster import SECRET, StubCluster, stub_cluster, until

from splitserve.orchestrator.agent.auth import agent_token, operator_token
from splitserve.orchestrator.agent.messages import SetRole

if TYPE_CHECKING:
    import aiohttp

OPERATOR = {"Authorization": f"Bearer {operator_token(SECRET)}"}


async def flip(
    cluster: StubCluster, node: str, headers: dict[str, str] | None = None, **body: Any
) -> aiohttp.ClientResponse:
    """An operator's request."""
    url = f"{cluster.url}/internal/nodes/{node}/flip"
    return await cluster.session.post(url, json=body, headers=headers or OPERATOR)


async def status_of(cluster: StubCluster, node: str) -> dict[str, Any]:
    """What the router says of a node."""
    answer = await (await cluster.session.get(cluster.url + "/internal/status")).json()
    found: dict[str, Any] = answer["nodes"][node]
    return found


async def test_a_node_is_flipped() -> None:
    """202, the agent is told, status and metrics show the role, and requests go accordingly."""
    async with stub_cluster("p0", "d0", "d1") as cluster:
        cluster.router.core.membership.nodes["d0"].decode_legs = 1
        response = await flip(cluster, "d0", role="prefill")
        assert response.status == 202
        message = "d0 takes prefill work from now on; it still owes 1 decode leg"
        assert await response.json() == {"verdict": "flipped", "message": message}
        agent = cluster.agents["d0"]
        await until(lambda: agent.frames[1:] == [SetRole(role="prefill", epoch=1)])
        seen = await status_of(cluster, "d0")
        assert (seen["role"], seen["pool"], seen["is_flipping"]) == ("prefill", "decode", True)
        assert seen["owed"] == {"legs": 1, "transfers": 0, "leased_blocks": 0}
        metrics = await (await cluster.session.get(cluster.url + "/metrics")).text()
        assert 'splitserve_node_decode_legs{node="d0",role="prefill"} 1.0' in metrics
        assert 'splitserve_node_flipping{node="d0",role="prefill"} 1.0' in metrics
        assert "splitserve_role_flips_total 1.0" in metrics
        cluster.router.core.membership.nodes["d0"].decode_legs = 0
        for _ in range(2):
            assert (await cluster.post()).status == 200
        assert len(cluster.engines["d1"].asked) == 2
        assert len(cluster.engines["d0"].asked) == 1
        again = await flip(cluster, "d0", role="prefill")
        assert (again.status, (await again.json())["verdict"]) == (200, "same_role")


@pytest.mark.parametrize(
    ("node", "role", "status", "verdict"),
    [
        ("d9", "prefill", 404, "unknown_node"),
        ("d0", "prefill", 409, "last_decode_node"),
        ("p0", "decode", 409, "last_prefill_node"),
    ],
)
async def test_what_is_refused(node: str, role: str, status: int, verdict: str) -> None:
    """With the reason; the last prefill node may be forced."""
    async with stub_cluster("p0", "d0") as cluster:
        response = await flip(cluster, node, role=role)
        assert (response.status, (await response.json())["verdict"]) == (status, verdict)
        assert (await status_of(cluster, "p0"))["role"] == "prefill"
        forced = await flip(cluster, node, role=role, force=True)
        assert forced.status == (202 if node == "p0" else status)


@pytest.mark.parametrize(
    "body", [{}, {"role": "both"}, {"role": "prefill", "force": 1}, {"role": "prefill", "x": 1}]
)
async def test_a_wrong_body_is_400(body: dict[str, Any]) -> None:
    """No role, no such role, a wrong type, an unknown key."""
    async with stub_cluster("p0", "d0", "d1") as cluster:
        assert (await flip(cluster, "d0", **body)).status == 400
        assert cluster.router.core.flips == 0


@pytest.mark.parametrize("token", [None, "Bearer sk-1", f"Bearer {agent_token(SECRET)}"])
async def test_only_operators_may(token: str | None) -> None:
    """Not with a tenant's key or an agent's token."""
    async with stub_cluster("p0", "d0", "d1", keys={"sk-1": "a"}) as cluster:
        headers = {"Authorization": token} if token else {"X-Nothing": "1"}
        assert (await flip(cluster, "d0", headers, role="prefill")).status == 401
        assert cluster.router.core.flips == 0


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "p0/flip", 405), ("POST", "/flip", 404)]
)
async def test_other_paths_do_not_exist(method: str, path: str, status: int) -> None:
    """404 or 405, as for everything that is not there."""
    async with stub_cluster("p0", "d0", "d1") as cluster:
        url = f"{cluster.url}/internal/nodes/{path}"
        answer = await cluster.session.request(
            method, url, json={"role": "decode"}, headers=OPERATOR
        )
        assert answer.status == status
