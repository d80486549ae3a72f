"""What an engine's scheduler loads and saves, without a server."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from splitserve.kv_transfer.cache import engine_cache
from splitserve.kv_transfer.cache.engine_cache import (
    CHUNKS_PER_SAVE_LIMIT,
    EngineCache,
    PromptIdentity,
)
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.keys import KEY_BYTES, NO_TENANT
from splitserve.kv_transfer.cache.lookup_client import Hits
from splitserve.kv_transfer.cache.messages import MESSAGE_LIMIT_BYTES, Mark, Reserve, TierSpeed
from splitserve.kv_transfer.cache.orders import CacheNews, Loaded, LoadOrder, SaveOrder
from splitserve.kv_transfer.cache.packets import encode
from splitserve.kv_transfer.cache.settings import CacheClientConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK, BLOCK = 8, 4
GEOMETRY = ChunkGeometry(
    layers=2, chunk_tokens=CHUNK, block_tokens=BLOCK, heads=1, key_bytes=8, value_bytes=8,
    item_bytes=2, order="rows",
)  # fmt: skip
IDS = list(range(100, 200))
SPEEDS = (TierSpeed(0, 0), TierSpeed(0.001, 1e9))


class Lookups:
    """Finds what the test says, when it says so."""

    def __init__(self) -> None:
        self.hits: Hits | None = Hits(b"", SPEEDS)
        self.forgotten: list[int] = []
        self.is_there = True
        self.count = 0

    def ask(self, keys: Sequence[bytes]) -> int | None:
        self.count += 1
        return self.count if self.is_there else None

    def answer(self, lookup_id: int, wait_s: float = 0.0) -> Hits | None:
        return self.hits

    def forget(self, lookup_id: int) -> None:
        self.forgotten.append(lookup_id)

    def close(self) -> None:
        """Nothing."""


class Holder:
    """Counts who holds what."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()

    def hold(self, block_ids: Sequence[int]) -> None:
        self.held.update(block_ids)

    def let_go(self, block_ids: Sequence[int]) -> None:
        self.held.subtract(block_ids)
        assert min(self.held.values()) >= 0, "let go more often than held"


class Rig:
    def __init__(self, ranks: int = 1, **config: object) -> None:
        self.lookups, self.holder = Lookups(), Holder()
        settings = CacheClientConfig(socket_path="", chunk_tokens=CHUNK, **config)  # type: ignore[arg-type]
        self.cache = EngineCache(
            settings, self.lookups, self.holder, model=bytes(32), geometry=GEOMETRY, ranks=ranks
        )

    def arrive(self, tokens: int, name: str = "r", marks: tuple[Mark, ...] = ()) -> None:
        self.cache.arrived(name, range_of(tokens), PromptIdentity(), NO_TENANT, marks)

    def found(self, *tiers: int) -> None:
        self.lookups.hits = Hits(bytes(tiers), SPEEDS)

    def loads(self) -> tuple[LoadOrder, ...]:
        return self.cache.take_orders().loads

    def saves(self) -> tuple[SaveOrder, ...]:
        return self.cache.take_orders().saves

    def end_load(self, order: LoadOrder, chunks: int, *, is_foreign: bool = False) -> None:
        wanted = len(order.keys) // KEY_BYTES
        loaded = Loaded(order.request_id, order.load_id, wanted, chunks, 0, 0.1, is_foreign)
        self.cache.step_reported([CacheNews(loaded=(loaded,))])

    def end_saves(self, *orders: SaveOrder) -> None:
        self.cache.step_reported([CacheNews(saved=tuple(order.save_id for order in orders))])


def range_of(tokens: int) -> list[int]:
    return list(range(tokens))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_lookup_that_has_no_answer_yet(rig: Rig) -> None:
    """The scheduler is asked to come again; then it is told, as often as it asks."""
    rig.arrive(30)
    rig.lookups.hits = None
    assert rig.cache.hit_tokens("r", 0) is None
    rig.found(0, 0)
    assert [rig.cache.hit_tokens("r", 0) for _ in range(3)] == [16, 16, 16]
    assert rig.cache.hit_tokens("unknown", 0) == 0


def test_without_a_server_nothing_waits(rig: Rig) -> None:
    """The prompt is computed, and saved all the same: the workers may know one."""
    rig.lookups.is_there = False
    rig.arrive(30)
    assert rig.cache.hit_tokens("r", 0) == 0
    rig.cache.scheduled("r", 0, 30, IDS)
    assert len(rig.saves()) == 1


@pytest.mark.parametrize(
    ("computed", "tokens", "first_block", "keys", "blocks"),
    [(0, 24, 0, 3, (0, 6)), (4, 20, 1, 3, (1, 6)), (8, 16, 0, 2, (2, 6)), (20, 4, 1, 1, (5, 6)),
     (24, 0, 0, 0, (0, 0)), (28, 0, 0, 0, (0, 0))],
)  # fmt: skip
def test_what_the_engine_has_is_left_out(
    rig: Rig, computed: int, tokens: int, first_block: int, keys: int, blocks: tuple[int, int]
) -> None:
    """Of three chunks that are there, those blocks are loaded that the engine lacks."""
    rig.arrive(30)
    rig.found(0, 0, 0)
    assert rig.cache.hit_tokens("r", computed) == tokens
    assert rig.cache.allocated("r", IDS, tokens) == tokens
    orders = rig.loads()
    assert len(orders) == bool(tokens)
    for order in orders:
        assert (order.first_block, len(order.keys)) == (first_block, keys * KEY_BYTES)
        assert order.block_ids == tuple(IDS[blocks[0] : blocks[1]])


def test_a_whole_prompt_may_be_there(rig: Rig) -> None:
    """All of it is loaded; the engine computes the last token again by itself."""
    rig.arrive(2 * CHUNK)
    rig.found(0, 0)
    assert rig.cache.hit_tokens("r", 0) == 2 * CHUNK


def test_more_than_the_cache_has_comes_from_outside(rig: Rig) -> None:
    """The cache says how much of it is its own."""
    rig.arrive(30)
    rig.found(0, 0)
    rig.cache.hit_tokens("r", 0)
    assert rig.cache.allocated("r", IDS, 29) == 16


def test_a_load_that_failed_is_asked_for_once_more(rig: Rig) -> None:
    """As far as a new look-up finds something; never a third time, and nothing of the last offer is
    left then.
    """
    rig.arrive(50)
    rig.found(0, 0, 0, 0, 0)
    assert rig.cache.hit_tokens("r", 0) == 40
    rig.cache.allocated("r", IDS, 40)
    (order,) = rig.loads()
    rig.end_load(order, 3)
    rig.found(0, 0, 0)
    assert rig.cache.hit_tokens("r", 0) == 24
    assert rig.lookups.count == 2
    rig.cache.allocated("r", IDS, 24)
    (order,) = rig.loads()
    rig.end_load(order, 1)
    assert rig.cache.hit_tokens("r", 0) == 0
    assert rig.cache.allocated("r", IDS, 20) == 0
    assert not rig.cache.has_orders
    rig.cache.scheduled("r", 0, 50, IDS)
    (save,) = rig.saves()
    assert save.keys.startswith(order.keys[KEY_BYTES : 2 * KEY_BYTES])


def test_all_ranks_have_to_have_a_chunk() -> None:
    """The rank with the least says how much came; before the last one has ended nothing is said."""
    rig = Rig(ranks=2)
    rig.arrive(30)
    rig.found(0, 0, 0)
    rig.cache.hit_tokens("r", 0)
    rig.cache.allocated("r", IDS, 24)
    (order,) = rig.loads()
    rig.end_load(order, 3)
    assert rig.cache.has_orders
    rig.end_load(order, 2)
    assert not rig.cache.has_orders
    rig.cache.scheduled("r", 0, 30, IDS)
    (save,) = rig.saves()
    assert save.keys == order.keys[2 * KEY_BYTES :]


def test_a_chunk_that_cannot_be_read_is_not_asked_for_again(rig: Rig) -> None:
    """By any request."""
    rig.arrive(30)
    rig.found(0, 0, 0)
    rig.cache.hit_tokens("r", 0)
    rig.cache.allocated("r", IDS, 24)
    rig.end_load(rig.loads()[0], 1, is_foreign=True)
    rig.arrive(30, "s")
    assert rig.cache.hit_tokens("s", 0) == CHUNK


def test_what_did_not_come_from_a_prefill_node_is_looked_up_again(rig: Rig) -> None:
    """That node, or another engine, may have saved more of the prompt before it failed."""
    rig.arrive(30)
    assert rig.cache.hit_tokens("r", 0) == 0
    assert rig.cache.allocated("r", IDS, 30) == 0  # All of it is to come from the prefill node.
    rig.found(0, 0)
    assert rig.cache.hit_tokens("r", 0) == 2 * CHUNK
    assert rig.lookups.count == 2
    assert rig.cache.allocated("r", IDS, 2 * CHUNK) == 2 * CHUNK


def test_a_load_that_would_not_pay(rig: Rig) -> None:
    """Once the engine is known to compute fast, one chunk is not worth a load."""
    rig.cache.costs.prefill_tokens_per_s = 1e6
    rig.arrive(30)
    rig.found(1)
    assert rig.cache.hit_tokens("r", 0) == 0
    assert rig.cache.counters["loads_that_would_not_pay"] == 1


def test_chunks_are_saved_in_the_step_that_completes_them(rig: Rig) -> None:
    """Not those that the host has; blocks are held from then until every rank is done."""
    rig = Rig(ranks=2)
    rig.arrive(40, marks=(Mark(b"m", 3 * CHUNK), Mark(b"n", 5)))
    rig.found(0)
    rig.cache.hit_tokens("r", 0)
    rig.cache.scheduled("r", 0, 20, IDS)
    (first,) = rig.saves()
    assert (len(first.keys), first.block_ids) == (KEY_BYTES, tuple(IDS[2:4]))
    rig.cache.scheduled("r", 20, 20, IDS)
    (second,) = rig.saves()
    assert (len(second.keys), second.block_ids) == (3 * KEY_BYTES, tuple(IDS[4:10]))
    assert second.parent == first.keys
    assert second.marks == ((0, Mark(b"m", 3 * CHUNK)),)
    assert rig.holder.held.total() == 8
    rig.end_saves(first, second)
    assert rig.holder.held.total() == 8
    rig.end_saves(first, second)
    assert rig.holder.held.total() == 0
    assert not rig.cache.has_orders


def test_decoding_saves_nothing(rig: Rig) -> None:
    """Steps behind the prompt are of no interest before the request ends."""
    rig.arrive(10)
    rig.cache.scheduled("r", 0, 10, IDS)
    rig.end_saves(*rig.saves())
    for position in range(10, 30):
        rig.cache.scheduled("r", position, 1, IDS)
    assert not rig.saves()


@pytest.mark.parametrize(
    ("computed", "answer", "saved"),
    [(19, 10, 2), (24, 14, 2), (24, 15, 3), (24, 16, 3), (25, 15, 3), (23, 14, 2), (0, 14, 0)],
)
def test_the_answer_is_saved_when_the_request_ends(
    rig: Rig, computed: int, answer: int, saved: int
) -> None:
    """Whole chunks of what is computed, never with the last token; nothing of what was aborted."""
    rig.arrive(10)
    rig.cache.scheduled("r", 0, 10, IDS)
    before = rig.saves()
    rig.end_saves(*before)
    rig.cache.finished("r", computed, range_of(10 + answer), IDS)
    orders = rig.saves()
    total = sum(len(order.keys) for order in (*before, *orders)) // KEY_BYTES
    assert total == max(1, saved)
    assert all(order.is_final for order in orders)


def test_answers_may_be_left_out() -> None:
    """``save_generated: false`` keeps prompts only."""
    rig = Rig(save_generated=False)
    rig.arrive(10)
    rig.cache.finished("r", 30, range_of(31), IDS)
    assert [len(order.keys) for order in rig.saves()] == [KEY_BYTES]


def test_what_waits_is_bounded() -> None:
    """More than the limit is postponed, and shed when the request ends; one save always goes."""
    rig = Rig(save_limit_bytes=3 * GEOMETRY.chunk_bytes)
    rig.arrive(80)
    rig.cache.scheduled("r", 0, 32, IDS)
    (first,) = rig.saves()
    rig.cache.scheduled("r", 32, 48, IDS)
    assert not rig.saves()
    rig.cache.finished("r", 80, range_of(81), IDS)
    assert not rig.saves()
    assert rig.cache.counters["chunks_shed"] == 6
    rig.end_saves(first)
    assert rig.holder.held.total() == 0


def test_a_long_prompt_is_several_saves(rig: Rig) -> None:
    """Each question fits into a packet, with its marks; together they are the prompt, in order."""
    chunks = 2 * CHUNKS_PER_SAVE_LIMIT + 7
    marks = tuple(Mark(bytes(32), n * CHUNK) for n in range(1, chunks) for _ in range(2))
    rig.arrive(chunks * CHUNK, marks=marks)
    rig.cache.scheduled("r", 0, chunks * CHUNK, list(range(chunks * 2)))
    orders = rig.saves()
    questions = [
        Reserve(save_id=o.save_id, parent=o.parent, keys=o.keys, marks=o.marks) for o in orders
    ]
    assert max(len(encode(question)) for question in questions) <= MESSAGE_LIMIT_BYTES
    assert sum(len(order.keys) for order in orders) == chunks * KEY_BYTES
    assert [order.parent for order in orders[1:]] == [o.keys[-KEY_BYTES:] for o in orders[:-1]]
    assert [i for order in orders for i in order.block_ids] == list(range(chunks * 2))


def test_a_request_that_ends_early(rig: Rig) -> None:
    """Its look-up is forgotten; its load may end later."""
    rig.lookups.hits = None
    rig.arrive(30)
    rig.cache.finished("r", 0, range_of(30), IDS)
    assert rig.lookups.forgotten == [1]
    rig.arrive(30, "s")
    rig.found(0, 0)
    rig.cache.hit_tokens("s", 0)
    rig.cache.allocated("s", IDS, 16)
    (order,) = rig.loads()
    rig.cache.finished("s", 0, range_of(30), IDS)
    rig.end_load(order, 1)
    assert not rig.cache.has_orders


def test_prefill_speed_of_an_engine_that_plans_ahead(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of 100 tokens takes a second, also when the next one is planned before it ends; a
    step that says nothing of itself changes nothing.
    """
    clock = [0.0]
    monkeypatch.setattr(engine_cache, "monotonic", lambda: clock[0])
    rig.arrive(1000)
    steps = []
    for number in range(6):
        rig.cache.scheduled("r", number * 100, 100, list(range(250)))
        steps.append(rig.cache.take_orders().step)
        if number:
            clock[0] = float(number)
            rig.cache.step_reported([CacheNews(step=steps[number - 1])])
            rig.cache.step_reported([CacheNews()])
    assert rig.cache.costs.prefill_tokens_per_s == pytest.approx(100)
