"""The connector in vLLM's scheduler: vLLM's words translated for ``Legs``, and back."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import vllm
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import RequestStatus

from splitserve.kv_transfer.engine_endpoint import EngineDescription
from splitserve.orchestrator.engines.connector_config import cluster_secret, connector_config
from splitserve.orchestrator.engines.hardware import of_processor
from splitserve.orchestrator.engines.legs import Computed, EngineLoad, Legs
from splitserve.orchestrator.engines.vllm.cache_half import engine_cache, prompt_identity
from splitserve.orchestrator.engines.vllm.fingerprint import engine_fingerprint
from splitserve.orchestrator.engines.vllm.support import extra_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from splitserve.kv_transfer.cache.orders import CacheOrders
    from splitserve.kv_transfer.orders import StepOrders
    from splitserve.orchestrator.engines.vllm.worker_half import RankReport

COMPLETE = frozenset({RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED})


class SchedulerHalf:
    """The connector in the engine core. Used by the scheduler's thread only."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        config = connector_config(extra_config(vllm_config))
        tensor_parallel = vllm_config.parallel_config.tensor_parallel_size
        self._blocks = kv_cache_config.num_blocks
        self._live: set[str] = set()
        self._running = 0
        self._report_by_rank: dict[int, RankReport] = {}
        self.block_pool: BlockPool | None = None
        caches = bool(vllm_config.cache_config.enable_prefix_caching)
        fingerprint = engine_fingerprint(vllm_config, kv_cache_config)
        description = EngineDescription(
            incarnation=config.incarnation,
            fingerprint=fingerprint,
            control_addresses=tuple(config.advertised_address(r) for r in range(tensor_parallel)),
            block_tokens=kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
            total_blocks=self._blocks,
            max_model_len=vllm_config.model_config.max_model_len,
            tensor_parallel=tensor_parallel,
            transport=config.transport,
            reports_prefixes=caches,
            reports_transfers=True,
            uses_cache=config.cache is not None,
            step_limit_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            running_limit_requests=vllm_config.scheduler_config.max_num_seqs,
            kv_bytes_per_token=_kv_bytes_per_token(kv_cache_config, tensor_parallel),
            vocabulary_tokens=vllm_config.model_config.get_vocab_size(),
            engine=f"vllm {vllm.__version__}",
            hardware=_hardware(tensor_parallel),
        )
        cache = None
        if config.cache is not None:
            cache = engine_cache(
                config.cache, vllm_config, kv_cache_config, incarnation=config.incarnation,
                fingerprint=fingerprint, pool=lambda: self.block_pool,
            )  # fmt: skip
        self._legs = Legs(
            cluster_secret(),
            config.endpoint_address,
            description,
            self._load,
            self._is_cached if caches else None,
            cache,
        )
        self._legs.start()

    def arrived(self, request: Request) -> None:
        """A request reached the scheduler."""
        self._live.add(request.request_id)
        self._legs.arrived(
            request.request_id,
            request.kv_transfer_params,
            request.prompt_token_ids or (),
            prompt_identity(request),
        )

    def wanted_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Prompt tokens that come from outside; None: ask again in a moment."""
        if request.skip_reading_prefix_cache:
            return 0
        return self._legs.wanted_tokens(request.request_id, computed_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The request has blocks."""
        self._legs.allocated(request.request_id, blocks.get_block_ids()[0], external_tokens)

    def build_orders(self, output: SchedulerOutput) -> tuple[StepOrders, CacheOrders]:
        """Everything the workers must know before this step."""
        for request_id in output.preempted_req_ids or ():
            self._legs.preempted(request_id)
        if self._legs.must_hear_of_steps:
            self._tell_of_step(output)
        self._running = len(output.num_scheduled_tokens)
        return self._legs.take_orders(), self._legs.take_cache_orders()

    def _tell_of_step(self, output: SchedulerOutput) -> None:
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        computed = {request.req_id: request.num_computed_tokens for request in new}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        assert output.kv_connector_block_state is not None
        for request_id, before in computed.items():
            block_ids = output.kv_connector_block_state.get_block_ids(request_id)
            assert block_ids is not None, f"no block table for the scheduled request {request_id}"
            tokens = output.num_scheduled_tokens[request_id]
            self._legs.scheduled(request_id, before, tokens, block_ids[0])

    def step_reported(self, output: KVConnectorOutput) -> None:
        """The workers' transfer threads are done with these."""
        untold = self._legs.settled(output.finished_sending or (), output.finished_recving or ())
        if output.finished_sending and untold:
            output.finished_sending -= untold  # vLLM acts on what is left.
        meta = output.kv_connector_worker_meta
        if meta is not None:
            self._report_by_rank = {**self._report_by_rank, **meta.by_rank}
            for ended in meta.ended.values():
                self._legs.transfers_ended(ended)
        self._legs.cache_reported(meta.cache_news.values() if meta is not None else ())

    def finished(self, request: Request, block_ids: list[int]) -> bool:
        """The engine is done with the request. True when its blocks are still read for a peer."""
        self._live.discard(request.request_id)
        aborted = request.status not in COMPLETE
        # An aborted request may count tokens as computed that are still on their way.
        computed_tokens = 0 if aborted else request.num_computed_tokens
        return self._legs.finished(
            request.request_id,
            aborted=aborted,
            blocks=len(block_ids),
            block_hashes=lambda: request.block_hashes,
            computed=Computed(computed_tokens, request.all_token_ids, block_ids),
        )

    @property
    def has_orders(self) -> bool:
        """Whether the workers must be told something although no request runs."""
        return self._legs.has_orders

    def stop(self) -> None:
        """End the endpoint's thread."""
        self._legs.stop()

    def _is_cached(self, block_hash: bytes) -> bool:
        """Asked by the endpoint's thread."""
        pool = self.block_pool
        if pool is None:
            return False
        try:
            return pool.get_cached_block(BlockHash(block_hash), [0]) is not None
        except (RuntimeError, StopIteration):
            # Several blocks have that content and the scheduler's thread has just changed which
            return True

    def _load(self) -> EngineLoad:
        """Read by the endpoint's thread: single reads of what the scheduler's thread replaces."""
        live, pool = len(self._live), self.block_pool
        reports = list(self._report_by_rank.values())
        running = min(self._running, live)
        return EngineLoad(
            running=running,
            waiting=live - running,
            free_blocks=pool.get_num_free_blocks() if pool is not None else self._blocks,
            rank_counters=[report.counters for report in reports],
            rank_holdings=[report.holdings for report in reports],
            now=monotonic(),
        )


def _kv_bytes_per_token(kv_cache_config: KVCacheConfig, ranks: int) -> int:
    """Of all layers and ranks."""
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    bytes_per_block: int = spec.page_size_bytes * len(group.layer_names) * ranks
    return bytes_per_block // int(spec.block_size)


def _hardware(ranks: int) -> str:
    """A GPU's name, or the processor's; how many of them, or of its cores, the engine has."""
    if current_platform.is_cpu():
        return of_processor()
    return f"{ranks} x {current_platform.get_device_name()}"
