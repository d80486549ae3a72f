"""One JSON line per request: when what happened to it, and who served it.

Lines are collected and written together a few times a second, so a request never waits for the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import IO, TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from splitserve.orchestrator.core.effects import Timeline
    from splitserve.orchestrator.router.token_counts import Tally

_log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.2
HELD_LIMIT_LINES = 1000


class RequestLog:
    """Writes the lines, and remembers the latest timelines for people who ask."""

    def __init__(self, stream: IO[bytes] | None, kept_requests: int) -> None:
        self._stream = stream
        self._kept: deque[tuple[Timeline, Tally]] = deque(maxlen=kept_requests)
        self._unwritten: list[tuple[Timeline, Tally]] = []
        self._flush_timer: asyncio.TimerHandle | None = None
        self._lost_lines = 0
        self._wall_offset = time.time() - time.monotonic()

    def add(self, timeline: Timeline, tally: Tally) -> None:
        """One request ended."""
        entry = (timeline, tally)
        self._kept.append(entry)
        if self._stream is None:
            return
        self._unwritten.append(entry)
        if len(self._unwritten) >= HELD_LIMIT_LINES:
            self.flush()
        elif self._flush_timer is None:
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_later(FLUSH_INTERVAL_S, self.flush)

    def find(self, client_request_id: str) -> dict[str, Any] | None:
        """The latest timeline with that X-Request-Id."""
        for timeline, tally in reversed(self._kept):
            if tally.client_request_id == client_request_id:
                return as_record(timeline, tally, self._wall_offset)
        return None

    def latest(self, count: int) -> list[dict[str, Any]]:
        """The latest timelines, oldest first."""
        return [as_record(*entry, self._wall_offset) for entry in list(self._kept)[-count:]]

    def record(self, timeline: Timeline, tally: Tally) -> dict[str, Any]:
        """One request as the log shows it."""
        return as_record(timeline, tally, self._wall_offset)

    def flush(self) -> None:
        """Everything added so far is written."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._unwritten and self._stream is not None:
            entries, self._unwritten = self._unwritten, []
            records = (as_record(*entry, self._wall_offset) for entry in entries)
            lines = b"".join(
                orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in records
            )
            try:
                self._stream.write(lines)
                self._stream.flush()
            except OSError as error:
                if not self._lost_lines:
                    _log.error("the request log cannot be written: %s", error)
                self._lost_lines += len(entries)
            else:
                if self._lost_lines:
                    _log.error("%d lines of the request log were lost", self._lost_lines)
                self._lost_lines = 0


def as_record(timeline: Timeline, tally: Tally, wall_offset: float) -> dict[str, Any]:
    """A timeline as the log shows it: the wall time of arrival, everything else in milliseconds
    after it.
    """
    received = timeline.received

    def after(moment: float | None) -> float | None:
        return None if moment is None else round((moment - received) * 1000, 3)

    return {
        "event": "request",
        "request_id": tally.client_request_id,
        "id": timeline.request_id,
        "received_unix_s": round(received + wall_offset, 3),
        "endpoint": timeline.endpoint,
        "tenant": timeline.tenant,
        "streaming": timeline.streaming,
        "prompt_tokens_estimate": timeline.prompt_tokens,
        "prompt_tokens": tally.prompt_tokens,
        "output_tokens": tally.output_tokens,
        "output_limit_tokens": tally.output_limit_tokens,
        "decision": timeline.decision,
        "prefill_node": timeline.prefill_node,
        "decode_node": timeline.decode_node,
        "expected_cached_tokens": timeline.expected_cached_tokens,
        "attempts": timeline.attempts,
        "continuations": timeline.continuations,
        "dispatched_ms": after(timeline.dispatched),
        "prefill_answered_ms": after(timeline.prefill_answered),
        "prefill_status": timeline.prefill_status,
        "first_data_ms": after(timeline.first_data),
        "last_data_ms": after(timeline.last_data),
        "status": timeline.status,
        "outcome": timeline.outcome,
        "reason": timeline.reason,
    }
