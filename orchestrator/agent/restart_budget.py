"""How often, and after which delay, a process that died is started again. Pure: ``now`` is an
argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitserve.orchestrator.config import SupervisionConfig


@dataclass
class RestartBudget:
    """The restarts of one process. Delays double with each restart inside the window, up to a
    limit.
    """

    delay_s: float
    delay_limit_s: float
    limit: int
    window_s: float
    _restarts: deque[float] = field(default_factory=deque)

    @classmethod
    def of(cls, supervision: SupervisionConfig) -> RestartBudget:
        """A fresh budget as the YAML says."""
        return cls(
            supervision.restart_delay_s,
            supervision.restart_delay_limit_s,
            supervision.restart_limit,
            supervision.restart_window_s,
        )

    def take(self, now: float) -> float | None:
        """Seconds to wait before the next start, which is counted; None when the process shall stay
        down.
        """
        while self._restarts and self._restarts[0] <= now - self.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self.limit:
            return None
        delay = min(self.delay_s * 2.0 ** len(self._restarts), self.delay_limit_s)
        self._restarts.append(now)
        return delay
