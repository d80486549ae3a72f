"""Runs what reports on an engine beside the agent's own work."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

_log = logging.getLogger(__name__)


def report_task(reports: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """The task that reports something of the engine for as long as it lives; without it the node
    serves all the same.
    """

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            _log.error("reports of the engine have ended", exc_info=task.exception())

    task = asyncio.get_running_loop().create_task(reports)
    task.add_done_callback(ended)
    return task
