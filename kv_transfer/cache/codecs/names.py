"""The names of codecs and what they lose: all that configuration and books need to know. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

CodecName = Literal["raw", "bf16z", "int8", "int5z"]
RAW: CodecName = "raw"
CODED: tuple[CodecName, ...] = ("bf16z", "int8", "int5z")
LOSS: dict[CodecName, int] = {"raw": 0, "bf16z": 0, "int8": 1, "int5z": 2}
"""0: to the bit; else those with a larger one lose more."""
LOSSLESS = tuple(name for name, loss in LOSS.items() if not loss)
LOSSY = tuple(name for name, loss in LOSS.items() if loss)


def worst_of(names: Iterable[CodecName]) -> CodecName:
    """The one of these codecs that loses most; ``raw`` where none loses anything.

    It is part of the keys of a cache's chunks (``keys.model_digest``): what was computed behind a
    lossy chunk is not what it would be otherwise, whichever way it is stored itself.
    """
    worst = max(names, key=LOSS.__getitem__, default=RAW)
    return worst if LOSS[worst] else RAW
