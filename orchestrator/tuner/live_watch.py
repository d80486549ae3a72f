"""Whether clients suffer while a cluster is measured. Pure: it is shown the router's timelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from splitserve.orchestrator.tuner.outcome import Targets

MISSES_LIMIT = 3
"""So many are chance."""
SHARE = 0.1
"""Of clients' requests that may miss their targets, or twice as many as did before."""
SHARE_LIMIT = 0.5
"""But never more: where most miss their targets anyway, nothing should be measured."""


class LiveWatch:
    """Counts clients' requests that have missed their targets since the first look."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._seen: set[str] | None = None
        self._share_before = 0.0
        self.requests = 0
        """Of clients, that have ended since."""
        self.misses = 0

    def look(self, timelines: Iterable[dict[str, Any]]) -> str:
        """What is wrong, empty when nothing is; ``timelines`` are the latest of the router."""
        ours = [line for line in timelines if line["endpoint"] != "probe"]
        if self._seen is None:
            self._seen = {line["id"] for line in ours}
            missed = sum(self._misses(line) for line in ours)
            self._share_before = missed / len(ours) if ours else 0.0
            return ""
        for line in ours:
            if line["id"] not in self._seen:
                self._seen.add(line["id"])
                self.requests += 1
                self.misses += self._misses(line)
        limit = min(SHARE_LIMIT, max(SHARE, 2 * self._share_before))
        if self.misses >= MISSES_LIMIT and self.misses > limit * self.requests:
            return (
                f"{self.misses} of {self.requests} requests of clients have missed their targets "
                "since the measuring began"
            )
        return ""

    def _misses(self, line: dict[str, Any]) -> bool:
        ttft_s, itl_s = self._targets.ttft_s, self._targets.itl_s
        first_ms, last_ms = line["first_data_ms"], line["last_data_ms"]
        if not line["streaming"] or first_ms is None or line["outcome"] == "cancelled":
            return False
        if ttft_s is not None and first_ms > ttft_s * 1000:
            return True
        tokens = line.get("output_tokens") or 0
        gaps = max(1, tokens - 1)
        return itl_s is not None and tokens > 1 and (last_ms - first_ms) / gaps > itl_s * 1000
