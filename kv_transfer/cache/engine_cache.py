"""What an engine's scheduler loads from the cache of its host, and what it saves there.

Used by the scheduler's thread only. A request's chunks are looked up when it arrives; the answer
is there when the scheduler asks, or a moment later (``None`` until then, no wait that matters).
Whole chunks are loaded, so far as it pays. Whole chunks are saved: those of the prompt in the step
that computes them, those that the answer fills when the request ends. Blocks that are being saved
are *held* in the engine's pool, as if one more request used them, so a save delays nobody's end.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from splitserve.kv_transfer.cache.costs import STEP_LEAST_TOKENS, FetchCosts
from splitserve.kv_transfer.cache.keys import KeyChain, root_key
from splitserve.kv_transfer.cache.lookup_client import NOTHING, Hits
from splitserve.kv_transfer.cache.orders import CacheOrders, LoadOrder, SaveOrder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from splitserve.kv_transfer.cache.geometry import ChunkGeometry
    from splitserve.kv_transfer.cache.keys import Media
    from splitserve.kv_transfer.cache.messages import Mark
    from splitserve.kv_transfer.cache.orders import CacheNews, Loaded
    from splitserve.kv_transfer.cache.settings import CacheClientConfig

LOOKUP_WAIT_S = 0.5e-3
"""How long the scheduler waits for the answer to a look-up before it goes on without."""
LOADS_PER_REQUEST_LIMIT = 2
FOREIGN_LIMIT_KEYS = 65_536
"""Chunks in an order that the engine cannot read, which it remembers."""
STEPS_LIMIT = 16
"""Steps that are planned and not reported."""
CHUNKS_PER_SAVE_LIMIT = 1_024
MARKS_PER_SAVE_LIMIT = 1_024
"""More would not fit into one message to the server; a longer save is several."""


class Lookups(Protocol):
    """Asks the server (``LookupClient``)."""

    def ask(self, keys: Sequence[bytes]) -> int | None:
        """The number of a new look-up; None when there is nobody to ask."""

    def answer(self, lookup_id: int, wait_s: float = 0.0) -> Hits | None:
        """What it has found; None: not known yet."""

    def forget(self, lookup_id: int) -> None:
        """Nobody wants its answer."""

    def close(self) -> None:
        """No more questions."""


class BlockHolder(Protocol):
    """The engine's pool of blocks."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """These blocks keep their content until they are let go."""

    def let_go(self, block_ids: Sequence[int]) -> None:
        """One holder less."""


@dataclass(frozen=True)
class PromptIdentity:
    """What a prompt's KV depends on besides the model and the tokens."""

    salt: str = ""
    adapter: str = ""
    media: tuple[Media, ...] = ()
    is_known: bool = True
    """False for prompts whose KV depends on something else too: they are not cached."""


@dataclass(eq=False)
class CachedPrompt:
    """One request."""

    prompt_tokens: int
    chain: KeyChain
    marks: tuple[Mark, ...]
    lookup_id: int | None
    hits: Hits | None = None
    has_waited: bool = False
    limit_chunks: int = 1 << 30
    """Chunks from this one on have failed to come."""
    loads: int = 0
    was_parked: bool = False
    """It has waited for tokens from outside; asked again, they did not come."""
    offered: tuple[int, int] = (0, 0)
    """Tokens: from where to where the last answer to the scheduler reaches."""
    first_chunk: int = 0
    """Of the open load."""
    saved: int = 0
    """Leading chunks that the host has, or gets."""

    @property
    def keys(self) -> list[bytes]:
        """Of all whole chunks, those of the answer too once the request has ended."""
        return self.chain.keys


@dataclass(eq=False)
class OpenSave:
    """Blocks that the workers still read."""

    block_ids: tuple[int, ...]
    size_bytes: int
    ranks: int = 0
    """Ranks that are done."""


@dataclass(eq=False)
class OpenLoad:
    """A load that not every rank has ended."""

    request_id: str
    ended: list[Loaded] = field(default_factory=list)


class EngineCache:
    """Loads and saves of one engine."""

    def __init__(
        self,
        config: CacheClientConfig,
        lookups: Lookups,
        holder: BlockHolder,
        *,
        model: bytes,
        geometry: ChunkGeometry,
        ranks: int,
    ) -> None:
        self._config = config
        self._lookups = lookups
        self._holder = holder
        self._model = model
        self._chunk_tokens = geometry.chunk_tokens
        self._block_tokens = geometry.block_tokens
        self._chunk_bytes = geometry.chunk_bytes
        self._ranks = ranks
        self._prompts: dict[str, CachedPrompt] = {}
        self._loads: list[LoadOrder] = []
        self._saves: list[SaveOrder] = []
        self._open_saves: dict[int, OpenSave] = {}
        self._open_loads: dict[int, OpenLoad] = {}
        self._held_bytes = 0
        self._count = 0
        self._planned_tokens = 0
        """Prompt tokens of the step that is being planned."""
        self._steps: OrderedDict[int, tuple[int, float]] = OrderedDict()
        """Number of a step to its prompt tokens and when it was planned, until it is reported."""
        self._reported_at = 0.0
        self._foreign: OrderedDict[bytes, None] = OrderedDict()
        """Chunks that this engine cannot read, oldest first: they are not asked for again."""
        self.costs = FetchCosts(geometry.chunk_tokens, geometry.chunk_bytes)
        self.counters: defaultdict[str, float] = defaultdict(float)

    # -- loading -------------------------------------------------------------------------------

    def arrived(
        self,
        request_id: str,
        prompt: Sequence[int],
        identity: PromptIdentity,
        tenant: bytes,
        marks: Iterable[Mark] = (),
    ) -> None:
        """A request reached the scheduler; its chunks are being looked up. ``tenant`` is the tag
        of who has sent it.
        """
        root = root_key(self._model, tenant, identity.salt, identity.adapter)
        chain = KeyChain(root, self._chunk_tokens, identity.media)
        keys = chain.extend(prompt)
        lookup_id = self._lookups.ask(keys) if keys else None
        self._prompts[request_id] = CachedPrompt(
            len(prompt), chain, tuple(marks), lookup_id, NOTHING if lookup_id is None else None
        )

    def hit_tokens(self, request_id: str, computed_tokens: int) -> int | None:
        """Prompt tokens behind ``computed_tokens`` (whole blocks) that are loaded; None: ask again
        in a moment. Asking has no effect; it may be repeated.
        """
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return 0
        prompt.offered = (computed_tokens, computed_tokens)
        if prompt.loads >= LOADS_PER_REQUEST_LIMIT:
            return 0
        if prompt.was_parked:
            self._ask_again(prompt)
        hits = self._hits(prompt)
        if hits is None:
            return None
        first = computed_tokens // self._chunk_tokens
        tiers = hits.tiers[first : prompt.limit_chunks]
        if not tiers or (first + len(tiers)) * self._chunk_tokens <= computed_tokens:
            return 0
        skipped = computed_tokens - first * self._chunk_tokens
        chunks = self.costs.worth(tiers, hits.speeds, skipped)
        end = (first + chunks) * self._chunk_tokens
        if end <= computed_tokens:
            self.counters["loads_that_would_not_pay"] += 1
            return 0
        prompt.offered = (computed_tokens, end)
        return end - computed_tokens

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> int:
        """The request has blocks, and ``external_tokens`` come from outside: how many of them this
        cache brings, from the first one on. They are on their way.
        """
        prompt = self._prompts.get(request_id)
        if prompt is None or not external_tokens:
            return 0
        prompt.was_parked = True
        start, end = prompt.offered
        if end <= start:
            return 0
        hits = prompt.hits
        assert hits is not None
        assert end - start <= external_tokens
        first, last = start // self._chunk_tokens, end // self._chunk_tokens
        self._count += 1
        prompt.loads += 1
        prompt.first_chunk = first
        skipped = start - first * self._chunk_tokens
        self.counters["load_tokens"] += end - start
        self._note_estimates(hits, first, last, end - start)
        self._open_loads[self._count] = OpenLoad(request_id)
        self._loads.append(LoadOrder(
            load_id=self._count,
            request_id=request_id,
            keys=b"".join(prompt.keys[first:last]),
            first_block=skipped // self._block_tokens,
            block_ids=tuple(block_ids[start // self._block_tokens : end // self._block_tokens]),
            limit_s=self._config.load_timeout_s,
        ))  # fmt: skip
        return end - start

    def is_loading(self, request_id: str) -> bool:
        """Whether the end of a load of this request has yet to be reported."""
        return any(load.request_id == request_id for load in self._open_loads.values())

    # -- saving --------------------------------------------------------------------------------

    def scheduled(
        self, request_id: str, computed_before: int, tokens: int, block_ids: Sequence[int]
    ) -> None:
        """The coming step computes ``tokens`` tokens of the request behind ``computed_before``."""
        prompt = self._prompts.get(request_id)
        if prompt is None or computed_before >= prompt.prompt_tokens:
            return
        self._planned_tokens += min(tokens, prompt.prompt_tokens - computed_before)
        self._note_known(prompt)
        whole = min((computed_before + tokens) // self._chunk_tokens, len(prompt.keys))
        if whole > prompt.saved:
            self._save(prompt, whole, block_ids, is_final=False)

    def finished(
        self, request_id: str, computed_tokens: int, tokens: Sequence[int], block_ids: Sequence[int]
    ) -> None:
        """The engine is done with the request. Its first ``computed_tokens`` tokens have their KV
        in ``block_ids``, but for the last one of ``tokens`` (prompt and answer): an engine that
        plans ahead counts that one before it is computed.
        """
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        if prompt.lookup_id is not None:
            self._lookups.forget(prompt.lookup_id)
        computed_tokens = min(computed_tokens, len(tokens) - 1)
        if not self._config.save_generated:
            computed_tokens = min(computed_tokens, prompt.prompt_tokens)
        whole = computed_tokens // self._chunk_tokens
        if whole <= prompt.saved or computed_tokens < prompt.prompt_tokens:
            return
        prompt.chain.extend(tokens[:computed_tokens])
        self._note_known(prompt)
        if whole > prompt.saved and not self._save(prompt, whole, block_ids, is_final=True):
            self.counters["chunks_shed"] += whole - prompt.saved

    # -- steps ---------------------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        """Whether a step must be taken although no request runs: something is to be told to the
        workers, or to be heard from them.
        """
        return bool(self._loads or self._saves or self._open_saves or self._open_loads)

    def take_orders(self) -> CacheOrders:
        """What the workers must know before the coming step."""
        step = 0
        if self._planned_tokens >= STEP_LEAST_TOKENS:
            self._count += 1
            step = self._count
            self._steps[step] = (self._planned_tokens, monotonic())
            while len(self._steps) > STEPS_LIMIT:
                self._steps.popitem(last=False)
        self._planned_tokens = 0
        orders = CacheOrders(tuple(self._loads), tuple(self._saves), step)
        self._loads.clear()
        self._saves.clear()
        return orders

    def step_reported(self, news_of_ranks: Iterable[CacheNews]) -> None:
        """What the workers' cache threads have ended in a step."""
        now = monotonic()
        for news in news_of_ranks:
            if news.step in self._steps:
                # An engine may plan a step while the one before it runs.
                tokens, planned_at = self._steps.pop(news.step)
                self.costs.step_took(tokens, now - max(planned_at, self._reported_at))
            for save_id in news.saved:
                self._saved(save_id)
            for loaded in news.loaded:
                self._loaded(loaded)
        self._reported_at = now

    def status(self) -> Mapping[str, float]:
        """Counters and estimates for the agent. May be called from any thread."""
        counters = {f"cache_{name}": float(value) for name, value in self.counters.copy().items()}
        return {
            **counters,
            "cache_held_bytes": float(self._held_bytes),
            "cache_prefill_tokens_per_s": self.costs.prefill_tokens_per_s,
            "cache_copy_bytes_per_s": self.costs.copy_bytes_per_s,
        }

    def stop(self) -> None:
        """No more look-ups."""
        self._lookups.close()

    # -- inside --------------------------------------------------------------------------------

    def _hits(self, prompt: CachedPrompt) -> Hits | None:
        if prompt.hits is None:
            assert prompt.lookup_id is not None
            wait_s = 0.0 if prompt.has_waited else LOOKUP_WAIT_S
            prompt.has_waited = True
            prompt.hits = self._lookups.answer(prompt.lookup_id, wait_s)
            if prompt.hits is not None:
                self.counters["asked_chunks"] += len(prompt.keys)
                self.counters["hit_chunks"] += len(prompt.hits.tiers)
                readable = self._readable(prompt.keys[: len(prompt.hits.tiers)])
                prompt.hits = replace(prompt.hits, tiers=prompt.hits.tiers[:readable])
                prompt.lookup_id = None
        return prompt.hits

    def _ask_again(self, prompt: CachedPrompt) -> None:
        """What was to come from outside has failed: the prefill node, or another engine, may have
        saved more of the prompt meanwhile.
        """
        prompt.was_parked = prompt.has_waited = False
        if prompt.lookup_id is None and prompt.keys:
            prompt.lookup_id = self._lookups.ask(prompt.keys)
            prompt.hits = None if prompt.lookup_id is not None else NOTHING

    def _readable(self, keys: Sequence[bytes]) -> int:
        """How many of these chunks, from the first one on, this engine may be able to read."""
        if not self._foreign:
            return len(keys)
        return next((i for i, key in enumerate(keys) if key in self._foreign), len(keys))

    def _note_known(self, prompt: CachedPrompt) -> None:
        """Chunks that the look-up found need not be saved."""
        if prompt.hits is not None:
            known = min(len(prompt.hits.tiers), prompt.limit_chunks)
            prompt.saved = max(prompt.saved, known)

    def _save(
        self, prompt: CachedPrompt, whole: int, block_ids: Sequence[int], *, is_final: bool
    ) -> bool:
        """Chunks up to ``whole`` are being saved; False when too much waits already."""
        while whole - prompt.saved > CHUNKS_PER_SAVE_LIMIT:
            part = prompt.saved + CHUNKS_PER_SAVE_LIMIT
            if not self._save(prompt, part, block_ids, is_final=is_final):
                return False
        first = prompt.saved
        size = (whole - first) * self._chunk_bytes
        if self._held_bytes and self._held_bytes + size > self._config.save_limit_bytes:
            self.counters["saves_postponed"] += 1
            return False
        blocks = self._chunk_tokens // self._block_tokens
        ids = tuple(block_ids[first * blocks : whole * blocks])
        self._holder.hold(ids)
        self._held_bytes += size
        self._count += 1
        self._open_saves[self._count] = OpenSave(ids, size)
        self._saves.append(SaveOrder(
            save_id=self._count,
            parent=prompt.keys[first - 1] if first else b"",
            keys=b"".join(prompt.keys[first:whole]),
            block_ids=ids,
            is_final=is_final,
            marks=self._marks(prompt, first, whole),
        ))  # fmt: skip
        prompt.saved = whole
        return True

    def _marks(self, prompt: CachedPrompt, first: int, whole: int) -> tuple[tuple[int, Mark], ...]:
        """Marks whose tokens end in these chunks, each with its chunk's index."""
        found = ((mark.tokens // self._chunk_tokens - 1, mark) for mark in prompt.marks)
        inside = ((i - first, mark) for i, mark in found if first <= i < whole)
        return tuple(itertools.islice(inside, MARKS_PER_SAVE_LIMIT))

    def _saved(self, save_id: int) -> None:
        save = self._open_saves[save_id]
        save.ranks += 1
        if save.ranks == self._ranks:
            del self._open_saves[save_id]
            self._held_bytes -= save.size_bytes
            self._holder.let_go(save.block_ids)

    def _loaded(self, loaded: Loaded) -> None:
        load = self._open_loads[loaded.load_id]
        load.ended.append(loaded)
        if len(load.ended) < self._ranks:
            return
        del self._open_loads[loaded.load_id]
        elapsed_s = max(each.elapsed_s for each in load.ended)
        self.counters["load_outcome_seconds"] += elapsed_s
        good = min(each.chunks for each in load.ended)
        prompt = self._prompts.get(load.request_id)
        if prompt is None:
            return
        if good < loaded.wanted:
            if any(each.is_foreign and each.chunks == good for each in load.ended):
                self._foreign[prompt.keys[prompt.first_chunk + good]] = None
                while len(self._foreign) > FOREIGN_LIMIT_KEYS:
                    self._foreign.popitem(last=False)
            prompt.limit_chunks = prompt.first_chunk + good
            prompt.saved = min(prompt.saved, prompt.limit_chunks)
        elif prompt.hits is not None:
            first = prompt.first_chunk
            if not any(prompt.hits.tiers[first : first + good]):
                self.costs.load_took(loaded.size_bytes, elapsed_s)

    def _note_estimates(self, hits: Hits, first: int, last: int, tokens: int) -> None:
        estimate = self.costs.load_s(hits.tiers[first:last], hits.speeds)
        self.counters["load_estimate_seconds"] += estimate
        if self.costs.prefill_tokens_per_s:
            self.counters["saved_compute_seconds"] += self.costs.compute_s(tokens)
        for number in hits.tiers[first:last]:
            self.counters[f"load_chunks_tier_{number}"] += 1
