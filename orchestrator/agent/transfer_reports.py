"""The facts of ended transfers, on their way from the engine to the routers.

The engine holds the question until it has something to tell, so facts are on their way at once and
nothing is polled while no transfer ends. A pause after each answer bounds what many short transfers
cost. What finds no router is lost: its requests were another router's.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING

from splitserve.kv_transfer.engine_endpoint import ANSWER_DEADLINE_S
from splitserve.kv_transfer.process_identity import boot_id
from splitserve.orchestrator.agent.messages import NodeTransfers
from splitserve.orchestrator.agent.readiness import ENDPOINT_ERRORS, Endpoint, answer_of

if TYPE_CHECKING:
    from splitserve.orchestrator.agent.routers import Routers
    from splitserve.orchestrator.observe.transfer_spans import TransferSpans

_log = logging.getLogger(__name__)

PAUSE_S = 0.05
"""Between two questions."""
RETRY_S = 1.0
"""After a question that was not answered."""


class TransferReports:
    """The reports of one node, one life of its engine after another."""

    def __init__(self, node: str, routers: Routers, spans: TransferSpans | None = None) -> None:
        self._node = node
        self._routers = routers
        self._spans = spans
        self._clock = boot_id()

    async def run(self, endpoint: Endpoint, incarnation: str) -> None:
        """Relay what that engine says; ends by cancellation."""
        while True:
            try:
                ended = await answer_of(endpoint.ended_transfers(), ANSWER_DEADLINE_S)
            except ENDPOINT_ERRORS as error:
                _log.debug("the engine does not say which transfers have ended: %r", error)
                await asyncio.sleep(RETRY_S)
                continue
            if ended and self._spans is not None:
                self._spans.take(ended)
            if ended:
                self._routers.transfers(
                    NodeTransfers(
                        node=self._node,
                        incarnation=incarnation,
                        clock=self._clock,
                        sent=monotonic(),
                        ended=ended,
                    )
                )
            await asyncio.sleep(PAUSE_S)
