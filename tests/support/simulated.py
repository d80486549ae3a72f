"""Profiles and requests for tests of the simulator, with times that are easy to add up."""

from __future__ import annotations

import msgspec

from splitserve.orchestrator.traces import TraceRequest
from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    EngineLimits,
    PrefillTime,
    Profile,
    TransferTime,
    exactly,
)

PROFILE = Profile(
    model="m",
    engine="none 1",
    hardware="none",
    limits=EngineLimits(
        step_tokens=512, sequences=16, block_tokens=16, total_blocks=1000, max_model_len=8192
    ),
    kv_bytes_per_token=1000,
    prefill=PrefillTime(exactly(0.01), exactly(0.001), exactly(1e-7)),
    decode=DecodeTime(exactly(0.02), exactly(0.001), exactly(1e-5)),
    transfers=(TransferTime("", "", exactly(0.002), exactly(1e9)),),
    request_s=0.003,
)


def profile_with(
    *,
    bytes_per_s: float = 1e9,
    decode_is_free: bool = False,
    total_blocks: int = PROFILE.limits.total_blocks,
) -> Profile:
    """``PROFILE`` with another network, free decode steps, or another memory."""
    decode = PROFILE.decode
    if decode_is_free:
        decode = DecodeTime(exactly(0.0), exactly(0.0), exactly(0.0))
    return msgspec.structs.replace(
        PROFILE,
        decode=decode,
        limits=msgspec.structs.replace(PROFILE.limits, total_blocks=total_blocks),
        transfers=(TransferTime("", "", exactly(0.002), exactly(bytes_per_s)),),
    )


def asked(*requests: tuple[float, int, int], blocks: tuple[int, ...] = ()) -> list[TraceRequest]:
    """Requests from (arrival, prompt tokens, answer tokens), all with the same trace blocks."""
    return [TraceRequest(at_s, prompt, output, blocks) for at_s, prompt, output in requests]
