"""The arena's memory and its free slots."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support.cache_rig import until

from splitserve.kv_transfer.cache.arena import PAGE_BYTES, Arena, Mapping

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOT = 3 * PAGE_BYTES - 100


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Ten slots."""
    made = Arena(10 * 3 * PAGE_BYTES + 50)
    made.cut(SLOT)
    yield made
    made.close()


def touched(arena: Arena) -> None:
    arena.start()
    until(lambda: arena.touched_bytes == arena.size_bytes, "the memory to be touched")


def test_slots_are_whole_pages(arena: Arena) -> None:
    """Each is given once, the lowest first, none beyond the end."""
    touched(arena)
    taken = []
    while (offset := arena.take()) is not None:
        taken.append(offset)
    assert taken == [n * 3 * PAGE_BYTES for n in range(10)]
    assert arena.free_slots == 0
    arena.give_back(taken[7])
    arena.give_back(taken[2])
    assert [arena.take(), arena.take(), arena.take()] == [taken[2], taken[7], None]


def test_no_slot_before_its_memory_is_there(arena: Arena) -> None:
    """An arena that was just made gives none; they come as the memory is touched."""
    assert arena.take() is None
    assert arena.free_slots == 10
    touched(arena)
    assert arena.take() == 0


def test_who_maps_it_sees_the_same_bytes(arena: Arena) -> None:
    """By the view and by the address."""
    touched(arena)
    descriptor = os.dup(arena.descriptor)
    other = Mapping(descriptor, arena.size_bytes)
    os.close(descriptor)
    arena.memory.view[5000:5003] = b"abc"
    other.touch(4096, 8192, writes=False)
    assert bytes(other.view[5000:5003]) == b"abc"
    assert other.address % PAGE_BYTES == 0
    assert other.address != arena.memory.address
    other.close()


def test_memory_that_cannot_be_had(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says why; slots that are there can be used."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(12, "no memory")

    monkeypatch.setattr(arena.memory, "touch", fail)
    arena.start()
    until(lambda: arena.failure is not None, "the failure")
    assert arena.take() is None
    assert "no memory" in str(arena.failure)
