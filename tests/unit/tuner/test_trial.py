"""Trials sum up outcomes; a profile's variants lie at the ends of its bands."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from splitserve.orchestrator.tuner.outcome import Outcome, Targets
from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    EngineLimits,
    Estimate,
    PrefillTime,
    Profile,
    TransferTime,
    exactly,
)
from splitserve.orchestrator.tuner.trial import PARTS, Split, trial_of
from splitserve.orchestrator.tuner.variants import variants


def outcome(*ttft_s: float, itl_s: float = 0.1) -> Outcome:
    times = np.array(ttft_s)
    itl = np.where(np.isnan(times), np.nan, itl_s)
    return Outcome(np.arange(len(times), dtype=float), times, itl, times + 10)


def test_a_trial_counts_good_requests_in_every_part() -> None:
    """The second half is late, one request has failed; the parts add up to all."""
    times = [0.5] * 64 + [2.0] * 63 + [math.nan]
    trial = trial_of(Split(1, 2), outcome(*times), Targets(ttft_s=1.0, itl_s=0.2))
    assert (trial.requests, trial.failed, trial.share_good) == (128, 1, 0.5)
    assert trial.good_in_part == (4,) * (PARTS // 2) + (0,) * (PARTS // 2)
    assert sum(trial.requests_in_part) == 128
    assert trial.ttft.p99 == 2.0
    assert trial.strain == 2.0


def test_few_requests_have_fewer_parts() -> None:
    """One part each."""
    trial = trial_of(Split(0, 1), outcome(0.5, 0.5, 3.0), Targets(ttft_s=1.0))
    assert trial.good_in_part == (1, 1, 0)


def test_what_is_never_answered_is_infinitely_far_from_its_targets() -> None:
    """And no request is good."""
    trial = trial_of(Split(0, 1), outcome(math.nan, math.nan), Targets(ttft_s=1.0))
    assert math.isinf(trial.strain)
    assert trial.goodput == 0


def test_splits_are_told_in_words() -> None:
    """As the table shows them."""
    assert str(Split(3, 5)) == "3:5"
    assert str(Split(3, 5, 200)) == "3:5 from 200 tokens"
    assert str(Split(0, 8)) == "8 aggregated"


def profile(token_s: Estimate, sequence_s: Estimate) -> Profile:
    return Profile(
        model="m",
        engine="mock 1",
        hardware="none",
        limits=EngineLimits(
            step_tokens=512, sequences=16, block_tokens=16, total_blocks=1000, max_model_len=4096
        ),
        kv_bytes_per_token=1000,
        prefill=PrefillTime(exactly(0.01), token_s, exactly(0)),
        decode=DecodeTime(exactly(0.02), sequence_s, exactly(0)),
        transfers=(TransferTime("", "", exactly(0.002), Estimate(1e9, 5e8, 2e9)),),
    )


def test_variants_are_the_ends_of_the_bands() -> None:
    """The profile itself, then both kinds of step slow or fast, against each other and together;
    slow transfers have a low bandwidth.
    """
    base = profile(Estimate(2, 1, 3), Estimate(20, 10, 30))
    found = [(v.prefill.token_s.value, v.decode.sequence_s.value) for v in variants(base)]
    assert found == [(2, 20), (3, 10), (1, 30), (1, 10), (3, 30)]
    slow = variants(base)[1].transfers[0]
    assert slow.bytes_per_s.value == 5e8


def test_what_nodes_do_to_each_other_has_its_ends_too() -> None:
    """Of neighbours, for either kind of step, and of sending, with prefill."""
    plain = profile(exactly(2), exactly(20))
    prefill = msgspec.structs.replace(
        plain.prefill, neighbour=Estimate(0.2, 0.1, 0.3), sending_s=Estimate(5, 4, 6)
    )
    decode = msgspec.structs.replace(plain.decode, neighbour=Estimate(0.4, 0.3, 0.5))
    found = [
        (v.prefill.neighbour.value, v.prefill.sending_s.value, v.decode.neighbour.value)
        for v in variants(msgspec.structs.replace(plain, prefill=prefill, decode=decode))
    ]
    assert found == [(0.2, 5, 0.4), (0.3, 6, 0.3), (0.1, 4, 0.5), (0.1, 4, 0.3), (0.3, 6, 0.5)]


def test_a_profile_without_bands_has_no_variants() -> None:
    """Nothing is tried twice."""
    exact = profile(exactly(2), exactly(20))
    exact = msgspec.structs.replace(
        exact, transfers=(TransferTime("", "", exactly(0.002), exactly(1e9)),)
    )
    assert variants(exact) == [exact]
    assert len(variants(profile(exactly(2), exactly(20)))) == 3
