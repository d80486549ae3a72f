"""The router's own description, and what it serves."""

from __future__ import annotations

from typing import Any

from router_stubs.cluster import SECRET, stub_cluster

from splitserve.orchestrator.agent.auth import operator_token
from splitserve.orchestrator.router.openapi import operations

NO_HTTP_API = {("GET", "/internal/agents")}
NAMES = {"{response_id}": "resp_1", "{request_id}": "r-1", "{node}": "d0"}


async def described(cluster: Any) -> dict[str, Any]:
    response = await cluster.session.get(f"{cluster.url}/openapi.json")
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = await response.json()
    return found


async def test_every_route_is_described() -> None:
    """And nothing else is."""
    async with stub_cluster("p0", "d0") as cluster:
        document = await described(cluster)
        told = {
            (method.upper(), path)
            for path, methods in document["paths"].items()
            for method in methods
        }
        routes = set(cluster.router.api.routes) - NO_HTTP_API
        assert {route for route in told if "{" not in route[1]} == routes
        assert told == {(o.method, o.path) for o in operations(has_cache=False)}


async def test_every_described_path_is_served() -> None:
    """Another method than those described gets a 405 that names them."""
    async with stub_cluster("p0", "d0") as cluster:
        for path, methods in (await described(cluster))["paths"].items():
            for name, value in NAMES.items():
                path = path.replace(name, value)
            headers = {"Authorization": f"Bearer {operator_token(SECRET)}"}
            response = await cluster.session.patch(cluster.url + path, headers=headers)
            assert response.status == 405, path
            allowed = {method.strip().lower() for method in response.headers["allow"].split(",")}
            assert allowed == methods.keys()


async def test_it_says_who_needs_a_key() -> None:
    """Operators always; clients when keys are on."""
    async with stub_cluster(keys={"sk-1": "a"}) as cluster:
        paths = (await described(cluster))["paths"]
        assert paths["/v1/completions"]["post"]["security"] == [{"key": []}]
        assert paths["/internal/status"]["get"]["security"] == [{"token": []}]
        assert "security" not in paths["/health"]["get"]
    async with stub_cluster() as cluster:
        assert "security" not in (await described(cluster))["paths"]["/v1/completions"]["post"]
