"""From times that a known profile would give back to that profile."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest

from splitserve.orchestrator.tuner.fitting import FitError
from splitserve.orchestrator.tuner.probe_plan import Plan, plan_probes
from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    EngineLimits,
    PrefillTime,
    TransferTime,
    exactly,
)
from splitserve.orchestrator.tuner.profile_fit import (
    BesideSample,
    DecodeSample,
    PrefillSample,
    SplitSample,
    TransferSample,
    fit_decode,
    fit_neighbour,
    fit_prefill,
    fit_sending,
    fit_transfers,
    prefill_row,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.tuner.profile import Estimate

LIMITS = EngineLimits(
    step_tokens=512, sequences=64, block_tokens=16, total_blocks=4000, max_model_len=2048
)
PREFILL = PrefillTime(exactly(0.02), exactly(1.5e-4), exactly(3e-8))
DECODE = DecodeTime(exactly(0.018), exactly(4e-4), exactly(2e-7))
REQUEST_S = 0.009
KV_BYTES = 20_000


def plan(limits: EngineLimits = LIMITS) -> Plan:
    """The probes of one round."""
    return plan_probes(limits, has_prefix_cache=True)


def noise(spread: float, seed: int) -> Callable[[], float]:
    """Factors around one."""
    draws = random.Random(seed)
    return lambda: max(0.1, draws.gauss(1, spread))


def decodes(spread: float = 0.0, seed: int = 0, rounds: int = 3) -> list[DecodeSample]:
    """What an engine of ``DECODE`` would show."""
    factor = noise(spread, seed)
    return [
        DecodeSample(probe, DECODE.seconds(probe.streams, probe.mean_context) * factor())
        for probe in plan().decode * rounds
    ]


def prefills(
    spread: float = 0.0, seed: int = 0, rounds: int = 3, limits: EngineLimits = LIMITS
) -> list[PrefillSample]:
    """What an engine of ``PREFILL`` would show."""
    factor = noise(spread, seed)
    parts = (PREFILL.base_s.value, PREFILL.token_s.value, PREFILL.attention_s.value, REQUEST_S)
    found = []
    for probe in plan(limits).prefill * rounds:
        row = prefill_row(probe, limits)
        seconds = math.fsum(part * x for part, x in zip(parts, row, strict=True))
        found.append(PrefillSample(probe, seconds * factor()))
    return found


def transfers(
    link: TransferTime, spread: float = 0.0, seed: int = 0, rounds: int = 3
) -> list[TransferSample]:
    """What a pair with that link would show, all but one token being cached."""
    factor = noise(spread, seed)
    found = []
    for probe in plan().transfer * rounds:
        tokens = probe.tokens
        computing = DECODE.seconds(1, tokens)
        landed = max(computing, tokens * KV_BYTES / link.bytes_per_s.value) + link.latency_s.value
        seconds = REQUEST_S + landed + DECODE.seconds(1, tokens)
        found.append(
            TransferSample(
                link.prefill_node, link.decode_node, tokens, tokens - 1, seconds * factor()
            )
        )
    return found


def links(samples: list[TransferSample]) -> tuple[TransferTime, ...]:
    """Fitted with the true times of everything else."""
    return fit_transfers(
        samples, PREFILL, DECODE, request_s=REQUEST_S, bytes_per_token=KV_BYTES, limits=LIMITS
    )


def holds(estimate: Estimate, true: Estimate) -> bool:
    """Whether the band holds the truth, but for rounding."""
    return estimate.low <= true.value * (1 + 1e-6) and true.value <= estimate.high * (1 + 1e-6)


def test_exact_times() -> None:
    """Come back exactly."""
    decode = fit_decode(decodes())
    prefill, request = fit_prefill(prefills(), decode, LIMITS)
    for found, true in (
        (decode.base_s, DECODE.base_s),
        (decode.sequence_s, DECODE.sequence_s),
        (decode.context_s, DECODE.context_s),
        (prefill.base_s, PREFILL.base_s),
        (prefill.token_s, PREFILL.token_s),
        (prefill.attention_s, PREFILL.attention_s),
        (request, exactly(REQUEST_S)),
    ):
        assert found.value == pytest.approx(true.value, rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_noisy_times_are_predicted(seed: int) -> None:
    """With 4 % of noise, within a few per cent; and the error that is told is about that size."""
    decode = fit_decode(decodes(0.04, seed))
    prefill, request = fit_prefill(prefills(0.04, seed), decode, LIMITS)
    for new, cached in ((100, 0), (512, 0), (64, 1500)):
        found = prefill.seconds(new, cached) + request.value
        assert found == pytest.approx(PREFILL.seconds(new, cached) + REQUEST_S, rel=0.06)
    for batch in ((1, 50), (8, 4000), (16, 400)):
        assert decode.seconds(*batch) == pytest.approx(DECODE.seconds(*batch), rel=0.06)
    assert 0.001 < prefill.error < 0.08
    assert 0.001 < decode.error < 0.08


def test_a_slow_round_is_outvoted() -> None:
    """One of three rounds took half as long again: the medians do not see it."""
    slow = [DecodeSample(s.probe, s.seconds * 1.5) for s in decodes(rounds=1)]
    found = fit_decode(decodes(rounds=2) + slow)
    assert found.seconds(4, 1000) == pytest.approx(DECODE.seconds(4, 1000), rel=1e-3)


def test_steps_that_were_never_two_are_told_from_requests_by_decoding() -> None:
    """Where every prompt takes one step its own time is taken from a step that samples."""
    wide = EngineLimits(
        step_tokens=8192, sequences=8, block_tokens=16, total_blocks=4000, max_model_len=2048
    )
    samples = prefills(limits=wide)
    assert max(prefill_row(s.probe, wide)[0] for s in samples) == 1
    prefill, request = fit_prefill(samples, DECODE, wide)
    one = DECODE.seconds(1, 16)
    assert prefill.seconds(1, 16) == pytest.approx(one, rel=0.1)
    total = prefill.seconds(1000, 0) + request.value
    assert total == pytest.approx(PREFILL.seconds(1000, 0) + REQUEST_S, rel=0.05)


def test_a_slow_link() -> None:
    """Is found with its latency, and its band holds it under noise."""
    link = TransferTime("", "", exactly(0.02), exactly(1e8))
    (found,) = links(transfers(link))
    assert found.latency_s.value == pytest.approx(0.02, abs=1e-4)
    assert found.bytes_per_s.value == pytest.approx(1e8, rel=0.01)
    held = [links(transfers(link, 0.02, seed))[0] for seed in range(10)]
    assert sum(holds(each.bytes_per_s, link.bytes_per_s) for each in held) >= 8
    assert sum(holds(each.latency_s, link.latency_s) for each in held) >= 8


def test_a_link_that_computing_hides() -> None:
    """Only a bound can be told of a bandwidth of which nothing is seen: what would just be seen."""
    (found,) = links(transfers(TransferTime("", "", exactly(0.001), exactly(1e12))))
    seen = max(
        probe.tokens * KV_BYTES / DECODE.seconds(1, probe.tokens) for probe in plan().transfer
    )
    assert found.bytes_per_s.value == pytest.approx(seen, rel=0.05)
    assert found.latency_s.value == pytest.approx(0.001, abs=1e-5)


def test_each_pair_has_its_own_link() -> None:
    """And there is one for any two nodes, first."""
    fast = TransferTime("p0", "d0", exactly(0.001), exactly(1e9))
    slow = TransferTime("p0", "d1", exactly(0.03), exactly(5e7))
    found = links(transfers(fast) + transfers(slow))
    assert [(each.prefill_node, each.decode_node) for each in found] == [
        ("", ""), ("p0", "d0"), ("p0", "d1")
    ]  # fmt: skip
    assert found[1].latency_s.value == pytest.approx(0.001, abs=1e-4)
    assert found[2].bytes_per_s.value == pytest.approx(5e7, rel=0.01)


def beside(slowdown: float, spread: float, seed: int, pairs: int = 9) -> list[BesideSample]:
    """Prompts of some lengths, alone and beside a node that slows them."""
    factor = noise(spread, seed)
    found = []
    for number in range(pairs):
        step_s = PREFILL.seconds(150 * (1 + number % 3), 0)
        alone_s = step_s * factor() + REQUEST_S
        found.append(BesideSample(alone_s, step_s * (1 + slowdown) * factor() + REQUEST_S))
    return found


def test_what_a_neighbour_does_is_found() -> None:
    """Exactly from exact times, whatever a request takes beside; with 5 % of noise within a few
    hundredths, and nearly always within the band.
    """
    exact = fit_neighbour(beside(0.35, 0.0, 0), REQUEST_S)
    assert exact.value == pytest.approx(0.35)
    found = [fit_neighbour(beside(0.35, 0.05, seed), REQUEST_S) for seed in range(20)]
    assert all(each.value == pytest.approx(0.35, abs=0.1) for each in found)
    assert sum(each.low <= 0.35 <= each.high for each in found) >= 18


def test_what_could_be_chance_is_no_slowdown() -> None:
    """Nodes that do not slow each other: zero but for one draw in some, with a bound; and so are
    times that got shorter, and too few.
    """
    found = [fit_neighbour(beside(0.0, 0.05, seed), REQUEST_S) for seed in range(20)]
    assert sum(each.value == 0 for each in found) >= 18
    assert all(each.high > 0 for each in found if not each.value)
    assert all(each.value < 0.1 for each in found)
    assert fit_neighbour(beside(-0.2, 0.01, 1), REQUEST_S) == exactly(0.0)
    assert fit_neighbour(beside(0.5, 0.0, 1, pairs=2), REQUEST_S) == exactly(0.0)


def splits(sending_s: float, spread: float, seed: int, link: TransferTime) -> list[SplitSample]:
    """Pairs of prompts, of which the split one takes the prefill node so much more per token."""
    factor = noise(spread, seed)
    found = []
    for tokens in (150, 300, 500) * 4:
        step_s = PREFILL.seconds(tokens, 0)
        through = max(step_s, tokens * KV_BYTES / link.bytes_per_s.value)
        landed = (through + sending_s * tokens) * factor() + link.latency_s.value
        split = REQUEST_S + landed + DECODE.seconds(1, tokens)
        found.append(SplitSample(tokens, REQUEST_S + step_s * factor(), split))
    return found


def sending(samples: list[SplitSample], link: TransferTime) -> Estimate:
    """With the true times of everything else."""
    return fit_sending(samples, link, DECODE, request_s=REQUEST_S, bytes_per_token=KV_BYTES)


@pytest.mark.parametrize("bytes_per_s", [1e9, 1e8])
def test_what_sending_takes_of_the_computing_is_found(bytes_per_s: float) -> None:
    """Whether the link hides behind computing or is slower than that; under noise within its
    band.
    """
    link = TransferTime("", "", exactly(0.02), exactly(bytes_per_s))
    assert sending(splits(5e-5, 0.0, 0, link), link).value == pytest.approx(5e-5)
    found = [sending(splits(5e-5, 0.02, seed, link), link) for seed in range(20)]
    assert sum(each.low <= 5e-5 <= each.high for each in found) >= 17


def test_sending_that_is_hidden() -> None:
    """Takes nothing of the computing, though noise has it so now and then; nor do too few pairs."""
    link = TransferTime("", "", exactly(0.02), exactly(1e9))
    assert sending(splits(0.0, 0.0, 0, link), link).value < 1e-12
    found = [sending(splits(0.0, 0.03, seed, link), link) for seed in range(20)]
    assert sum(each.value == 0 for each in found) >= 17
    assert all(each.value < 2e-5 for each in found)
    assert sending(splits(5e-5, 0.0, 0, link)[:2], link) == exactly(0.0)


def test_too_few_times() -> None:
    """Are no profile."""
    with pytest.raises(FitError, match="do not tell 3 parts apart"):
        fit_decode(decodes(rounds=1)[:2])
    with pytest.raises(FitError, match="nothing was observed"):
        fit_prefill([], DECODE, LIMITS)


def test_what_does_not_fit_widens_the_latency() -> None:
    """Transfers that seem to be over before the prompt is computed have a latency of zero, but not
    without doubt.
    """
    samples = [
        TransferSample(s.prefill_node, s.decode_node, s.tokens, s.cached, s.seconds * 0.8)
        for s in transfers(TransferTime("", "", exactly(0.0), exactly(1e12)))
    ]
    (found,) = links(samples)
    assert found.latency_s.value == 0
    assert found.latency_s.high > 0.002
    assert found.error > 0.1
