"""Probes of an agent."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import aiohttp
import pytest

from splitserve.orchestrator.agent.health import Health, HealthServer

if TYPE_CHECKING:
    from collections.abc import Callable


async def _asked(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, (await answer.text()).strip()


async def test_probes_tell_how_far_a_node_is(free_port: Callable[[], int]) -> None:
    """Live at once; started and ready as the agent says, with the reason; the port is free again
    after it was closed.
    """
    port = free_port()
    now = Health(False, "the node is loading")
    server = HealthServer(lambda: now)
    await server.listen("127.0.0.1", port)
    base = f"http://127.0.0.1:{port}"
    assert await _asked(f"{base}/livez") == (200, "ok")
    assert (await _asked(f"{base}/startupz"))[0] == 503
    assert await _asked(f"{base}/readyz") == (503, "the node is loading")
    now = Health(True, "no connection to the router")
    assert await _asked(f"{base}/startupz") == (200, "ok")
    assert await _asked(f"{base}/readyz") == (503, "no connection to the router")
    now = Health(True, "")
    assert await _asked(f"{base}/readyz") == (200, "ok")
    await server.close()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("phase", "is_connected", "refused", "obstacle"),
    [
        ("ready", True, "", ""),
        ("ready", True, "another model", "another model"),
        ("ready", False, "", "no connection to the router"),
        ("ready", False, "another secret", "another secret"),
        ("draining", True, "", "the node is draining"),
        ("dead", True, "another model", "the node is dead"),
    ],
)
def test_a_node_is_ready_when_the_router_uses_it(
    phase: str, is_connected: bool, refused: str, obstacle: str
) -> None:
    """Otherwise the probe says why not."""
    assert Health.of(True, phase, is_connected, refused) == Health(True, obstacle)


async def test_a_port_that_is_taken_is_told() -> None:
    """``OSError``, and nothing is left to close."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        server = HealthServer(lambda: Health(True, ""))
        with pytest.raises(OSError, match="address already in use"):
            await server.listen("127.0.0.1", taken.getsockname()[1])
        await server.close()
