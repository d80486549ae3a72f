"""The agent's WebSocket: authenticated, reconnecting, and no report of a death is lost."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec
import pytest
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

from splitserve.orchestrator.agent.auth import is_agent_token
from splitserve.orchestrator.agent.link import PATH, RouterLink
from splitserve.orchestrator.agent.messages import (
    AgentHello,
    EngineDied,
    FromAgent,
    LoadingProgress,
    NodeDescription,
    NodePrefixes,
    NodeState,
    PeerDied,
    ToAgent,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SECRET = bytes(range(32))
LIMIT_S = 10.0
HELLO = AgentHello(
    description=NodeDescription(
        node="prefill-0",
        pool="prefill",
        incarnation="i",
        engine_url="http://127.0.0.1:1",
        engine_api_key="k",
        control_addresses=(),
        model="m",
        max_model_len=1,
        block_tokens=1,
        total_blocks=1,
        tensor_parallel=1,
        transport="tcp",
        fingerprint={},
    ),
    role="prefill",
)
DEATH = EngineDied(
    node="prefill-0", incarnation="old", exit_status=1, likely_cause="c", last_lines=()
)


class FakeRouter:
    """Takes agents' connections and keeps their frames in order."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[FromAgent] = asyncio.Queue()
        self.sockets: list[web.WebSocketResponse] = []
        application = web.Application()
        application.router.add_get(PATH, self._serve)
        self.server = TestServer(application)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def next(self) -> FromAgent:
        async with asyncio.timeout(LIMIT_S):
            return await self.frames.get()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if not is_agent_token(request.headers.get("Authorization"), SECRET):
            raise web.HTTPUnauthorized
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sockets.append(socket)
        async for message in socket:
            assert message.type is WSMsgType.TEXT
            frame = msgspec.json.decode(message.data, type=FromAgent)
            if isinstance(frame, AgentHello):
                assert abs(frame.unix_s - time.time()) < LIMIT_S, "stamped when it was sent"
                frame = msgspec.structs.replace(frame, unix_s=0.0)
            self.frames.put_nowait(frame)
        return socket


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    """A router that listens."""
    router = FakeRouter()
    await router.server.start_server()
    yield router
    await router.server.close()


@pytest.fixture
async def link(router: FakeRouter) -> AsyncIterator[RouterLink]:
    """A link that runs; frames of the router come back as states, so that a test sees them."""

    async def on_message(message: ToAgent) -> None:
        assert isinstance(message, PeerDied)
        link.fresh(NodeState(node=message.incarnation, incarnation="", phase="ready"))

    link = RouterLink(router.url, SECRET, on_message)
    task = asyncio.create_task(link.run())
    yield link
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_hello_and_deaths_are_sent_once_per_connection(
    router: FakeRouter, link: RouterLink
) -> None:
    """What was reported before there was a connection arrives in order: death, then hello."""
    link.died(DEATH)
    link.hello(HELLO)
    assert await router.next() == DEATH
    assert await router.next() == HELLO
    await link.flush(LIMIT_S)
    link.fresh(LoadingProgress(node="prefill-0", stage="s", elapsed_s=1))
    assert isinstance(await router.next(), LoadingProgress)


async def test_everything_is_repeated_after_a_reconnect(
    router: FakeRouter, link: RouterLink
) -> None:
    """It may be another router, which knows neither who runs nor who died."""
    link.died(DEATH)
    link.hello(HELLO)
    assert [await router.next(), await router.next()] == [DEATH, HELLO]
    await router.sockets[0].close()
    assert [await router.next(), await router.next()] == [DEATH, HELLO]


async def test_a_new_role_is_said_on_the_next_connection(
    router: FakeRouter, link: RouterLink
) -> None:
    """Not on this one, whose router has ordered it."""
    link.hello(HELLO)
    assert await router.next() == HELLO
    link.set_role("decode", 3)
    await router.sockets[0].close()
    assert await router.next() == msgspec.structs.replace(HELLO, role="decode", role_epoch=3)


async def test_frames_of_the_router_are_handed_over(router: FakeRouter, link: RouterLink) -> None:
    """One that cannot be read is passed over; the next one is obeyed."""
    link.hello(HELLO)
    await router.next()
    await router.sockets[0].send_str('{"type": "no such frame"}')
    await router.sockets[0].send_bytes(msgspec.json.encode(PeerDied(incarnation="x")))
    await router.sockets[0].send_str(msgspec.json.encode(PeerDied(incarnation="peer")).decode())
    state = await router.next()
    assert isinstance(state, NodeState)
    assert state.node == "peer"


async def test_nothing_is_sent_with_a_wrong_secret(router: FakeRouter) -> None:
    """The router refuses the hand-shake, and the agent goes on trying."""

    async def on_message(message: ToAgent) -> None:
        raise AssertionError("no frame can come")

    link = RouterLink(router.url, SECRET[::-1], on_message)
    link.hello(HELLO)
    task = asyncio.create_task(link.run())
    await asyncio.wait({task}, timeout=0.5)
    assert not task.done()
    assert router.sockets == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_prefixes_are_sent_in_order_and_only_on_their_connection(
    router: FakeRouter, link: RouterLink
) -> None:
    """There is room for a few; none is taken while there is no connection."""
    frames = [NodePrefixes(node="prefill-0", incarnation="i", removed=b"%8d" % n) for n in range(9)]
    assert not link.can_take_prefixes
    link.hello(HELLO)
    assert await router.next() == HELLO
    taken = 0
    while link.can_take_prefixes:
        link.prefixes(frames[taken])
        taken += 1
    assert 0 < taken < len(frames)
    assert [await router.next() for _ in range(taken)] == frames[:taken]
    link.prefixes(frames[taken])
    assert await router.next() == frames[taken]
    await router.sockets[0].close()
    assert await router.next() == HELLO
    assert link.can_take_prefixes
