"""What measuring codecs with a model has found."""

from __future__ import annotations

import msgspec


class CodecQuality(msgspec.Struct, frozen=True):
    """What one codec costs; ``splitserve cache quality --json`` prints these."""

    codec: str
    kl: float
    """Mean per token, in nats."""
    kl_p99: float
    top1: float
    """Share of tokens whose likeliest successor stays the same."""
    ratio: float
    """Bytes of stored chunks without the codec over those with it."""
    tokens: int
    """Predictions that were compared."""


class Measured(msgspec.Struct, frozen=True):
    """The output of ``splitserve cache quality --json``."""

    codecs: tuple[CodecQuality, ...]
