"""A router in this process with stub engines, and agents that speak for them."""

from __future__ import annotations

import asyncio
import io
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from router_stubs.core_story import description
from router_stubs.engine import StubEngine
from splitserve.orchestrator.agent.auth import agent_token
from splitserve.orchestrator.agent.messages import AgentHello, NodeState, ToAgent
from splitserve.orchestrator.config import ClusterConfig
from splitserve.orchestrator.router import app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SECRET = bytes(range(32))


class StubAgent:
    """One agent's WebSocket; ``frames`` are what the router sent."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.frames: list[ToAgent] = []
        self.reading = asyncio.ensure_future(self._read())

    async def say(self, frame: msgspec.Struct) -> None:
        """Send one frame."""
        await self.socket.send_str(msgspec.json.encode(frame).decode())

    async def _read(self) -> None:
        async for message in self.socket:
            self.frames.append(msgspec.json.decode(message.data, type=ToAgent))


class StubCluster:
    """What a test needs: the router, its URL, a client session, engines and agents by name."""

    def __init__(self, router: app.Router, session: aiohttp.ClientSession, log: io.BytesIO) -> None:
        self.router = router
        self.session = session
        self.log = log
        self.url = f"http://127.0.0.1:{router.port}"
        self.engines: dict[str, StubEngine] = {}
        self.agents: dict[str, StubAgent] = {}

    async def add_node(self, name: str, **changes: Any) -> StubEngine:
        """An engine and its agent, accepted and ready."""
        engine = StubEngine()
        await engine.start()
        self.engines[name] = engine
        token = agent_token(SECRET)
        socket = await self.session.ws_connect(
            f"{self.url}/internal/agents", headers={"Authorization": f"Bearer {token}"}
        )
        agent = self.agents[name] = StubAgent(socket)
        fields = {"engine_url": f"http://127.0.0.1:{engine.port}", "total_blocks": 10_000}
        told = description(name, **(fields | {"engine_api_key": f"key-{name}"} | changes))
        await agent.say(AgentHello(description=told, role=told.pool))
        await agent.say(
            NodeState(
                node=name,
                incarnation=told.incarnation,
                phase="ready",
                free_blocks=told.total_blocks,
                total_blocks=told.total_blocks,
            )
        )
        nodes = self.router.core.membership.nodes
        await until(lambda: name in nodes and nodes[name].is_usable)
        return engine

    async def post(self, path: str = "completions", **request: Any) -> aiohttp.ClientResponse:
        """One request; ``json`` is a small streamed completion unless told otherwise."""
        if "json" not in request and "data" not in request:
            request["json"] = completion()
        return await self.session.post(f"{self.url}/v1/{path}", **request)

    async def idle(self) -> None:
        """Until the core has nothing left: no request, no slot, no block."""
        core = self.router.core
        await until(lambda: not core.requests and not self.router.driver.exchanges)
        for node in core.membership.nodes.values():
            assert (node.prefill_legs, node.decode_legs, node.committed_blocks) == (0, 0, 0)


def completion(**changes: Any) -> dict[str, Any]:
    """A small streamed completion."""
    return {"model": "m", "prompt": "hello", "stream": True, "max_tokens": 8} | changes


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Poll until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.002)


async def settled(value: Callable[[], int], for_s: float = 0.1, timeout_s: float = 20.0) -> None:
    """Poll until the value has not changed for ``for_s``."""
    loop = asyncio.get_running_loop()
    last, since = value(), loop.time()
    async with asyncio.timeout(timeout_s):
        while loop.time() < since + for_s:
            await asyncio.sleep(0.005)
            if value() != last:
                last, since = value(), loop.time()


@asynccontextmanager
async def stub_cluster(
    *nodes: str,
    keys: dict[str, str] | None = None,
    policy: dict[str, Any] | None = None,
    cache: dict[str, Any] | None = None,
    tracing: dict[str, Any] | None = None,
    decode_args: dict[str, Any] | None = None,
    **router_settings: Any,
) -> AsyncIterator[StubCluster]:
    """A running cluster; everything is stopped afterwards."""
    # The agents of stubs report once
    router_settings = {"port": 0, "node_silence_limit_s": 600.0} | router_settings
    config = ClusterConfig.model_validate(
        {
            "engine": "mock",
            "model": {"path": "x", "served_name": "m"},
            "router": router_settings,
            "policy": policy or {},
            "cache": cache,
            "observability": {"tracing": tracing},
            "decode": {"engine_args": decode_args or {}},
        }
    )
    log = io.BytesIO()
    router = await app.start(config, SECRET, keys or {}, log)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        cluster = StubCluster(router, session, log)
        try:
            for name in nodes:
                await cluster.add_node(name)
            yield cluster
        finally:
            for agent in cluster.agents.values():
                await agent.socket.close()
                agent.reading.cancel()
            await router.stop()
            for engine in cluster.engines.values():
                await engine.stop()
