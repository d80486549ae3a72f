"""The router's orders on their way to the engine: in their order, and without holding up what the
agent does for the router itself.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from msgspec import structs

from splitserve.kv_transfer.orders import Retarget
from splitserve.orchestrator.agent.messages import (
    FailTransfer,
    PeerDied,
    RetargetTransfer,
    ToAgent,
)
from splitserve.orchestrator.agent.readiness import ENDPOINT_ERRORS, Endpoint, answer_of

if TYPE_CHECKING:
    from splitserve.orchestrator.agent.life import Life

_log = logging.getLogger(__name__)

RELAY_LIMIT_ORDERS = 10_000
"""Orders that may wait for an engine that does not answer; later ones are lost."""


class OrderRelay:
    """Orders for the lives of one node's engine."""

    def __init__(self) -> None:
        self._orders: asyncio.Queue[tuple[Life, ToAgent]] = asyncio.Queue(RELAY_LIMIT_ORDERS)

    def put(self, life: Life, message: ToAgent) -> None:
        """The order waits for its turn."""
        try:
            self._orders.put_nowait((life, message))
        except asyncio.QueueFull:
            _log.warning("lost %r: %d orders wait", message, RELAY_LIMIT_ORDERS)

    async def run(self) -> None:
        """Hand orders to the engine one by one, for ever; those for an engine that has ended are
        dropped.
        """
        while True:
            life, message = await self._orders.get()
            if life.endpoint is not None:
                await _relay(life.endpoint, message)
            self._orders.task_done()

    async def empty(self) -> None:
        """Returns when no order waits."""
        await self._orders.join()


async def _relay(endpoint: Endpoint, message: ToAgent) -> None:
    match message:
        case FailTransfer(transfer_id=transfer_id, reason=reason):
            call = endpoint.fail_transfer(transfer_id, reason)
        case RetargetTransfer():
            call = endpoint.retarget(Retarget(**structs.asdict(message)))
        case PeerDied(incarnation=incarnation):
            call = endpoint.peer_died(incarnation)
        case _:
            _log.warning("%r is not for an engine", message)
            return
    try:
        await answer_of(call)
    except ENDPOINT_ERRORS as error:
        _log.warning("the engine did not take %r: %r", message, error)
