"""A profile that is known exactly, of engines that compute a prompt token in 0.1 ms."""

from __future__ import annotations

from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    EngineLimits,
    PrefillTime,
    Profile,
    TransferTime,
    exactly,
)

FAST = Profile(
    model="mock",
    engine="mock 1",
    hardware="none",
    limits=EngineLimits(
        step_tokens=2048, sequences=64, block_tokens=32, total_blocks=2000, max_model_len=4096
    ),
    kv_bytes_per_token=1000,
    prefill=PrefillTime(exactly(0.005), exactly(1e-4), exactly(0)),
    decode=DecodeTime(exactly(0.008), exactly(1e-4), exactly(1e-8)),
    transfers=(TransferTime("", "", exactly(0.002), exactly(1e9)),),
)
