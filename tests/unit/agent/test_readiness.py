"""What an agent asks its engine before the node takes part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from splitserve.orchestrator.agent.engine_http import EngineHttp
from splitserve.orchestrator.agent.readiness import warm_up

if TYPE_CHECKING:
    import pytest

BODY = {"model": "m", "prompt": [1, 2], "max_tokens": 2}


async def serve(status: int, seen: list[Any]) -> TestServer:
    """An engine that answers every completion with that status."""

    async def complete(request: web.Request) -> web.Response:
        seen.append((request.headers["Authorization"], await request.json()))
        return web.json_response({"why": "because"}, status=status)

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    server = TestServer(app)
    await server.start_server()
    return server


async def test_the_engine_has_answered_once(caplog: pytest.LogCaptureFixture) -> None:
    """With its own key, and nothing is said about it."""
    seen: list[Any] = []
    server = await serve(200, seen)
    await warm_up(EngineHttp(str(server.make_url("")).rstrip("/"), "key"), BODY)
    await server.close()
    assert seen == [("Bearer key", BODY)]
    assert not caplog.text


async def test_a_refusal_is_said_and_does_not_keep_the_node_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The status and the engine's words are in the log."""
    server = await serve(400, [])
    await warm_up(EngineHttp(str(server.make_url("")).rstrip("/"), "key"), BODY)
    await server.close()
    assert "400" in caplog.text
    assert "because" in caplog.text


async def test_no_answer_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Whether the engine is dead others find out."""
    server = await serve(200, [])
    url = str(server.make_url("")).rstrip("/")
    await server.close()
    await warm_up(EngineHttp(url, "key"), BODY)
    assert "got no answer" in caplog.text
