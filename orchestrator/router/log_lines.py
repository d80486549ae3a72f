"""Writes the request log: a JSON line per record."""

from __future__ import annotations

import logging
from typing import IO, TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable

_log = logging.getLogger(__name__)


class LogLines:
    """Lines that cannot be written are lost, which is said once each way."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self._lost = 0

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """All of them together."""
        lines = [orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in records]
        try:
            self.stream.write(b"".join(lines))
            self.stream.flush()
        except OSError as error:
            if not self._lost:
                _log.error("the request log cannot be written: %s", error)
            self._lost += len(lines)
        else:
            if self._lost:
                _log.error("%d lines of the request log were lost", self._lost)
            self._lost = 0
