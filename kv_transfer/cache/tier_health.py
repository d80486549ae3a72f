"""How fast a lower tier is, and whether it is asked at all. Pure.

A breaker opens after some failures in a row; while it is open the tier costs nothing, and the
server tries it again by itself, with a delay that doubles. Latency and rate are moving averages of
what was measured.
"""

from __future__ import annotations

FAILURE_LIMIT = 3
"""Failures in a row that open the breaker."""
OPEN_S = 2.0
OPEN_LIMIT_S = 60.0
WEIGHT = 0.25
"""Of a new measurement in the average."""
START_BYTES_PER_S = 500e6
"""What a tier is believed to give before it was measured."""
TOGETHER_S = 50e-6
"""A chunk that comes so soon after another one has come with it, out of one call to the store."""


class TierHealth:
    """One tier's breaker and speed."""

    def __init__(self, *, is_remote: bool) -> None:
        self.latency_s = 1e-3 if is_remote else 1e-4
        self.bytes_per_s = START_BYTES_PER_S
        self.has_answered = False
        """Whether the latency was ever measured."""
        self.has_delivered = False
        """Whether the rate was."""
        self._together_bytes = 0
        self._together_s = 0.0
        self._before = START_BYTES_PER_S
        """Average without the chunks that came together last."""
        self.is_open = False
        """The tier is not to be asked."""
        self.last_error = ""
        self.trips = 0
        self._failures = 0
        self._delay_s = OPEN_S
        self.probe_at = float("inf")
        """When an open breaker's tier is to be tried."""

    def answered(self, latency_s: float) -> None:
        """The tier has answered a question without content."""
        self.has_answered = True
        self.latency_s += WEIGHT * (latency_s - self.latency_s)
        self._succeeded()

    def read(self, size_bytes: int, elapsed_s: float) -> None:
        """The tier has delivered a chunk. Those that came together are one measurement."""
        if elapsed_s >= TOGETHER_S:
            self._together_bytes, self._together_s = 0, 0.0
            self._before = self.bytes_per_s
        self._together_bytes += size_bytes
        self._together_s += elapsed_s
        took_s = max(self._together_s - self.latency_s, self._together_s / 2, 1e-6)
        rate = self._together_bytes / took_s
        self.has_delivered = True
        self.bytes_per_s = self._before + WEIGHT * (rate - self._before)
        self._succeeded()

    def wrote(self) -> None:
        """The tier has taken chunks."""
        self._succeeded()

    def failed(self, reason: str, now: float) -> bool:
        """The tier could not be used. True when this opens the breaker."""
        self.last_error = reason
        self._failures += 1
        if self.is_open:
            self._delay_s = min(2 * self._delay_s, OPEN_LIMIT_S)
            self.probe_at = now + self._delay_s
            return False
        if self._failures < FAILURE_LIMIT:
            return False
        self.is_open = True
        self.trips += 1
        self.probe_at = now + self._delay_s
        return True

    def must_probe(self, now: float) -> bool:
        """Whether a tier that is left alone is to be tried now; this says so once."""
        if not self.is_open or now < self.probe_at:
            return False
        self.probe_at = now + self._delay_s + OPEN_LIMIT_S
        return True

    def _succeeded(self) -> None:
        self._failures = 0
        self.is_open = False
        self._delay_s = OPEN_S
        self.probe_at = float("inf")
