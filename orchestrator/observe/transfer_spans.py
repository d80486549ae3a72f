"""The agents' spans: what each side of a transfer did, below the leg that it belongs to.

Facts have times of the host's monotonic clock, spans those of its wall clock; the two are compared
when a span is made.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from splitserve.kv_transfer.transfer_facts import (
    DELIVERED,
    LANDED,
    ReceiveFacts,
    SendFacts,
    TransferFacts,
)
from splitserve.orchestrator.observe.span_sender import SpanSender, exporter_of
from splitserve.orchestrator.observe.spans import SpanSource
from splitserve.orchestrator.observe.trace_context import parse_traceparent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from splitserve.orchestrator.config.tracing_schema import TracingConfig
    from splitserve.orchestrator.observe.sent_counts import SentCounts

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class TransferSpans:
    """Sends the spans of one node's transfers. ``close`` ends its thread."""

    def __init__(self, tracing: TracingConfig, node: str) -> None:
        source = SpanSource(f"{tracing.service_name}-agent", node)
        self._sender: SpanSender[TransferFacts] = SpanSender(
            exporter_of(tracing),
            lambda facts: transfer_spans(facts, time.time_ns() - time.monotonic_ns(), source),
            tracing.traces_url,
        )

    @property
    def counts(self) -> SentCounts:
        """What became of traced transfers so far."""
        return self._sender.counts

    def take(self, ended: Iterable[TransferFacts]) -> None:
        """Transfers have ended; those that are traced give spans."""
        for facts in ended:
            if facts.traceparent:
                self._sender.put(facts)

    def close(self, timeout_s: float) -> None:
        """What is left is sent, for at most ``timeout_s``."""
        self._sender.close(timeout_s)


def transfer_spans(
    facts: TransferFacts, wall_offset_ns: int, source: SpanSource
) -> list[ReadableSpan]:
    """The span of one rank's side of one attempt; none when its ``traceparent`` is none."""
    place = parse_traceparent(facts.traceparent.encode())
    if place is None:
        return []
    trace_id = int(place[0], 16)

    def wall(moment: float) -> int:
        return round(moment * 1e9) + wall_offset_ns

    if isinstance(facts, SendFacts):
        name, is_whole = "transfer send", facts.outcome == DELIVERED
        start, events = _sent(facts)
    else:
        name, is_whole = "transfer receive", facts.outcome == LANDED
        start, events = _received(facts)
    return [
        ReadableSpan(
            name,
            SpanContext(trace_id, random.getrandbits(64) or 1, False, _SAMPLED),
            SpanContext(trace_id, int(place[1], 16), True, _SAMPLED),
            source.resource,
            {
                "splitserve.node": source.instance,
                "splitserve.transfer.id": facts.transfer_id,
                "splitserve.transfer.attempt": facts.attempt,
                "splitserve.transfer.rank": facts.rank,
                "splitserve.transfer.outcome": facts.outcome,
                "splitserve.transfer.pages": facts.pages,
                "splitserve.transfer.bytes": facts.bytes,
            },
            [Event(what, attributes, wall(at)) for what, at, attributes in events],
            kind=SpanKind.PRODUCER if isinstance(facts, SendFacts) else SpanKind.CONSUMER,
            status=Status(StatusCode.UNSET if is_whole else StatusCode.ERROR),
            start_time=wall(min(start, facts.ended)),
            end_time=wall(facts.ended),
            instrumentation_scope=source.scope,
        )
    ]


Moment = tuple[str, float, dict[str, int]]


def _sent(facts: SendFacts) -> tuple[float, list[Moment]]:
    """(when it began, what happened)."""
    events: list[Moment] = [
        (
            "layers_written",
            write.at,
            {
                "splitserve.layers.first": write.first_layer,
                "splitserve.layers.last": write.last_layer,
                "splitserve.transfer.pages": write.pages,
                "splitserve.transfer.bytes": write.bytes,
            },
        )
        for write in facts.writes
    ]
    if facts.computed is not None:
        events.append(("prompt_computed", facts.computed, {}))
    known = [at for at in (facts.started, facts.first_write) if at is not None]
    return min(known, default=facts.ended), sorted(events, key=lambda event: event[1])


def _received(facts: ReceiveFacts) -> tuple[float, list[Moment]]:
    """(when it began, what happened)."""
    events: list[Moment] = []
    if facts.reserved is not None:
        events.append(("pages_reserved", facts.reserved, {}))
    if facts.granted is not None:
        events.append(("pages_granted", facts.granted, {}))
    if facts.outcome == LANDED:
        events.append(("pages_landed", facts.ended, {}))
    known = [at for at in (facts.reserved, facts.granted) if at is not None]
    return min(known, default=facts.ended), events
