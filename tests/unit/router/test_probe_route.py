"""The operators' way to measure nodes: who may, what is sent where, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from router_stubs.cluster import SECRET, StubCluster, stub_cluster

from splitserve.orchestrator.agent.auth import agent_token, operator_token

if TYPE_CHECKING:
    import aiohttp

OPERATOR = {"Authorization": f"Bearer {operator_token(SECRET)}"}
PROMPT = [5, 6, 7]


async def probe(
    cluster: StubCluster, nodes: Any, headers: dict[str, str] | None = None, **fields: Any
) -> aiohttp.ClientResponse:
    """An operator's request."""
    body = {"prompt": PROMPT, "max_tokens": 4, "nodes": nodes} | fields
    return await cluster.session.post(
        f"{cluster.url}/internal/probe", json=body, headers=headers or OPERATOR
    )


async def test_goes_to_its_nodes() -> None:
    """The engines get a plain completion; the status counts it and the timeline names it."""
    async with stub_cluster("p0", "d0", "d1") as cluster:
        response = await probe(cluster, {"decode": "d1"})
        assert response.status == 200
        await response.read()
        (asked,) = cluster.engines["d1"].asked
        assert asked.body["prompt"] == PROMPT
        assert "nodes" not in asked.body
        response = await probe(cluster, {"decode": "d1", "prefill": "p0"})
        assert response.status == 200
        assert len(cluster.engines["p0"].asked) == 1
        assert not cluster.engines["d0"].asked
        status = await (await cluster.session.get(cluster.url + "/internal/status")).json()
        assert {name: node["placed_legs"] for name, node in status["nodes"].items()} == {
            "p0": 1, "d0": 0, "d1": 2
        }  # fmt: skip
        assert {line["endpoint"] for line in status["timelines"]} == {"probe"}


@pytest.mark.parametrize(
    "headers", [{"X": "1"}, {"Authorization": f"Bearer {agent_token(SECRET)}"}]
)
async def test_only_for_operators(headers: dict[str, str]) -> None:
    """Neither clients nor agents."""
    async with stub_cluster("d0") as cluster:
        assert (await probe(cluster, {"decode": "d0"}, headers)).status == 401
        assert not cluster.engines["d0"].asked


@pytest.mark.parametrize(
    ("nodes", "fields", "status", "words"),
    [
        (None, {}, 400, "'nodes' says where"),
        ({"prefill": "p0"}, {}, 400, "missing required field"),
        ({"decode": "d7"}, {}, 404, "of: d0, p0"),
        ({"decode": "d0"}, {"prompt": "text"}, 400, "token ids"),
        ({"decode": "d0", "prefill": "p0"}, {"n": 2}, 400, "cannot be split: n"),
        ({"decode": "d0"}, {"model": "other"}, 404, "does not exist"),
    ],
)
async def test_what_is_no_probe(
    nodes: Any, fields: dict[str, Any], status: int, words: str
) -> None:
    """Refused with the field, and no engine is asked."""
    async with stub_cluster("p0", "d0") as cluster:
        response = await probe(cluster, nodes, **fields)
        assert response.status == status
        assert words in (await response.json())["error"]["message"]
        assert not cluster.engines["d0"].asked
