"""Which codec new chunks of one tier get, and what loading them takes. Pure.

A tier with a codec of its own uses that. One with ``auto`` chooses by what was measured: of the
codecs allowed the one with which a chunk is in pages soonest, when it comes over this tier's link
and is decoded by one thread; it has to beat the bytes as they are by ``GAIN``. Before the link and
the codecs have been measured, chunks stay as they are.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

from splitserve.kv_transfer.cache.codecs.names import LOSS, RAW, worst_of

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.chunk_coding import Trial
    from splitserve.kv_transfer.cache.codecs.names import CodecName

GAIN = 0.9
"""Of the time without a codec: coding costs processor time, and measurements waver."""
WEIGHT = 0.25
"""Of a new trial in the average."""
ATTEMPTS_LIMIT = 4
"""A codec that could not be measured on so many chunks cannot code this model's."""


class CodecChoice:
    """One tier's."""

    def __init__(
        self, codec: CodecName | Literal["auto"], auto_codecs: tuple[CodecName, ...] = ()
    ) -> None:
        self.configured = codec
        names = auto_codecs if codec == "auto" else (codec,)
        self._candidates = tuple(name for name in names if name != RAW)
        self._worst = LOSS[worst_of(names)]
        self._rates: dict[CodecName, tuple[float, float]] = {}
        """Ratio and decoded bytes per second, by codec."""
        self._attempts: Counter[CodecName] = Counter()

    @property
    def can_code(self) -> bool:
        """Whether what lies in the tier may be coded."""
        return bool(self._candidates)

    def takes(self, codec: CodecName) -> bool:
        """Whether a chunk that is coded so loses no more than this tier's chunks may."""
        return LOSS[codec] <= self._worst

    def to_try(self) -> tuple[CodecName, ...]:
        """Codecs that are to be measured on the next chunk."""
        names = tuple(
            name
            for name in self._candidates
            if name not in self._rates and self._attempts[name] < ATTEMPTS_LIMIT
        )
        self._attempts.update(names)
        return names

    def tried(self, trial: Trial) -> None:
        """A codec was measured."""
        ratio, rate = trial.ratio, trial.decode_bytes_per_s
        old = self._rates.get(trial.codec)
        if old is not None:
            ratio, rate = (o + WEIGHT * (n - o) for o, n in zip(old, (ratio, rate), strict=True))
        self._rates[trial.codec] = (ratio, rate)

    def choose(self, link_bytes_per_s: float | None) -> CodecName:
        """The codec of the next chunk; None: the tier's rate is not known yet."""
        if self.configured != "auto":
            return self.configured
        if link_bytes_per_s is None:
            return RAW
        best, best_s = RAW, GAIN / link_bytes_per_s
        for name in self._candidates:
            each_s = self._seconds_per_byte(name, link_bytes_per_s)
            if name in self._rates and each_s < best_s:
                best, best_s = name, each_s
        return best

    def load_bytes_per_s(self, link_bytes_per_s: float, *, is_measured: bool) -> float:
        """How fast KV comes from the tier, counted as it lies in pages."""
        codec = self.choose(link_bytes_per_s if is_measured else None)
        return 1 / self._seconds_per_byte(codec, link_bytes_per_s)

    def _seconds_per_byte(self, codec: CodecName, link_bytes_per_s: float) -> float:
        """Of a byte in pages. A codec that was not measured counts as none."""
        if codec not in self._rates:
            return 1 / link_bytes_per_s
        ratio, decode_bytes_per_s = self._rates[codec]
        return 1 / (ratio * link_bytes_per_s) + 1 / decode_bytes_per_s
