"""What the engine's prefix cache has, on its way to the routers.

The engine is asked for what has changed since its last answer, so every answer has to reach every
router that is connected. Where one may be lost (the engine did not answer in time, a connection
broke), and for every router that welcomes the node, the engine is asked to begin again, for all of
them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from splitserve.kv_transfer.held_prefixes import NOTHING_HELD
from splitserve.orchestrator.agent.messages import NodePrefixes
from splitserve.orchestrator.agent.readiness import ENDPOINT_ERRORS, Endpoint, answer_of

if TYPE_CHECKING:
    from splitserve.orchestrator.agent.routers import Routers

_log = logging.getLogger(__name__)

ASK_INTERVAL_S = 0.25


class PrefixReports:
    """The reports of one node, one life of its engine after another."""

    def __init__(self, node: str, routers: Routers) -> None:
        self._node = node
        self._routers = routers
        self._is_welcome = False
        self._from_start = True

    def welcome(self) -> None:
        """A router takes part, and knows nothing of what was said before."""
        self._is_welcome = self._from_start = True

    async def run(self, endpoint: Endpoint, incarnation: str) -> None:
        """Relay what that engine says; ends by cancellation."""
        while True:
            try:
                await self._relay(endpoint, incarnation)
            except ENDPOINT_ERRORS as error:
                _log.debug("the engine does not say what it has cached: %r", error)
                self._from_start = True
            await asyncio.sleep(ASK_INTERVAL_S)

    async def _relay(self, endpoint: Endpoint, incarnation: str) -> None:
        """Until there is nothing more to say, or the link to a router is full."""
        if not self._routers.connected:
            self._is_welcome = False
        while self._is_welcome and self._routers.can_take_prefixes:
            from_start, self._from_start = self._from_start, False
            report = await answer_of(endpoint.prefixes(from_start=from_start))
            if report != NOTHING_HELD:
                self._routers.prefixes(
                    NodePrefixes(
                        node=self._node,
                        incarnation=incarnation,
                        is_first=report.is_first,
                        added=report.added,
                        tokens=report.tokens,
                        removed=report.removed,
                    )
                )
            if not report.has_more:
                return
