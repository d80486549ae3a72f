"""Answers to a supervisor's probes, such as Kubernetes': whether an agent lives, its engine has
started, and the router uses it. Plain HTTP without secrets, and only where it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable

LIVE_PATH = "/livez"
"""The agent's loop runs."""
STARTED_PATH = "/startupz"
"""Its engine has been ready once."""
READY_PATH = "/readyz"
"""The router gives it work."""
_CLOSE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Health:
    """An agent at one moment."""

    has_started: bool
    obstacle: str
    """Why the node gets no work; empty while it does."""

    @classmethod
    def of(cls, has_started: bool, phase: str, is_connected: bool, refused: str) -> Health:
        """From what an agent knows; ``refused`` is the router's reason not to use the node."""
        obstacle = refused
        if phase != "ready":
            obstacle = f"the node is {phase}"
        elif not is_connected:
            obstacle = refused or "no connection to the router"
        return cls(has_started, obstacle)


class HealthServer:
    """Answers until it is closed; a loop that hangs does not answer, which is the point."""

    def __init__(self, health: Callable[[], Health]) -> None:
        self._health = health
        self._runner: web.AppRunner | None = None

    async def listen(self, host: str, port: int) -> None:
        """Probes are answered on ``host:port``. Raises ``OSError`` when that cannot be had."""
        app = web.Application()
        app.router.add_get(LIVE_PATH, self._live)
        app.router.add_get(STARTED_PATH, self._started)
        app.router.add_get(READY_PATH, self._ready)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_TIMEOUT_S)
        await runner.setup()
        self._runner = runner
        await web.TCPSite(runner, host, port).start()

    async def close(self) -> None:
        """The port is free again."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _live(self, request: web.Request) -> web.Response:
        return _answer("")

    async def _started(self, request: web.Request) -> web.Response:
        return _answer("" if self._health().has_started else "the engine has not been ready yet")

    async def _ready(self, request: web.Request) -> web.Response:
        return _answer(self._health().obstacle)


def _answer(obstacle: str) -> web.Response:
    return web.Response(status=503 if obstacle else 200, text=f"{obstacle or 'ok'}\n")
