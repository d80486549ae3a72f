"""One JSON line per finished transfer, on each side, for benchmarks and for people who ask where
the time went.

Off unless ``SPLITSERVE_TRANSFER_LOG`` names a file. Times are seconds of the host's monotonic
clock, comparable between processes of one host.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

LOG_ENV = "SPLITSERVE_TRANSFER_LOG"


class TransferLog:
    """Appends records; each line is one write, so several processes may share the file."""

    def __init__(self, path: str | None = None) -> None:
        path = path if path is not None else os.environ.get(LOG_ENV)
        self._descriptor: int | None = None
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    @property
    def is_on(self) -> bool:
        """Whether records are kept."""
        return self._descriptor is not None

    def record(self, side: str, **fields: Any) -> None:
        """Append one line; does nothing when the log is off. A file that fails turns it off."""
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, json.dumps({"side": side, **fields}).encode() + b"\n")
        except OSError as error:
            logger.warning("transfers are not logged any more: %s", error)
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
