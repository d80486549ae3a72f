"""vLLM's worker end of the cache, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from splitserve.kv_transfer.cache.orders import CacheNews, CacheOrders
from splitserve.kv_transfer.orders import StepOrders, TransferResults
from splitserve.orchestrator.engines.vllm.worker_half import LOAD_WAIT_S, WorkerHalf


class Threads:
    """Plays the transfer thread and the cache thread."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def begin_step(self, *_: object) -> None:
        """Nothing."""

    def take_results(self) -> TransferResults:
        return TransferResults()

    def take_news(self, wait_s: float) -> CacheNews:
        self.waits.append(wait_s)
        return CacheNews()


def test_only_a_step_that_computes_nothing_waits_for_loads() -> None:
    """Streams must not stand still because another request waits for its chunks."""
    group = SimpleNamespace(layer_names=["layer"])
    config: Any = SimpleNamespace(kv_cache_groups=[group])
    half, threads = WorkerHalf(config, config), Threads()
    half._thread = half._cache = threads  # type: ignore[assignment]
    for computes in (True, False, True):
        half.begin_step(StepOrders(), CacheOrders(), computes=computes)
        half.take_results()
    assert threads.waits == [0.0, LOAD_WAIT_S, 0.0]
