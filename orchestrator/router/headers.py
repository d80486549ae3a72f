"""Which headers travel.

To both engines: everything the client sent (``traceparent``, ``user-agent``, its own headers)
except hop-by-hop headers and those that ``Connection`` names, what describes the message on its own
connection (``host``, ``content-length``, ``expect``, ``accept-encoding``, ``content-encoding``,
``content-type``, which is always JSON), ``x-data-parallel-rank`` (steers an engine),
``x-splitserve-timing`` (a wish to the router), and clients' keys (``authorization``,
``x-api-key``), in whose place the engine's own one goes. Where the router takes part in traces,
each leg gets a ``traceparent`` of its own instead of the client's, and ``tracestate`` goes along
only with a trace that is continued. ``x-request-id`` is the client's when it is printable ASCII of
at most 128 characters, else the router's; it is the same on both legs and in the answer.

Back to the client: everything the decode engine sent except hop-by-hop headers, ``content-length``
(set anew), ``date`` and ``server``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from splitserve.orchestrator.observe.trace_context import SERVER, UNTRACED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from splitserve.orchestrator.observe.trace_context import TraceContext
    from splitserve.orchestrator.router.engine_client import RawHeaders

HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_TO_ENGINES: Final = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"content-type",
    b"content-encoding",
    b"accept-encoding",
    b"expect",
    b"authorization",
    b"x-api-key",
    b"x-data-parallel-rank",
    b"x-request-id",
    b"x-splitserve-timing",
}
_NOT_TO_ENGINES_TRACED: Final = _NOT_TO_ENGINES | {b"traceparent"}
_NOT_TO_ENGINES_NEW_TRACE: Final = _NOT_TO_ENGINES_TRACED | {b"tracestate"}
_UNTRACED_LINE: Final = f"traceparent: {UNTRACED.traceparent(SERVER)}\r\n".encode()
_NOT_TO_CLIENT: Final = HOP_BY_HOP | {b"content-length", b"date", b"server", b"x-request-id"}

REQUEST_ID_LIMIT_CHARACTERS = 128


def request_id_of(value: bytes | None, own: str) -> str:
    """The client's request id when it is fit to be one, else the router's own."""
    if value and len(value) <= REQUEST_ID_LIMIT_CHARACTERS and value.isascii():
        text = value.decode()
        if text.isprintable() and " " not in text:
            return text
    return own


def to_engines(
    headers: Iterable[tuple[bytes, bytes]], request_id: str, trace: TraceContext | None = None
) -> bytes:
    """The header lines that both legs share. Those of the request's place in a trace are not among
    them: see ``trace_line``.
    """
    dropped = _NOT_TO_ENGINES
    if trace is not None:
        dropped = _NOT_TO_ENGINES_TRACED if trace.parent else _NOT_TO_ENGINES_NEW_TRACE
    lines = []
    named: frozenset[bytes] = frozenset()
    kept = []
    for name, value in headers:
        lower = name.lower()
        if lower == b"connection":
            named |= {token.strip().lower() for token in value.split(b",")}
        elif lower not in dropped:
            kept.append((lower, value))
    for name, value in kept:
        if name not in named:
            lines.append(name + b": " + value + b"\r\n")
    lines.append(b"x-request-id: " + request_id.encode() + b"\r\n")
    return b"".join(lines)


def trace_line(trace: TraceContext | None, span: str) -> bytes:
    """The header line of the leg that is ``span``, where the router takes part in traces."""
    if trace is UNTRACED:
        return _UNTRACED_LINE
    return b"" if trace is None else f"traceparent: {trace.traceparent(span)}\r\n".encode()


def to_client(headers: RawHeaders, request_id: str) -> RawHeaders:
    """The headers of the client's answer; names are lower case already."""
    kept = [(name, value) for name, value in headers if name not in _NOT_TO_CLIENT]
    kept.append((b"x-request-id", request_id.encode()))
    return kept


def request_head(
    path: str, host: str, key: str, shared: bytes, body_bytes: int, method: str = "POST"
) -> bytes:
    """The head of a leg's request, up to and including the empty line."""
    return (
        b"%b %b HTTP/1.1\r\nhost: %b\r\nauthorization: Bearer %b\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n%b\r\n"
        % (method.encode(), path.encode(), host.encode(), key.encode(), body_bytes, shared)
    )
