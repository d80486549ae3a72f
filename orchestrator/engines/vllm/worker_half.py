"""The connector in a vLLM worker: describing its KV memory and driving the rank's transfer thread
from the hooks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from splitserve.kv_transfer.cache.copy_thread import CacheThread
from splitserve.kv_transfer.cache.keys import model_digest
from splitserve.kv_transfer.cache.orders import CacheNews
from splitserve.kv_transfer.holdings import RankHoldings
from splitserve.kv_transfer.layout import PageLayout
from splitserve.kv_transfer.transfer_thread import TransferThread, WhenReady
from splitserve.kv_transfer.transports.base import Region
from splitserve.orchestrator.engines.connector_config import connector_config
from splitserve.orchestrator.engines.joined_receives import JoinedReceives
from splitserve.orchestrator.engines.vllm.cache_half import chunk_geometry
from splitserve.orchestrator.engines.vllm.fingerprint import engine_fingerprint
from splitserve.orchestrator.engines.vllm.support import UnsupportedEngineError, extra_config

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from splitserve.kv_transfer.cache.orders import CacheOrders
    from splitserve.kv_transfer.orders import StepOrders, TransferResults
    from splitserve.kv_transfer.transfer_facts import TransferFacts

logger = logging.getLogger(__name__)

LOAD_WAIT_S = 5e-3
"""How long a step that computes nothing waits for a load from the cache: without that, the engine's
processes would step on and on beside the copy.
"""


class RankReport(NamedTuple):
    """What one rank's transfer thread says of itself."""

    counters: dict[str, float]
    holdings: RankHoldings


class WorkerHalf:
    """One rank's end of the connector. Used by the worker's main thread."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._layer_names = list(kv_cache_config.kv_cache_groups[0].layer_names)
        self._layer_of = {name: number for number, name in enumerate(self._layer_names)}
        self._thread: TransferThread | None = None
        self._cache: CacheThread | None = None
        self._cache_news = CacheNews()
        self._joined = JoinedReceives()
        self._wait_s = 0.0
        self._last_report = RankReport({}, RankHoldings())
        self.rank: int = 0

    def start(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the KV memory and start the transfer thread. Raises when peers could not reach
        it.
        """
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        self.rank = get_tensor_model_parallel_rank()
        tensor_parallel = self._vllm_config.parallel_config.tensor_parallel_size
        views = [kv_caches[name] for name in self._layer_names]
        total_heads = self._vllm_config.model_config.get_total_num_kv_heads()
        layout = _describe(views, self._kv_cache_config.num_blocks, self.rank, total_heads)
        storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views}
        config = connector_config(extra_config(self._vllm_config))
        fingerprint = engine_fingerprint(self._vllm_config, self._kv_cache_config)
        self._thread = TransferThread(
            config.transfer_settings(self.rank, tensor_parallel),
            layout=layout,
            regions=[
                Region(
                    address, storage.nbytes(), views[0].device.index if views[0].is_cuda else None
                )
                for address, storage in storages.items()
            ],
            fingerprint=fingerprint,
        )
        self._thread.start()
        if config.cache is not None:
            chunk_tokens = config.cache.chunk_tokens
            self._cache = CacheThread(
                config.cache,
                engine=config.incarnation,
                rank=self.rank,
                ranks=tensor_parallel,
                model=model_digest(fingerprint, chunk_tokens, config.cache.key_codec),
                layout=layout,
                geometry=chunk_geometry(chunk_tokens, self._vllm_config, self._kv_cache_config),
            )
            self._cache.start()
        logger.info(
            "KV of rank %d: %d layers, %d blocks of %d tokens, pages of %d bytes",
            self.rank, layout.layers, layout.num_blocks, layout.block_tokens, layout.page_bytes,
        )  # fmt: skip

    @property
    def _transfers(self) -> TransferThread:
        assert self._thread is not None, "the KV memory was not registered"
        return self._thread

    def begin_step(self, orders: StepOrders, cache_orders: CacheOrders, *, computes: bool) -> None:
        """Before the forward pass, if the step ``computes`` anything."""
        self._wait_s = 0.0 if computes else LOAD_WAIT_S
        self._joined.begin_step(orders, cache_orders)
        if self._cache is not None:
            self._cache.begin_step(cache_orders)
        self._transfers.begin_step(orders, self._computed_so_far() if orders.progress else None)

    def layer_done(self, layer_name: str, kv_layer: torch.Tensor) -> None:
        """After the attention of a layer; layers without pages of their own are none of ours."""
        layer = self._layer_of.get(layer_name)
        if layer is not None:
            self._transfers.layer_done(layer, _recorded(kv_layer) if kv_layer.is_cuda else None)
            if self._cache is not None:
                self._cache.layer_done(layer)

    def end_step(self) -> None:
        """After the forward pass."""
        self._transfers.end_step(self._computed_so_far())
        if self._cache is not None:
            self._cache.end_step()

    def _computed_so_far(self) -> WhenReady | None:
        """A wait for what the device was given so far; None on CPU, where it is done."""
        if self._vllm_config.device_config.device_type != "cuda":
            return None
        import torch

        return _recorded(torch.empty(0, device="cuda"))

    def take_results(self) -> TransferResults:
        """What has finished since the last step."""
        if self._cache is not None:
            news = self._cache.take_news(self._wait_s)
            self._cache_news = self._cache_news.followed_by(news)
            return self._joined.results(self._transfers.take_results(), news)
        return self._transfers.take_results()

    def take_cache_news(self) -> CacheNews:
        """What ``take_results`` has heard of the cache since the last call."""
        news, self._cache_news = self._cache_news, CacheNews()
        return news

    def take_ended(self) -> tuple[TransferFacts, ...]:
        """The facts of the transfers that have ended since the last call."""
        return self._transfers.take_ended()

    def changed_report(self) -> RankReport | None:
        """What the thread counts and holds, None when that is as at the last call."""
        counters = self._transfers.counters()
        if self._cache is not None:
            counters.update(self._cache.counters())
        report = RankReport(counters, self._transfers.holdings())
        if report == self._last_report:
            return None
        self._last_report = report
        return report

    def stop(self) -> None:
        """End the threads that touch the KV memory."""
        if self._cache is not None:
            self._cache.stop()
        if self._thread is not None:
            self._thread.stop()


def _describe(
    views: list[torch.Tensor], num_blocks: int, rank: int, total_heads: int
) -> PageLayout:
    """The page layout of ``views``, each ``[blocks, heads, tokens, channels]`` with contiguous
    pages.

    Raises ``UnsupportedEngineError`` for any other memory layout.
    """
    first = views[0]
    blocks, heads, tokens, channels = first.shape
    if blocks != num_blocks:
        raise UnsupportedEngineError(
            f"the attention backend splits the engine's {num_blocks} blocks into {blocks}; choose "
            "a block_size that it takes whole"
        )
    expected = (tokens * channels, channels, 1)
    for view in views:
        if view.shape != first.shape or view.stride() != (first.stride(0), *expected):
            raise UnsupportedEngineError(
                f"KV pages of shape {tuple(view.shape)} and strides {view.stride()} are not "
                "contiguous by heads (layout LBHNC); this attention backend cannot be split"
            )
    item = first.element_size()
    return PageLayout(
        layer_bases=tuple(view.data_ptr() for view in views),
        block_stride=first.stride(0) * item,
        page_bytes=heads * tokens * channels * item,
        num_blocks=num_blocks,
        block_tokens=tokens,
        heads=heads,
        first_head=rank * heads,
        total_heads=total_heads,
    )


def _recorded(tensor: torch.Tensor) -> WhenReady:
    """A wait for everything that the tensor's current stream was given so far."""
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    wait: WhenReady = event.synchronize
    return wait
