"""Ranks and their transfer threads, over real sockets, without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.kv_rank import KvRank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def make_rank(free_port: Callable[[], int]) -> Iterator[Callable[..., KvRank]]:
    """A function that starts ranks; they are stopped after the test."""
    ranks: list[KvRank] = []

    def make(incarnation: str, *, port: int = 0, seed: int = 0, **settings: Any) -> KvRank:
        rank = KvRank(incarnation, port or free_port(), **settings)
        rank.fill(seed)
        rank.thread.start()
        ranks.append(rank)
        return rank

    yield make
    for rank in ranks:
        rank.thread.stop()


@pytest.fixture
def pair(make_rank: Callable[..., KvRank]) -> tuple[KvRank, KvRank]:
    """A prefill and a decode rank, not introduced to each other."""
    return make_rank("P", seed=1, stream_min_bytes=1), make_rank("D", seed=2)
