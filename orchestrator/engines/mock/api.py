"""The mock engine's HTTP server: that of all our engines, with the faults a test asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from splitserve.orchestrator.engines.mock.faults import Faults
from splitserve.orchestrator.engines.serving.api import EngineApi
from splitserve.orchestrator.engines.serving.protocol import ApiError, Prompt, Request

if TYPE_CHECKING:
    from splitserve.orchestrator.engines.mock.engine import MockEngine
    from splitserve.orchestrator.engines.mock.faults import FaultBox
    from splitserve.orchestrator.engines.serving.api import Served
    from splitserve.orchestrator.engines.serving.front import Front


class MockApi(EngineApi):
    """The routes."""

    guarded = ("/v1", "/mock")

    def __init__(
        self,
        engine: MockEngine,
        front: Front,
        served: Served,
        faults: FaultBox,
        *,
        allow_faults: bool,
    ) -> None:
        super().__init__(engine, front, served)
        self._faults = faults
        self._allow_faults = allow_faults

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = super().application()
        if self._allow_faults:
            app.router.add_get("/mock/faults", self._get_faults)
            app.router.add_put("/mock/faults", self._put_faults)
        return app

    async def _admit(self) -> None:
        if self._faults.take_refusal():
            raise ApiError(500, "this request is refused, as a test has asked for")
        await self._faults.admit()

    def _prompts(self, body: Request) -> list[Prompt]:
        prompts = super()._prompts(body)
        if not self._faults.now.tokenise_differently:
            return prompts
        return [
            prompt if prompt.text is None else Prompt(prompt.text, (*prompt.tokens, ord(" ")))
            for prompt in prompts
        ]

    async def _get_faults(self, request: web.Request) -> web.Response:
        return web.json_response(msgspec.to_builtins(self._faults.now))

    async def _put_faults(self, request: web.Request) -> web.Response:
        try:
            self._faults.set(msgspec.json.decode(await request.read(), type=Faults))
        except msgspec.DecodeError as error:
            raise ApiError(400, str(error)) from error
        return await self._get_faults(request)
