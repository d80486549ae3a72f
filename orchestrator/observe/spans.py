"""Spans of OpenTelemetry from what the router and the agents have noted, made when it is all over.

A request gives the span of the whole request, and below it those of its wait in the queue and of
its legs. Names of attributes are those of OpenTelemetry's conventions for generative AI and HTTP
where there are some, else they begin with ``splitserve.``. No prompt, no answer, no key.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from splitserve.orchestrator.observe.own_version import own_version
from splitserve.orchestrator.observe.trace_context import (
    DECODE_LEG,
    PREFILL_LEG,
    QUEUE,
    SERVER,
    parse_traceparent,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    Attribute = str | bool | int | float

FIRST_TOKEN = "first_token"
"""The event of the decode leg."""
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
_OPERATIONS = {"completions": "text_completion", "responses": "chat", "messages": "chat"}
"""``gen_ai.operation.name`` of endpoints that have another name than what they do."""
_SERVER_ATTRIBUTES = {
    "output_limit_tokens": "gen_ai.request.max_tokens",
    "streaming": "gen_ai.request.stream",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "status": "http.response.status_code",
    "request_id": "splitserve.request_id",
    "tenant": "splitserve.tenant",
    "decision": "splitserve.decision",
    "prefill_node": "splitserve.prefill_node",
    "decode_node": "splitserve.decode_node",
    "expected_cached_tokens": "splitserve.expected_cached_tokens",
    "attempts": "splitserve.attempts",
    "continuations": "splitserve.continuations",
    "outcome": "splitserve.outcome",
    "reason": "splitserve.reason",
    "transfer_pages": "splitserve.transfer.pages",
    "transfer_bytes": "splitserve.transfer.bytes",
    "transfer_hidden_ms": "splitserve.transfer.hidden_ms",
    "transfer_exposed_ms": "splitserve.transfer.exposed_ms",
}
"""Keys of a request's record, and what the request's span calls them."""
_USUAL = {"expected_cached_tokens": 0, "attempts": 1, "continuations": 0}
"""What is not worth an attribute; nor is an empty text."""


_MOMENTS = ("dispatched_ms", "prefill_answered_ms", "first_data_ms", "last_data_ms")


class _Resource(Resource):
    """The exporter puts spans of one resource together by its hash, which the library makes anew
    for each span out of all attributes, as JSON: a fifth of the time that a span takes.
    """

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True)
class SpanSource:
    """Who the spans are of."""

    service: str
    instance: str
    model: str = ""
    resource: Resource = field(init=False)
    scope: InstrumentationScope = field(init=False)

    def __post_init__(self) -> None:
        release = own_version()
        told: dict[str, str] = {
            "service.name": self.service,
            "service.version": release,
            "service.instance.id": self.instance,
        }
        created = Resource.create(told)
        resource = _Resource(created.attributes, created.schema_url)
        object.__setattr__(self, "resource", resource)
        object.__setattr__(self, "scope", InstrumentationScope("splitserve", release))


def request_spans(record: Mapping[str, Any], source: SpanSource) -> list[ReadableSpan]:
    """The router's spans of one request, from its record; none when it has no ``traceparent``."""
    place = parse_traceparent(str(record.get("traceparent")).encode())
    if place is None:
        return []
    return _RequestSpans(record, source, place[0], place[1][:-2]).all()


class _RequestSpans:
    def __init__(
        self, record: Mapping[str, Any], source: SpanSource, trace_id: str, stem: str
    ) -> None:
        self._record = record
        self._source = source
        self._trace_id = int(trace_id, 16)
        self._stem = stem
        self._received = round(record["received_unix_s"] * 1e9)
        self._server = self._context(stem + SERVER)
        self._end = max(self._at(key, self._received) for key in _MOMENTS)

    def all(self) -> list[ReadableSpan]:
        record = self._record
        spans = [self._whole()]
        dispatched = self._at("dispatched_ms", self._end)
        spans.append(self._child(QUEUE, "queue", self._received, dispatched))
        if record.get("dispatched_ms") is None:
            return spans
        if record.get("prefill_node"):
            spans.append(self._prefill_leg(dispatched))
        events = []
        if record.get("first_data_ms") is not None:
            events.append(Event(FIRST_TOKEN, timestamp=self._at("first_data_ms", dispatched)))
        spans.append(
            self._child(
                DECODE_LEG,
                "decode leg",
                dispatched,
                self._end,
                kind=SpanKind.CLIENT,
                attributes={"splitserve.node": str(record.get("decode_node") or "")},
                events=events,
            )
        )
        return spans

    def _whole(self) -> ReadableSpan:
        record = self._record
        endpoint, status = str(record.get("endpoint")), int(record.get("status") or 0)
        operation = _OPERATIONS.get(endpoint, endpoint)
        model = str(record.get("model") or self._source.model)
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "splitserve",
            "gen_ai.request.model": model,
        }
        for key, name in _SERVER_ATTRIBUTES.items():
            if (value := record.get(key)) is not None and value != _USUAL.get(key, ""):
                attributes[name] = value
        for part, milliseconds in (record.get("parts") or {}).items():
            if milliseconds is not None:
                attributes[f"splitserve.part.{part}_ms"] = milliseconds
        if record.get("streaming") and record.get("first_data_ms") is not None:
            first = record["first_data_ms"] / 1000
            attributes["gen_ai.response.time_to_first_chunk"] = first
        outcome = _UNSET
        if status >= 400:
            attributes["error.type"] = str(status)
        if record.get("outcome") == "error" or status >= 500:
            attributes.setdefault("error.type", "error")
            outcome = Status(StatusCode.ERROR, str(record.get("reason") or ""))
        parent = record.get("parent_span_id")
        return self._span(
            self._server,
            f"{operation} {model}",
            self._received,
            self._end,
            parent=self._context(parent, is_remote=True) if parent else None,
            kind=SpanKind.SERVER,
            attributes=attributes,
            status=outcome,
        )

    def _prefill_leg(self, dispatched: int) -> ReadableSpan:
        record = self._record
        attributes: dict[str, Attribute] = {"splitserve.node": str(record["prefill_node"])}
        status, outcome = record.get("prefill_status"), _UNSET
        if status is not None:
            attributes["http.response.status_code"] = status
            if status >= 400:
                attributes["error.type"] = str(status)
                outcome = Status(StatusCode.ERROR)
        return self._child(
            PREFILL_LEG,
            "prefill leg",
            dispatched,
            self._at("prefill_answered_ms", self._end),
            kind=SpanKind.CLIENT,
            attributes=attributes,
            status=outcome,
        )

    def _child(
        self,
        number: str,
        name: str,
        start: int,
        end: int,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: dict[str, Attribute] | None = None,
        events: list[Event] | None = None,
        status: Status = _UNSET,
    ) -> ReadableSpan:
        context = self._context(self._stem + number)
        return self._span(
            context,
            name,
            start,
            end,
            parent=self._server,
            kind=kind,
            attributes=attributes,
            events=events,
            status=status,
        )

    def _span(
        self,
        context: SpanContext,
        name: str,
        start: int,
        end: int,
        *,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: dict[str, Attribute] | None = None,
        events: list[Event] | None = None,
        status: Status = _UNSET,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context,
            parent,
            self._source.resource,
            attributes,
            events or (),
            kind=kind,
            status=status,
            start_time=start,
            end_time=max(start, end),
            instrumentation_scope=self._source.scope,
        )

    def _context(self, span_id: str, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(self._trace_id, int(span_id, 16), is_remote, _SAMPLED)

    def _at(self, key: str, otherwise: int) -> int:
        milliseconds = self._record.get(key)
        return otherwise if milliseconds is None else self._received + round(milliseconds * 1e6)
