"""What a cache of some size would save."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.kv_transfer.cache.advice import (
    Prompt,
    ceiling,
    key_of,
    log_spaced,
    replay,
    with_more_users,
)
from splitserve.orchestrator.traces import read_trace

TRACE = Path(__file__).resolve().parents[4] / "benchmarks/data/mooncake_conversation_trace.jsonl.gz"


def prompt(*numbers: int, tail_tokens: int = 0) -> Prompt:
    """A prompt of chunks of ten tokens and a rest."""
    return Prompt(tuple(key_of(number) for number in numbers), 10 * len(numbers) + tail_tokens)


def test_a_repeated_prompt_is_saved_as_far_as_it_is_the_same() -> None:
    """Chunks found, prompt tokens that need not be computed, and their shares of all."""
    prompts = [prompt(1, 2, 3), prompt(1, 2, 4, tail_tokens=5), prompt(5)]
    saving = replay(prompts, 100, "lru", 10)
    assert (saving.hit_chunks, saving.chunks) == (2, 7)
    assert (saving.saved_tokens, saving.tokens) == (20, 75)
    assert saving.hit_share == pytest.approx(2 / 7)
    assert saving.saved_share == pytest.approx(20 / 75)
    assert ceiling(prompts, 10).hit_chunks == 2
    assert ceiling(prompts, 10).capacity_chunks == 5


def test_a_partial_chunk_saves_only_its_tokens() -> None:
    """A trace may name a prompt's last partial block; it has fewer tokens than others."""
    prompts = [Prompt((key_of(1), key_of(2)), 15)] * 2
    assert replay(prompts, 10, "lru", 10).saved_tokens == 15
    assert ceiling(prompts, 10).saved_tokens == 15


def test_a_small_cache_saves_less() -> None:
    """What has been evicted is a miss; a prompt larger than the cache is kept in part."""
    prompts = [prompt(1, 2), prompt(3, 4), prompt(1, 2)]
    assert [replay(prompts, size, "lru", 10).hit_chunks for size in (1, 2, 3, 4)] == [0, 0, 1, 2]


def test_nothing_asked_nothing_saved() -> None:
    """Shares of an empty record are zero."""
    saving = ceiling([], 10)
    assert (saving.hit_share, saving.saved_share) == (0.0, 0.0)


def test_more_users_share_nothing_and_come_between() -> None:
    """Each copy has its own keys; the same cache hits less, one of twice the size as much."""
    prompts = [prompt(1, 2), prompt(3, 4), prompt(1, 2)]
    double = with_more_users(prompts, 2)
    assert len({key for each in double for key in each.keys}) == 8
    assert ceiling(double, 10).hit_share == ceiling(prompts, 10).hit_share
    assert replay(prompts, 4, "lru", 10).hit_share == pytest.approx(2 / 6)
    assert replay(double, 4, "lru", 10).hit_share == 0
    assert replay(double, 8, "lru", 10).hit_share == pytest.approx(2 / 6)
    assert with_more_users(prompts, 1) == prompts


def test_sizes_are_equal_factors_apart() -> None:
    """From the least to the most, each once."""
    assert log_spaced(1, 1_000, 4) == [1, 10, 100, 1_000]
    assert log_spaced(1, 3, 12) == [1, 2, 3]
    assert log_spaced(5, 5, 12) == [5]


def test_the_default_policy_beats_lru_on_real_chats() -> None:
    """An hour of chats at 10,000 blocks: LRU's hits are those counted elsewhere (57.7 % of what an
    infinite cache hits), those of ``s3fifo`` at least 1.05 times as many.
    """
    prompts = [
        Prompt(tuple(map(key_of, request.blocks)), request.input_tokens)
        for request in read_trace(TRACE, 512)
    ]
    most = ceiling(prompts, 512)
    assert round(most.hit_share, 4) == 0.3664
    lru = replay(prompts, 10_000, "lru", 512)
    assert lru.hit_chunks / most.hit_chunks == pytest.approx(0.577, abs=0.0006)
    assert replay(prompts, 10_000, "s3fifo", 512).hit_chunks >= 1.05 * lru.hit_chunks
