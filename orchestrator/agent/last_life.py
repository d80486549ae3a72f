"""What an agent leaves for the one after it: which life of the engine it ran. An agent that dies
takes its engine with it and cannot say so any more; the next one does.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from splitserve.orchestrator.agent.messages import EngineDied

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)

KILLED = 137
"""The exit status of a process that was killed."""


class LastLife:
    """The note of one node."""

    def __init__(self, run_dir: Path, node: str) -> None:
        self._node = node
        self._path = run_dir / f"{node}.incarnation"

    def begin(self, incarnation: str) -> None:
        """That life has begun; a full disk must not keep the node away."""
        try:
            self._path.write_text(incarnation)
        except OSError as error:
            self.end()
            _log.error("cannot note the incarnation %s: %s", incarnation, error)

    def end(self) -> None:
        """It is over, and has been reported."""
        self._path.unlink(missing_ok=True)

    def unreported(self) -> EngineDied | None:
        """The end of a life that the agent before this one could not report."""
        try:
            incarnation = self._path.read_text().strip()
        except FileNotFoundError:
            return None
        return EngineDied(
            node=self._node,
            incarnation=incarnation,
            exit_status=KILLED,
            likely_cause="its agent died, and the engine with it",
            last_lines=(),
        )
