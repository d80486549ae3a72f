"""Spans from records and facts, whatever is missing in them."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from splitserve.kv_transfer.transfer_facts import LayerWrite, ReceiveFacts, SendFacts
from splitserve.orchestrator.observe.spans import SpanSource, request_spans
from splitserve.orchestrator.observe.transfer_spans import transfer_spans

SOURCE = SpanSource("splitserve-router", "here", "m")
TRACE = "0af7651916cd43dd8448eb211c80319c"
STEM = "b7ad6b71692033"
RECEIVED_NS = 1_700_000_000_000_000_000
RECORD: dict[str, Any] = {
    "request_id": "mine",
    "received_unix_s": 1_700_000_000.0,
    "endpoint": "chat",
    "streaming": True,
    "prefill_node": "p0",
    "decode_node": "d0",
    "dispatched_ms": 1.5,
    "prefill_answered_ms": 20.0,
    "prefill_status": 200,
    "first_data_ms": 21.25,
    "last_data_ms": 50.0,
    "prompt_tokens": 7,
    "output_tokens": 9,
    "status": 200,
    "outcome": "ok",
    "parts": {"queue": 1.5, "prefill": 19.75, "decode": 28.75},
    "traceparent": f"00-{TRACE}-{STEM}00-01",
    "parent_span_id": None,
}


def test_a_records_times_are_its_spans_times() -> None:
    """To the nanosecond; parts and token counts are attributes under their conventional names."""
    whole, queue, prefill, decode = request_spans(RECORD, SOURCE)
    assert whole.name == "chat m"
    assert (whole.start_time, whole.end_time) == (RECEIVED_NS, RECEIVED_NS + 50_000_000)
    assert (queue.start_time, queue.end_time) == (RECEIVED_NS, RECEIVED_NS + 1_500_000)
    assert prefill.end_time == RECEIVED_NS + 20_000_000
    assert decode.events[0].timestamp == RECEIVED_NS + 21_250_000
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.usage.input_tokens"] == 7
    assert whole.attributes["gen_ai.usage.output_tokens"] == 9
    assert whole.attributes["gen_ai.response.time_to_first_chunk"] == 0.02125
    assert whole.attributes["splitserve.part.prefill_ms"] == 19.75
    assert [span.kind for span in (whole, queue, prefill, decode)] == [
        SpanKind.SERVER,
        SpanKind.INTERNAL,
        SpanKind.CLIENT,
        SpanKind.CLIENT,
    ]


@pytest.mark.parametrize("missing", sorted(RECORD.keys() - {"traceparent", "received_unix_s"}))
@pytest.mark.parametrize("how", ["null", "absent"])
def test_what_a_record_does_not_say(missing: str, how: str) -> None:
    """No span ends before it begins or lies outside the request, whatever is not known."""
    record = RECORD | {missing: None}
    if how == "absent":
        del record[missing]
    spans = request_spans(record, SOURCE)
    whole = spans[0]
    for span in spans:
        assert whole.start_time <= span.start_time <= span.end_time <= whole.end_time  # type: ignore[operator]


def test_a_request_that_was_never_dispatched() -> None:
    """Its wait is all there is, and a refusal of the router is an error of the router alone."""
    record = RECORD | {
        "dispatched_ms": None,
        "first_data_ms": None,
        "status": 503,
        "outcome": "error",
        "reason": "no pair in time",
    }
    whole, queue = request_spans(record, SOURCE)
    assert queue.end_time == whole.end_time
    assert whole.status.status_code is StatusCode.ERROR
    assert whole.status.description == "no pair in time"
    refused = request_spans(record | {"status": 429, "outcome": "refused"}, SOURCE)[0]
    assert refused.status.status_code is StatusCode.UNSET
    assert (refused.attributes or {})["error.type"] == "429"


def test_what_is_not_traced_has_no_spans() -> None:
    """Neither records without a trace nor facts without one."""
    assert request_spans(RECORD | {"traceparent": None}, SOURCE) == []
    sent = SendFacts(transfer_id="t", attempt=1, rank=0, outcome="delivered", ended=2.0)
    assert transfer_spans(sent, 0, SOURCE) == []


def test_both_sides_of_a_transfer() -> None:
    """Below their legs, with what happened in its order and when."""
    traceparent = f"00-{TRACE}-{STEM}02-01"
    sent = SendFacts(
        transfer_id="r.1",
        attempt=1,
        rank=0,
        outcome="delivered",
        started=1.0,
        first_write=1.25,
        computed=1.5,
        ended=1.75,
        pages=8,
        bytes=8192,
        writes=(LayerWrite(0, 1, 1.3, 4, 4096), LayerWrite(2, 3, 1.75, 4, 4096)),
        traceparent=traceparent,
    )
    received = ReceiveFacts(
        transfer_id="r.1",
        attempt=1,
        rank=0,
        ranks=1,
        outcome="landed",
        reserved=0.5,
        granted=0.75,
        ended=1.8,
        pages=8,
        bytes=8192,
        traceparent=traceparent,
    )
    (send,) = transfer_spans(sent, 10**18, SOURCE)
    (receive,) = transfer_spans(received, 10**18, SOURCE)
    assert [event.name for event in send.events] == [
        "layers_written",
        "prompt_computed",
        "layers_written",
    ]
    assert (send.start_time, send.end_time) == (10**18 + 10**9, 10**18 + 1_750_000_000)
    assert [event.name for event in receive.events] == [
        "pages_reserved",
        "pages_granted",
        "pages_landed",
    ]
    for span in (send, receive):
        assert span.parent is not None
        assert f"{span.parent.span_id:016x}" == f"{STEM}02"
        assert span.status.status_code is StatusCode.UNSET
        assert (span.attributes or {})["splitserve.transfer.bytes"] == 8192


@pytest.mark.parametrize("outcome", ["the client left", "fenced"])
def test_a_transfer_that_did_not_come_about(outcome: str) -> None:
    """Its span says why; it lasts no time when nothing is known but its end."""
    facts = ReceiveFacts(
        transfer_id="r.1",
        attempt=2,
        rank=1,
        ranks=2,
        outcome=outcome,
        ended=3.0,
        traceparent=f"00-{TRACE}-{STEM}03-01",
    )
    (span,) = transfer_spans(facts, 0, SOURCE)
    assert span.start_time == span.end_time == 3 * 10**9
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["splitserve.transfer.outcome"] == outcome
