"""Sends spans to the collector from a thread of its own: nobody waits for it, and what it cannot
keep up with is dropped and counted.

The thread also makes the spans, from whatever was put in; that is most of the work.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from splitserve.orchestrator.observe.sent_counts import SentCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from splitserve.orchestrator.config.tracing_schema import TracingConfig

_log = logging.getLogger(__name__)

QUEUE_LIMIT_ITEMS = 4096
"""Ended requests or transfers that wait to be sent; more are dropped."""
BATCH_LIMIT_ITEMS = 256
BATCH_DELAY_S = 0.5
"""How long the first item of a batch waits for others."""
EXPORT_TIMEOUT_S = 5.0
"""For the collector to take one batch, all tries together."""

T = TypeVar("T")


class SpanSender(Generic[T]):
    """Owns the thread and the exporter. ``put`` may be called from one thread."""

    def __init__(
        self,
        exporter: SpanExporter,
        make_spans: Callable[[T], Sequence[ReadableSpan]],
        url: str,
        on_batch: Callable[[SentCounts], None] | None = None,
    ) -> None:
        self._exporter = exporter
        self._make_spans = make_spans
        self._url = url
        self._on_batch = on_batch
        self._queue: queue.Queue[T | None] = queue.Queue(QUEUE_LIMIT_ITEMS)
        self._exported = self._failed = self._dropped = 0
        self._is_failing = False
        self._has_complained = False
        """Of an item that gives no spans; said of the first."""
        self._ends_at: float | None = None
        self._reasons = _Reasons()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> SentCounts:
        """What became of the items so far."""
        return SentCounts(self._exported, self._failed, self._dropped)

    def put(self, item: T) -> None:
        """Its spans are sent soon, or never; never waits."""
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._dropped += 1

    def close(self, timeout_s: float) -> None:
        """What is left is sent, for at most ``timeout_s``."""
        self._ends_at = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            _log.warning("the collector at %s is too slow: spans are lost at the end", self._url)
        self._thread.join(max(0.0, self._ends_at - time.monotonic()))
        # Ends the exporter's wait for its next try
        self._exporter.shutdown()

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            batch, goes_on = self._next_batch()
            if batch and (self._ends_at is None or time.monotonic() < self._ends_at):
                self._export(batch)
            if self._on_batch is not None:
                self._on_batch(self.counts)

    def _next_batch(self) -> tuple[list[T], bool]:
        """(items, whether others may follow)."""
        first = self._queue.get()
        if first is None:
            return [], False
        batch, end = [first], time.monotonic() + BATCH_DELAY_S
        while len(batch) < BATCH_LIMIT_ITEMS:
            try:
                item = self._queue.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            if item is None:
                return batch, False
            batch.append(item)
        return batch, True

    def _export(self, batch: list[T]) -> None:
        spans: list[ReadableSpan] = []
        made = 0
        for item in batch:
            try:
                spans += self._make_spans(item)
                made += 1
            except Exception as error:
                # Whatever it is, the others are sent
                if not self._has_complained:
                    _log.error("no spans can be made of %.200r: %r", item, error)
                self._has_complained = True
        self._failed += len(batch) - made
        if not spans:
            return
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            self._reasons.latest = repr(error)
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._exported += made
            if self._is_failing:
                _log.warning("the collector at %s takes spans again", self._url)
            self._is_failing = False
            return
        self._failed += made
        if not self._is_failing:
            _log.warning(
                "the collector at %s (observability.tracing.otlp_endpoint) takes no spans: %s; "
                "they are lost until it does, and requests are served as before",
                self._url,
                self._reasons.latest or "no reason given",
            )
        self._is_failing = True


class _Reasons(logging.Handler):
    """Keeps what the exporter would log for every batch."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.latest = ""
        exporters = logging.getLogger("opentelemetry")
        exporters.addHandler(self)
        exporters.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.latest = record.getMessage()


def exporter_of(tracing: TracingConfig) -> SpanExporter:
    """The exporter for that collector; its further options come from ``OTEL_EXPORTER_OTLP_*``."""
    exporter: SpanExporter
    if tracing.otlp_protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        exporter = GrpcExporter(endpoint=tracing.traces_url, timeout=EXPORT_TIMEOUT_S)
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpExporter,
        )

        exporter = HttpExporter(endpoint=tracing.traces_url, timeout=EXPORT_TIMEOUT_S)
    return exporter
