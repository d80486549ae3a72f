"""Requests whose prompt comes in two parts, one from the cache and one from a prefill node: vLLM is
told of them once, when both parts have ended. Pure; one per worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.kv_transfer.orders import StepOrders, TransferResults

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.orders import CacheNews, CacheOrders


@dataclass
class _Parts:
    left: int = 2
    has_failed: bool = False


class JoinedReceives:
    """What every rank's transfer thread and cache thread report, as one."""

    def __init__(self) -> None:
        self._open: dict[str, _Parts] = {}

    def begin_step(self, orders: StepOrders, cache_orders: CacheOrders) -> None:
        """These parts are on their way from now on."""
        received = {order.request_id for order in orders.receives}
        for load in cache_orders.loads:
            if load.request_id in received:
                assert load.request_id not in self._open, f"{load.request_id} is received twice"
                self._open[load.request_id] = _Parts()

    def results(self, transfers: TransferResults, news: CacheNews) -> TransferResults:
        """Requests that have all of their parts now, and those of them that lack some bytes."""
        finished: set[str] = set()
        failed: set[str] = set()
        ended = [
            (name, name in transfers.failed_receiving) for name in transfers.finished_receiving
        ]
        ended += [(loaded.request_id, not loaded.is_whole) for loaded in news.loaded]
        for request_id, has_failed in ended:
            parts = self._open.get(request_id)
            if parts is not None:
                parts.left -= 1
                parts.has_failed |= has_failed
                if parts.left:
                    continue
                has_failed = parts.has_failed
                del self._open[request_id]
            finished.add(request_id)
            if has_failed:
                failed.add(request_id)
        return TransferResults(transfers.finished_sending, frozenset(finished), frozenset(failed))
