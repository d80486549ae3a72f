"""Whether fetching a prefix pays: what loading it is estimated to take, beside computing it. Pure.

Both rates are moving averages of what this engine has measured. Computing is estimated by the
tokens alone; that it takes longer behind a long context makes loading look a little worse than it
is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.messages import TierSpeed

WEIGHT = 0.2
"""Of a new measurement in the average."""
STEP_LEAST_TOKENS = 32
"""Steps that compute fewer prompt tokens say nothing about prefill."""
LOAD_OVERHEAD_S = 2e-3
"""Parking a request and scheduling it again."""
START_COPY_BYTES_PER_S = 2e9


class FetchCosts:
    """Estimates of one engine."""

    def __init__(self, chunk_tokens: int, chunk_bytes: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._chunk_bytes = chunk_bytes
        self.prefill_tokens_per_s = 0.0
        """0 before it was measured: loading is taken to pay then."""
        self.copy_bytes_per_s = START_COPY_BYTES_PER_S

    def step_took(self, prompt_tokens: int, elapsed_s: float) -> None:
        """A step has computed so many prompt tokens."""
        if prompt_tokens < STEP_LEAST_TOKENS or elapsed_s <= 0:
            return
        rate = prompt_tokens / elapsed_s
        old = self.prefill_tokens_per_s
        self.prefill_tokens_per_s = old + WEIGHT * (rate - old) if old else rate

    def load_took(self, size_bytes: int, elapsed_s: float) -> None:
        """A load from the arena alone has taken so long."""
        if size_bytes and elapsed_s > 0:
            self.copy_bytes_per_s += WEIGHT * (size_bytes / elapsed_s - self.copy_bytes_per_s)

    def compute_s(self, tokens: int) -> float:
        """Estimated time to compute so many prompt tokens."""
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else float("inf")

    def load_s(self, tiers: bytes, speeds: tuple[TierSpeed, ...]) -> float:
        """Estimated time to load chunks from these tiers."""
        return LOAD_OVERHEAD_S + sum(self._each(tiers, speeds))

    def worth(self, tiers: bytes, speeds: tuple[TierSpeed, ...], skipped_tokens: int) -> int:
        """How many of these chunks, from the first on, to load so that the prompt is ready soonest.
        The engine has ``skipped_tokens`` of the first one.
        """
        if not self.prefill_tokens_per_s:
            return len(tiers)
        best, best_s, took_s = 0, 0.0, LOAD_OVERHEAD_S
        for index, each_s in enumerate(self._each(tiers, speeds)):
            took_s += each_s
            tokens = (index + 1) * self._chunk_tokens - skipped_tokens
            saved_s = self.compute_s(tokens) - took_s
            if saved_s > best_s:
                best, best_s = index + 1, saved_s
        return best

    def _each(self, tiers: bytes, speeds: tuple[TierSpeed, ...]) -> list[float]:
        copy_s = self._chunk_bytes / self.copy_bytes_per_s
        by_tier = [copy_s]
        by_tier += [copy_s + self._chunk_bytes / s.bytes_per_s for s in speeds[1:]]
        met: set[int] = set()
        each = []
        for tier in tiers:
            latency_s = 0.0 if tier in met or not tier else speeds[tier].latency_s
            met.add(tier)
            each.append(by_tier[tier] + latency_s)
        return each
