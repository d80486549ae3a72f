"""``GET /metrics``: the router's own figures at once, with a cache those of its server after a
short question.

A cache server that does not answer costs a scrape ``STAT_LIMIT_S``, and is shown as down.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.control_messages import Stat, StatWish
from splitserve.orchestrator.router.cache_control import (
    CacheControl,
    CacheRefusalError,
    CacheSilentError,
)
from splitserve.orchestrator.router.errors import ApiError

if TYPE_CHECKING:
    from splitserve.orchestrator.router.http_server import HttpConnection
    from splitserve.orchestrator.router.metrics import RouterMetrics

_log = logging.getLogger(__name__)

SCRAPES_LIMIT = 8
"""That wait for the cache server at a time; the next one gets status 429."""
STAT_LIMIT_S = 1.0
_HEADERS = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]


class Scrapes:
    """Answers them; holds those that wait."""

    def __init__(self, metrics: RouterMetrics, cache_socket: str | None) -> None:
        self._metrics = metrics
        self._control = CacheControl(cache_socket) if cache_socket is not None else None
        self._waiting: set[_Scrape] = set()

    def handle(self, connection: HttpConnection) -> None:
        """The figures go out, now or soon. Raises ``ApiError``."""
        if self._control is None:
            self.answer(connection, None)
            return
        if len(self._waiting) >= SCRAPES_LIMIT:
            raise ApiError(429, "too many scrapes at a time", retry_after_s=1)
        scrape = _Scrape(self, self._control, connection)
        self._waiting.add(scrape)
        scrape.task.add_done_callback(lambda task: self._waiting.discard(scrape))

    def answer(self, connection: HttpConnection, stat: Stat | None) -> None:
        """The figures go out."""
        connection.answer(200, _HEADERS, self._metrics.render(stat))

    def close(self) -> None:
        """Those that wait are answered without the cache's figures."""
        for scrape in list(self._waiting):
            scrape.task.cancel()
            self.answer(scrape.connection, None)


class _Scrape:
    """One that waits. Its connection calls it when the client leaves."""

    def __init__(self, scrapes: Scrapes, control: CacheControl, connection: HttpConnection) -> None:
        self.connection = connection
        connection.listener = self
        self.task = asyncio.get_running_loop().create_task(self._run(scrapes, control))

    def client_gone(self) -> None:
        """Nobody waits for the answer."""
        self.task.cancel()

    def pause(self) -> None:
        """Answers are short: the connection holds them."""

    def resume(self) -> None:
        """See ``pause``."""

    async def _run(self, scrapes: Scrapes, control: CacheControl) -> None:
        stat = None
        try:
            stat = await control.ask("stat", StatWish(), Stat, STAT_LIMIT_S)
        except (CacheSilentError, CacheRefusalError) as error:
            _log.debug("no figures of the cache: %s", error)
        scrapes.answer(self.connection, stat)
