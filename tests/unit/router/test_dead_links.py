"""Both kinds of the router's connections end when their link is dead."""

from __future__ import annotations

from typing import Any

from router_stubs.cluster import stub_cluster

from splitserve.orchestrator.router.dead_links import LIMIT_S, OPTIONS


async def test_the_kernel_watches_clients_and_engines() -> None:
    """Connections that a request has left open carry the options."""
    async with stub_cluster("p0", "d0") as cluster:
        body: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 4}
        response = await cluster.post("completions", json=body)
        assert response.status == 200
        await response.read()
        await cluster.idle()
        to_clients = [c._transport for c in cluster.router._server.connections]
        to_engines = [c._transport for idle in cluster.router.client._idle.values() for c in idle]
        assert to_clients
        assert to_engines
        for transport in to_clients + to_engines:
            assert transport is not None
            connection = transport.get_extra_info("socket")
            found = [connection.getsockopt(level, option) for level, option, _ in OPTIONS]
            assert found == [value for *_, value in OPTIONS]
    assert LIMIT_S < 30
