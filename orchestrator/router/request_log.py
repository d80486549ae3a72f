"""One JSON line per request: when what happened to it, and who served it.

Lines are collected and written together a few times a second, so a request never waits for the log.
A line waits for what the nodes say of the request's transfer, for at most ``FACTS_WAIT_S``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import orjson

from splitserve.orchestrator.observe.trace_context import SERVER, UNTRACED
from splitserve.orchestrator.router.request_parts import Moments, overlap_of, parts_of
from splitserve.orchestrator.router.transfer_facts import NO_TRANSFER, Transfer, is_in_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from splitserve.orchestrator.core.effects import Timeline
    from splitserve.orchestrator.router.span_pipe import SpanPipe
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


class Account(NamedTuple):
    """Where a request's time went."""

    parts: dict[str, float]
    """Milliseconds; see ``request_parts``."""
    transfer: Transfer
    hidden_ms: float | None
    exposed_ms: float | None


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
        self, stream: IO[bytes] | None, kept_requests: int, spans: SpanPipe | None = None
    ) -> None:
        self.on_final: list[Callable[[Timeline, Tally, Account], None]] = []
        """Who wants to know where each request's time went, once that is known or not waited for
        any more.
        """
        self._stream = stream
        self._spans = spans
        """Who makes spans of the requests that are traced."""
        self._kept: deque[Entry] = deque(maxlen=kept_requests)
        self._unwritten: list[Entry] = []
        """Those that wait for what nodes know."""
        self._ready: list[Entry] = []
        """Those that wait for nothing: few, since they are written while the processor's caches
        still have them, which halves the time.
        """
        self._flush_timer: asyncio.TimerHandle | None = None
        self._lost_lines = 0
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
        lines: list[bytes] = []
        traced: list[bytes] = []
        for entry, account in entries:
            for tell in self.on_final:
                tell(entry.timeline, entry.tally, account)
            is_traced = self._spans is not None and entry.tally.is_traced
            if self._stream is None and not is_traced:
                continue
            record = self.record(entry.timeline, entry.tally, account)
            line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
            lines.append(line)
            if is_traced:
                traced.append(line)
            if len(lines) >= WRITTEN_TOGETHER_LINES:
                self._hand_over(lines, traced)
                lines, traced = [], []
        self._hand_over(lines, traced)

    def _hand_over(self, lines: list[bytes], traced: list[bytes]) -> None:
        if traced and self._spans is not None:
            self._spans.send(traced)
        if lines and self._stream is not None:
            self._write_lines(self._stream, lines)

    def _write_lines(self, stream: IO[bytes], lines: list[bytes]) -> None:
        try:
            stream.write(b"".join(lines))
            stream.flush()
        except OSError as error:
            if not self._lost_lines:
                _log.error("the request log cannot be written: %s", error)
            self._lost_lines += len(lines)
        else:
            if self._lost_lines:
                _log.error("%d lines of the request log were lost", self._lost_lines)
            self._lost_lines = 0

    def _record(self, entry: Entry) -> dict[str, Any]:
        return self.record(entry.timeline, entry.tally, entry.account())


def account_of(timeline: Timeline, transfer: Transfer, now: float | None = None) -> Account:
    """Where the time went of a request that has ended; of one that has not, up to ``now``."""
    ended = timeline.last_data if now is None else now
    landed = transfer.landed
    if landed is not None and not is_in_time(landed, timeline.first_data):
        landed = None  # Another one brought the first data, or none.
    moments = Moments(
        timeline.received,
        timeline.received if ended is None else ended,
        timeline.streaming,
        timeline.first_dispatched,
        timeline.redispatched,
        transfer.prefill_started,
        transfer.prefill_ended,
        landed,
        timeline.first_data,
    )
    if transfer is NO_TRANSFER:
        return Account(parts_of(moments), transfer, None, None)
    overlap = overlap_of(transfer.first_write, transfer.prefill_ended, transfer.landed)
    return Account(parts_of(moments), transfer, *overlap)


def server_timing(timeline: Timeline, facts: RequestFacts | None, now: float) -> bytes:
    """The header of that name (W3C) for an answer that begins now: the parts before the first data,
    by what is known, and their sum.
    """
    transfer = NO_TRANSFER if facts is None else facts.transfer(timeline.first_data)
    until = now if timeline.first_data is None else timeline.first_data
    parts = account_of(timeline, transfer, until).parts
    if timeline.streaming:
        parts.pop("decode", None)
    total = "ttft" if timeline.streaming else "total"
    parts[total] = round((until - timeline.received) * 1000, 3)
    return ", ".join(f"{name};dur={ms}" for name, ms in parts.items()).encode()


def as_record(
    timeline: Timeline, tally: Tally, wall_offset: float, account: Account
) -> dict[str, Any]:
    """A timeline as the log shows it: the wall time of arrival, everything else in milliseconds
    after it. What did not happen, or is not known, is null.
    """
    received, transfer = timeline.received, account.transfer

    def after(moment: float) -> float:
        return round((moment - received) * 1e6) / 1000

    trace = None if tally.trace is UNTRACED else tally.trace
    return {
        "event": "request",
        "request_id": tally.client_request_id,
        "id": timeline.request_id,
        "received_unix_s": round(received + wall_offset, 6),
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
        "queued_ms": None if (at := timeline.queued) is None else after(at),
        "dispatched_ms": None if (at := timeline.first_dispatched) is None else after(at),
        "redispatched_ms": None if (at := timeline.redispatched) is None else after(at),
        "reserved_ms": None if (at := transfer.reserved) is None else after(at),
        "granted_ms": None if (at := transfer.granted) is None else after(at),
        "prefill_started_ms": None if (at := transfer.prefill_started) is None else after(at),
        "prefill_ended_ms": None if (at := transfer.prefill_ended) is None else after(at),
        "delivered_ms": None if (at := transfer.delivered) is None else after(at),
        "landed_ms": None if (at := transfer.landed) is None else after(at),
        "prefill_answered_ms": None if (at := timeline.prefill_answered) is None else after(at),
        "prefill_status": timeline.prefill_status,
        "first_data_ms": None if (at := timeline.first_data) is None else after(at),
        "last_data_ms": None if (at := timeline.last_data) is None else after(at),
        "layer_writes": []
        if not transfer.writes
        else [
            {
                "layers": (write.first_layer, write.last_layer),
                "ms": after(write.at),
                "pages": write.pages,
                "bytes": write.bytes,
            }
            for write in transfer.writes
        ],
        "transfer_pages": transfer.pages,
        "transfer_bytes": transfer.bytes,
        "transfer_hidden_ms": account.hidden_ms,
        "transfer_exposed_ms": account.exposed_ms,
        "parts": account.parts,
        "status": timeline.status,
        "outcome": timeline.outcome,
        "reason": timeline.reason,
        "traceparent": None if trace is None else trace.traceparent(SERVER),
        "parent_span_id": (trace.parent or None) if trace is not None else None,
    }
