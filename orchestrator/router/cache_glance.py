"""The figures of the host's cache for those who watch the router: asked for now and then while
somebody looks, and not otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from splitserve.orchestrator.router.cache_control import CacheRefusalError, CacheSilentError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_log = logging.getLogger(__name__)

REFRESH_S = 2.0
"""Age at which the figures are asked for anew."""
_SHOWN = ("chunk_tokens", "arena", "tiers", "counters")
"""Neither tenants nor engines: who may see them asks for them."""


class CacheGlance:
    """The latest figures of one cache. ``stat`` answers, or fails, in bounded time."""

    def __init__(self, stat: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._stat = stat
        self._figures: dict[str, Any] | None = None
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    def look(self) -> dict[str, Any] | None:
        """What is known: the tiers' figures, or what is the ``trouble`` with them; None before the
        first answer.
        """
        now = time.monotonic()
        if self._asking is None and now - self._asked_at >= REFRESH_S:
            self._asked_at = now
            self._asking = asyncio.get_running_loop().create_task(self._ask())
            self._asking.add_done_callback(self._asked)
        return self._figures

    def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self) -> None:
        try:
            stat = await self._stat()
        except (CacheSilentError, CacheRefusalError) as error:
            self._figures = {"trouble": str(error)}
        else:
            self._figures = {name: stat[name] for name in _SHOWN} | {"trouble": ""}

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None
        if not task.cancelled() and task.exception() is not None:
            _log.error("the cache's figures cannot be shown", exc_info=task.exception())
