"""A worker's loads: chunk by chunk, in any order, and to an end in any case."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.cache_rig import CHUNK_TOKENS, SHAPE

from splitserve.kv_transfer.cache.messages import CloseChunks, OpenChunks, Ready, ReadyChunk
from splitserve.kv_transfer.cache.orders import Loaded, LoadOrder
from splitserve.kv_transfer.cache.page_copier import Copied
from splitserve.kv_transfer.cache.worker_loads import GRACE_S, WorkerLoads
from splitserve.orchestrator.engines.mock.model import chunk_geometry

if TYPE_CHECKING:
    from collections.abc import Sequence

GEOMETRY = chunk_geometry(CHUNK_TOKENS, SHAPE)
BLOCKS = GEOMETRY.blocks
ARENA: Any = object()
LIMIT_S = 5.0
CHUNKS = 4


class Copier:
    """Notes what is copied; a chunk that lies at one of ``wrong`` is not whole."""

    geometry = GEOMETRY
    rank_bytes = 10

    def __init__(self) -> None:
        self.copied: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.wrong: dict[int, Copied] = {}

    def load(self, arena: object, chunk: ReadyChunk, first: int, ids: Sequence[int]) -> Copied:
        self.copied[chunk.index] = (first, tuple(ids))
        return self.wrong.get(chunk.index, Copied.WHOLE)


@pytest.fixture
def copier() -> Copier:
    return Copier()


@pytest.fixture
def loads(copier: Copier) -> WorkerLoads:
    """With one load of four chunks, of whose first one the engine has a block."""
    made = WorkerLoads(copier)  # type: ignore[arg-type]
    order = LoadOrder(
        1, "r", bytes(32 * CHUNKS), 1, tuple(range(100, 100 + CHUNKS * BLOCKS - 1)), LIMIT_S
    )
    question = made.begin(order, 0.0, is_there=True)
    assert question == OpenChunks(load_id=1, keys=order.keys, limit_s=LIMIT_S)
    return made


def ready(*indices: int, missing: tuple[int, ...] = ()) -> Ready:
    chunks = tuple(
        ReadyChunk(index=i, offset=i, geometry=GEOMETRY, pieces=1, checksums=b"") for i in indices
    )
    return Ready(load_id=1, chunks=chunks, missing=missing)


def ended(loads: WorkerLoads) -> list[tuple[int, int]]:
    return [(loaded.chunks, loaded.wanted) for loaded in loads.take_ended()]


def test_chunks_in_any_order(loads: WorkerLoads, copier: Copier) -> None:
    """Each is copied to its blocks and closed by itself; the last one ends the load."""
    assert loads.ready(ready(2, 0), ARENA, 0.0) == [
        CloseChunks(load_id=1, indices=(2,)), CloseChunks(load_id=1, indices=(0,)),
    ]  # fmt: skip
    loads.ready(ready(3), ARENA, 0.0)
    assert not loads.take_ended()
    assert loads.ready(ready(1), ARENA, 0.0)[-1] == CloseChunks(load_id=1)
    assert ended(loads) == [(4, 4)]
    assert copier.copied[0] == (1, tuple(range(100, 100 + BLOCKS - 1)))
    for index in (1, 2, 3):
        start = 100 + index * BLOCKS - 1
        assert copier.copied[index] == (0, tuple(range(start, start + BLOCKS)))


def test_what_is_missing_ends_the_load_there(loads: WorkerLoads) -> None:
    """The chunks before it are waited for; those behind it are closed unread."""
    loads.ready(ready(3, missing=(2, 3)), ARENA, 0.0)
    loads.ready(ready(0), ARENA, 0.0)
    assert not loads.take_ended()
    loads.ready(ready(1), ARENA, 0.0)
    assert ended(loads) == [(2, 4)]
    assert loads.ready(ready(2), ARENA, 0.0) == []


@pytest.mark.parametrize("wrong", [Copied.BROKEN, Copied.FOREIGN])
def test_a_chunk_that_cannot_be_read(loads: WorkerLoads, copier: Copier, wrong: Copied) -> None:
    """The load ends before it; only a broken one is said to be broken."""
    copier.wrong[1] = wrong
    answers = loads.ready(ready(0, 1, 2), ARENA, 0.0)
    assert [answer.broken for answer in answers if answer.broken] == (
        [(1,)] if wrong is Copied.BROKEN else []
    )
    (loaded,) = loads.take_ended()
    assert (loaded.chunks, loaded.is_foreign) == (1, wrong is Copied.FOREIGN)
    assert not loaded.is_whole


def test_a_server_that_is_silent(loads: WorkerLoads) -> None:
    """A little after the server's own time the load has failed with what came."""
    loads.ready(ready(0, 2), ARENA, 0.0)
    assert loads.expire(LIMIT_S + GRACE_S - 0.1) == []
    assert loads.next_deadline() == LIMIT_S + GRACE_S
    assert loads.expire(LIMIT_S + GRACE_S) == [CloseChunks(load_id=1)]
    assert ended(loads) == [(1, 4)]
    assert loads.next_deadline() == float("inf")


def test_a_server_that_is_gone(loads: WorkerLoads) -> None:
    """The load has failed; without a server one fails at once."""
    loads.ready(ready(0), ARENA, 0.0)
    loads.lost(1.0)
    assert ended(loads) == [(1, 4)]
    assert loads.begin(LoadOrder(2, "s", bytes(32), 0, (1,), 1.0), 0.0, is_there=False) is None
    assert loads.take_ended() == [Loaded("s", 2, 1, 0, 0, 0.0)]
