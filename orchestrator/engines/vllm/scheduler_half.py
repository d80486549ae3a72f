"""The connector in vLLM's scheduler: which requests are legs, what the workers are told, and the
agent's endpoint.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from splitserve.decode_node.reservations import Reservations
from splitserve.kv_transfer.engine_endpoint import EngineDescription, EngineEndpoint, EngineStatus
from splitserve.kv_transfer.fingerprint import prompt_hash
from splitserve.kv_transfer.orders import StepOrders
from splitserve.kv_transfer.transfer_params import BadTransferParamsError, TransferParams, unseal
from splitserve.orchestrator.engines.connector_config import cluster_secret, connector_config
from splitserve.orchestrator.engines.vllm.fingerprint import engine_fingerprint
from splitserve.orchestrator.engines.vllm.support import extra_config
from splitserve.prefill_node.prefills import Prefills

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

COMPLETE = frozenset({RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED})


class SchedulerHalf:
    """Everything the connector decides in the engine core. Used by the scheduler's thread only."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        config = connector_config(extra_config(vllm_config))
        self._secret = cluster_secret()
        self._blocks = kv_cache_config.num_blocks
        block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        tensor_parallel = vllm_config.parallel_config.tensor_parallel_size
        self._prefills = Prefills(block_tokens)
        self._reservations = Reservations(block_tokens)
        self._live: set[str] = set()
        self._running = 0
        self._counters_by_rank: dict[int, dict[str, float]] = {}
        self._own_counters = {"ignored_transfer_params": 0.0, "prompt_tokens_computed": 0.0}
        self.block_pool: BlockPool | None = None
        self._endpoint = EngineEndpoint(
            config.endpoint_address,
            self._secret,
            EngineDescription(
                incarnation=config.incarnation,
                fingerprint=engine_fingerprint(vllm_config, kv_cache_config),
                control_addresses=tuple(config.control_address(r) for r in range(tensor_parallel)),
                block_tokens=block_tokens,
                total_blocks=self._blocks,
                max_model_len=vllm_config.model_config.max_model_len,
                tensor_parallel=tensor_parallel,
                transport=config.transport,
            ),
            self._status,
        )
        self._endpoint.start()

    def arrived(self, request: Request) -> None:
        """A request reached the scheduler; a leg is recognised by its sealed parameters."""
        self._live.add(request.request_id)
        params = self._leg(request)
        if params is None or not request.prompt_token_ids:
            return
        digest = prompt_hash(request.prompt_token_ids, _extras(request))
        side = self._prefills if params.role == "prefill" else self._reservations
        if not side.arrived(request.request_id, params, request.num_prompt_tokens, digest):
            logger.warning(
                "request %s repeats transfer %s: it is computed here",
                request.request_id,
                params.transfer_id,
            )

    def wanted_tokens(self, request: Request, computed_tokens: int) -> int:
        """Prompt tokens that should come from the prefill node."""
        if request.skip_reading_prefix_cache:
            return 0
        return self._reservations.wanted_tokens(request.request_id, computed_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The request has blocks."""
        self._reservations.reserved(request.request_id, blocks.get_block_ids()[0], external_tokens)

    def build_orders(self, output: SchedulerOutput) -> StepOrders:
        """Everything the workers must know before this step."""
        for request_id in output.preempted_req_ids or ():
            self._prefills.preempted(request_id)
        for new in output.scheduled_new_reqs:
            self._scheduled(output, new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._scheduled(output, request_id, computed)
        self._running = len(output.num_scheduled_tokens)
        preempted, opens, progress, closes = self._prefills.take_orders()
        receives, cancels, declines = self._reservations.take_orders()
        given_up, dead_peers = self._endpoint.take_orders()
        return StepOrders(
            preempted=preempted,
            opens=opens,
            progress=progress,
            closes=closes,
            receives=receives,
            cancels=cancels,
            declines=declines,
            given_up=given_up,
            dead_peers=dead_peers,
        )

    def _scheduled(self, output: SchedulerOutput, request_id: str, computed: int) -> None:
        if not self._prefills.is_active:
            return
        assert output.kv_connector_block_state is not None
        block_ids = output.kv_connector_block_state.get_block_ids(request_id)
        assert block_ids is not None, f"no block table for the scheduled request {request_id}"
        scheduled = output.num_scheduled_tokens[request_id]
        self._prefills.scheduled(request_id, computed, scheduled, block_ids[0])

    def step_reported(self, output: KVConnectorOutput) -> None:
        """The workers' transfer threads are done with these."""
        self._reservations.settled(output.finished_recving or ())
        self._prefills.released(output.finished_sending or set())
        meta = output.kv_connector_worker_meta
        if meta is not None:
            self._counters_by_rank = {**self._counters_by_rank, **meta.by_rank}

    def finished(self, request: Request, blocks: int) -> bool:
        """The engine is done with the request. True when its blocks are still read for a peer."""
        request_id = request.request_id
        self._live.discard(request_id)
        self._reservations.finished(request_id)
        aborted = request.status not in COMPLETE
        return self._prefills.finished(request_id, aborted=aborted, blocks=blocks)

    @property
    def has_orders(self) -> bool:
        """Whether the workers must be told something although no request runs."""
        return (
            self._endpoint.has_orders or self._prefills.has_orders or self._reservations.has_orders
        )

    def stop(self) -> None:
        """End the endpoint's thread."""
        self._endpoint.stop()

    def _leg(self, request: Request) -> TransferParams | None:
        try:
            return unseal(request.kv_transfer_params, self._secret)
        except BadTransferParamsError as error:
            self._own_counters["ignored_transfer_params"] += 1
            logger.warning("request %s: %s; served without a transfer", request.request_id, error)
            return None

    def _status(self) -> EngineStatus:
        """Read by the endpoint's thread: single reads of values that the scheduler thread
        replaces.
        """
        live = len(self._live)
        running = min(self._running, live)
        counters: dict[str, float] = dict(self._own_counters)
        for rank_counters in self._counters_by_rank.values():
            for name, value in rank_counters.items():
                counters[name] = counters.get(name, 0.0) + value
        pool = self.block_pool
        return EngineStatus(
            running=running,
            waiting=live - running,
            free_blocks=pool.get_num_free_blocks() if pool is not None else self._blocks,
            total_blocks=self._blocks,
            open_transfers=int(counters.pop("open_sends", 0) + counters.pop("open_receives", 0)),
            leased_blocks=self._prefills.leased_blocks,
            counters=counters,
        )


def _extras(request: Request) -> str:
    """What a prompt's KV depends on besides its tokens, as canonical text."""
    adapter = request.lora_request.lora_name if request.lora_request else ""
    media = ",".join(str(feature.identifier) for feature in request.mm_features or ())
    return f"adapter={adapter};salt={request.cache_salt or ''};media={media}"
