"""Which adapters an engine has: what it says, and what is in their files."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from splitserve.orchestrator.agent.adapters import ADAPTERS_LIMIT, loaded_adapters
from splitserve.orchestrator.agent.engine_http import EngineHttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MODEL = {"id": "m", "root": "/models/m", "parent": None}


@asynccontextmanager
async def engine(answer: Any, status: int = 200) -> AsyncIterator[str]:
    """An engine that says this of its models to who has the key."""

    async def models(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer key"
        if isinstance(answer, str):
            return web.Response(text=answer, status=status)
        return web.json_response(answer, status=status)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        yield str(server.make_url("/")).rstrip("/")


def card(name: str, root: str) -> dict[str, Any]:
    return {"id": name, "root": root, "parent": "m"}


async def test_adapters_are_known_by_their_content(tmp_path: Path) -> None:
    """Not by where they lie; the model itself is none."""
    for folder, weights in (("one", b"x"), ("same", b"x"), ("other", b"y")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_model.safetensors").write_bytes(weights)
        (tmp_path / folder / "adapter_config.json").write_text("{}")
    cards = [card(name, str(tmp_path / name)) for name in ("one", "same", "other")]
    async with engine({"data": [MODEL, *cards]}) as url:
        found = await loaded_adapters(EngineHttp(url, "key"))
    assert found.keys() == {"one", "same", "other"}
    assert found["one"].path == str(tmp_path / "one")
    assert found["one"].content == found["same"].content != found["other"].content


async def test_an_adapter_without_files_here() -> None:
    """One of the Hub is known by its name."""
    async with engine({"data": [card("a", "org/a"), card("b", "org/b")]}) as url:
        found = await loaded_adapters(EngineHttp(url, "key"))
    assert found["a"].content != found["b"].content


@pytest.mark.parametrize(
    ("answer", "status"), [("no", 404), ("{", 200), ({"data": 3}, 200), ({"error": "x"}, 401)]
)
async def test_an_engine_that_does_not_say(
    answer: Any, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Serves its model only, and the log tells why."""
    async with engine(answer, status) as url:
        assert await loaded_adapters(EngineHttp(url, "key")) == {}
    assert "does not say which adapters" in caplog.text


async def test_their_number_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """The router's frame has a bound; what is left out is said."""
    cards = [card(f"a{number}", "org/a") for number in range(ADAPTERS_LIMIT + 1)]
    async with engine({"data": cards}) as url:
        assert len(await loaded_adapters(EngineHttp(url, "key"))) == ADAPTERS_LIMIT
    assert f"of {ADAPTERS_LIMIT + 1} adapters" in caplog.text
