"""The router as a process of its own: how it starts, refuses to start, and stops."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import aiohttp
import pytest
from router_stubs.cluster import SECRET, StubAgent, completion, until
from router_stubs.core_story import description
from router_stubs.engine import SSE, Asked, StubEngine, chunk, start_stream

from splitserve.kv_transfer.channel import SECRET_ENV
from splitserve.orchestrator.agent.auth import agent_token
from splitserve.orchestrator.agent.messages import AgentHello, NodeState
from splitserve.orchestrator.config import ClusterConfig, dump_resolved

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


async def start(
    tmp_path: Path, port: int, env: dict[str, str], drain_timeout_s: float = 0.2
) -> asyncio.subprocess.Process:
    """A router process on that port."""
    config = ClusterConfig.model_validate(
        {
            "engine": "mock",
            "model": {"path": "x", "served_name": "m"},
            "router": {"port": port},
            "supervision": {"drain_timeout_s": drain_timeout_s},
        }
    )
    path = tmp_path / "resolved.json"
    path.write_text(dump_resolved(config))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "splitserve.orchestrator.router", "--config", str(path)),
        env={k: v for k, v in os.environ.items() if k != SECRET_ENV} | env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_sigterm_ends_streams_with_an_error_and_the_process_with_0(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """After the drain time; the error is an event, and there is no [DONE]."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    engine = StubEngine()
    await engine.start()

    async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await start_stream(writer)
        await chunk(writer, SSE[0])
        await asyncio.Event().wait()

    engine.answer = hang
    process = await start(tmp_path, port, {SECRET_ENV: SECRET.hex()})
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            socket = await _connect(session, url)
            agent = StubAgent(socket)
            node = description("d0", engine_url=f"http://127.0.0.1:{engine.port}")
            await agent.say(AgentHello(description=node, role="decode"))
            state = {"node": "d0", "incarnation": "d0-1", "free_blocks": 100, "total_blocks": 100}
            await agent.say(NodeState(phase="ready", **state))  # type: ignore[arg-type]
            await until(lambda: bool(agent.frames))
            response = await session.post(f"{url}/v1/completions", json=completion())
            assert response.status == 200
            process.send_signal(signal.SIGTERM)
            text = await response.read()
            assert text.startswith(SSE[0])
            assert b'"code":503' in text
            assert b"[DONE]" not in text
            agent.reading.cancel()
            await socket.close()
        async with asyncio.timeout(30):
            assert await process.wait() == 0
        assert process.stdout is not None
        assert b'"status":503' in await process.stdout.read()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        await engine.stop()


async def _connect(session: aiohttp.ClientSession, url: str) -> aiohttp.ClientWebSocketResponse:
    """An agent's connection, as soon as the router listens."""
    headers = {"Authorization": f"Bearer {agent_token(SECRET)}"}
    async with asyncio.timeout(20):
        while True:
            try:
                return await session.ws_connect(f"{url}/internal/agents", headers=headers)
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("env", "status", "words"),
    [
        ({}, 2, b"SPLITSERVE_SECRET"),
        ({SECRET_ENV: "xyz"}, 2, b"SPLITSERVE_SECRET"),
        ({SECRET_ENV: SECRET.hex()}, 3, b"router.port"),
    ],
    ids=["no secret", "bad secret", "port in use"],
)
async def test_a_router_that_cannot_start_says_why(
    tmp_path: Path, env: dict[str, str], status: int, words: bytes
) -> None:
    """The exit status tells a wrong configuration from a port in use, and no secret is printed."""
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    process = await start(tmp_path, port, env)
    async with asyncio.timeout(30):
        _, errors = await process.communicate()
    assert process.returncode == status
    assert words in errors
    assert SECRET.hex().encode() not in errors
    taken.close()
