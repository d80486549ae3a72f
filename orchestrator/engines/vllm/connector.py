"""The class that vLLM loads: splitserve's KV connector, one instance in the scheduler and one in
each worker.

Loaded through ``kv_connector_module_path``. vLLM imports this module in its API server too, so
nothing heavy is imported at the top. The role of a request (prefill leg, decode leg, neither) comes
with the request; one engine can serve all three at once. vLLM's hard rules for connectors are
asserts in its engine loop: a request id is reported as sent or received exactly once, and only when
vLLM waits for it. ``Prefills``, ``Reservations`` and the transfer thread keep these rules; this
class only translates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from splitserve.kv_transfer.cache.orders import CacheNews, CacheOrders
    from splitserve.kv_transfer.orders import StepOrders
    from splitserve.kv_transfer.transfer_facts import TransferFacts
    from splitserve.orchestrator.engines.vllm.scheduler_half import SchedulerHalf
    from splitserve.orchestrator.engines.vllm.worker_half import RankReport, WorkerHalf


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, once per step."""

    orders: StepOrders
    cache_orders: CacheOrders
    computes: bool
    """Whether anything is computed in this step."""


@dataclass
class WorkerReports(KVConnectorWorkerMetadata):
    """Workers to scheduler: what each rank's threads count and hold, and what has ended."""

    by_rank: dict[int, RankReport] = field(default_factory=dict)
    cache_news: dict[int, CacheNews] = field(default_factory=dict)
    ended: dict[int, tuple[TransferFacts, ...]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReports:
        """The reports of both."""
        assert isinstance(other, WorkerReports)
        return WorkerReports(
            {**self.by_rank, **other.by_rank},
            {**self.cache_news, **other.cache_news},
            {**self.ended, **other.ended},
        )


class SplitserveConnector(KVConnectorBase_V1, SupportsHMA):
    """Streams KV layer by layer between engines, and loads it into reserved blocks."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        from splitserve.orchestrator.engines.vllm.support import refuse_unsupported

        refuse_unsupported(vllm_config, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            from splitserve.orchestrator.engines.vllm.scheduler_half import SchedulerHalf

            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config)
        else:
            from splitserve.orchestrator.engines.vllm.worker_half import WorkerHalf

            self._worker = WorkerHalf(vllm_config, kv_cache_config)

    @property
    def _scheduler_half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a scheduler method was called in a worker"
        return self._scheduler

    @property
    def _worker_half(self) -> WorkerHalf:
        assert self._worker is not None, "a worker method was called in the scheduler"
        return self._worker

    # -- class ---------------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Layers outermost, then blocks, then heads: a head's slice of a page is contiguous."""
        return "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """The layer hooks do work, so they must run between graph pieces."""
        return True

    # -- scheduler -----------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Called once after construction."""
        self._scheduler_half.block_pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        """At arrival, before any allocation."""
        self._scheduler_half.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """(tokens that will come from outside, asynchronously); None: not known yet. Without
        effect.
        """
        tokens = self._scheduler_half.wanted_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Groups that arrive from outside and must not be zeroed."""
        assert self._kv_cache_config is not None
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks are allocated; called again with 0 once an asynchronous load is over."""
        self._scheduler_half.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers are told before this step."""
        orders, cache_orders = self._scheduler_half.build_orders(scheduler_output)
        computes = scheduler_output.total_num_scheduled_tokens > 0
        return StepMetadata(orders, cache_orders, computes)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers reported after a step."""
        self._scheduler_half.step_reported(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Once per request; True keeps its blocks until it is reported as sent."""
        return self._scheduler_half.finished(request, block_ids), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``, for engines with the hybrid KV cache manager."""
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """Whether an otherwise idle engine must take a step."""
        return self._scheduler_half.has_orders

    # -- worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The KV memory exists: describe it and become reachable."""
        self._worker_half.start(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Before the step's forward pass."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._worker_half.begin_step(
            connector_metadata.orders,
            connector_metadata.cache_orders,
            computes=connector_metadata.computes,
        )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: grants leave when the step begins, pages arrive by themselves."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled only when all of its pages are in place."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """A layer's KV of this step is in the cache."""
        self._worker_half.layer_done(layer_name, kv_layer)

    def wait_for_save(self) -> None:
        """The forward pass is over. Does not wait: blocks stay until their pages are written."""
        self._worker_half.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose pages are written or have arrived since the last step."""
        results = self._worker_half.take_results()
        return KVConnectorTransferResults(
            finished_sending=set(results.finished_sending),
            finished_recving=set(results.finished_receiving),
            failed_recving=set(results.failed_receiving),
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What this rank counts and holds, when that changed, and what has ended."""
        rank = self._worker_half.rank
        changed, news = self._worker_half.changed_report(), self._worker_half.take_cache_news()
        ended = self._worker_half.take_ended()
        if changed is None and news.is_empty and not ended:
            return None
        return WorkerReports(
            {} if changed is None else {rank: changed},
            {} if news.is_empty else {rank: news},
            {rank: ended} if ended else {},
        )

    def shutdown(self) -> None:
        """Stop the threads of this process."""
        if self._worker is not None:
            self._worker.stop()
        if self._scheduler is not None:
            self._scheduler.stop()
