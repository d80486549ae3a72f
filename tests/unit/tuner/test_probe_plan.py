"""Which probes are planned for which engines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitserve.orchestrator.tuner.probe_plan import (
    POOL_SHARE,
    STREAM_TOKENS,
    DecodeProbe,
    PrefillProbe,
    TransferProbe,
    plan_probes,
    within,
)
from splitserve.orchestrator.tuner.profile import EngineLimits

LIMITS = EngineLimits(
    step_tokens=512, sequences=64, block_tokens=16, total_blocks=4000, max_model_len=4096
)


def test_spans_what_the_engine_can_do() -> None:
    """Short and the longest prompts, cached beginnings, batches, and prompts that cross a step."""
    plan = plan_probes(LIMITS, has_prefix_cache=True)
    lengths = [probe.new for probe in plan.prefill if not probe.cached]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (16, 4096 - STREAM_TOKENS - 2)
    assert {512, 528, 1024, 1040} <= set(lengths)
    assert len([probe for probe in plan.prefill if probe.cached]) == 4
    assert {probe.streams for probe in plan.decode} == {1, 2, 4, 8, 16}
    assert plan.transfer[-1].tokens == 4065
    assert [probe.tokens for probe in plan.split] == [610, 1221, 2442]
    kinds = (plan.prefill, plan.decode, plan.transfer, plan.split)
    assert plan.size == sum(map(len, kinds)) < 32


def test_what_is_made_beside_a_busy_neighbour() -> None:
    """Three single prompts of which nothing is cached, from neither end, and three batches, one
    stream among them.
    """
    plan = plan_probes(LIMITS, has_prefix_cache=True)
    prompts = sorted(probe for probe in plan.beside if isinstance(probe, PrefillProbe))
    batches = sorted(probe for probe in plan.beside if isinstance(probe, DecodeProbe))
    assert (len(prompts), len(batches)) == (3, 3)
    assert set(prompts) < set(plan.prefill)
    assert set(batches) < set(plan.decode)
    assert all((probe.prompts, probe.cached) == (1, 0) for probe in prompts)
    assert plan.prefill[0].new < prompts[0].new < prompts[-1].new < plan.prefill[-1].new
    assert batches[0] == DecodeProbe(1, 16)
    assert plan.companion_tokens == (4096 - STREAM_TOKENS - 2) // 8


def test_without_a_prefix_cache_nothing_is_cached() -> None:
    """No probe counts on it."""
    plan = plan_probes(LIMITS, has_prefix_cache=False)
    assert not [probe for probe in plan.prefill if probe.cached]
    assert not plan.split


def test_prompts_together_where_none_takes_two_steps() -> None:
    """Each fills its step; where that needs many prompts nothing is sent together."""
    wide = EngineLimits(
        step_tokens=2048, sequences=8, block_tokens=16, total_blocks=4000, max_model_len=2048
    )
    plan = plan_probes(wide, has_prefix_cache=True)
    together = [probe for probe in plan.prefill if probe.prompts > 1]
    assert together == [PrefillProbe(2022, prompts=2), PrefillProbe(2022, prompts=3)]
    wider = EngineLimits(
        step_tokens=8192, sequences=8, block_tokens=16, total_blocks=4000, max_model_len=2048
    )
    assert not [p for p in plan_probes(wider, has_prefix_cache=True).prefill if p.prompts > 1]


@given(
    step=st.integers(1, 20_000),
    sequences=st.integers(1, 1000),
    block=st.sampled_from([1, 16, 128]),
    blocks=st.integers(4, 20_000),
    length=st.integers(32, 200_000),
    caches=st.booleans(),
)
def test_nothing_is_too_large(
    step: int, sequences: int, block: int, blocks: int, length: int, caches: bool
) -> None:
    """Whatever the limits: every probe fits in the model's length, in the batch and in half of the
    blocks.
    """
    limits = EngineLimits(
        step_tokens=step,
        sequences=sequences,
        block_tokens=block,
        total_blocks=blocks,
        max_model_len=length,
    )
    plan = plan_probes(limits, has_prefix_cache=caches)
    capacity = max(2, blocks * block * POOL_SHARE)
    for probe in plan.prefill:
        assert 0 < probe.new + probe.cached < length
        assert (probe.cached + probe.new) * probe.prompts <= capacity
        assert probe.prompts <= sequences
    for decode in plan.decode:
        assert decode.context + STREAM_TOKENS < length
        assert 0 < decode.streams <= sequences
        assert decode.streams * (decode.context + STREAM_TOKENS) <= capacity
    for transfer in plan.transfer:
        assert 0 < transfer.tokens < length
        assert transfer.tokens <= capacity


def test_probes_are_cut_to_a_limit() -> None:
    """Of each kind the part that can be shorter is; several prompts together are left out."""
    assert within(PrefillProbe(100), 100, 16) == PrefillProbe(100)
    assert within(PrefillProbe(100), 60.7, 16) == PrefillProbe(60)
    assert within(PrefillProbe(32, cached=480), 300, 16) == PrefillProbe(32, cached=256)
    assert within(PrefillProbe(32, cached=480), 40, 16) is None
    assert within(PrefillProbe(100, prompts=2), 150, 16) is None
    assert within(DecodeProbe(4, 100), 300, 16) == DecodeProbe(4, 75)
    assert within(DecodeProbe(4, 100), 3, 16) is None
    assert within(TransferProbe(161), 100, 16) == TransferProbe(97)
    assert within(TransferProbe(161), 16, 16) is None


@given(st.sampled_from(plan_probes(LIMITS, has_prefix_cache=True).prefill), st.integers(0, 5000))
def test_nothing_is_above_the_limit(probe: PrefillProbe, limit: int) -> None:
    """Cut or as it was."""
    found = within(probe, limit, 16)
    assert found is None or found.computed_tokens <= limit
