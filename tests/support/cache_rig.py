"""The cache without engines: a real server, in a thread or a process of its own, and what an engine
has of it, driven step by step by a test.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from splitserve.kv_transfer.cache.chunk_codec import ChunkCodec
from splitserve.kv_transfer.cache.copy_thread import CacheThread
from splitserve.kv_transfer.cache.engine_cache import EngineCache, PromptIdentity
from splitserve.kv_transfer.cache.keys import NO_TENANT, model_digest
from splitserve.kv_transfer.cache.lookup_client import LookupClient
from splitserve.kv_transfer.cache.server import CacheServer
from splitserve.kv_transfer.cache.settings import CacheClientConfig, CacheSettings, TierSettings
from splitserve.kv_transfer.cache.socket_path import is_listening
from splitserve.kv_transfer.cache.tiers.registry import create
from splitserve.orchestrator.engines.mock.model import KvMemory, KvShape, MockModel, chunk_geometry
from splitserve.orchestrator.engines.serving.blocks import BlockPool
from splitserve.orchestrator.engines.serving.cache_half import PoolHolder
from support.standing_still import tell

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from splitserve.kv_transfer.cache.orders import Loaded

CHUNK_TOKENS = 64
SHAPE = KvShape(layers=3, heads=4, block_tokens=16, head_bytes=32)
CHUNK_BYTES = SHAPE.layers * SHAPE.heads * CHUNK_TOKENS * SHAPE.head_bytes
FINGERPRINT = {"weights": "w"}
DEADLINE_S = 15.0
_names = itertools.count(1)


def settings_in(
    folder: Path, *, slots: int = 64, disk: bool = False, disk_slots: int = 256
) -> CacheSettings:
    """A server with an arena of so many chunks, and a disk when it is wanted."""
    tiers = [TierSettings(type="cpu", capacity_bytes=slots * CHUNK_BYTES)]
    if disk:
        place = str(folder / "disk")
        tiers.append(
            TierSettings(type="disk", capacity_bytes=disk_slots * (CHUNK_BYTES + 2**14), url=place)
        )
    return CacheSettings(
        socket_path=str(folder / "cache.sock"), chunk_tokens=CHUNK_TOKENS, tiers=tuple(tiers)
    )


@contextmanager
def served(settings: CacheSettings) -> Iterator[CacheServer]:
    """A server in a thread. What it thought when it was asked to stop is still there to see."""
    tiers = [create(tier) for tier in settings.tiers if tier.type != "cpu"]
    server = CacheServer(settings, tiers, ChunkCodec(None))
    thread = threading.Thread(target=server.run, name="cache-server")
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(DEADLINE_S)
    assert not thread.is_alive(), "the cache server does not stop"


class ServerProcess:
    """A server that can be killed and stopped."""

    def __init__(self, settings: CacheSettings, folder: Path) -> None:
        self.settings = settings
        path = folder / "cache.json"
        path.write_bytes(msgspec.json.encode(settings))
        self.log = folder / "cache.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "splitserve.kv_transfer.cache", str(path)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        until(lambda: is_listening(settings.socket_path), "the server to listen")

    def send(self, number: signal.Signals) -> None:
        """A signal to the process."""
        tell(self.process.pid, number)

    def end(self) -> None:
        """The process is gone."""
        self.process.kill()
        self.process.wait(DEADLINE_S)


def until(condition: object, what: str, deadline_s: float = DEADLINE_S) -> None:
    """Return once ``condition()`` is true; fail naming ``what`` when it is not in time."""
    assert callable(condition)
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not in {deadline_s:g} s: {what}"
        time.sleep(0.002)


@dataclass
class Running:
    """One request in the engine."""

    name: str
    prompt: list[int]
    blocks: list[int]
    computed: int = 0
    cached: int = 0
    loaded: list[Loaded] = field(default_factory=list)


class CacheEngine:
    """Scheduler's end and workers' ends of one engine, with real KV memory and no loop."""

    def __init__(
        self,
        settings: CacheSettings,
        *,
        ranks: int = 1,
        shape: KvShape = SHAPE,
        blocks: int = 200,
        order: str = "rows",
        load_timeout_s: float = 10.0,
        lookup_timeout_s: float = 2.0,
        save_limit_bytes: int = 2**28,
    ) -> None:
        self.name = f"engine-{next(_names)}"
        self.shape = shape
        self.model = MockModel(shape)
        self.pool = BlockPool(blocks)
        self.idle_blocks = self.pool.free_blocks
        self.memories = [
            KvMemory(shape, rank=rank, tensor_parallel=ranks, blocks=blocks)
            for rank in range(ranks)
        ]
        config = CacheClientConfig(
            socket_path=settings.socket_path,
            chunk_tokens=CHUNK_TOKENS,
            load_timeout_s=load_timeout_s,
            lookup_timeout_s=lookup_timeout_s,
            save_limit_bytes=save_limit_bytes,
        )
        geometry = msgspec.structs.replace(chunk_geometry(CHUNK_TOKENS, shape), order=order)
        model = model_digest(FINGERPRINT, CHUNK_TOKENS)
        self.lookups = LookupClient(
            config.socket_path, self.name, ranks, model, geometry, limit_s=lookup_timeout_s
        )
        self.cache = EngineCache(
            config, self.lookups, PoolHolder(lambda: self.pool),
            model=model, geometry=geometry, ranks=ranks,
        )  # fmt: skip
        self.threads = [
            CacheThread(
                config, engine=self.name, rank=rank, ranks=ranks, model=model,
                layout=memory.layout, geometry=geometry,
            )
            for rank, memory in enumerate(self.memories)
        ]  # fmt: skip
        self._ended: dict[str, list[Loaded]] = {}
        for thread in self.threads:
            thread.start()
        self.until_connected()

    def until_connected(self) -> None:
        """Every worker has mapped the arena."""
        until(
            lambda: all(t.counters().get("cache_connected") for t in self.threads),
            "the workers to connect",
        )

    def stop(self) -> None:
        """The threads have ended."""
        self.cache.stop()
        for thread in self.threads:
            thread.stop()

    # -- one request ---------------------------------------------------------------------------

    def begin(self, prompt: Sequence[int], shared: Sequence[int] = ()) -> Running:
        """A request arrives. Blocks of ``shared`` hold its beginning already."""
        name = f"request-{next(_names)}"
        fresh = -(-(len(prompt) + 1) // self.shape.block_tokens) - len(shared)
        blocks = self.pool.take(list(shared), fresh)
        assert blocks is not None
        request = Running(name, list(prompt), blocks, len(shared) * self.shape.block_tokens)
        self.cache.arrived(name, request.prompt, PromptIdentity(), NO_TENANT)
        return request

    def hit_tokens(self, request: Running) -> int:
        """What the scheduler is told, as soon as it is known."""
        found: list[int | None] = [None]
        self.cache.costs.prefill_tokens_per_s = 0.0  # It computes too fast for any load to pay.

        def known() -> bool:
            found[0] = self.cache.hit_tokens(request.name, request.computed)
            return found[0] is not None

        until(known, "an answer to a look-up")
        assert found[0] is not None
        return found[0]

    def order_load(self, request: Running) -> int:
        """Begin to load what the cache has; returns the tokens that are on their way."""
        tokens = self.hit_tokens(request)
        brought = self.cache.allocated(request.name, request.blocks, tokens)
        assert brought == tokens
        self.step()
        return tokens

    def load(self, request: Running) -> int:
        """Load what the cache has; returns how many tokens came, 0 when it failed."""
        tokens = self.order_load(request)
        if not tokens:
            return 0
        until(lambda: self.has_loaded(request), "the load's end", 3 * DEADLINE_S)
        if any(not loaded.is_whole for loaded in request.loaded):
            return 0
        request.computed += tokens
        request.cached = tokens
        return tokens

    def has_loaded(self, request: Running) -> bool:
        """Whether every rank has ended the request's load."""
        self.step()
        request.loaded = self._ended.get(request.name, [])
        return len(request.loaded) == len(self.threads)

    def compute(self, request: Running, tokens: int | None = None) -> None:
        """One step computes the prompt's next ``tokens`` (all that are left)."""
        left = len(request.prompt) - request.computed
        self.step((request, min(left, tokens or left)))

    def finish(self, request: Running, answer: Sequence[int] = (0,)) -> None:
        """The request ends with that answer, whose last token was never computed."""
        tokens = [*request.prompt, *answer]
        self.cache.finished(request.name, len(tokens) - 1, tokens, request.blocks)
        self.pool.give_back(request.blocks)

    def abort(self, request: Running) -> None:
        """The client has gone."""
        self.cache.finished(request.name, 0, request.prompt, request.blocks)
        self.pool.give_back(request.blocks)

    def serve(self, prompt: Sequence[int]) -> Running:
        """A whole request: load what is there, compute the rest, check every byte of KV."""
        request = self.begin(prompt)
        self.load(request)
        if request.computed == len(prompt):
            request.computed -= 1
        self.compute(request)
        self.check(request)
        self.finish(request)
        return request

    def check(self, request: Running) -> None:
        """The pages hold the KV of the prompt."""
        expected = KvMemory(self.shape, rank=0, tensor_parallel=1, blocks=len(request.blocks) + 1)
        table = list(range(1, len(request.blocks) + 1))
        states = self.model.states(request.prompt)
        for layer in range(self.shape.layers):
            self.model.write(expected, layer, states, 0, table)
        count = len(request.prompt)
        right = self.model.next_token([expected], table, count)
        assert self.model.next_token(self.memories, request.blocks, count) == right, "wrong KV"

    # -- steps ---------------------------------------------------------------------------------

    def step(self, *work: tuple[Running, int]) -> None:
        """One step that computes so many tokens of these requests."""
        for request, tokens in work:
            self.cache.scheduled(request.name, request.computed, tokens, request.blocks)
        orders = self.cache.take_orders()
        for thread in self.threads:
            thread.begin_step(orders)
        for layer in range(self.shape.layers):
            for request, tokens in work:
                states = self.model.states(request.prompt[: request.computed + tokens])
                new = states[request.computed :]
                for memory in self.memories:
                    self.model.write(memory, layer, new, request.computed, request.blocks)
            for thread in self.threads:
                thread.layer_done(layer)
        for request, tokens in work:
            request.computed += tokens
        news = []
        for thread in self.threads:
            thread.end_step()
            news.append(thread.take_news())
            for loaded in news[-1].loaded:
                self._ended.setdefault(loaded.request_id, []).append(loaded)
        self.cache.step_reported(news)

    def until_saved(self) -> None:
        """No save and no load is open, and no block is held for one."""

        def idle() -> bool:
            self.step()
            return not self.cache.has_orders

        until(idle, "saves and loads to end")
        assert self.cache.status()["cache_held_bytes"] == 0

    def until_idle(self) -> None:
        """As ``until_saved``; every block is free."""
        self.until_saved()
        assert self.pool.free_blocks == self.idle_blocks


def prompt_of(length: int, start: int = 1) -> list[int]:
    """A prompt that shares no chunk with one of another ``start``."""
    return [(start * 17 + n * 31 + n // 7) % 251 for n in range(length)]


def audit(server: CacheServer) -> None:
    """Soon nothing is held for anybody, and every taken slot has a chunk that look-ups find. For a
    server whose clients have ended what they did.
    """
    book, arena = server.book, server.arena

    def held() -> str:
        taken = arena.slots - arena.free_slots
        return (
            f"{book.loads.open_loads} loads, {book.saves.open_reservations} reservations, "
            f"{book.arena.departing} departing, busy: {book.arena.is_busy}, "
            f"{taken} slots taken for {len(book.arena.index)} chunks"
        )

    nothing = "0 loads, 0 reservations, 0 departing, busy: False, {0} slots taken for {0} chunks"
    try:
        until(lambda: held() == nothing.format(len(book.arena.index)), "nothing to be held")
    except AssertionError:
        raise AssertionError(held()) from None
