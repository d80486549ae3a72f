"""A worker's saves, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.cache_rig import CHUNK_TOKENS, SHAPE

from splitserve.kv_transfer.cache.messages import MESSAGE_LIMIT_BYTES, Commit, Reserve, Reserved
from splitserve.kv_transfer.cache.orders import SaveOrder
from splitserve.kv_transfer.cache.packets import encode
from splitserve.kv_transfer.cache.worker_saves import ANSWER_LIMIT_S, WorkerSaves
from splitserve.orchestrator.engines.mock.model import chunk_geometry

if TYPE_CHECKING:
    from collections.abc import Sequence

LAYERS = SHAPE.layers
BLOCKS = CHUNK_TOKENS // SHAPE.block_tokens
ARENA: Any = object()


class Copier:
    """Notes what is copied instead of copying it."""

    rank_bytes = 1

    def __init__(self) -> None:
        self.geometry = chunk_geometry(CHUNK_TOKENS, SHAPE)
        self.copied: list[tuple[int, int, tuple[int, ...]]] = []

    def save_layer(self, arena: object, offset: int, layer: int, ids: Sequence[int]) -> bytes:
        self.copied.append((offset, layer, tuple(ids)))
        return bytes([layer] * 8)


@pytest.fixture
def copier() -> Copier:
    return Copier()


@pytest.fixture
def saves(copier: Copier) -> WorkerSaves:
    return WorkerSaves(copier)  # type: ignore[arg-type]


def order(number: int = 1, chunks: int = 2, *, is_final: bool = False) -> SaveOrder:
    return SaveOrder(
        number, b"", b"".join(n.to_bytes(32) for n in range(chunks)),
        tuple(range(chunks * BLOCKS)), is_final,
    )  # fmt: skip


def begun(saves: WorkerSaves, *, is_final: bool = False) -> None:
    """Two chunks, of which the second one has its room."""
    question = saves.begin(order(is_final=is_final), 0.0, is_there=True)
    assert isinstance(question, Reserve)
    assert saves.reserved(Reserved(save_id=1, offsets=(-1, 4096))) is None


def committed(saves: WorkerSaves) -> list[tuple[int, bytes]]:
    return [part for commit in saves.copy_due(ARENA) for part in commit.written]


WHOLE = (1, b"".join(bytes([layer] * 8) for layer in range(LAYERS)))


def test_layers_are_copied_as_they_become_final(saves: WorkerSaves, copier: Copier) -> None:
    """The save ends, and is committed with all checksums, with its last layer; the blocks are those
    of the chunk that has room.
    """
    begun(saves)
    for layer in range(LAYERS):
        assert not saves.take_ended()
        saves.layer_final(layer)
        done = committed(saves)
    assert done == [WHOLE]
    assert saves.take_ended() == [1]
    ids = tuple(range(BLOCKS, 2 * BLOCKS))
    assert copier.copied == [(4096, layer, ids) for layer in range(LAYERS)]


def test_a_layer_without_a_hook(saves: WorkerSaves, copier: Copier) -> None:
    """Whichever hook does not fire: at the step's end every layer is copied, once."""
    for missing in range(LAYERS):
        copier.copied.clear()
        begun(saves)
        for layer in range(LAYERS):
            if layer != missing:
                saves.layer_final(layer)
                assert not committed(saves)
        saves.all_final()
        assert committed(saves) == [WHOLE]
        assert sorted(layer for _, layer, _ in copier.copied) == list(range(LAYERS))


def test_computed_blocks_are_copied_at_once(saves: WorkerSaves) -> None:
    """A request that has ended needs no step."""
    begun(saves, is_final=True)
    assert committed(saves) == [WHOLE]


def test_a_server_that_answers_late(saves: WorkerSaves) -> None:
    """The blocks are let go; the room that comes then is given back unwritten."""
    saves.begin(order(), 0.0, is_there=True)
    saves.expire(ANSWER_LIMIT_S / 2)
    assert not saves.take_ended()
    assert saves.next_deadline() == ANSWER_LIMIT_S
    saves.expire(ANSWER_LIMIT_S)
    assert saves.take_ended() == [1]
    saves.all_final()
    assert saves.reserved(Reserved(save_id=1, offsets=(-2, 4096))) == Commit(
        save_id=1, written=(), abandoned=(1,)
    )
    assert not committed(saves)


def test_nothing_to_write(saves: WorkerSaves) -> None:
    """Without room for any chunk, or without a server, a save ends at once."""
    saves.begin(order(1), 0.0, is_there=True)
    saves.reserved(Reserved(save_id=1, offsets=(-1, -2)))
    assert saves.begin(order(2), 0.0, is_there=False) is None
    assert saves.take_ended() == [1, 2]
    assert (saves.counters["chunks_present"], saves.counters["chunks_without_room"]) == (1, 1)


def test_a_server_that_is_gone(saves: WorkerSaves) -> None:
    """Every save has ended; the running step's hooks are of no consequence."""
    begun(saves)
    saves.begin(order(2), 0.0, is_there=True)
    saves.layer_final(0)
    saves.lost()
    saves.layer_final(1)
    saves.all_final()
    assert sorted(saves.take_ended()) == [1, 2]
    assert not committed(saves)
    assert saves.next_deadline() == float("inf")


def test_a_commit_of_many_chunks_is_several(saves: WorkerSaves) -> None:
    """Each fits into a packet; together they are all."""
    count = 4_000
    saves.begin(order(1, count, is_final=True), 0.0, is_there=True)
    saves.reserved(Reserved(save_id=1, offsets=tuple(range(count))))
    commits = list(saves.copy_due(ARENA))
    assert len(commits) > 1
    assert all(len(encode(commit)) <= MESSAGE_LIMIT_BYTES for commit in commits)
    assert [i for commit in commits for i, _ in commit.written] == list(range(count))
