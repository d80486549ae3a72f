"""The KV connector of an engine whose scheduler and ranks live in one process: the product's own
pieces behind the scheduler's hooks and the forward pass.

What ``engines/vllm/scheduler_half.py`` and ``worker_half.py`` are to vLLM: the same ``Legs`` with
the agent's endpoint, and one ``TransferThread`` per tensor-parallel rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from msgspec import structs

from splitserve.kv_transfer.cache.engine_cache import PromptIdentity
from splitserve.kv_transfer.cache.orders import CacheNews
from splitserve.kv_transfer.engine_endpoint import EngineDescription
from splitserve.kv_transfer.orders import TransferResults
from splitserve.kv_transfer.transfer_thread import TransferThread
from splitserve.orchestrator.engines.joined_receives import JoinedReceives
from splitserve.orchestrator.engines.legs import Computed, EngineLoad, Legs
from splitserve.orchestrator.engines.serving.cache_half import cache_threads, engine_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.kv_transfer.cache.copy_thread import CacheThread
    from splitserve.orchestrator.engines.connector_config import ConnectorConfig
    from splitserve.orchestrator.engines.serving.memory import RankMemory
    from splitserve.orchestrator.engines.serving.scheduler import Request, Scheduler, StepPlan


@dataclass(frozen=True)
class EngineFacts:
    """What an engine says of itself, to its peers and to its agent."""

    engine: str
    """Name and version."""
    hardware: str
    fingerprint: dict[str, str]
    vocabulary_tokens: int
    max_model_len: int
    prefix_caching: bool
    step_limit_tokens: int
    running_limit_requests: int


class NoConnector:
    """An engine that takes part in no split."""

    has_orders = False

    def start(self, scheduler: Scheduler) -> None:
        """Nothing."""

    def arrived(self, request: Request) -> None:
        """Nothing."""

    def wanted_tokens(self, request: Request, computed_tokens: int) -> int:
        """None."""
        return 0

    def allocated(self, request: Request, external_tokens: int) -> None:
        """Nothing."""

    def finished(self, request: Request, *, aborted: bool) -> bool:
        """Nobody reads its blocks."""
        return False

    def step_reported(self, results: TransferResults) -> TransferResults:
        """All of it."""
        return results

    def begin_step(self, plan: StepPlan) -> None:
        """Nothing."""

    def layer_done(self, layer: int) -> None:
        """Nothing."""

    def look(self) -> frozenset[str]:
        """Nothing."""
        return frozenset()

    def end_step(self) -> TransferResults:
        """Nothing was sent or received."""
        return TransferResults()

    def stop(self) -> None:
        """Nothing."""


class Connector:
    """Both halves. ``start`` and the rest are called by the engine's loop; the endpoint's thread
    reads ``_status``.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        secret: bytes,
        memories: Sequence[RankMemory],
        facts: EngineFacts,
    ) -> None:
        layout, fingerprint = memories[0].layout, facts.fingerprint
        self._memories = memories
        self._reports = RankReports(len(memories))
        self._prompt_tokens_computed = 0
        self._preemptions = 0
        self._scheduler: Scheduler | None = None
        self._threads = [
            TransferThread(
                config.transfer_settings(rank, len(memories)),
                layout=memory.layout,
                regions=[memory.region],
                fingerprint=fingerprint,
            )
            for rank, memory in enumerate(memories)
        ]
        self._seen = [TransferResults()] * len(memories)
        """What each rank's thread has reported in the present step."""
        self._joined = [JoinedReceives() for _ in memories]
        self._caches: list[CacheThread] = []
        self._cache_news: list[CacheNews] = []
        cache = None
        if config.cache is not None:
            self._caches = cache_threads(
                config.cache, memories, incarnation=config.incarnation, fingerprint=fingerprint
            )
            cache = engine_cache(
                config.cache, memories, incarnation=config.incarnation, fingerprint=fingerprint,
                pool=lambda: self._bound_scheduler.pool,
            )  # fmt: skip
        self._legs = Legs(
            secret,
            config.endpoint_address,
            EngineDescription(
                incarnation=config.incarnation,
                fingerprint=fingerprint,
                control_addresses=tuple(map(config.advertised_address, range(len(memories)))),
                block_tokens=layout.block_tokens,
                total_blocks=layout.num_blocks,
                max_model_len=facts.max_model_len,
                tensor_parallel=len(memories),
                transport=config.transport,
                reports_prefixes=facts.prefix_caching,
                reports_transfers=True,
                uses_cache=config.cache is not None,
                step_limit_tokens=facts.step_limit_tokens,
                running_limit_requests=facts.running_limit_requests,
                kv_bytes_per_token=memories[0].token_bytes,
                vocabulary_tokens=facts.vocabulary_tokens,
                engine=facts.engine,
                hardware=facts.hardware,
            ),
            self._load,
            self._is_cached if facts.prefix_caching else None,
            cache,
        )

    @property
    def _bound_scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "the connector was not started"
        return self._scheduler

    def start(self, scheduler: Scheduler) -> None:
        """Peers and the agent can reach this engine. Raises when they could not."""
        self._scheduler = scheduler
        for thread in self._threads:
            thread.start()
        for cache in self._caches:
            cache.start()
        self._legs.start()

    def stop(self) -> None:
        """The threads have ended and the KV memory is not touched any more."""
        self._legs.stop()
        for cache in self._caches:
            cache.stop()
        for thread in self._threads:
            thread.stop()

    # -- the scheduler's hooks -----------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """A request reached the scheduler."""
        identity = PromptIdentity(salt=request.salt)
        self._legs.arrived(request.id, request.kv_transfer_params, request.prompt, identity)

    def wanted_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Prompt tokens that come from outside; None: ask again in a moment."""
        return self._legs.wanted_tokens(request.id, computed_tokens)

    def allocated(self, request: Request, external_tokens: int) -> None:
        """The request has blocks."""
        self._legs.allocated(request.id, request.blocks, external_tokens)

    def finished(self, request: Request, *, aborted: bool) -> bool:
        """True when the request's blocks are still read for a peer."""
        scheduler = self._scheduler
        assert scheduler is not None, "a request ends before the connector was started"
        return self._legs.finished(
            request.id,
            aborted=aborted,
            blocks=len(request.blocks),
            block_hashes=lambda: scheduler.hashes(request),
            computed=Computed(0 if aborted else request.length - 1, request.tokens, request.blocks),
        )

    def step_reported(self, results: TransferResults) -> TransferResults:
        """The transfer threads are done with these."""
        untold = self._legs.settled(results.finished_sending, results.finished_receiving)
        self._legs.cache_reported(self._cache_news)
        self._cache_news = []
        for thread in self._threads:
            if ended := thread.take_ended():
                self._legs.transfers_ended(ended)
        return structs.replace(results, finished_sending=results.finished_sending - untold)

    # -- the forward pass ----------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        """Whether the threads must be told something although no request runs."""
        return self._legs.has_orders

    def begin_step(self, plan: StepPlan) -> None:
        """Tell the threads what this step is about. Waits only when a request is preempted."""
        self._preemptions += len(plan.preempted)
        for request_id in plan.preempted:
            self._legs.preempted(request_id)
        for chunk in plan.chunks:
            request = chunk.request
            self._prompt_tokens_computed += max(
                0, min(chunk.tokens, len(request.prompt) - chunk.first)
            )
            if self._legs.must_hear_of_steps:
                self._legs.scheduled(request.id, chunk.first, chunk.tokens, chunk.block_ids)
        orders, cache_orders = self._legs.take_orders(), self._legs.take_cache_orders()
        for joined in self._joined:
            joined.begin_step(orders, cache_orders)
        for cache in self._caches:
            cache.begin_step(cache_orders)
        for thread, memory in zip(self._threads, self._memories, strict=True):
            thread.begin_step(orders, memory.computed_so_far() if orders.progress else None)

    def layer_done(self, layer: int) -> None:
        """The forward pass has left ``layer`` on every rank."""
        for thread, memory in zip(self._threads, self._memories, strict=True):
            thread.layer_done(layer, memory.computed_so_far())
        for cache in self._caches:
            cache.layer_done(layer)

    def look(self) -> frozenset[str]:
        """In the middle of a step: requests of which some rank's transfer has ended, to be told at
        the step's end.
        """
        for rank, thread in enumerate(self._threads):
            seen, new = self._seen[rank], thread.take_results()
            self._seen[rank] = TransferResults(
                seen.finished_sending | new.finished_sending,
                seen.finished_receiving | new.finished_receiving,
                seen.failed_receiving | new.failed_receiving,
            )
        return frozenset().union(*(seen.finished_receiving for seen in self._seen))

    def end_step(self) -> TransferResults:
        """The forward pass is over; what all ranks have finished since the last step."""
        for thread, memory in zip(self._threads, self._memories, strict=True):
            thread.end_step(memory.computed_so_far())
        for cache in self._caches:
            cache.end_step()
        news = [cache.take_news() for cache in self._caches] or [CacheNews()] * len(self._threads)
        self._cache_news += [each for each in news if not each.is_empty]
        self.look()
        parts = zip(self._joined, self._seen, news, strict=True)
        joined = self._reports.join([j.results(seen, each) for j, seen, each in parts])
        self._seen = [TransferResults()] * len(self._threads)
        return joined

    def _is_cached(self, block_hash: bytes) -> bool:
        """Asked by the endpoint's thread: a single read of what the loop's thread changes."""
        assert self._scheduler is not None, "the endpoint was started before the scheduler"
        return bool(self._scheduler.pool.find((block_hash,)))

    def _load(self) -> EngineLoad:
        """Read by the endpoint's thread: single reads of values that the loop's thread replaces."""
        scheduler = self._scheduler
        assert scheduler is not None, "the endpoint was started before the scheduler"
        own = {
            "prompt_tokens_computed": float(self._prompt_tokens_computed),
            "preemptions": float(self._preemptions),
        }
        return EngineLoad(
            running=scheduler.running_requests,
            waiting=scheduler.waiting_requests,
            free_blocks=scheduler.pool.free_blocks,
            rank_counters=[
                own,
                *(thread.counters() for thread in self._threads),
                *(cache.counters() for cache in self._caches),
            ],
            rank_holdings=[thread.holdings() for thread in self._threads],
            now=monotonic(),
        )


class RankReports:
    """Joins what the ranks report: a request is finished when every rank has said so, and failed
    when one has.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._failed: set[str] = set()

    def join(self, results: Sequence[TransferResults]) -> TransferResults:
        """The requests that are finished on all ranks now."""
        for result in results:
            self._sent.update(result.finished_sending)
            self._received.update(result.finished_receiving)
            self._failed |= result.failed_receiving
        received = self._complete(self._received)
        failed = received & self._failed
        self._failed -= failed
        return TransferResults(self._complete(self._sent), received, failed)

    def _complete(self, counts: Counter[str]) -> frozenset[str]:
        complete = frozenset(name for name, ranks in counts.items() if ranks == self._ranks)
        for name in complete:
            del counts[name]
        return complete
