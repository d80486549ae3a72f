"""The legs of split requests in an engine's scheduler: what every adapter does alike.

An adapter reports what its scheduler does and hands ``take_orders`` to the transfer threads of its
workers before each step. The agent's endpoint lives here too, so that what it relays reaches the
next step.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from splitserve.decode_node.reservations import Reservations
from splitserve.kv_transfer.cache.keys import tag_of
from splitserve.kv_transfer.cache.messages import Mark
from splitserve.kv_transfer.cache.orders import CacheOrders
from splitserve.kv_transfer.engine_endpoint import EngineEndpoint, EngineStatus
from splitserve.kv_transfer.fingerprint import prompt_hash
from splitserve.kv_transfer.held_prefixes import NOTHING_HELD, HeldPrefixes
from splitserve.kv_transfer.holdings import (
    RECEIVES,
    WAITS_FOR_BLOCKS,
    Holding,
    RankHoldings,
    joined,
)
from splitserve.kv_transfer.orders import StepOrders
from splitserve.kv_transfer.prefix_marks import mark_positions
from splitserve.kv_transfer.transfer_params import BadTransferParamsError, TransferParams, unseal
from splitserve.prefill_node.prefills import Prefills

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from splitserve.kv_transfer.cache.engine_cache import EngineCache, PromptIdentity
    from splitserve.kv_transfer.cache.orders import CacheNews
    from splitserve.kv_transfer.engine_endpoint import EngineDescription
    from splitserve.kv_transfer.held_prefixes import PrefixReport
    from splitserve.kv_transfer.transfer_facts import TransferFacts

logger = logging.getLogger(__name__)

MARKED_LIMIT_REQUESTS = 4_096
"""Requests in the engine whose marks are kept; of more, those of the oldest are forgotten."""
UNREAD_LIMIT_REQUESTS = 1_024
"""Finished requests whose marks wait for the agent's question."""


@dataclass(frozen=True)
class EngineLoad:
    """What only the engine knows of itself."""

    running: int
    waiting: int
    free_blocks: int
    rank_counters: Sequence[Mapping[str, float]] = field(default_factory=tuple)
    """Counters of each rank's transfer thread."""
    rank_holdings: Sequence[RankHoldings] = field(default_factory=tuple)
    """What each rank's transfer thread holds for whom."""
    now: float = 0.0
    """Of this look, in the clock of ``rank_holdings``."""


@dataclass(frozen=True)
class Computed:
    """What an engine has of a request that ends."""

    computed_tokens: int
    """The first so many tokens have their KV in the blocks."""
    tokens: Sequence[int]
    """Prompt and answer."""
    block_ids: Sequence[int]


class Legs:
    """All legs of one engine. Used by its scheduler's thread; only the endpoint reads ``status``
    from another one.
    """

    def __init__(
        self,
        secret: bytes,
        endpoint_address: str,
        description: EngineDescription,
        load: Callable[[], EngineLoad],
        is_cached: Callable[[bytes], bool] | None = None,
        cache: EngineCache | None = None,
    ) -> None:
        """``is_cached``: whether the engine's own prefix cache has a block of that hash; None for
        an engine without one. Asked in the endpoint's thread.
        """
        self._secret = secret
        self._cache = cache
        self._load = load
        self._total_blocks = description.total_blocks
        self._prefills = Prefills(description.block_tokens)
        self._reservations = Reservations(description.block_tokens)
        self._ignored_params = 0
        self._untold: set[str] = set()
        """Prefill legs that were aborted while they waited for the cache."""
        self._marks: dict[str, tuple[tuple[bytes, int], ...]] = {}
        """By request, oldest first."""
        self._finished: deque[tuple[tuple[tuple[bytes, int], ...], Sequence[bytes]]] = deque(
            maxlen=UNREAD_LIMIT_REQUESTS
        )
        """(marks, hashes of the full blocks); from the scheduler's thread to the endpoint's."""
        self._held = HeldPrefixes(description.block_tokens, is_cached) if is_cached else None
        self.endpoint = EngineEndpoint(
            endpoint_address, secret, description, self.status, self._prefixes
        )

    def start(self) -> None:
        """The agent can reach the endpoint. Raises ``OSError`` when its address is taken."""
        self.endpoint.start()

    def stop(self) -> None:
        """The endpoint's thread has ended."""
        self.endpoint.stop()
        if self._cache is not None:
            self._cache.stop()

    def arrived(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any] | None,
        prompt: Sequence[int],
        identity: PromptIdentity,
    ) -> None:
        """A request reached the scheduler; a leg is recognised by its sealed parameters.

        ``identity`` is what the prompt's KV depends on besides its tokens.
        """
        params = self._leg(request_id, kv_transfer_params)
        if not prompt:
            return
        if params is not None and params.marks:
            self._note_marks(request_id, params, len(prompt))
        if self._cache is not None and identity.is_known:
            marks = (Mark(digest, tokens) for digest, tokens in self.marks_of(request_id))
            self._cache.arrived(
                request_id, prompt, identity, tag_of(params.tenant if params else ""), marks
            )
        if params is None or params.role == "alone":
            return
        extras = prompt_extras(identity)
        side = self._prefills if params.role == "prefill" else self._reservations
        if not side.arrived(request_id, params, len(prompt), prompt_hash(prompt, extras)):
            logger.warning(
                "request %s repeats transfer %s: it is computed here",
                request_id,
                params.transfer_id,
            )

    def marks_of(self, request_id: str) -> tuple[tuple[bytes, int], ...]:
        """(digest, tokens before it) of each mark of a request that is in the engine."""
        return self._marks.get(request_id, ())

    def wanted_tokens(self, request_id: str, computed_tokens: int) -> int | None:
        """Prompt tokens behind ``computed_tokens`` that come from outside: from the cache of this
        host, then from the prefill node. None: ask again in a moment.
        """
        sent = self._reservations.wanted_tokens(request_id, computed_tokens)
        if self._cache is None:
            return sent
        cached = self._cache.hit_tokens(request_id, computed_tokens)
        if cached is None:
            return None
        # What the cache leaves over may be the last token only, which every engine computes itself.
        return sent if sent > cached + 1 else cached

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """The request has blocks, the last ``external_tokens`` prompt tokens come from outside."""
        cached = 0
        if self._cache is not None:
            cached = self._cache.allocated(request_id, block_ids, external_tokens)
        self._reservations.reserved(request_id, block_ids, external_tokens - cached)

    @property
    def must_hear_of_steps(self) -> bool:
        """Whether ``scheduled`` is to be called for each request of the coming step."""
        return self._prefills.is_active or self._cache is not None

    def scheduled(
        self, request_id: str, computed_before: int, tokens: int, block_ids: Sequence[int]
    ) -> None:
        """The coming step computes ``tokens`` tokens of the request behind ``computed_before``."""
        self._prefills.scheduled(request_id, computed_before, tokens, block_ids)
        if self._cache is not None:
            self._cache.scheduled(request_id, computed_before, tokens, block_ids)

    def preempted(self, request_id: str) -> None:
        """The engine takes the request's blocks back before the coming step."""
        self._prefills.preempted(request_id)

    def take_orders(self) -> StepOrders:
        """Everything the workers must know before the coming step."""
        preempted, opens, progress, closes = self._prefills.take_orders()
        given_up, dead_peers, retargets = self.endpoint.take_orders()
        for retarget in retargets:
            self._reservations.retarget(retarget)
        receives, retargeted, acknowledged, cancels, declines = self._reservations.take_orders()
        return StepOrders(
            preempted=preempted,
            opens=opens,
            progress=progress,
            closes=closes,
            receives=receives,
            retargets=retargeted,
            acknowledged=acknowledged,
            cancels=cancels,
            declines=declines,
            given_up=given_up,
            dead_peers=dead_peers,
        )

    def take_cache_orders(self) -> CacheOrders:
        """As ``take_orders``, for the workers' cache threads."""
        return self._cache.take_orders() if self._cache is not None else CacheOrders()

    def cache_reported(self, news_of_ranks: Iterable[CacheNews]) -> None:
        """A step is over, and the workers' cache threads have ended these."""
        if self._cache is not None:
            self._cache.step_reported(news_of_ranks)

    def transfers_ended(self, ended: Iterable[TransferFacts]) -> None:
        """What the workers' transfer threads know of transfers that are over, for timelines."""
        self.endpoint.transfers_ended(ended)

    def settled(
        self, finished_sending: Iterable[str], finished_receiving: Iterable[str]
    ) -> frozenset[str]:
        """The transfer threads of all workers are done with these requests. Those that the engine
        must not be told of as sent: it waits for the end of their loads instead.
        """
        self._reservations.settled(finished_receiving)
        sent = frozenset(finished_sending)
        self._prefills.released(sent)
        untold = sent & self._untold
        self._untold -= untold
        return untold

    def finished(
        self,
        request_id: str,
        *,
        aborted: bool,
        blocks: int,
        block_hashes: Callable[[], Sequence[bytes]] | None = None,
        computed: Computed | None = None,
    ) -> bool:
        """The engine is done with the request. True when its blocks are still read for a peer.

        ``block_hashes`` gives the hashes of its full blocks in the engine's prefix cache; called
        only when they are of use. ``computed`` is what may be kept in the host's cache.
        """
        if self._cache is not None and computed is not None:
            self._cache.finished(
                request_id, computed.computed_tokens, computed.tokens, computed.block_ids
            )
        marks = self._marks.pop(request_id, None)
        if marks and block_hashes is not None and self._held is not None:
            self._finished.append((marks, block_hashes()))
        self._reservations.finished(request_id)
        is_kept = self._prefills.finished(request_id, aborted=aborted, blocks=blocks)
        if is_kept and self._cache is not None and self._cache.is_loading(request_id):
            # It is parked, and the report of its load frees its blocks. None of them is read for a
            # peer, for nothing of it is scheduled. An engine that hears of both ends fails.
            self._untold.add(request_id)
            return False
        return is_kept

    @property
    def has_orders(self) -> bool:
        """Whether the workers must be told something although no request runs."""
        return (
            self.endpoint.has_orders
            or self._prefills.has_orders
            or self._reservations.has_orders
            or (self._cache is not None and self._cache.has_orders)
        )

    def status(self) -> EngineStatus:
        """Read by the endpoint's thread: single reads of what the scheduler's thread replaces."""
        load = self._load()
        counters: Counter[str] = Counter({"ignored_transfer_params": self._ignored_params})
        for rank_counters in load.rank_counters:
            counters.update(rank_counters)
        if self._cache is not None:
            counters.update(self._cache.status())
        unreserved = [
            Holding(transfer_id, request_id, RECEIVES, WAITS_FOR_BLOCKS, 0, 0.0, peer)
            for transfer_id, request_id, peer in self._reservations.unreserved()
        ]
        holdings, totals = joined(load.rank_holdings, load.now, unreserved)
        return EngineStatus(
            running=load.running,
            waiting=load.waiting,
            free_blocks=load.free_blocks,
            total_blocks=self._total_blocks,
            open_transfers=int(counters.pop("open_sends", 0) + counters.pop("open_receives", 0)),
            leased_blocks=self._prefills.leased_blocks,
            quarantined_transfers=totals.quarantined_transfers,
            quarantined_blocks=totals.quarantined_blocks,
            holdings=holdings,
            holdings_left_out=totals.left_out,
            overdue_writers=totals.overdue_writers,
            counters=dict(counters),
        )

    def _note_marks(self, request_id: str, params: TransferParams, prompt_tokens: int) -> None:
        tokens = max(0, prompt_tokens - params.resumed_tokens)
        if len(self._marks) >= MARKED_LIMIT_REQUESTS:
            del self._marks[next(iter(self._marks))]
        self._marks[request_id] = mark_positions(params.marks, params.prompt_bytes, tokens)

    def _prefixes(self, from_start: bool) -> PrefixReport:
        """Called in the endpoint's thread, which alone uses ``_held``."""
        held = self._held
        if held is None:
            return NOTHING_HELD
        while self._finished:
            held.note(*self._finished.popleft())
        return held.report(from_start=from_start)

    def _leg(self, request_id: str, found: dict[str, Any] | None) -> TransferParams | None:
        try:
            return unseal(found, self._secret)
        except BadTransferParamsError as error:
            self._ignored_params += 1
            logger.warning("request %s: %s; served without a transfer", request_id, error)
            return None


def prompt_extras(identity: PromptIdentity) -> str:
    """What a prompt's KV depends on besides its tokens, as canonical text."""
    media = ",".join(item.identifier for item in identity.media)
    return f"adapter={identity.adapter};salt={identity.salt};media={media}"
