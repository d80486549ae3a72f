"""One JSON line per request: when what happened to it, and who served it.

Lines are collected and written together a few times a second, by a process of their own while it
runs (``observe.log_program``), so a request never waits for the log. A line waits for what the
nodes say of the request's transfer, for at most ``FACTS_WAIT_S``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from splitserve.orchestrator.router.log_lines import LogLines
from splitserve.orchestrator.router.request_records import (
    Account,
    Ended,
    account_of,
    as_record,
    frame_of,
)
from splitserve.orchestrator.router.transfer_facts import NO_TRANSFER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from splitserve.orchestrator.core.effects import Timeline
    from splitserve.orchestrator.router.record_pipe import RecordPipe
    from splitserve.orchestrator.router.token_counts import Tally
    from splitserve.orchestrator.router.transfer_facts import RequestFacts

_log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.2
HELD_LIMIT_LINES = 1000
"""Then those that wait for nothing are written, and if that leaves more than half of them, all."""
WRITTEN_TOGETHER_LINES = 32
"""Memory for so many is used again and again; for a thousand it would be new each time, which takes
longer than all else about a line.
"""
FACTS_WAIT_S = 1.5
"""How long a request that has ended waits for what its nodes know of its transfer."""


@dataclass(slots=True)
class Entry:
    """One request that has ended."""

    timeline: Timeline
    tally: Tally
    facts: RequestFacts | None = None
    """None when no node will tell of it."""
    waits_until: float = 0.0

    def account(self) -> Account:
        """By what is known now."""
        if self.facts is None:
            return account_of(self.timeline, NO_TRANSFER)
        return account_of(self.timeline, self.facts.transfer(self.timeline.first_data))


class RequestLog:
    """Writes the lines, and remembers the latest timelines for people who ask."""

    def __init__(
        self,
        stream: IO[bytes] | None,
        kept_requests: int,
        spans: RecordPipe | None = None,
        writer: RecordPipe | None = None,
    ) -> None:
        """``spans`` makes spans of the requests that are traced. ``writer`` writes the lines to
        ``stream`` while it runs; what comes before and after its life is written here.
        """
        self.on_final: list[Callable[[Timeline, Tally, Account], None]] = []
        """Who wants to know where each request's time went, once that is known or not waited for
        any more.
        """
        self._lines = None if stream is None else LogLines(stream)
        self._spans = spans
        self._writer = writer
        self._unsaid_losses = 0
        """Lines that the writer could not take."""
        self._kept: deque[Entry] = deque(maxlen=kept_requests)
        self._unwritten: list[Entry] = []
        """Those that wait for what nodes know."""
        self._ready: list[Entry] = []
        """Those that wait for nothing: few, since they are written while the processor's caches
        still have them, which halves the time.
        """
        self._flush_timer: asyncio.TimerHandle | None = None
        self._wall_offset = time.time() - time.monotonic()

    def add(self, timeline: Timeline, tally: Tally, facts: RequestFacts | None = None) -> None:
        """One request ended. ``facts`` are what nodes tell of its transfer, now or soon."""
        waits_until = time.monotonic() + FACTS_WAIT_S if facts is not None else 0.0
        entry = Entry(timeline, tally, facts, waits_until)
        self._kept.append(entry)
        if facts is None:
            self._ready.append(entry)
            if len(self._ready) >= WRITTEN_TOGETHER_LINES:
                self._write_ready()
            self._arm()
            return
        self._unwritten.append(entry)
        if len(self._unwritten) >= HELD_LIMIT_LINES:
            self._write_due()
            if len(self._unwritten) > HELD_LIMIT_LINES // 2:
                self.flush()
        self._arm()

    def find(self, client_request_id: str, tenant: str | None) -> dict[str, Any] | None:
        """The tenant's latest timeline with that X-Request-Id, by what is known now; without a
        tenant anybody's. Others may have chosen the same id.
        """
        for entry in reversed(self._kept):
            if entry.tally.client_request_id == client_request_id and (
                tenant is None or entry.timeline.tenant == tenant
            ):
                return self._record(entry)
        return None

    def latest(self, count: int) -> list[dict[str, Any]]:
        """The latest timelines, oldest first."""
        return [self._record(entry) for entry in list(self._kept)[-count:]]

    def record(self, timeline: Timeline, tally: Tally, account: Account) -> dict[str, Any]:
        """A request that has ended, as its line shows it."""
        return as_record(timeline, tally, self._wall_offset, account)

    def flush(self) -> None:
        """Everything added so far is written."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        self._ready += self._unwritten
        self._unwritten = []
        self._write_ready()

    def _write_ready(self) -> None:
        entries, self._ready = self._ready, []
        if entries:
            self._write((entry, entry.account()) for entry in entries)

    def _arm(self) -> None:
        if (self._ready or self._unwritten) and self._flush_timer is None:
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_later(FLUSH_INTERVAL_S, self._time_passed)

    def _time_passed(self) -> None:
        self._flush_timer = None
        # The wall clock may have been set, or the machine have slept
        self._wall_offset = time.time() - time.monotonic()
        try:
            self._write_ready()
            self._write_due()
        finally:
            self._arm()

    def _write_due(self) -> None:
        """Those that wait for nothing any more."""
        now = time.monotonic()
        due: list[tuple[Entry, Account]] = []
        waiting: list[Entry] = []
        for entry in self._unwritten:
            is_early = entry.waits_until > now
            if is_early and entry.facts is not None and not entry.facts.may_be_complete:
                waiting.append(entry)
                continue
            account = entry.account()
            if account.transfer.is_complete or not is_early:
                due.append((entry, account))
            else:
                waiting.append(entry)
        self._unwritten = waiting
        if due:
            self._write(due)

    def _write(self, entries: Iterable[tuple[Entry, Account]]) -> None:
        batch: list[Ended] = []
        for entry, account in entries:
            for tell in self.on_final:
                tell(entry.timeline, entry.tally, account)
            batch.append(Ended(entry.timeline, entry.tally, account))
            if len(batch) >= WRITTEN_TOGETHER_LINES:
                self._hand_over(batch)
                batch = []
        if batch:
            self._hand_over(batch)

    def _hand_over(self, batch: list[Ended]) -> None:
        if self._spans is not None:
            traced = [one for one in batch if one.tally.is_traced]
            if traced:
                self._spans.send(frame_of(traced, self._wall_offset), len(traced))
        if self._lines is None:
            return
        if self._writer is None or not self._writer.is_running:
            self._lines.write(self.record(*one) for one in batch)
        elif not self._writer.send(frame_of(batch, self._wall_offset), len(batch)):
            if not self._unsaid_losses:
                _log.error("the request log cannot be written as fast as requests end")
            self._unsaid_losses += len(batch)
        elif self._unsaid_losses:
            _log.error("%d lines of the request log were lost", self._unsaid_losses)
            self._unsaid_losses = 0

    def _record(self, entry: Entry) -> dict[str, Any]:
        return self.record(entry.timeline, entry.tally, entry.account())
