"""A profile as it may be in truth: its coefficients at the ends of their bands.

The two kinds of step go wrong together or against each other, and the second shifts the best
ratio most; so these four ends stand for what a profile does not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    Estimate,
    PrefillTime,
    TransferTime,
    exactly,
)

if TYPE_CHECKING:
    from splitserve.orchestrator.tuner.profile import Profile

Pace = Literal["low", "high"]
"""Of times: low is fast."""
ENDS: tuple[tuple[Pace, Pace], ...] = (
    ("high", "low"),
    ("low", "high"),
    ("low", "low"),
    ("high", "high"),
)
"""(prefill, decode)."""


def variants(profile: Profile) -> list[Profile]:
    """The profile itself, then its ends; an end that equals another one is left out."""
    found = [profile]
    for prefill, decode in ENDS:
        end = at_ends(profile, prefill, decode)
        if all(_times(end) != _times(other) for other in found):
            found.append(end)
    return found


def at_ends(profile: Profile, prefill: Pace, decode: Pace) -> Profile:
    """The profile with every coefficient of a kind of step at one end of its band. Transfers go
    with prefill: both make first tokens late.
    """
    return msgspec.structs.replace(
        profile,
        prefill=PrefillTime(
            _at(profile.prefill.base_s, prefill),
            _at(profile.prefill.token_s, prefill),
            _at(profile.prefill.attention_s, prefill),
            profile.prefill.error,
            _at(profile.prefill.neighbour, prefill),
            _at(profile.prefill.sending_s, prefill),
        ),
        decode=DecodeTime(
            _at(profile.decode.base_s, decode),
            _at(profile.decode.sequence_s, decode),
            _at(profile.decode.context_s, decode),
            profile.decode.error,
            _at(profile.decode.neighbour, decode),
        ),
        transfers=tuple(
            TransferTime(
                transfer.prefill_node,
                transfer.decode_node,
                _at(transfer.latency_s, prefill),
                _at(transfer.bytes_per_s, "low" if prefill == "high" else "high"),
                transfer.error,
            )
            for transfer in profile.transfers
        ),
    )


def _at(estimate: Estimate, end: Pace) -> Estimate:
    return exactly(estimate.low if end == "low" else estimate.high)


def _times(profile: Profile) -> tuple[float, ...]:
    """The values that steps and transfers are computed from."""
    prefill, decode = profile.prefill, profile.decode
    estimates = [prefill.base_s, prefill.token_s, prefill.attention_s]
    estimates += [decode.base_s, decode.sequence_s, decode.context_s]
    estimates += [prefill.neighbour, decode.neighbour, prefill.sending_s]
    for transfer in profile.transfers:
        estimates += [transfer.latency_s, transfer.bytes_per_s]
    return tuple(estimate.value for estimate in estimates)
