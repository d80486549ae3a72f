"""The thread that sends spans: bounds, faults, and its end."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from splitserve.orchestrator.observe import span_sender as subject
from splitserve.orchestrator.observe.sent_counts import SentCounts
from splitserve.orchestrator.observe.span_sender import SpanSender
from splitserve.orchestrator.observe.spans import SpanSource, request_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan

SOURCE = SpanSource("s", "i", "m")
LIMIT_S = 10.0


class Exporter(SpanExporter):
    """Keeps names of traces; waits while ``gate`` is shut."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.result: SpanExportResult | Exception = SpanExportResult.SUCCESS
        self.taken: list[str] = []
        self.is_shut = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        assert self.gate.wait(LIMIT_S)
        if isinstance(self.result, Exception):
            raise self.result
        self.taken += [span.name for span in spans]
        return self.result

    def shutdown(self) -> None:
        self.is_shut = True
        self.gate.set()


def make(name: str) -> list[ReadableSpan]:
    """The span of the whole request alone."""
    if name == "bad":
        raise ValueError("bad")
    record = {
        "received_unix_s": 1.0,
        "endpoint": "completions",
        "model": name,
        "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
    }
    return request_spans(record, SOURCE)[:1]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Exporter:
    """With batches that leave at once."""
    monkeypatch.setattr(subject, "BATCH_DELAY_S", 0.01)
    return Exporter()


def until(sender: SpanSender[str], counts: SentCounts) -> None:
    """Poll until that became of what was put in."""
    end = time.monotonic() + LIMIT_S
    while sender.counts != counts:
        assert time.monotonic() < end, sender.counts
        time.sleep(0.005)


def test_an_item_that_gives_no_spans_spoils_no_other(exporter: Exporter) -> None:
    """It counts as failed; the rest of its batch is sent."""
    sender = SpanSender(exporter, make, "url")
    for name in ("one", "bad", "two"):
        sender.put(name)
    until(sender, SentCounts(exported=2, failed=1))
    assert exporter.taken == ["text_completion one", "text_completion two"]
    sender.close(LIMIT_S)
    assert exporter.is_shut


def test_what_comes_too_fast_is_dropped(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is bounded; who puts in never waits; what is in it is sent later."""
    monkeypatch.setattr(subject, "QUEUE_LIMIT_ITEMS", 3)
    exporter.gate.clear()
    sender = SpanSender(exporter, make, "url")
    sender.put("first")
    end = time.monotonic() + LIMIT_S
    while sender._queue.qsize():
        assert time.monotonic() < end
        time.sleep(0.005)
    time_before = time.monotonic()
    for number in range(100):
        sender.put(str(number))
    assert time.monotonic() - time_before < LIMIT_S
    exporter.gate.set()
    sender.close(LIMIT_S)
    assert sender.counts.dropped >= 96
    assert sender.counts.exported + sender.counts.dropped == 101


def test_an_exporter_that_raises(exporter: Exporter, caplog: pytest.LogCaptureFixture) -> None:
    """Counts as a collector that takes nothing; said once."""
    exporter.result = RuntimeError("broken pipe of theirs")
    sender = SpanSender(exporter, make, "http://collector")
    for number in (1, 2):
        sender.put("one")
        until(sender, SentCounts(failed=number))
    sender.close(LIMIT_S)
    (record,) = caplog.records
    assert "http://collector" in record.getMessage()
    assert "broken pipe of theirs" in record.getMessage()


def test_the_end_waits_so_long_and_no_longer(exporter: Exporter) -> None:
    """For a collector that does not answer."""
    exporter.gate.clear()
    sender = SpanSender(exporter, make, "url")
    sender.put("one")
    begin = time.monotonic()
    sender.close(0.2)
    assert 0.15 < time.monotonic() - begin < LIMIT_S
    assert exporter.is_shut
