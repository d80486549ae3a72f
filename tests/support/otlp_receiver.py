"""A collector for tests: takes spans by OTLP over HTTP and keeps them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@dataclass(frozen=True)
class Span:
    """One span as it arrived; ids in hexadecimal, times in nanoseconds."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    status: int
    attributes: dict[str, Any]
    events: dict[str, int]


@dataclass
class OtlpReceiver:
    """What has come so far."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    """What it answers."""

    async def wait_for(
        self, is_enough: Callable[[list[Span]], bool], timeout_s: float = 20.0
    ) -> list[Span]:
        """The spans, once they are enough."""
        async with asyncio.timeout(timeout_s):
            while True:
                if is_enough(self.spans):
                    return self.spans
                await asyncio.sleep(0.01)

    async def take(self, request: web.Request) -> web.Response:
        """One batch."""
        self.headers.append(dict(request.headers))
        message = ExportTraceServiceRequest.FromString(await request.read())
        if self.status == 200:
            self.spans += spans_in(message)
        return web.Response(status=self.status, content_type="application/x-protobuf")


def spans_in(message: ExportTraceServiceRequest) -> list[Span]:
    """All spans of a batch."""
    found = []
    for of_resource in message.resource_spans:
        resource = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                found.append(
                    Span(
                        str(resource.get("service.name", "")),
                        str(resource.get("service.instance.id", "")),
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.kind,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        span.status.code,
                        _attributes(span.attributes),
                        {event.name: event.time_unix_nano for event in span.events},
                    )
                )
    return found


def _attributes(pairs: Any) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        found[pair.key] = getattr(pair.value, kind) if kind else None
    return found


@asynccontextmanager
async def otlp_receiver(port: int = 0) -> AsyncIterator[OtlpReceiver]:
    """It listens on a loopback port."""
    receiver = OtlpReceiver()
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/traces", receiver.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    address = runner.addresses[0]
    receiver.url = f"http://127.0.0.1:{address[1]}"
    try:
        yield receiver
    finally:
        await runner.cleanup()
