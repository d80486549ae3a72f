"""Requests that need no pair: they go to a decode node as they came, and its answer comes back
unchanged.

They take no KV that the router would have to plan for, so they do not wait: placed at once, bounded
in number, with the deadlines, headers and retries of all other requests (``core/admission``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from splitserve.orchestrator.core.events import RequestArrived
from splitserve.orchestrator.router import headers as header_policy
from splitserve.orchestrator.router.client_request import ClientRequest
from splitserve.orchestrator.router.endpoints import CANCEL_SUFFIX, RESPONSE_PREFIX, STORED_RESPONSE
from splitserve.orchestrator.router.errors import ApiError
from splitserve.orchestrator.router.exchange import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.observe.trace_context import TraceIds
    from splitserve.orchestrator.router.core_driver import CoreDriver
    from splitserve.orchestrator.router.endpoints import Forwarded
    from splitserve.orchestrator.router.http_request import HttpRequest
    from splitserve.orchestrator.router.http_server import HttpConnection
    from splitserve.orchestrator.router.response_ids import ResponseIds
    from splitserve.orchestrator.router.tenants import Tenants


class Forwarding:
    """Sends requests on; holds nothing of them."""

    def __init__(
        self,
        driver: CoreDriver,
        tenants: Tenants,
        response_ids: ResponseIds,
        new_id: Callable[[], str],
        trace_ids: TraceIds | None = None,
    ) -> None:
        self._driver = driver
        self._trace_ids = trace_ids
        self._tenants = tenants
        self._response_ids = response_ids
        self._new_id = new_id

    def handle(self, request: HttpRequest, connection: HttpConnection, endpoint: Forwarded) -> None:
        """One of the endpoints in the table. Raises ``ApiError``."""
        tenant = self._tenants.authenticate(request.header(b"authorization"))
        adapter = ""
        if endpoint.method == "POST":
            check_json_headers(request)
            adapter = self._adapter_in(request.body)
        target = with_query(request.path, request.query)
        self._send(request, connection, endpoint.name, target, tenant, adapter=adapter)

    def handle_response(self, request: HttpRequest, connection: HttpConnection) -> None:
        """``GET /v1/responses/ID`` or ``POST /v1/responses/ID/cancel``: the node that holds the
        response answers. Raises ``ApiError``.
        """
        tenant = self._tenants.authenticate(request.header(b"authorization"))
        response_id = request.path.removeprefix(RESPONSE_PREFIX).removesuffix(CANCEL_SUFFIX)
        holder = self._response_ids.holder(response_id, tenant)
        target = with_query(request.path, request.query)
        self._send(request, connection, STORED_RESPONSE, target, tenant, holder=holder)

    def _send(
        self,
        request: HttpRequest,
        connection: HttpConnection,
        name: str,
        target: str,
        tenant: str,
        *,
        adapter: str = "",
        holder: str = "",
    ) -> None:
        own_id = self._new_id()
        client_id = header_policy.request_id_of(request.header(b"x-request-id"), own_id)
        sent = ClientRequest(
            name,
            request.body,
            {},
            is_streaming=False,
            prompt_tokens=0,
            output_tokens=0,
            alone_because=name,
            method=request.method,
            target=target,
            needs_kv=False,
        )
        trace = None
        if self._trace_ids is not None:
            trace = self._trace_ids.place_of(request.header(b"traceparent"))
        exchange = Exchange(
            self._driver,
            own_id,
            sent,
            header_policy.to_engines(request.headers, client_id, trace),
            client_id,
            None,
            connection,
            trace=trace,
        )
        connection.listener = exchange
        arrived = RequestArrived(
            own_id,
            name,
            prompt_tokens=0,
            output_tokens=0,
            streaming=False,
            alone_because=name,
            tenant=tenant,
            adapter=adapter,
            bound_to=holder,
            needs_kv=False,
        )
        self._driver.admit(exchange, arrived)

    def _adapter_in(self, body: bytes) -> str:
        """The adapter that the body asks for, if it is one that not every node may have. What is no
        JSON the engine will say.
        """
        adapters = self._driver.core.membership.adapters
        if not adapters:
            return ""
        try:
            fields: Any = orjson.loads(body)
        except orjson.JSONDecodeError:
            return ""
        model = fields.get("model") if isinstance(fields, dict) else None
        return model if isinstance(model, str) and model in adapters else ""


def is_stored_response(method: str, path: str) -> bool:
    """Whether the path names one response, and the method does something with it."""
    if not path.startswith(RESPONSE_PREFIX):
        return False
    name = path.removeprefix(RESPONSE_PREFIX)
    if name.endswith(CANCEL_SUFFIX):
        return method == "POST" and "/" not in name.removesuffix(CANCEL_SUFFIX)
    return method == "GET" and bool(name) and "/" not in name


def with_query(path: str, query: str) -> str:
    """What the engine is asked for. Raises ``ApiError`` 400 for what cannot be part of an URL."""
    target = f"{path}?{query}" if query else path
    if not (target.isascii() and target.isprintable()):
        raise ApiError(400, "the URL has characters that must be percent-encoded")
    return target


def check_json_headers(request: HttpRequest) -> None:
    """Raise ``ApiError`` unless the body is said to be JSON, not compressed."""
    encoding = request.header(b"content-encoding")
    if encoding is not None and encoding.lower() != b"identity":
        raise ApiError(415, "send the body without Content-Encoding")
    if not is_json(request.header(b"content-type")):
        raise ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed")


def is_json(content_type: bytes | None) -> bool:
    """Whether a ``Content-Type`` says JSON."""
    media_type = (content_type or b"").partition(b";")[0]
    return media_type.strip().lower() == b"application/json"
