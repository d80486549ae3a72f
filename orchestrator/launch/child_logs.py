"""The logs of the processes that ``up`` keeps alive: kept within a bound, and quoted when one of
them fails.
"""

from __future__ import annotations

import logging
import os
import shutil
from typing import TYPE_CHECKING

from splitserve.orchestrator.agent.engine_log import LOG_LIMIT_BYTES

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)

_TAIL_BYTES = 4096
_TAIL_LINES = 15
_HEAD_LINES = 4


def bound_log(path: Path, limit_bytes: int = LOG_LIMIT_BYTES) -> None:
    """A log over the limit has been moved to ``NAME.1`` and emptied.

    Its writer appends to the same file for its whole life, so the content is copied and the file
    truncated; lines written between the two are lost.
    """
    if not path.exists() or path.stat().st_size <= limit_bytes:
        return
    kept = path.with_name(path.name + ".1")
    try:
        shutil.copyfile(path, kept)
    except OSError as error:  # Above all a full disk: then room is worth more than old lines.
        _log.error("%s is emptied without a copy: %s", path, error)
        kept.unlink(missing_ok=True)
    os.truncate(path, 0)


def tail(path: Path) -> tuple[str, ...]:
    """The last lines of a log."""
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = handle.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-_TAIL_LINES:])


def shortened(lines: tuple[str, ...]) -> tuple[str, ...]:
    """An engine's story on half a screen: its first errors and its last lines."""
    if len(lines) <= _TAIL_LINES:
        return lines
    return (*lines[:_HEAD_LINES], "...", *lines[_HEAD_LINES - _TAIL_LINES :])
