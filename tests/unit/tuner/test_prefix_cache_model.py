"""What a simulated node says of its prefix cache: when an engine would."""

from __future__ import annotations

from splitserve.orchestrator.tuner.prefix_cache_model import BlockPool

BLOCK, TRACE_BLOCK = 32, 64


def pool_of(trace_blocks: int) -> BlockPool:
    return BlockPool(trace_blocks * TRACE_BLOCK // BLOCK, BLOCK, TRACE_BLOCK)


def test_a_prompt_is_told_when_its_request_is_done() -> None:
    """Others share it before that; each block is told once, whoever is done first."""
    pool = pool_of(10)
    first = pool.take((1, 2), 128, 128)
    assert first is not None
    pool.register(first)
    second = pool.take((1, 2, 3), 192, 192)
    assert second is not None
    assert pool.cached_tokens(second) == 128
    pool.register(second)
    assert pool.added == []
    pool.tell(second)
    pool.release(second)
    assert pool.added == [(1, 0), (2, 1), (3, 2)]
    pool.tell(first)
    pool.release(first)
    assert pool.added == [(1, 0), (2, 1), (3, 2)]


def test_only_what_was_told_is_taken_back() -> None:
    """And what comes again is told again."""
    pool = pool_of(2)
    for prompt, is_told in (((1, 2), True), ((3, 4), False), ((1, 2), True)):
        holding = pool.take(prompt, 128, 128)
        assert holding is not None
        pool.register(holding)
        if is_told:
            pool.tell(holding)
        pool.release(holding)
    assert pool.evicted == [(2, 1), (1, 0)]
    assert pool.added == [(1, 0), (2, 1)] * 2
